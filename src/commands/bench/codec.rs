//! What the lossless codec makes of KV on one core: of synthetic KV, and of a model's own.

use super::Told;
use super::expect::Running;
use super::tiers::median;
use crate::config::{Config, Model};
use anyhow::{anyhow, ensure};
use bytes::Bytes;
use kvbm::codec::synthetic::{self, Shape};
use kvbm::codec::{Coder, bound, favourite};
use kvbm::{Block, Codec, Fingerprint, SequenceHash};
use serde_json::{Value, json};
use std::time::Instant;
use tokenizers::Tokenizer;
use worker::engine::llama::ModelSource;

/// Of 2 MiB, as bf16.
const SHAPE: Shape = Shape { layers: 32, tokens: 16, channels: 1024 };
/// Bytes of KV that are looked at, at most, and tokens that are computed for them.
const BYTES: usize = 8 << 20;
const TOKENS: usize = 512;
const ROUNDS: usize = 9;
/// What a model reads: prose about this program, from this program.
const TEXT: &str = include_str!("../../README.md");

/// Measures the codec on one core.
pub(super) async fn measure(config: &Config, own: bool) -> anyhow::Result<Told> {
    let values = synthetic::kv(1, SHAPE);
    let mut samples = vec![("synthetic KV, bf16".to_owned(), vec![synthetic::bf16(&values)])];
    if own {
        let (source, name) = match &config.model {
            Model::BuiltIn(model) => (ModelSource::Builtin(*model), config.model.to_string()),
            Model::Folder(folder) => (ModelSource::Folder(folder.clone()), config.model.to_string()),
        };
        let running = Running::of(config, source).await?;
        let card = running.runtime.card();
        let name = if card.random_weights { format!("{name} with random weights") } else { name };
        let encoded = Tokenizer::from_bytes(&*card.tokenizer).and_then(|tokenizer| tokenizer.encode(TEXT, true));
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
        eprintln!("{what}");
        let sample = tokio::task::spawn_blocking(move || sample(&payloads)).await?;
        text += &format!("{what}\n  {sample}\n");
        let Sample { codec, ratio, bound, encode, decode } = sample;
        json.push(json!({
            "sample": what, "codec": format!("{codec:?}"), "ratio": ratio, "entropy_bound_ratio": bound,
            "encode_bytes_per_second": encode, "decode_bytes_per_second": decode,
        }));
    }
    Ok(Told { json: json!({ "compression": Value::from(json) }), text })
}

/// What the codec makes of some payloads, one core.
struct Sample {
    codec: Codec,
    ratio: f64,
    bound: f64,
    encode: f64,
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
    let (codec, _) = favourite(&all);
    let seal = |payload: &Vec<u8>| {
        let name = SequenceHash::from_bytes([1; 16]);
        Block::seal(name, None, Fingerprint::of([]), Bytes::from(payload.clone()))
    };
    let blocks: Vec<Block> = payloads.iter().map(seal).collect();
    let bytes: usize = payloads.iter().map(Vec::len).sum();
    let mut coder = Coder::default();
    let encoded: Vec<Block> = blocks.iter().map(|block| coder.encode(block, codec)).collect();
    let small: usize = encoded.iter().map(|block| block.payload.len()).sum();
    let timed = |mut work: Box<dyn FnMut() + '_>| {
        let times = (0..ROUNDS).map(|_| {
            let began = Instant::now();
            work();
            began.elapsed().as_secs_f64()
        });
        bytes as f64 / median(times.collect())
    };
    let mut decoder = Coder::default();
    let encode = timed(Box::new(|| blocks.iter().for_each(|block| drop(coder.encode(block, codec)))));
    let decode = timed(Box::new(|| encoded.iter().for_each(|block| drop(decoder.decode(block)))));
    Sample { codec, ratio: bytes as f64 / small as f64, bound: bound(codec, &all), encode, decode }
}
