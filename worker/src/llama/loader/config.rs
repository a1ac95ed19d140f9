//! The shape of a Llama-family model: parsed and checked once, so that the forward pass need not check.

mod parse;

pub(crate) use parse::token_ids;

/// The architecture of a model. Architectures differ in biases, in norms of queries and keys, and in windows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Family {
    /// Llama 2 and 3.
    Llama,
    /// Llama with a sliding window.
    Mistral,
    /// Llama with biases on queries, keys and values.
    Qwen2,
    /// Llama with an RMS norm over each head's query and key, before rotation.
    Qwen3,
}

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

/// Rotary position embedding in the half-split form: dimension `i` rotates with `i + head_dim / 2`. Its `Debug`
/// output is part of the fingerprint of blocks.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Rope {
    /// Base of the wavelengths.
    pub(crate) theta: f64,
    /// Scaling of frequencies for a longer context.
    pub(crate) scaling: Option<Llama3Scaling>,
}

/// Llama 3's scaling of frequencies: wavelengths over `original_context / low_freq_factor` are multiplied by
/// `factor`, those under `original_context / high_freq_factor` are unchanged, those between are interpolated linearly
/// in frequency.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Llama3Scaling {
    /// The factor of long wavelengths.
    pub(crate) factor: f64,
    /// Lower bound of the scaled wavelengths, as a fraction of the original context.
    pub(crate) low_freq_factor: f64,
    /// Upper bound of the unchanged wavelengths, as a fraction of the original context.
    pub(crate) high_freq_factor: f64,
    /// The context of the pretraining, in tokens.
    pub(crate) original_context: usize,
}
