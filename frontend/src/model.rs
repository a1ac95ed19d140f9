//! Models as the frontend serves them: chat template, text to tokens, and the bytes of each token.
//!
//! The prompts of a server behind this gateway are rendered and tokenized as that server does (`local`).
//!
//! Not here: tokens to text (`output`), and the computation, which is the engine's.

mod cache;
mod encode;
mod local;
mod served;
mod special;
mod template;
mod token_cache;
mod vocabulary;

pub(crate) use cache::{ModelCache, find_card};
pub(crate) use encode::EncodeJob;
pub(crate) use local::{ContentFormat, PromptKind, PromptText, TooMuchNewText};
pub use local::{LocalTokenizer, TokenizerText};
pub use served::check_model;
pub(crate) use served::{ModelOptions, ServedModel, prompt_too_long};
pub(crate) use template::Conversation;
pub(crate) use token_cache::TokenCache;
pub(crate) use vocabulary::Vocabulary;
