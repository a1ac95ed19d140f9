//! The forward pass against an external reference: models and logits written by Hugging Face `transformers`
//! (`tests/fixtures/reference/make.py`), one for each model family and each storage format.

use super::loader::{Config, LoadedModel};
use super::model::{Chunk, Model};
use bytemuck::{Pod, pod_read_unaligned};
use kvbm::BlockId;
use safetensors::SafeTensors;
use std::path::Path;

/// Largest allowed difference of a logit, relative to the largest logit. Both sides compute in f32 with another order
/// of summation; the observed difference is about 1e-6.
const TOLERANCE: f32 = 5e-6;

struct Reference {
    tokens: Vec<u32>,
    positions: Vec<u32>,
    /// One row per position.
    logits: Vec<f32>,
}

impl Reference {
    fn read(folder: &Path) -> Self {
        let bytes = std::fs::read(folder.join("reference.safetensors")).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        Self { tokens: values(&file, "tokens"), positions: values(&file, "positions"), logits: values(&file, "logits") }
    }
}

fn values<T: Pod>(file: &SafeTensors<'_>, name: &str) -> Vec<T> {
    file.tensor(name).unwrap().data().chunks_exact(size_of::<T>()).map(pod_read_unaligned).collect()
}

/// The largest difference of a logit at any of the reference's positions, relative to the largest logit, after `amend`
/// has changed the configuration.
fn difference(name: &str, amend: impl FnOnce(&mut Config)) -> f32 {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/reference").join(name);
    let reference = Reference::read(&path);
    let LoadedModel { card, mut config, weights } = LoadedModel::open(&path, None).unwrap();
    amend(&mut config);
    let blocks = reference.tokens.len().div_ceil(card.block_size);
    let model = Model::new(config, weights, 2).unwrap();
    let kv_cache = model.kv_cache(card.block_size, blocks).unwrap();
    let table: Vec<BlockId> = (0..blocks as u32).rev().map(BlockId).collect();
    let (mut start, mut worst) = (0, 0.0);
    for (position, expected) in reference.positions.iter().zip(reference.logits.chunks(card.vocabulary)) {
        let end = *position as usize + 1;
        let (tokens, table) = (&reference.tokens[start..end], &table[..end.div_ceil(card.block_size)]);
        worst = model.forward(&[Chunk { tokens, start, table, logits: true }], &kv_cache, |mut logits| {
            logits.row(0).iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(worst, f32::max)
        });
        start = end;
    }
    worst / reference.logits.iter().fold(0.0, |largest: f32, logit| largest.max(logit.abs()))
}

fn agrees(name: &str) {
    let difference = difference(name, |_| ());
    assert!(difference <= TOLERANCE, "{name}: a logit is off by {difference} of the largest");
}

#[test]
fn llama_agrees() {
    agrees("llama");
}

#[test]
fn llama_with_scaled_rope_agrees() {
    agrees("llama3");
}

#[test]
fn mistral_with_a_window_below_the_prompt_agrees() {
    agrees("mistral");
}

#[test]
fn qwen2_agrees() {
    agrees("qwen2");
}

#[test]
fn qwen3_agrees() {
    agrees("qwen3");
}

#[test]
fn the_tolerance_detects_small_changes_of_each_setting() {
    let scaling = |config: &mut Config| config.rope.scaling.as_mut().unwrap().factor = 8.1;
    for (name, setting, difference) in [
        ("llama", "theta", difference("llama", |config| config.rope.theta = 10_100.0)),
        ("llama", "epsilon", difference("llama", |config| config.norm_eps = 1e-5)),
        ("llama3", "factor", difference("llama3", scaling)),
        ("llama3", "no scaling", difference("llama3", |config| config.rope.scaling = None)),
        ("mistral", "window", difference("mistral", |config| config.sliding_window = Some(25))),
    ] {
        assert!(difference > 2.0 * TOLERANCE, "{name} with another {setting} is off by {difference} only");
    }
}
