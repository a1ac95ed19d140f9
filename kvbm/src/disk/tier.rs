//! The tier: one index over the logs of all paths.

use super::load::{self, SegmentRead};
use super::log::{Log, Shared, Spill};
use super::path::{LogPath, READERS};
use super::striping::Striper;
use crate::block::{Block, Date, Fingerprint, Header, Level, SequenceHash};
use crate::event::SetDigest;
use crate::tier::{Loaded, StoreError, Tier, Usage, WriteClaims};
use futures::future::{BoxFuture, FutureExt};
use futures::stream::{self, BoxStream, StreamExt};
use parking_lot::Mutex;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use tokio::runtime::Handle;
use tokio::sync::{mpsc, watch};
use tokio_util::task::TaskTracker;

/// Blocks on one or several local disks.
pub struct DiskTier {
    pub(super) log_paths: Vec<Arc<LogPath>>,
    pub(super) shared: Shared,
    pub(super) striper: Mutex<Striper>,
    pub(super) claims: WriteClaims,
    pub(super) recovered: watch::Sender<bool>,
    pub(super) runtime: Handle,
    /// All work that reads or writes the folders. It runs on blocking threads.
    pub(super) tasks: TaskTracker,
}

/// State of one path.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PathState {
    /// Folder of the path.
    pub folder: PathBuf,
    /// Why the path is down, or `None`. Its blocks are misses until it is reopened.
    pub failure: Option<String>,
    /// Why the last write to the path failed, until one succeeds. Its blocks are still read. `None` while it is down.
    pub write_failure: Option<String>,
    /// Bytes that the log is limited to, below its capacity, because its disk is full. `None` otherwise.
    pub limited_to: Option<u64>,
    /// Number of times that the path went down.
    pub failures: u64,
}

impl DiskTier {
    /// Closes the tier: it stores and finds no more blocks, writes the accepted ones, seals the open segments, and
    /// unlocks the folders. Resolves when no thread uses a file of the tier any more, even while the tier is still
    /// referenced.
    pub async fn close(&self) {
        let logs: Vec<_> = self.log_paths.iter().filter_map(|log_path| log_path.close()).collect();
        self.tasks.close();
        self.tasks.wait().await;
        let sealed = self.runtime.spawn_blocking(move || logs.iter().for_each(|log| log.close()));
        if let Err(error) = sealed.await {
            tracing::error!(%error, "cannot seal the G3 log; the next start scans its last segments");
        }
    }

    /// Resolves when the recovery of all folders is complete. Recovered blocks are served at once; blocks that are
    /// stored meanwhile are written after the recovery.
    pub async fn recovered(&self) {
        // The sender lives as long as `self`.
        let _ = self.recovered.subscribe().wait_for(|done| *done).await;
    }

    /// Number of corrupt byte ranges found while segments without a footer were scanned. The record that the last
    /// process was writing when it died does not count.
    pub fn corrupt_ranges(&self) -> u64 {
        self.shared.corruption.ranges.load(Ordering::Relaxed)
    }

    /// Number of corrupt footers; their segments were scanned.
    pub fn corrupt_footers(&self) -> u64 {
        self.shared.corruption.footers.load(Ordering::Relaxed)
    }

    /// Number of segments whose files disappeared while the tier was open, as far as reads noticed it.
    pub fn missing_segments(&self) -> u64 {
        self.shared.corruption.missing_segments.load(Ordering::Relaxed)
    }

    /// Digest of the blocks on all paths. Reads the whole index, so call it rarely.
    pub fn set_digest(&self) -> SetDigest {
        self.shared.index.set_digest()
    }

    /// Sets the next tier for blocks in use that do not fit into the log when their segment is reclaimed. Blocks that
    /// `accepts` selects are sent to `to`; they are dropped when the channel is full. Call it once, before any block is
    /// stored.
    pub fn spill(
        &self,
        accepts: impl Fn(Fingerprint, SequenceHash) -> bool + Send + Sync + 'static,
        to: mpsc::Sender<Block>,
    ) {
        let _ = self.shared.spill.set(Spill { accepts: Box::new(accepts), to });
    }

    /// Limits loads to blocks of at most `bytes`, whatever the log says. Call it before the first load.
    pub fn set_max_block_bytes(&self, bytes: u64) {
        self.shared.max_block.store(bytes.min(Header::MAX_LENGTH), Ordering::Relaxed);
    }

    /// State of each path.
    pub fn paths(&self) -> Vec<PathState> {
        let state = |log_path: &Arc<LogPath>| {
            let log = log_path.log();
            PathState {
                folder: log_path.folder.clone(),
                failure: log.is_none().then(|| log_path.failure().unwrap_or_else(|| "closed".into())),
                write_failure: log.as_ref().and_then(|log| log.write_failure()),
                limited_to: log.and_then(|log| log.limited_to()),
                failures: log_path.failures(),
            }
        };
        self.log_paths.iter().map(state).collect()
    }

    pub(super) fn logs(&self) -> Vec<Option<Arc<Log>>> {
        self.log_paths.iter().map(|log_path| log_path.log()).collect()
    }
}

impl Tier for DiskTier {
    fn level(&self) -> Level {
        Level::G3
    }

    fn holds(&self, fingerprint: Fingerprint, hashes: &[SequenceHash]) -> usize {
        self.shared.index.holds(fingerprint, hashes)
    }

    fn load(&self, fingerprint: Fingerprint, hashes: Vec<SequenceHash>) -> BoxStream<'static, Loaded> {
        let logs = self.logs();
        let (missing, parts) = load::plan(&self.shared, &logs, fingerprint, &hashes);
        let hashes: Arc<[SequenceHash]> = hashes.into();
        let paths = self.log_paths.iter().zip(logs).zip(parts).filter_map(|((log_path, log), parts)| {
            let (log_path, log, hashes) = (log_path.clone(), log?, hashes.clone());
            let read = move |part: SegmentRead| {
                load::read_part(log_path.clone(), log.clone(), fingerprint, hashes.clone(), part)
            };
            Some(stream::iter(parts).map(read).buffer_unordered(READERS).flatten().boxed())
        });
        let misses = stream::iter(missing.into_iter().map(|index| (index, Ok(None))));
        misses.chain(stream::select_all(paths)).boxed()
    }

    fn store(&self, blocks: Vec<Block>) -> BoxFuture<'_, Vec<Result<(), StoreError>>> {
        self.store_on_paths(blocks).boxed()
    }

    fn discard(&self, fingerprint: Fingerprint, hash: SequenceHash) {
        let Some(location) = self.shared.index.get(fingerprint, hash) else { return };
        if self.shared.index.remove([(fingerprint, hash)], |_| true) > 0 {
            // Every path may have a copy, because blocks are stored again while a path is down.
            for log in self.logs().into_iter().flatten() {
                log.queue.push_tombstone(location.group, fingerprint, hash);
            }
            self.start_writers();
        }
    }

    fn withdraw(&self, fingerprint: Fingerprint, hash: SequenceHash) {
        // No tombstone: the record is found again by the next start, unless a newer one follows.
        self.shared.index.remove([(fingerprint, hash)], |_| true);
    }

    fn expire(&self, now: Date) -> usize {
        self.shared.index.expire(now)
    }

    fn usage(&self) -> Usage {
        let bytes = self.logs().into_iter().flatten().map(|log| log.used_bytes()).sum();
        let capacity = self.log_paths.iter().map(|log_path| log_path.settings.capacity_bytes).sum();
        Usage { blocks: self.shared.index.len() as u64, bytes, capacity: Some(capacity) }
    }
}
