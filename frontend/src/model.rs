//! Models as the frontend uses them: chat template, text to tokens, and the bytes of each token.
//!
//! Not here: tokens to text (`output`), and the computation, which is the engine's.

mod cache;
mod encode;
mod served;
mod special;
mod template;
mod vocabulary;

pub(crate) use cache::Models;
pub use served::check_model;
pub(crate) use served::{Model, Options, too_long};
pub(crate) use template::Conversation;
pub(crate) use vocabulary::Vocabulary;
