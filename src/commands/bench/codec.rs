//! Compression ratio and speed of the lossless codec on one core, for synthetic KV and for KV of a model.

use super::Report;
use super::expect::Running;
use super::tiers::median;
use crate::commands::output;
use crate::config::{Config, Model};
use anyhow::{Context, anyhow, ensure};
use bytes::Bytes;
use kvbm::codec::synthetic::{self, Shape};
use kvbm::codec::{Coder, best_codec, entropy_bound};
use kvbm::{Block, Codec, Fingerprint, SequenceHash};
use serde_json::{Value, json};
use std::time::Instant;
use tokenizers::Tokenizer;
use worker::llama::ModelSource;

/// 2 MiB of bf16 values.
const SHAPE: Shape = Shape { layers: 32, tokens: 16, channels: 1024 };
/// Limit of the KV bytes that are measured.
const BYTES: usize = 8 << 20;
/// Limit of the prompt tokens that are computed for them.
const TOKENS: usize = 512;
const ROUNDS: usize = 9;
/// The prompt: English prose that is part of the repository.
const TEXT: &str = include_str!("../../../README.md");

/// Measures the codec on one core.
pub(super) async fn measure(config: &Config, with_model: bool) -> anyhow::Result<Report> {
    let values = synthetic::kv(1, SHAPE);
    let mut samples = vec![("synthetic KV, bf16".to_owned(), vec![synthetic::bf16(&values)])];
    if with_model {
        let (source, name) = match &config.model {
            Model::BuiltIn(model) => (ModelSource::Builtin(*model), config.model.to_string()),
            Model::Folder(folder) => (ModelSource::Folder(folder.clone()), config.model.to_string()),
        };
        let running = Running::of(config, source).await?;
        let card = running.runtime.card();
        let name = if card.random_weights { format!("{name} with random weights") } else { name };
        let text = card.tokenizer.as_deref().context("the model has no tokenizer")?;
        let encoded = Tokenizer::from_bytes(text).and_then(|tokenizer| tokenizer.encode(TEXT, true));
        let tokens = encoded.map_err(|error| anyhow!("the model's tokenizer: {error}"))?;
        let ids = tokens.get_ids();
        let payloads: Vec<Vec<u8>> =
            running.kv(&ids[..ids.len().min(TOKENS)]).await?.iter().map(|block| block.payload.to_vec()).collect();
        ensure!(!payloads.is_empty(), "the text has no full block");
        let rounded = |payload: &Vec<u8>| {
            let values: Vec<f32> = payload.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
            synthetic::bf16(&values)
        };
        samples.push((format!("{name}: rounded to bf16"), payloads.iter().map(rounded).collect()));
        samples.push((format!("{name}: f32, the format of the native engine"), payloads));
    }
    let mut text = String::new();
    let mut json = Vec::new();
    for (what, payloads) in samples {
        output::note(&what);
        let sample = tokio::task::spawn_blocking(move || sample(&payloads)).await?;
        text += &format!("{what}\n  {sample}\n");
        let Sample { codec, ratio, bound, encode, decode } = sample;
        json.push(json!({
            "sample": what, "codec": format!("{codec:?}"), "ratio": ratio, "entropy_bound_ratio": bound,
            "encode_bytes_per_second": encode, "decode_bytes_per_second": decode,
        }));
    }
    Ok(Report { json: json!({ "compression": Value::from(json) }), text })
}

/// Results of one sample on one core.
struct Sample {
    codec: Codec,
    /// Raw bytes per encoded byte.
    ratio: f64,
    /// The ratio that the entropy of the bytes allows.
    bound: f64,
    /// Raw bytes per second.
    encode: f64,
    /// Raw bytes per second.
    decode: f64,
}

impl std::fmt::Display for Sample {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { codec, ratio, bound, encode, decode } = self;
        let (share, encode, decode) = (100.0 * ratio / bound, encode / 1e9, decode / 1e9);
        if *codec == Codec::Raw {
            return write!(f, "compression is not worth its time; blocks stay uncompressed");
        }
        write!(
            f,
            "{codec:?}: {ratio:.3} : 1, {share:.1} % of the entropy bound {bound:.3}; \
             encodes {encode:.2} GB/s, decodes {decode:.2} GB/s per core"
        )
    }
}

fn sample(payloads: &[Vec<u8>]) -> Sample {
    let all: Vec<u8> = payloads.concat().into_iter().take(BYTES).collect();
    let (codec, _) = best_codec(&all);
    let seal = |payload: &Vec<u8>| {
        let name = SequenceHash::from_bytes([1; 16]);
        Block::new(name, None, Fingerprint::of([]), Bytes::from(payload.clone()))
    };
    let blocks: Vec<Block> = payloads.iter().map(seal).collect();
    let bytes: usize = payloads.iter().map(Vec::len).sum();
    let mut coder = Coder::default();
    let encoded: Vec<Block> = blocks.iter().map(|block| coder.encode(block, codec)).collect();
    let encoded_bytes: usize = encoded.iter().map(|block| block.payload.len()).sum();
    let timed = |mut work: Box<dyn FnMut() + '_>| {
        let times = (0..ROUNDS).map(|_| {
            let started = Instant::now();
            work();
            started.elapsed().as_secs_f64()
        });
        bytes as f64 / median(times.collect())
    };
    let mut decoder = Coder::default();
    let encode = timed(Box::new(|| blocks.iter().for_each(|block| drop(coder.encode(block, codec)))));
    let decode = timed(Box::new(|| encoded.iter().for_each(|block| drop(decoder.decode(block)))));
    Sample { codec, ratio: bytes as f64 / encoded_bytes as f64, bound: entropy_bound(codec, &all), encode, decode }
}
