//! Loading of models: Hugging Face folders, and the built-in models, which are folders too once they are written.
//!
//! Everything is read once and checked. Each error names the file, and the field or tensor in it.

mod builtin;
mod config;
mod error;
mod huggingface;
mod json;
mod weights;

pub use builtin::{Builtin, BuiltinError};
#[cfg(test)]
pub(super) use config::Family;
pub(super) use config::{Config, Llama3Scaling, Rope};
pub use error::FolderError;
pub(super) use huggingface::{BLOCK_SIZE, LoadedModel, ModelFolder};
pub use huggingface::{TokenizerFiles, folder_name};
pub(super) use weights::{Layer, Matrix, Weights};
