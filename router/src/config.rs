//! What several sections of the configuration have in common: latency targets, and the errors of invalid values.
//!
//! Not here: the sections themselves, each of which is in the room that it is about; `state` has them together.

mod problem;
mod slo;

pub use problem::{Problem, Quantity};
pub use slo::Slo;
