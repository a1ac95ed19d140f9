//! The weights of a model in memory: f32, each matrix one allocation, projections that read the same input fused.

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

impl std::fmt::Debug for Matrix {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Matrix({} × {})", self.rows, self.cols)
    }
}
