//! Request parameters: reads JSON fields, checks them, and converts them to the types of the engine.
//!
//! Not here: prompts and messages (`api`).

mod cache;
mod fields;
mod generation;
pub(crate) mod known_fields;
mod sampling;
pub(crate) mod scheduling;

pub(crate) use cache::peek_salts;
pub use cache::{CacheDomains, SecretError};
pub(crate) use fields::{Fields, Raw, empty, integer, mistyped, mistyped_as, too_long};
pub(crate) use generation::{CHOICES_MAX, Delivery, GenerationParams, StreamUsage, TOP_LOGPROBS_MAX};
pub(crate) use known_fields::EndpointKind;
