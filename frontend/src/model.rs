//! Models as the frontend serves them: chat template, text to tokens, and the bytes of each token.
//!
//! Not here: tokens to text (`output`), and the computation, which is the engine's.

mod cache;
mod encode;
mod served;
mod special;
mod template;
mod token_cache;
mod vocabulary;

pub(crate) use cache::{ModelCache, find_card};
pub use served::check_model;
pub(crate) use served::{ModelOptions, ServedModel, prompt_too_long};
pub(crate) use template::Conversation;
pub(crate) use vocabulary::Vocabulary;
