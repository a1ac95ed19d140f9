//! The weights of one layer.

use super::Matrix;

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
