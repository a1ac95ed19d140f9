//! The native engine: Llama-family models from a Hugging Face folder, computed on the CPU over paged KV blocks.
//!
//! ```text
//!  Request ─▶ engine ─▶ scheduler ─▶ model.forward over the KV cache (G1)
//!                        │  ▲            └─▶ sampling ─▶ stream
//!                 prefix │  │ blocks
//!                        └─▶ kvbm
//! ```
//!
//! One [`Runtime`] (weights, compute threads) serves any number of [`LlamaEngine`]s in a process.
//!
//! **Invariant**: a row's result depends only on its own inputs, not on chunk size, other rows of the batch, threads or
//! the worker's role. So the KV of a block has the same bits on whichever worker it is computed, and reuse never
//! changes an answer.

mod engine;
mod limits;
mod loader;
mod model;
mod prefetch;
mod runtime;
mod scheduler;
mod settings;

#[cfg(test)]
mod reference;
#[cfg(test)]
pub(crate) mod tests;

pub use engine::LlamaEngine;
pub use limits::Limits;
pub use loader::{Builtin, BuiltinError, FolderError, TokenizerFiles, folder_name};
pub use runtime::{Memory, ModelSource, OpenError, Runtime, Shape};
pub use settings::{HandoffLimits, Settings, UnreadOutput};
