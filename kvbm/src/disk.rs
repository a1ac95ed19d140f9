//! G3: blocks on a local SSD, in a log of large segments that exactly one process owns.
//!
//! ```text
//!   store ─▶ queue ─▶ two writers ─▶ head segment ─▶ indexed, announced, answered
//!   load  ─▶ index ─▶ runs of neighbours ─▶ a few readers ─▶ stream
//!   full  ─▶ oldest segment given up whole, what is in use carried over
//!   open  ─▶ footers of sealed segments, a scan of the one that was open ─▶ announced again
//! ```
//!
//! *At rest* means: survives the death of the process. A power cut may cost blocks, never correctness, because whoever
//! serves a block verifies it. A write that fails costs its blocks; the tier goes on reading, and writes again after a
//! second. What one might look for here and will not find: eviction of single blocks, and any `fsync`.

mod direct;
mod listing;
mod load;
mod log;
mod owner;
mod queue;
mod reclaim;
mod record;
mod recover;
mod room;
mod segment;
#[cfg(test)]
mod tests;

use crate::tier::{LoadError, Loaded, StoreError, Tier, Usage};
use crate::{Block, EventLog, Fingerprint, Level, SequenceHash};
use futures::future::{BoxFuture, FutureExt};
use futures::stream::{self, BoxStream, StreamExt};
use load::{Part, again};
use log::Log;
use serde::{Deserialize, Serialize};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tokio::runtime::Handle;
use tokio::sync::Semaphore;
use tokio_util::task::AbortOnDropHandle;

/// Reads at once, over all loads: a SATA device is fast with two, an `NVMe` one with eight.
const READERS: usize = 8;

/// How large the log may grow.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Settings {
    /// Bytes that the log may take. Default 16 GiB.
    pub capacity_bytes: u64,
    /// Bytes of one segment, the unit of reclaiming; at most a quarter of the capacity is used. Default 128 MiB: writes stay
    /// sequential for long, and what is scanned after a crash takes a tenth of a second.
    pub segment_bytes: u64,
    /// Bytes that the filesystem keeps free; the log shrinks rather than take them. Default 1 GiB.
    pub min_free_bytes: u64,
}

impl Default for Settings {
    fn default() -> Self {
        Self { capacity_bytes: 16 << 30, segment_bytes: 128 << 20, min_free_bytes: 1 << 30 }
    }
}

impl Settings {
    /// A log has at least four segments: one being written, one in reserve, and some that rest.
    const SEGMENTS_MIN: u64 = 4;
    /// Below this, footers would outweigh blocks.
    const SEGMENT_BYTES_MIN: u64 = 64 << 10;

    fn in_grains(self, grain: u64) -> Result<Self, OpenError> {
        let segment = self.segment_bytes.min(self.capacity_bytes / Self::SEGMENTS_MIN);
        let segment_bytes = segment / grain * grain;
        if segment_bytes < Self::SEGMENT_BYTES_MIN {
            let least = Self::SEGMENTS_MIN * Self::SEGMENT_BYTES_MIN;
            return Err(OpenError::TooSmall { capacity_bytes: self.capacity_bytes, least });
        }
        Ok(Self { segment_bytes, ..self })
    }
}

/// The log was not opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// Another process has it; give this one a folder of its own.
    #[error("folder {folder:?} belongs to {}", pid.map_or_else(|| "another process".into(), |pid| format!("process {pid}")))]
    Owned {
        /// Which folder.
        folder: PathBuf,
        /// Whose, if it said so.
        pid: Option<u32>,
    },
    /// The settings leave no room for a log.
    #[error("a capacity of {capacity_bytes} bytes is too small for a disk tier, which takes at least {least}")]
    TooSmall {
        /// What was asked for.
        capacity_bytes: u64,
        /// What would do, for segments that are not smaller than this allows either.
        least: u64,
    },
    /// The folder cannot be used.
    #[error("{path:?}: {source}")]
    Io {
        /// Which file or folder.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

/// A log of segments in a folder.
pub struct DiskTier {
    log: Arc<Log>,
    readers: Arc<Semaphore>,
    runtime: Handle,
}

impl DiskTier {
    /// Takes possession of a folder, finds the blocks that a process before this one left there, and announces them.
    /// Blocks for the time that this takes. Dropping the tier seals the log and gives the folder back.
    ///
    /// # Panics
    /// Outside a tokio runtime.
    pub fn open(folder: &Path, settings: Settings, events: Arc<EventLog>) -> Result<Arc<Self>, OpenError> {
        let log = Arc::new(Log::open(folder, settings, events)?);
        Ok(Arc::new(Self { log, readers: Arc::new(Semaphore::new(READERS)), runtime: Handle::current() }))
    }

    fn write(&self) {
        if self.log.queue.wants_writer() {
            let log = self.log.clone();
            // The handle is not kept: a writer ends by itself, and one that panics answers for what waits.
            drop(self.runtime.spawn_blocking(move || log.drain()));
        }
    }
}

impl Tier for DiskTier {
    fn level(&self) -> Level {
        Level::G3
    }

    fn holds(&self, fingerprint: Fingerprint, names: &[SequenceHash]) -> usize {
        self.log.index.holds(fingerprint, names)
    }

    fn load(&self, fingerprint: Fingerprint, names: Vec<SequenceHash>) -> BoxStream<'static, Loaded> {
        let (missing, parts) = self.log.plan(fingerprint, &names);
        let (log, readers, runtime) = (self.log.clone(), self.readers.clone(), self.runtime.clone());
        let names: Arc<[SequenceHash]> = names.into();
        let read = move |part: Part| {
            let (log, readers, runtime, names) = (log.clone(), readers.clone(), runtime.clone(), names.clone());
            async move {
                let indices: Vec<usize> = part.run.wanted.iter().map(|wanted| wanted.index).collect();
                let permit = readers.acquire_owned().await;
                let reading = runtime.spawn_blocking(move || {
                    let loaded = log.load(fingerprint, &names, &part);
                    drop(permit);
                    loaded
                });
                // Dropping the stream calls off what has not started.
                let loaded = AbortOnDropHandle::new(reading).await.unwrap_or_else(|died| {
                    let error = io::Error::other(died);
                    indices.into_iter().map(|index| (index, Err(LoadError::Io(again(&error))))).collect()
                });
                stream::iter(loaded)
            }
        };
        let misses = stream::iter(missing.into_iter().map(|index| (index, Ok(None))));
        misses.chain(stream::iter(parts).map(read).buffer_unordered(READERS).flatten()).boxed()
    }

    fn store(&self, blocks: Vec<Block>) -> BoxFuture<'_, Vec<Result<(), StoreError>>> {
        let offer = |block: Block| {
            if self.log.index.get(block.header.fingerprint, block.header.name).is_some() {
                return Ok(None);
            }
            if !self.log.fits(block.header.length) {
                return Err(StoreError::Full);
            }
            self.log.queue.offer(block).map(Some)
        };
        let offered: Vec<_> = blocks.into_iter().map(offer).collect();
        self.write();
        async move {
            let mut answers = Vec::with_capacity(offered.len());
            for offered in offered {
                answers.push(match offered {
                    Ok(Some(waiting)) => {
                        waiting.await.unwrap_or_else(|_| Err(io::Error::other("the writer died").into()))
                    }
                    Ok(None) => Ok(()),
                    Err(refused) => Err(refused),
                });
            }
            answers
        }
        .boxed()
    }

    fn discard(&self, fingerprint: Fingerprint, name: SequenceHash) {
        self.log.discard(fingerprint, name, |_| true);
        self.write();
    }

    fn usage(&self) -> Usage {
        let log = &self.log;
        Usage { blocks: log.index.len() as u64, bytes: log.taken(), capacity: Some(log.capacity()) }
    }
}
