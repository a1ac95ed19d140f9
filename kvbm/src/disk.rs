//! Tier G3: blocks on local SSDs. Each path (folder) holds one log of large segments, owned by exactly one process.
//!
//! ```text
//!   store ─▶ striping chooses a path ─▶ queue ─▶ writers ─▶ head segment ─▶ index, event, answer
//!   load  ─▶ index ─▶ per path: runs of adjacent records ─▶ up to eight readers ─▶ one stream
//!   full  ─▶ the oldest segment is reclaimed, blocks in use are carried over
//!   open  ─▶ footers of sealed segments, a scan of unsealed ones ─▶ index, events
//! ```
//!
//! A stored block survives the death of the process. A power cut may lose blocks; it causes no wrong answers, because
//! every load is verified. A failed write loses its blocks; the tier continues to read, and writes again after a
//! second. Each path has its own log, capacity and lock; one index covers all paths. A path that fails loses its
//! blocks only, and is reopened automatically (`path`). Not here: eviction of single blocks, and `fsync`.

mod direct;
mod file_io;
mod footer;
mod inspect;
mod load;
mod lock;
mod log;
mod path;
mod queue;
mod reclaim;
mod record;
mod recover;
mod segment;
mod settings;
mod space;
mod striping;
#[cfg(test)]
mod tests;
mod verify;
mod write;

pub use inspect::{DomainBlocks, LogContents, inspect};
pub use settings::{OpenError, Settings};
pub use verify::{Verification, verify};

use crate::block::{Block, Date, Fingerprint, Header, Level, SequenceHash};
use crate::event::{EventLog, SetDigest};
use crate::tier::{Index, LoadError, Loaded, Quotas, StoreError, Tier, Usage, WriteClaims};
use crate::transform::crypt::MetadataKeys;
use direct::BufferPool;
use futures::future::{BoxFuture, FutureExt};
use futures::stream::{self, BoxStream, StreamExt};
use load::SegmentRead;
use log::{Log, Shared, Spill};
use parking_lot::Mutex;
use path::{DEVICE_TIMEOUT, LogPath};
use queue::clone_error;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SendError, sync_channel};
use std::thread;
use std::time::Instant;
use striping::Striper;
use tokio::runtime::Handle;
use tokio::sync::{mpsc, oneshot, watch};
use tokio_util::sync::CancellationToken;
use tokio_util::task::{AbortOnDropHandle, TaskTracker};

/// Maximum number of concurrent reads per path. A SATA device is fast with two, an `NVMe` device with eight.
const READERS: usize = 8;

/// Blocks on one or several local disks.
pub struct DiskTier {
    log_paths: Vec<Arc<LogPath>>,
    shared: Shared,
    striper: Mutex<Striper>,
    claims: WriteClaims,
    recovered: watch::Sender<bool>,
    runtime: Handle,
    /// All work that reads or writes the folders. It runs on blocking threads.
    tasks: TaskTracker,
}

/// State of one path.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PathState {
    /// Folder of the path.
    pub folder: PathBuf,
    /// Why the path is down, or `None`. Its blocks are misses until it is reopened.
    pub failure: Option<String>,
    /// Number of times that the path went down.
    pub failures: u64,
}

impl DiskTier {
    /// Locks a folder, recovers the blocks that an earlier process stored there, and publishes events for them.
    /// Blocks the calling thread meanwhile. [`DiskTier::close`] seals the log and unlocks the folder; otherwise that
    /// happens when the last read or write of the tier ends.
    ///
    /// # Panics
    /// Outside a tokio runtime.
    pub fn open(folder: &Path, settings: Settings, events: Arc<EventLog>) -> Result<Arc<Self>, OpenError> {
        Self::striped(&[(folder.to_owned(), settings)], events)
    }

    /// Opens a tier over several folders, best one per device. Blocks are striped over them, and read from all at
    /// once.
    ///
    /// A folder that cannot be used is left out until it can be. Fails only when no folder can be used, when another
    /// process owns one, or when the settings are invalid.
    ///
    /// # Panics
    /// Outside a tokio runtime, without a path, or with more than 255.
    pub fn striped(paths: &[(PathBuf, Settings)], events: Arc<EventLog>) -> Result<Arc<Self>, OpenError> {
        let tier = Self::claim(paths, &Quotas::default(), events, None)?;
        tier.recover();
        Ok(tier)
    }

    /// Opens a tier with quotas and recovers its blocks in the background; see [`DiskTier::recovered`]. `keys` seal
    /// the footers. Each domain with a quota or a weight has segments of its own on every path.
    ///
    /// # Panics
    /// As for [`DiskTier::striped`].
    pub fn open_in_background(
        paths: &[(PathBuf, Settings)],
        quotas: &Quotas,
        events: Arc<EventLog>,
        keys: Option<Arc<MetadataKeys>>,
    ) -> Result<Arc<Self>, OpenError> {
        let tier = Self::claim(paths, quotas, events, keys)?;
        let recovering = tier.clone();
        drop(tier.tasks.spawn_blocking_on(move || recovering.recover(), &tier.runtime));
        Ok(tier)
    }

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

    /// Digest of the blocks on all paths. Reads the whole index, so call it rarely.
    pub fn set_digest(&self) -> SetDigest {
        self.shared.index.set_digest()
    }

    /// Sets the next tier for blocks in use that do not fit into the log when their segment is reclaimed. Blocks that
    /// `wants` accepts are sent to `to`; they are dropped when the channel is full. Call it once, before any block is
    /// stored.
    pub fn spill(
        &self,
        wants: impl Fn(Fingerprint, SequenceHash) -> bool + Send + Sync + 'static,
        to: mpsc::Sender<Block>,
    ) {
        let _ = self.shared.spill.set(Spill { wants: Box::new(wants), to });
    }

    /// Limits loads to blocks of at most `bytes`, whatever the log says. Call it before the first load.
    pub fn set_max_block_bytes(&self, bytes: u64) {
        self.shared.max_block.store(bytes.min(Header::MAX_LENGTH), Ordering::Relaxed);
    }

    /// State of each path.
    pub fn paths(&self) -> Vec<PathState> {
        let state = |log_path: &Arc<LogPath>| PathState {
            folder: log_path.folder.clone(),
            failure: log_path.log().is_none().then(|| log_path.failure().unwrap_or_else(|| "closed".into())),
            failures: log_path.failures(),
        };
        self.log_paths.iter().map(state).collect()
    }

    fn claim(
        paths: &[(PathBuf, Settings)],
        quotas: &Quotas,
        events: Arc<EventLog>,
        keys: Option<Arc<MetadataKeys>>,
    ) -> Result<Arc<Self>, OpenError> {
        let shared = Shared {
            index: Arc::new(Index::new(Level::G3, events)),
            next: Arc::default(),
            pool: BufferPool::default(),
            paths: paths.len() as u32,
            quotas: quotas.for_tier(Level::G3, 1),
            capacity: paths.iter().map(|(_, settings)| settings.capacity_bytes).sum(),
            corruption: Arc::default(),
            max_block: Arc::new(AtomicU64::new(Header::MAX_LENGTH)),
            keys,
            spill: Arc::default(),
            #[cfg(test)]
            hooks: tests::TestHooks::default(),
        };
        Self::open_logs(paths, shared)
    }

    fn open_logs(paths: &[(PathBuf, Settings)], shared: Shared) -> Result<Arc<Self>, OpenError> {
        assert!((1..=usize::from(u8::MAX)).contains(&paths.len()), "one to 255 paths");
        let tasks = TaskTracker::new();
        let log_path = |(number, (folder, settings)): (usize, &(PathBuf, Settings))| {
            LogPath::new(number as u8, folder, *settings, shared.clone(), tasks.clone())
        };
        let log_paths: Vec<Arc<LogPath>> = paths.iter().enumerate().map(log_path).collect();
        let mut down = Vec::new();
        for (log_path, opened) in log_paths.iter().zip(open_all(&log_paths)) {
            match opened {
                Ok(()) => {}
                Err(error @ OpenError::Io { .. }) => down.push((log_path, error)),
                Err(error) => return Err(error),
            }
        }
        if down.len() == log_paths.len() {
            return Err(down.swap_remove(0).1);
        }
        for (log_path, error) in down {
            tracing::warn!(
                folder = %log_path.folder.display(), %error,
                "cannot open a G3 path; G3 continues without it"
            );
            // A path whose opening timed out is completed by `LogPath::finish_open`.
            match &error {
                OpenError::Io { source, .. } if source.kind() == io::ErrorKind::TimedOut => {
                    log_path.count_failure(&error.to_string());
                }
                error => log_path.fail(&error.to_string()),
            }
        }
        let (recovered, _) = watch::channel(false);
        let (striper, claims, runtime) = (Mutex::default(), WriteClaims::default(), Handle::current());
        Ok(Arc::new(Self { log_paths, shared, striper, claims, recovered, runtime, tasks }))
    }

    fn recover(&self) {
        thread::scope(|scope| {
            for log_path in &self.log_paths {
                scope.spawn(|| log_path.recover());
            }
        });
        self.recovered.send_replace(true);
        self.write();
    }

    fn logs(&self) -> Vec<Option<Arc<Log>>> {
        self.log_paths.iter().map(|log_path| log_path.log()).collect()
    }

    fn write(&self) {
        for log_path in &self.log_paths {
            if let Some(log) = log_path.log().filter(|log| log.queue.wants_writer()) {
                let log_path = log_path.clone();
                // The handle is dropped: a writer ends by itself, and one that panics answers the queued jobs.
                let writing = move || log_path.work(&log, Log::drain).unwrap_or_default();
                drop(self.tasks.spawn_blocking_on(writing, &self.runtime));
            }
        }
    }

    /// Queues a block on one of the paths that are not in `refused_by`.
    fn submit(&self, block: &Block, refused_by: &[usize]) -> Submitted {
        let (fingerprint, hash) = (block.header.fingerprint, block.header.hash);
        if self.shared.index.get(fingerprint, hash).is_some() {
            return Submitted::Answered(Ok(()));
        }
        let claim = match self.claims.claim(fingerprint, hash) {
            Ok(claim) => claim,
            Err(other) => return Submitted::Claimed(other),
        };
        let mut logs = self.logs();
        if logs.iter().flatten().next().is_some() && !logs.iter().flatten().any(|log| log.fits(block.header.length)) {
            return Submitted::Answered(Err(StoreError::Full));
        }
        let accepts = |path: usize, log: &Log| {
            !refused_by.contains(&path)
                && log.fits(block.header.length)
                && !log.in_cooldown()
                && log.queue.has_room(block)
        };
        let weight = |(path, log): (usize, &Option<Arc<Log>>)| {
            let log = log.as_ref().filter(|log| accepts(path, log));
            log.map(|log| log.capacity())
        };
        let weights: Vec<Option<u64>> = logs.iter().enumerate().map(weight).collect();
        let turn = self.striper.lock().next(block.header.length, &weights);
        let chosen = turn.and_then(|path| Some((path, logs[path].take()?)));
        let Some((path, log)) = chosen else { return Submitted::Answered(Err(StoreError::Busy)) };
        match log.queue.push(block.clone(), Some(claim)) {
            Ok(answer) => Submitted::Waits { path, failed: log.failed.clone(), answer },
            Err(error) => Submitted::Answered(Err(error)),
        }
    }

    /// Waits for the result of a submission. On an error the second value is the path that refused.
    async fn finish(&self, block: &Block, submitted: Submitted) -> (Result<(), StoreError>, Option<usize>) {
        match submitted {
            Submitted::Answered(answer) => (answer, None),
            Submitted::Waits { path, failed, answer } => {
                let answer = tokio::select! {
                    biased;
                    answer = answer => answer.ok(),
                    // A device that does not answer may take an hour; the path fails before that.
                    () = failed.cancelled() => None,
                };
                let answer = answer.unwrap_or_else(|| {
                    self.claims.revoke(block.header.fingerprint, block.header.hash);
                    Err(io::Error::other("the G3 path has failed").into())
                });
                let refused = answer.is_err().then_some(path);
                (answer, refused)
            }
            Submitted::Claimed(other) => {
                other.cancelled().await;
                let is_stored = self.shared.index.get(block.header.fingerprint, block.header.hash).is_some();
                (if is_stored { Ok(()) } else { Err(StoreError::Busy) }, None)
            }
        }
    }
}

/// Receives the result of opening a path.
type Opening = Receiver<Result<(), OpenError>>;

/// Opens each path on a thread of its own, so that one that does not answer delays neither the others nor the start.
fn open_all(log_paths: &[Arc<LogPath>]) -> Vec<Result<(), OpenError>> {
    let open = |log_path: &Arc<LogPath>| {
        let (done, opened) = sync_channel(0);
        let (log_path, runtime) = (log_path.clone(), Handle::current());
        let opening = move || {
            let _inside = runtime.enter();
            if let Err(SendError(late)) = done.send(log_path.open()) {
                log_path.finish_open(late);
            }
        };
        thread::Builder::new().name("g3-open".into()).spawn(opening).map(|_| opened)
    };
    let opening: Vec<_> = log_paths.iter().map(open).collect();
    let deadline = Instant::now() + DEVICE_TIMEOUT;
    let wait = |(log_path, opened): (&Arc<LogPath>, io::Result<Opening>)| {
        let failed = |source| OpenError::Io { path: log_path.folder.clone(), source };
        let left = deadline.saturating_duration_since(Instant::now());
        match opened.map_err(failed)?.recv_timeout(left) {
            Ok(opened) => opened,
            Err(RecvTimeoutError::Timeout) => Err(failed(io::ErrorKind::TimedOut.into())),
            Err(RecvTimeoutError::Disconnected) => Err(failed(io::Error::other("opening the G3 path panicked"))),
        }
    };
    log_paths.iter().zip(opening).map(wait).collect()
}

/// Result of [`DiskTier::submit`].
enum Submitted {
    Answered(Result<(), StoreError>),
    /// The block is queued.
    Waits {
        path: usize,
        failed: CancellationToken,
        answer: oneshot::Receiver<Result<(), StoreError>>,
    },
    /// Another caller is storing the same block.
    Claimed(CancellationToken),
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
            let read = move |part: SegmentRead| read(log_path.clone(), log.clone(), fingerprint, hashes.clone(), part);
            Some(stream::iter(parts).map(read).buffer_unordered(READERS).flatten().boxed())
        });
        let misses = stream::iter(missing.into_iter().map(|index| (index, Ok(None))));
        misses.chain(stream::select_all(paths)).boxed()
    }

    fn store(&self, blocks: Vec<Block>) -> BoxFuture<'_, Vec<Result<(), StoreError>>> {
        let submitted: Vec<Submitted> = blocks.iter().map(|block| self.submit(block, &[])).collect();
        self.write();
        async move {
            let mut answers = Vec::with_capacity(blocks.len());
            for (block, mut submitted) in blocks.into_iter().zip(submitted) {
                let mut refused_by = Vec::new();
                answers.push(loop {
                    let (answer, refused) = self.finish(&block, submitted).await;
                    refused_by.extend(refused);
                    if refused.is_none() || refused_by.len() == self.log_paths.len() {
                        break answer;
                    }
                    // A path that fails costs a block another try, but not its place in the order.
                    submitted = match self.submit(&block, &refused_by) {
                        Submitted::Answered(Err(StoreError::Busy)) => break answer,
                        submitted => submitted,
                    };
                    self.write();
                });
            }
            answers
        }
        .boxed()
    }

    fn discard(&self, fingerprint: Fingerprint, hash: SequenceHash) {
        let Some(location) = self.shared.index.get(fingerprint, hash) else { return };
        if self.shared.index.remove([(fingerprint, hash)], |_| true) > 0 {
            // Every path may have a copy, because blocks are stored again while a path is down.
            for log in self.logs().into_iter().flatten() {
                log.queue.push_tombstone(location.group, fingerprint, hash);
            }
            self.write();
        }
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

/// Reads a part of one path on a blocking thread.
async fn read(
    log_path: Arc<LogPath>,
    log: Arc<Log>,
    fingerprint: Fingerprint,
    hashes: Arc<[SequenceHash]>,
    part: SegmentRead,
) -> impl futures::Stream<Item = Loaded> {
    let indices: Vec<usize> = part.run.blocks.iter().map(|wanted| wanted.index).collect();
    let failed = log.failed.clone();
    let reading = async {
        let permit = log_path.readers.acquire(part.group, part.run.end() - part.run.start()).await;
        let reading = log_path.clone().spawn_blocking(move || {
            let loaded = log_path.work(&log, |log| log.load(fingerprint, &hashes, &part));
            drop(permit);
            loaded
        });
        // Dropping the stream cancels reads that have not started.
        AbortOnDropHandle::new(reading).await.ok().flatten()
    };
    let loaded = tokio::select! {
        biased;
        loaded = reading => loaded,
        () = failed.cancelled() => None,
    };
    let loaded = loaded.unwrap_or_else(|| {
        let error = io::Error::other("the G3 path has failed");
        indices.into_iter().map(|index| (index, Err(LoadError::Io(clone_error(&error))))).collect()
    });
    stream::iter(loaded)
}
