//! The native engine: Llama-family models from a Hugging Face folder, computed on the CPU with real attention over paged
//! KV blocks.

pub(crate) mod arena;
mod attention;
pub(crate) mod builtin;
pub(crate) mod config;
pub(crate) mod folder;
mod kernel;
mod linear;
pub(crate) mod model;
#[cfg(test)]
mod reference;
mod rope;
pub(crate) mod sampling;
pub(crate) mod weights;

pub use builtin::{Builtin, BuiltinError};
pub use folder::FolderError;
