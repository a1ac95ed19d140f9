//! The shape of a Llama-family model: what the forward pass must know, parsed once into values that cannot be wrong.

mod parse;

pub(crate) use parse::token_ids;

/// Which of the kindred architectures a model is. They differ in biases, in norms of queries and keys, and in windows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Family {
    /// The plain one.
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
    /// Positions that the model was made for, prompt and output together.
    pub(crate) context: usize,
    /// Added to the mean square in every RMS norm.
    pub(crate) norm_eps: f32,
    /// Rotary position embedding.
    pub(crate) rope: Rope,
    /// The output head is the embedding.
    pub(crate) tied: bool,
    /// A token sees itself and this many less one before it; `None`: all. The same in every layer.
    pub(crate) sliding_window: Option<usize>,
    /// Tokens that end a sequence.
    pub(crate) eos: Vec<u32>,
    /// The token that starts a sequence, when the model has one.
    pub(crate) bos: Option<u32>,
}

/// Rotary position embedding, in the half-split form: dimension `i` rotates with `i + head_dim / 2`.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Rope {
    /// Base of the wavelengths.
    pub(crate) theta: f64,
    /// How frequencies are changed for a longer context.
    pub(crate) scaling: Option<Llama3Scaling>,
}

/// Llama 3's scaling of frequencies: wavelengths over `original_context / low_freq_factor` are stretched by `factor`,
/// those under `original_context / high_freq_factor` stay, those between are blended linearly in frequency.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Llama3Scaling {
    /// The stretch.
    pub(crate) factor: f64,
    /// Bounds the stretched wavelengths.
    pub(crate) low_freq_factor: f64,
    /// Bounds the kept wavelengths.
    pub(crate) high_freq_factor: f64,
    /// The context of the pretraining, in tokens.
    pub(crate) original_context: usize,
}
