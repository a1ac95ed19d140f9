//! A model as its clients see it.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::sync::Arc;

/// Context of a model whose server does not say it: no prompt is too long for the router, since the server checks it.
pub const UNKNOWN_CONTEXT: usize = 1 << 30;

/// A model as its clients see it: its id, its limits, its tokenizer and chat template.
#[derive(Clone, PartialEq, Serialize, Deserialize)]
pub struct ModelCard {
    /// The id that clients send.
    pub id: String,
    /// The model that it is an adapter of.
    #[serde(default)]
    pub parent: Option<String>,
    /// The model that it is a further name of, on the same server; `None`: it is not known to be one. vLLM lists each
    /// `--served-model-name` as a model.
    #[serde(default)]
    pub name_of: Option<String>,
    /// Identifies the weights in block hashes: two cards with the same identity share an index.
    pub identity: String,
    /// When the model was created or loaded, in seconds since 1970.
    pub created: u64,
    /// Maximum of prompt and output tokens together; may be [`UNKNOWN_CONTEXT`].
    pub context: usize,
    /// Tokens per KV block.
    pub block_size: usize,
    /// Size of the vocabulary.
    pub vocabulary: usize,
    /// Tokens that end a sequence.
    pub eos: Vec<u32>,
    /// The text of `tokenizer.json`; `None` when only the engine can tokenize.
    pub tokenizer: Option<Arc<str>>,
    /// The Jinja chat template, when the model has one.
    pub chat_template: Option<String>,
    /// Special tokens that templates name: `bos_token`, `eos_token` and the like, with their text.
    pub special_tokens: Vec<(String, String)>,
    /// The model's recommended sampling, for requests that do not set these fields: the fields of
    /// `generation_config.json` that are in [`Sampling`](super::Sampling). `None`: no recommendation.
    #[serde(default)]
    pub sampling: SamplingDefaults,
    /// The weights are random and the text is meaningless; reported to users.
    pub random_weights: bool,
    /// Requests for the model are [relayed](super::Work::Relay): the engine is a server of the client's API.
    #[serde(default)]
    pub is_relayed: bool,
    /// The blocks that its workers announce are hashed from the engine's own tokens, so they match no tokens that were
    /// estimated from the text of a prompt.
    #[serde(default)]
    pub has_exact_blocks: bool,
}

/// The model's recommended sampling, for the fields that a request does not set: those fields of
/// `generation_config.json` that [`Sampling`](super::Sampling) has. `None`: no recommendation.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct SamplingDefaults {
    /// As in [`Sampling`](super::Sampling).
    pub temperature: Option<f32>,
    /// As in [`Sampling`](super::Sampling).
    pub top_p: Option<f32>,
    /// As in [`Sampling`](super::Sampling).
    pub top_k: Option<u32>,
    /// As in [`Sampling`](super::Sampling).
    pub min_p: Option<f32>,
    /// As in [`Sampling`](super::Sampling).
    pub repetition_penalty: Option<f32>,
}

impl ModelCard {
    /// A model of which nothing else is known. Its identity is its id, and its blocks are exact.
    pub fn new(id: &str, context: usize, block_size: usize) -> Self {
        Self {
            id: id.to_owned(),
            parent: None,
            name_of: None,
            identity: id.to_owned(),
            created: 0,
            context,
            block_size,
            vocabulary: 0,
            eos: Vec::new(),
            tokenizer: None,
            chat_template: None,
            special_tokens: Vec::new(),
            sampling: SamplingDefaults::default(),
            random_weights: false,
            is_relayed: false,
            has_exact_blocks: true,
        }
    }

    /// The first name of the model, which all of its names have in common.
    pub fn first_name(&self) -> &str {
        self.name_of.as_ref().unwrap_or(&self.id)
    }
}

impl fmt::Debug for ModelCard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { id, identity, context, block_size, .. } = self;
        write!(f, "ModelCard({id}, identity {identity}, context {context}, blocks of {block_size})")
    }
}
