//! Reads the weights from a checkpoint, and hashes them.

use super::{Checkpoint, Layer, Matrix, Weights};
use crate::llama::loader::config::{Config, Family};
use crate::llama::loader::error::FolderError;
use parking_lot::Mutex;
use rayon::prelude::*;
use std::collections::BTreeMap;

impl Weights {
    /// Reads the weights of a model of this shape. `Checkpoint::check` must have passed.
    pub(crate) fn load(checkpoint: &Checkpoint, config: &Config) -> Result<Self, FolderError> {
        let source = Source { checkpoint, hashes: Mutex::default() };
        let layers = (0..config.layers).into_par_iter().map(|i| Layer::load(&source, config, i));
        Ok(Self {
            embed: source.matrix(&["model.embed_tokens.weight"], config.hidden)?,
            layers: layers.collect::<Result<_, FolderError>>()?,
            norm: source.vector(&["model.norm.weight"])?,
            head: if config.tied { None } else { Some(source.matrix(&["lm_head.weight"], config.hidden)?) },
            identity: source.identity(),
        })
    }
}

impl Layer {
    fn load(source: &Source<'_>, config: &Config, index: usize) -> Result<Self, FolderError> {
        let full = |name: &&str| format!("model.layers.{index}.{name}.weight");
        let vector = |name: &str| source.vector(&[&full(&name)]);
        let matrix = |names: &[&str], cols: usize| {
            let names: Vec<String> = names.iter().map(full).collect();
            source.matrix(&names.iter().map(String::as_str).collect::<Vec<_>>(), cols)
        };
        let bias = |name: &str| format!("model.layers.{index}.self_attn.{name}.bias");
        let qkv_bias = || source.vector(&[&bias("q_proj"), &bias("k_proj"), &bias("v_proj")]);
        let (biased, normed) = (config.family == Family::Qwen2, config.family == Family::Qwen3);
        Ok(Self {
            attention_norm: vector("input_layernorm")?,
            qkv: matrix(&["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"], config.hidden)?,
            qkv_bias: biased.then(qkv_bias).transpose()?,
            q_norm: normed.then(|| vector("self_attn.q_norm")).transpose()?,
            k_norm: normed.then(|| vector("self_attn.k_norm")).transpose()?,
            output: matrix(&["self_attn.o_proj"], config.heads * config.head_dim)?,
            ffn_norm: vector("post_attention_layernorm")?,
            gate_up: matrix(&["mlp.gate_proj", "mlp.up_proj"], config.hidden)?,
            down: matrix(&["mlp.down_proj"], config.intermediate)?,
        })
    }
}

/// Reads tensors and records the hash of each.
struct Source<'a> {
    checkpoint: &'a Checkpoint,
    hashes: Mutex<BTreeMap<String, blake3::Hash>>,
}

impl Source<'_> {
    /// The tensors' values, concatenated: gains of norms, or biases. All must be finite, since one that is not makes
    /// all logits NaN. Not checked: matrices, whose values are many. Their faults are found in the logits.
    fn vector(&self, names: &[&str]) -> Result<Vec<f32>, FolderError> {
        let data = self.values(names)?;
        if data.iter().all(|value| value.is_finite()) { Ok(data) } else { Err(self.checkpoint.not_finite(names[0])) }
    }

    /// The tensors' values, concatenated.
    fn values(&self, names: &[&str]) -> Result<Vec<f32>, FolderError> {
        let sizes = names.iter().map(|name| self.checkpoint.size(name)).collect::<Result<Vec<_>, _>>()?;
        let mut data = vec![0.0; sizes.iter().sum()];
        let mut rest = &mut data[..];
        for (name, size) in names.iter().zip(sizes) {
            let (values, after) = rest.split_at_mut(size);
            let hash = self.checkpoint.read(name, values)?;
            self.hashes.lock().insert((*name).to_owned(), hash);
            rest = after;
        }
        Ok(data)
    }

    /// The tensors' rows, concatenated.
    fn matrix(&self, names: &[&str], cols: usize) -> Result<Matrix, FolderError> {
        let data = self.values(names)?;
        Ok(Matrix { rows: data.len() / cols, cols, data })
    }

    /// The hash of all tensors that were read, by name.
    fn identity(self) -> [u8; 32] {
        let mut hasher = blake3::Hasher::new();
        for (name, hash) in self.hashes.into_inner() {
            hasher.update(blake3::hash(name.as_bytes()).as_bytes()).update(hash.as_bytes());
        }
        *hasher.finalize().as_bytes()
    }
}
