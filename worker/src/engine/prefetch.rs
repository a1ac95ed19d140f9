//! Copies of a prefix into the memory of an engine, before a request needs them.

use bytes::Bytes;
use kvbm::SequenceHash;
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// A prefix to copy into the host memory of an engine.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PrefixCopy {
    /// The hashes of its blocks, from the first.
    pub blocks: Arc<[SequenceHash]>,
    /// Another worker that has them in memory. `None`: the engine's own tiers have them.
    pub peer: Option<PeerMemory>,
}

/// The memory of a worker; opaque to all but engines of one kind.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PeerMemory(pub Bytes);

/// What was copied. 0 blocks: the engine had all of them.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Prefetched {
    /// Number of blocks.
    pub blocks: u32,
    /// Their bytes.
    pub bytes: u64,
}

/// Why a prefix was not copied. None of these is a fault that concerns requests.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error, Serialize, Deserialize)]
pub enum PrefetchError {
    /// The engine never copies a prefix.
    #[error("the engine does not prefetch")]
    Unsupported,
    /// The engine has a queue, copies another prefix, or has stopped.
    #[error("the engine is busy")]
    Busy,
    /// The engine has no host memory for blocks, or too little of it.
    #[error("the engine has too little host memory for the prefix")]
    NoMemory,
    /// Neither the engine's tiers nor the other worker have the first missing block, or the worker is unknown.
    #[error("the prefix was not found")]
    NotFound,
    /// It was not copied in time. Blocks that were copied stay.
    #[error("the copy took too long")]
    TimedOut,
    /// The engine could not be asked.
    #[error("{0}")]
    Failed(String),
}

impl PrefetchError {
    /// The reason as a label of metrics.
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Unsupported => "unsupported",
            Self::Busy => "busy",
            Self::NoMemory => "no_memory",
            Self::NotFound => "not_found",
            Self::TimedOut => "timed_out",
            Self::Failed(_) => "failed",
        }
    }
}
