//! The shape of a Llama-family model: parsed and checked once, so that the forward pass need not check.

mod family;
mod parse;
mod rope;

pub(crate) use family::Family;
pub(crate) use parse::token_ids;
pub(crate) use rope::{Llama3Scaling, Rope};

/// The shape of a model. `heads` is a multiple of `kv_heads`, `head_dim` is even, nothing is zero.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Config {
    /// The architecture.
    pub(crate) family: Family,
    /// Width of the residual stream.
    pub(crate) hidden: usize,
    /// How many layers.
    pub(crate) layers: usize,
    /// Query heads per layer.
    pub(crate) heads: usize,
    /// Key/value heads per layer.
    pub(crate) kv_heads: usize,
    /// Width of one head; `heads * head_dim` need not be `hidden`.
    pub(crate) head_dim: usize,
    /// Width of the gated feed-forward network.
    pub(crate) intermediate: usize,
    /// Rows of the embedding: logits per token.
    pub(crate) vocabulary: usize,
    /// Positions that the model was trained for, prompt and output together.
    pub(crate) context: usize,
    /// Added to the mean square in every RMS norm.
    pub(crate) norm_eps: f32,
    /// Rotary position embedding.
    pub(crate) rope: Rope,
    /// The output head is the embedding.
    pub(crate) tied: bool,
    /// Length of the sliding window, in every layer: a token sees itself and `window - 1` tokens before it; `None`:
    /// all tokens.
    pub(crate) sliding_window: Option<usize>,
    /// Tokens that end a sequence.
    pub(crate) eos: Vec<u32>,
    /// The token that starts a sequence, when the model has one.
    pub(crate) bos: Option<u32>,
}
