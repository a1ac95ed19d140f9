//! Why a model folder cannot be served. Messages say what to change.

use std::io;
use std::path::PathBuf;

/// A model folder cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum FolderError {
    /// There is no such folder.
    #[error(
        "{path}: no such folder; a model is a folder with config.json, model.safetensors and tokenizer.json",
        path = .path.display()
    )]
    NotAFolder {
        /// The given path.
        path: PathBuf,
    },
    /// A file cannot be read.
    #[error("{path}: {source}", path = .path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// A file does not have the expected format.
    #[error("{path}: {problem}", path = .path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
    /// A field has an invalid or unsupported value.
    #[error("{path}: `{field}` {problem}", path = .path.display())]
    Field {
        /// The file.
        path: PathBuf,
        /// The field, with its parents.
        field: String,
        /// What is wrong with it, and what would be right.
        problem: String,
    },
    /// There are no weights in a supported format.
    #[error(
        "{path}: neither model.safetensors nor model.safetensors.index.json is there; other formats (.bin, .gguf) \
         must be converted to safetensors first",
        path = .path.display()
    )]
    NoWeights {
        /// The folder.
        path: PathBuf,
    },
    /// There is no tokenizer in a supported format.
    #[error(
        "{path}: tokenizer.json is missing; it comes with most models, and transformers writes it from other forms: \
         AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)",
        path = .path.display()
    )]
    NoTokenizer {
        /// The folder.
        path: PathBuf,
    },
    /// A file of weights is invalid.
    #[error("{path}: {problem}", path = .path.display())]
    Weights {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
    /// A tensor is missing, or does not match config.json.
    #[error("{path}: tensor `{tensor}` {problem}", path = .path.display())]
    Tensor {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// What is wrong with it, and what would be right.
        problem: String,
    },
    /// The weights do not fit into memory.
    #[error(
        "{path}: the weights need {needed} MiB of memory, {available} MiB are available; stop other programs or \
         choose a smaller model",
        path = .path.display(),
        needed = .needed.div_ceil(1 << 20),
        available = .available >> 20
    )]
    Memory {
        /// The folder.
        path: PathBuf,
        /// Bytes that the weights take once loaded.
        needed: u64,
        /// Bytes of memory that are available.
        available: u64,
    },
}
