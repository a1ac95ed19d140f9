//! The supported architectures.

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

impl Family {
    /// All architectures.
    pub(super) const ALL: [Self; 4] = [Self::Llama, Self::Mistral, Self::Qwen2, Self::Qwen3];

    /// The name in `architectures` of config.json.
    pub(crate) fn architecture(self) -> &'static str {
        match self {
            Family::Llama => "LlamaForCausalLM",
            Family::Mistral => "MistralForCausalLM",
            Family::Qwen2 => "Qwen2ForCausalLM",
            Family::Qwen3 => "Qwen3ForCausalLM",
        }
    }

    /// The number of key/value heads of a configuration without that field.
    pub(super) fn default_kv_heads(self, heads: usize) -> usize {
        match self {
            Family::Llama => heads,
            Family::Mistral => 8,
            Family::Qwen2 | Family::Qwen3 => 32,
        }
    }
}
