//! What the engines of a process share: one copy of the weights, the compute threads, and the permit to compute.

use super::loader::{BLOCK_SIZE, Builtin, BuiltinError, Config, FolderError, LoadedModel, ModelFolder, Weights};
use super::model::{KvCache, Model};
use crate::engine::{FinishReason, ModelCard, StopConditions};
use kvbm::DeviceBlocks;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tokio::sync::{Semaphore, SemaphorePermit};

/// Where a model is loaded from.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum ModelSource {
    /// A built-in model, written to the data directory the first time.
    Builtin(Builtin),
    /// A Hugging Face folder.
    Folder(PathBuf),
}

/// A model could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The model's folder is missing something or is invalid.
    #[error(transparent)]
    Folder(#[from] FolderError),
    /// The built-in model could not be written.
    #[error(transparent)]
    Builtin(#[from] BuiltinError),
    /// The compute threads could not be started.
    #[error(
        "the system refuses {threads} compute threads: {cause}; use fewer, or raise the limits of threads (ulimit -u, \
         TasksMax= in systemd) and of the address space (ulimit -v, LimitAS= in systemd)"
    )]
    Threads {
        /// Their number.
        threads: usize,
        /// The answer of the system.
        cause: rayon::ThreadPoolBuildError,
    },
}

/// The memory that a model needs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Shape {
    /// Bytes of the weights in memory, once per process.
    pub weights_bytes: u64,
    /// Bytes of one block.
    pub block_bytes: usize,
    /// Tokens of one block.
    pub block_tokens: usize,
    /// The context, in tokens.
    pub context_tokens: usize,
    /// Bytes of the blocks of one request that fills the context.
    pub context_bytes: u64,
}

impl Shape {
    /// Reads a model's shape and checks its folder, without loading the weights. A built-in model need not have been
    /// written yet.
    pub fn of(source: &ModelSource) -> Result<Self, OpenError> {
        Ok(match source {
            ModelSource::Builtin(name) => Self::new(&name.config(), BLOCK_SIZE),
            ModelSource::Folder(path) => Self::new(&ModelFolder::read(path)?.config, BLOCK_SIZE),
        })
    }

    fn new(config: &Config, block_size: usize) -> Self {
        let Config { layers, kv_heads, head_dim, context, .. } = *config;
        let block_bytes = layers * 2 * kv_heads * head_dim * size_of::<f32>() * block_size;
        let context_bytes = (block_bytes * context.div_ceil(block_size)) as u64;
        let weights_bytes = Weights::bytes(config);
        Self { weights_bytes, block_bytes, block_tokens: block_size, context_tokens: context, context_bytes }
    }
}

/// Device memory (G1) of one engine: given to a block manager, and with it to
/// [`LlamaEngine::start`](super::LlamaEngine::start).
#[derive(Clone)]
pub struct Memory(pub(super) Arc<KvCache>);

impl Memory {
    /// The memory as kvbm's device blocks.
    pub fn device(&self) -> Arc<dyn DeviceBlocks> {
        Arc::clone(&self.0) as Arc<dyn DeviceBlocks>
    }
}

/// A loaded model, shared by any number of engines. One of them computes at a time.
pub struct Runtime {
    pub(super) model: Model,
    pub(super) card: Arc<ModelCard>,
    /// FIFO, so that an engine with many long prompts cannot starve the others.
    compute: Semaphore,
}

impl Runtime {
    /// Loads a model; blocks the calling thread.
    ///
    /// `threads` is the number of compute threads. A built-in model is written to `data_dir` the first time; `progress`
    /// is called with the bytes written so far and the bytes in all.
    pub fn open(
        source: &ModelSource,
        data_dir: &Path,
        threads: usize,
        progress: &(dyn Fn(u64, u64) + Sync),
    ) -> Result<Arc<Self>, OpenError> {
        let LoadedModel { card, config, weights } = match source {
            ModelSource::Builtin(name) => LoadedModel::open(&name.ensure(data_dir, progress)?, Some(name.name()))?,
            ModelSource::Folder(path) => LoadedModel::open(path, None)?,
        };
        let model = Model::new(config, weights, threads).map_err(|cause| OpenError::Threads { threads, cause })?;
        Ok(Arc::new(Self { model, card: Arc::new(card), compute: Semaphore::new(1) }))
    }

    /// The model as clients see it.
    pub fn card(&self) -> &Arc<ModelCard> {
        &self.card
    }

    /// Device memory of `blocks` blocks for one engine. Pages take no memory until they are used.
    ///
    /// Fails when the address space cannot be reserved.
    pub fn memory(&self, blocks: usize) -> io::Result<Memory> {
        Ok(Memory(Arc::new(self.model.kv_cache(self.card.block_size, blocks)?)))
    }

    /// The memory that the model needs.
    pub fn shape(&self) -> Shape {
        Shape::new(self.model.config(), self.card.block_size)
    }

    /// Bytes of one block.
    pub fn block_bytes(&self) -> usize {
        self.shape().block_bytes
    }

    /// The permit to compute, held until it is dropped.
    pub(super) async fn compute_permit(&self) -> SemaphorePermit<'_> {
        self.compute.acquire().await.expect("the semaphore is never closed")
    }

    /// Tokens that may not be chosen after `generated` tokens, because they would end the answer before `min_tokens`.
    pub(super) fn banned_tokens(&self, stop: &StopConditions, generated: usize) -> Vec<u32> {
        if generated >= stop.min_tokens as usize {
            return Vec::new();
        }
        self.card.eos.iter().chain(&stop.stop_tokens).copied().collect()
    }

    /// The reason to finish, if the chosen token ends the answer.
    pub(super) fn finish_reason(&self, stop: &StopConditions, token: u32) -> Option<FinishReason> {
        if stop.stop_tokens.contains(&token) {
            return Some(FinishReason::StopToken(token));
        }
        (!stop.ignore_eos && self.card.eos.contains(&token)).then_some(FinishReason::Stop)
    }
}
