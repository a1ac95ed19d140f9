//! What the engines of a process share: one copy of the weights, the compute threads, and fair turns on them.

use super::loader::{BLOCK_SIZE, Builtin, BuiltinError, Config, Described, Folder, FolderError, Weights};
use super::model::{Arena, Model};
use crate::engine::{Finish, ModelCard, StopRule};
use kvbm::DeviceBlocks;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tokio::sync::{Semaphore, SemaphorePermit};

/// Where a model comes from.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum ModelSource {
    /// Made up here, once, and kept in the data directory.
    Builtin(Builtin),
    /// A Hugging Face folder.
    Folder(PathBuf),
}

/// A model could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// Its folder is not what it should be.
    #[error(transparent)]
    Folder(#[from] FolderError),
    /// It could not be made.
    #[error(transparent)]
    Builtin(#[from] BuiltinError),
}

/// What a model asks of the machine.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Shape {
    /// Bytes of memory that the weights take, however many engines compute with them.
    pub weights_bytes: u64,
    /// Bytes of one block.
    pub block_bytes: usize,
    /// Bytes of the blocks of one request that fills the context.
    pub context_bytes: u64,
}

impl Shape {
    /// Reads a model's shape, and checks its folder but for the weights, which are not loaded. A built-in model need not have
    /// been made.
    pub fn of(source: &ModelSource) -> Result<Self, OpenError> {
        Ok(match source {
            ModelSource::Builtin(name) => Self::new(&name.config(), BLOCK_SIZE),
            ModelSource::Folder(path) => Self::new(&Described::read(path)?.config, BLOCK_SIZE),
        })
    }

    fn new(config: &Config, block_size: usize) -> Self {
        let Config { layers, kv_heads, head_dim, context, .. } = *config;
        let block_bytes = layers * 2 * kv_heads * head_dim * size_of::<f32>() * block_size;
        let context_bytes = (block_bytes * context.div_ceil(block_size)) as u64;
        Self { weights_bytes: Weights::bytes(config), block_bytes, context_bytes }
    }
}

/// G1 of one engine: device memory, to be given to a block manager and then to [`LlamaEngine::start`] with it.
#[derive(Clone)]
pub struct Memory(pub(super) Arc<Arena>);

impl Memory {
    /// The memory as kvbm sees it.
    pub fn device(&self) -> Arc<dyn DeviceBlocks> {
        Arc::clone(&self.0) as Arc<dyn DeviceBlocks>
    }
}

/// A loaded model that any number of engines compute with, in fair turns.
pub struct Runtime {
    pub(super) model: Model,
    pub(super) card: Arc<ModelCard>,
    /// First come, first served: an engine with one long prompt after the other cannot starve its neighbours.
    turns: Semaphore,
}

impl Runtime {
    /// Loads a model. Blocks for as long as that takes.
    ///
    /// `threads` compute. A built-in model is made in `data_dir` the first time, and `progress` told of bytes written and
    /// bytes in all.
    pub fn open(
        source: &ModelSource,
        data_dir: &Path,
        threads: usize,
        progress: &(dyn Fn(u64, u64) + Sync),
    ) -> Result<Arc<Self>, OpenError> {
        let Folder { card, config, weights } = match source {
            ModelSource::Builtin(name) => Folder::open(&name.ensure(data_dir, progress)?, Some(name.name()))?,
            ModelSource::Folder(path) => Folder::open(path, None)?,
        };
        let model = Model::new(config, weights, threads);
        Ok(Arc::new(Self { model, card: Arc::new(card), turns: Semaphore::new(1) }))
    }

    /// The model as clients see it.
    pub fn card(&self) -> &Arc<ModelCard> {
        &self.card
    }

    /// Device memory for one engine: so many blocks. Costs no memory until it is used.
    ///
    /// Fails when the address space cannot be had.
    pub fn memory(&self, blocks: usize) -> io::Result<Memory> {
        Ok(Memory(Arc::new(self.model.arena(self.card.block_size, blocks)?)))
    }

    /// What the model asks of the machine.
    pub fn shape(&self) -> Shape {
        Shape::new(self.model.config(), self.card.block_size)
    }

    /// Bytes of one block.
    pub fn block_bytes(&self) -> usize {
        self.shape().block_bytes
    }

    /// The right to compute, until it is dropped.
    pub(super) async fn turn(&self) -> SemaphorePermit<'_> {
        self.turns.acquire().await.expect("the semaphore is never closed")
    }

    /// Tokens that may not be chosen after `generated` tokens: those that would end the answer too early.
    pub(super) fn banned(&self, stop: &StopRule, generated: usize) -> Vec<u32> {
        if generated >= stop.min_tokens as usize {
            return Vec::new();
        }
        self.card.eos.iter().chain(&stop.stop_tokens).copied().collect()
    }

    /// Whether a chosen token ends the answer.
    pub(super) fn ends(&self, stop: &StopRule, token: u32) -> Option<Finish> {
        if stop.stop_tokens.contains(&token) {
            return Some(Finish::StopToken(token));
        }
        (!stop.ignore_eos && self.card.eos.contains(&token)).then_some(Finish::Stop)
    }
}
