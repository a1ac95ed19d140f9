//! The weights of a model in memory: f32, one allocation per matrix, with projections of the same input fused.

mod checkpoint;

pub(crate) use checkpoint::Checkpoint;

use super::config::{Config, Family};
use super::error::FolderError;
use parking_lot::Mutex;
use rayon::prelude::*;
use std::collections::BTreeMap;

/// A matrix of a linear layer: `y = x · Wᵀ`.
#[derive(Clone, PartialEq)]
pub(crate) struct Matrix {
    /// Outputs.
    pub(crate) rows: usize,
    /// Inputs.
    pub(crate) cols: usize,
    /// Row-major, `[out][in]`.
    pub(crate) data: Vec<f32>,
}

/// All weights of a model.
pub(crate) struct Weights {
    /// `[vocabulary][hidden]`.
    pub(crate) embed: Matrix,
    /// First to last.
    pub(crate) layers: Vec<Layer>,
    /// Gain of the last norm, `[hidden]`.
    pub(crate) norm: Vec<f32>,
    /// `[vocabulary][hidden]`; `None`: tied, use `embed`.
    pub(crate) head: Option<Matrix>,
    /// Hash of the weights as they were stored.
    pub(crate) identity: [u8; 32],
}

/// The weights of one layer.
pub(crate) struct Layer {
    /// Gain of the norm before attention, `[hidden]`.
    pub(crate) attention_norm: Vec<f32>,
    /// Query rows, then key rows, then value rows: `[(heads + 2 · kv_heads) · head_dim][hidden]`.
    pub(crate) qkv: Matrix,
    /// Added to `qkv`'s outputs, in the same order (Qwen2).
    pub(crate) qkv_bias: Option<Vec<f32>>,
    /// Gain of the norm over each query head, `[head_dim]` (Qwen3).
    pub(crate) q_norm: Option<Vec<f32>>,
    /// Gain of the norm over each key head, `[head_dim]` (Qwen3).
    pub(crate) k_norm: Option<Vec<f32>>,
    /// `[hidden][heads · head_dim]`.
    pub(crate) output: Matrix,
    /// Gain of the norm before the feed-forward network, `[hidden]`.
    pub(crate) ffn_norm: Vec<f32>,
    /// Gate rows, then up rows: `[2 · intermediate][hidden]`.
    pub(crate) gate_up: Matrix,
    /// `[hidden][intermediate]`.
    pub(crate) down: Matrix,
}

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

    /// Bytes that the weights of a model of this shape take in memory.
    pub(crate) fn bytes(config: &Config) -> u64 {
        let values = tensors(config).iter().map(|(_, shape)| shape.iter().product::<usize>() as u64).sum::<u64>();
        values * size_of::<f32>() as u64
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
    /// The tensors' values, concatenated.
    fn vector(&self, names: &[&str]) -> Result<Vec<f32>, FolderError> {
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
        let data = self.vector(names)?;
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

/// Every tensor of a model of this shape, with its Hugging Face name.
pub(crate) fn tensors(config: &Config) -> Vec<(String, Vec<usize>)> {
    let Config { hidden, intermediate, vocabulary, head_dim, .. } = *config;
    let (queries, keys) = (config.heads * head_dim, config.kv_heads * head_dim);
    let mut all = vec![
        ("model.embed_tokens.weight".to_owned(), vec![vocabulary, hidden]),
        ("model.norm.weight".to_owned(), vec![hidden]),
    ];
    if !config.tied {
        all.push(("lm_head.weight".to_owned(), vec![vocabulary, hidden]));
    }
    for i in 0..config.layers {
        let mut add = |name: &str, shape: &[usize]| all.push((format!("model.layers.{i}.{name}"), shape.to_vec()));
        add("input_layernorm.weight", &[hidden]);
        add("post_attention_layernorm.weight", &[hidden]);
        add("self_attn.q_proj.weight", &[queries, hidden]);
        add("self_attn.k_proj.weight", &[keys, hidden]);
        add("self_attn.v_proj.weight", &[keys, hidden]);
        add("self_attn.o_proj.weight", &[hidden, queries]);
        add("mlp.gate_proj.weight", &[intermediate, hidden]);
        add("mlp.up_proj.weight", &[intermediate, hidden]);
        add("mlp.down_proj.weight", &[hidden, intermediate]);
        match config.family {
            Family::Llama | Family::Mistral => {}
            Family::Qwen2 => {
                add("self_attn.q_proj.bias", &[queries]);
                add("self_attn.k_proj.bias", &[keys]);
                add("self_attn.v_proj.bias", &[keys]);
            }
            Family::Qwen3 => {
                add("self_attn.q_norm.weight", &[head_dim]);
                add("self_attn.k_norm.weight", &[head_dim]);
            }
        }
    }
    all
}

impl std::fmt::Debug for Matrix {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Matrix({} × {})", self.rows, self.cols)
    }
}
