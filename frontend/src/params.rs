//! Request parameters: JSON fields read one by one, checked, and turned into the types of the engine.
//!
//! Not here: the prompt (`api::chat::messages`, `api::completions::prompts`).

mod cache;
mod fields;
mod generation;
pub(crate) mod known_fields;
mod sampling;
pub(crate) mod scheduling;

pub use cache::{Domains, SecretError};
pub(crate) use fields::{Fields, Raw, empty, integer, mistyped, mistyped_as, too_long};
pub(crate) use generation::{CHOICES_MAX, Controls, Delivery, StreamUsage, TOP_LOGPROBS_MAX};
pub(crate) use known_fields::Shape;
