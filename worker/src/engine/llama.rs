//! The native engine: Llama-family models from a Hugging Face folder, computed on the CPU with real attention over paged
//! KV blocks.

pub(crate) mod arena;
mod attention;
pub(crate) mod config;
pub(crate) mod folder;
mod kernel;
mod linear;
pub(crate) mod model;
mod rope;
pub(crate) mod sampling;
pub(crate) mod weights;

pub use folder::FolderError;
