//! The tensors of a model, computed from its configuration.

use super::Weights;
use crate::llama::loader::config::{Config, Family};

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

impl Weights {
    /// Bytes that the weights of a model of this shape take in memory.
    pub(crate) fn bytes(config: &Config) -> u64 {
        let values = tensors(config).iter().map(|(_, shape)| shape.iter().product::<usize>() as u64).sum::<u64>();
        values * size_of::<f32>() as u64
    }
}
