//! G3: blocks on local SSDs, in a log of large segments on each, which exactly one process owns.
//!
//! ```text
//!   store ─▶ a path in turn ─▶ queue ─▶ a few writers ─▶ head segment ─▶ indexed, announced, answered
//!   load  ─▶ index ─▶ on each path: runs of neighbours ─▶ a few readers ─▶ one stream
//!   full  ─▶ oldest segment given up whole, what is in use carried over
//!   open  ─▶ footers of sealed segments, a scan of the one that was open ─▶ announced again
//! ```
//!
//! *At rest* means: survives the death of the process. A power cut may cost blocks, never correctness, because whoever
//! serves a block verifies it. A write that fails costs its blocks; the tier goes on reading, and writes again after a
//! second. Of several paths each has its own log, budget and lock; one index tells what rests on all of them. A path that fails
//! costs its blocks and nothing else, and comes back by itself (`path`). What one might look for here and will not find: eviction of single blocks, and any `fsync`.

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

pub use inspect::{Holding, Survey, survey};
pub use settings::{OpenError, Settings};
pub use verify::{Verification, verify};

use crate::block::{Block, Date, Fingerprint, Header, Level, SequenceHash};
use crate::event::{Census, EventLog};
use crate::tier::{Claims, Index, LoadError, Loaded, Shares, StoreError, Tier, Usage};
use crate::transform::crypt::MetadataKeys;
use direct::Pool;
use futures::future::{BoxFuture, FutureExt};
use futures::stream::{self, BoxStream, StreamExt};
use load::Part;
use log::{Log, Shared, Spill};
use path::{NO_ANSWER, Volume};
use queue::again;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SendError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Instant;
use striping::Spread;
use tokio::runtime::Handle;
use tokio::sync::{mpsc, oneshot, watch};
use tokio_util::sync::CancellationToken;
use tokio_util::task::{AbortOnDropHandle, TaskTracker};

/// Reads at once of one path, over all loads: a SATA device is fast with two, an `NVMe` one with eight.
const READERS: usize = 8;

/// Blocks on one or several local disks.
pub struct DiskTier {
    volumes: Vec<Arc<Volume>>,
    shared: Shared,
    spread: Mutex<Spread>,
    claims: Claims,
    recovered: watch::Sender<bool>,
    runtime: Handle,
    /// Everything that reads or writes the folders, off the async threads.
    tasks: TaskTracker,
}

/// How one path does.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PathState {
    /// Its folder.
    pub folder: PathBuf,
    /// Why it is not used, if it is not: its blocks are misses, and it is tried again now and then.
    pub failure: Option<String>,
    /// How often it went down.
    pub failures: u64,
}

impl DiskTier {
    /// Takes possession of a folder, finds the blocks that a process before this one left there, and announces them.
    /// Blocks for the time that this takes. [`DiskTier::close`] seals the log and gives the folder back; without it, that
    /// happens when the last read or write of the tier ends.
    ///
    /// # Panics
    /// Outside a tokio runtime.
    pub fn open(folder: &Path, settings: Settings, events: Arc<EventLog>) -> Result<Arc<Self>, OpenError> {
        Self::striped(&[(folder.to_owned(), settings)], events)
    }

    /// The same over several folders, best one per device: blocks are spread over them, and read from all at once.
    ///
    /// A folder that cannot be used now is left out until it can; an error is only that none can be used, that one belongs to
    /// another process, or that its settings are impossible.
    ///
    /// # Panics
    /// Outside a tokio runtime, without a path, or with more than 255.
    pub fn striped(paths: &[(PathBuf, Settings)], events: Arc<EventLog>) -> Result<Arc<Self>, OpenError> {
        let tier = Self::claim(paths, &Shares::default(), events, None)?;
        tier.recover();
        Ok(tier)
    }

    /// The same, keeping to what domains are promised, and without waiting for what rests there to be found; see
    /// [`DiskTier::recovered`]. Footers are sealed with `keys`, if there are any. Each domain that is promised or given anything has segments of its own on every path.
    ///
    /// # Panics
    /// As above.
    pub fn begin(
        paths: &[(PathBuf, Settings)],
        shares: &Shares,
        events: Arc<EventLog>,
        keys: Option<Arc<MetadataKeys>>,
    ) -> Result<Arc<Self>, OpenError> {
        let tier = Self::claim(paths, shares, events, keys)?;
        let recovering = tier.clone();
        drop(tier.tasks.spawn_blocking_on(move || recovering.recover(), &tier.runtime));
        Ok(tier)
    }

    /// Ends the tier: it takes and finds no more blocks, what was accepted is written, the open segments are sealed, and the
    /// folders are given back. Resolves when no thread touches a file of the tier any more, whoever still holds the tier.
    pub async fn close(&self) {
        let logs: Vec<_> = self.volumes.iter().filter_map(|volume| volume.close()).collect();
        self.tasks.close();
        self.tasks.wait().await;
        let sealed = self.runtime.spawn_blocking(move || logs.iter().for_each(|log| log.close()));
        if let Err(error) = sealed.await {
            tracing::error!(%error, "cannot seal the G3 log; the next start scans its last segments");
        }
    }

    /// Resolves when all that rested in the folders at the start is known. What is known earlier is served earlier; what is
    /// stored earlier rests later.
    pub async fn recovered(&self) {
        // The sender lives as long as `self`.
        let _ = self.recovered.subscribe().wait_for(|done| *done).await;
    }

    /// Stretches of segments that held no sound record where one should have been, found while segments without a footer
    /// were scanned. What the last process was writing when it died does not count.
    pub fn damaged(&self) -> u64 {
        self.shared.damaged.stretches.load(Ordering::Relaxed)
    }

    /// Footers of segments that turned out not to be what they were; those segments were scanned.
    pub fn damaged_footers(&self) -> u64 {
        self.shared.damaged.footers.load(Ordering::Relaxed)
    }

    /// Which blocks rest in all its folders. Looks at each: for whoever wants to know, now and then.
    pub fn census(&self) -> Census {
        self.shared.index.census()
    }

    /// Hands over what is in use when its segment is given up and the log has no room for it, as far as `wants` it: for the
    /// next tier. What does not fit into `to` is dropped. To be called once, before there are any blocks.
    pub fn spill(
        &self,
        wants: impl Fn(Fingerprint, SequenceHash) -> bool + Send + Sync + 'static,
        to: mpsc::Sender<Block>,
    ) {
        let _ = self.shared.spill.set(Spill { wants: Box::new(wants), to });
    }

    /// Reads no block of more than `bytes`, whatever the log says of it: of an engine whose blocks have less. To be called
    /// before anybody loads.
    pub fn limit_blocks(&self, bytes: u64) {
        self.shared.max_block.store(bytes.min(Header::MAX_LENGTH), Ordering::Relaxed);
    }

    /// How each path does.
    pub fn paths(&self) -> Vec<PathState> {
        let state = |volume: &Arc<Volume>| PathState {
            folder: volume.folder.clone(),
            failure: volume.log().is_none().then(|| volume.failure().unwrap_or_else(|| "closed".into())),
            failures: volume.failures(),
        };
        self.volumes.iter().map(state).collect()
    }

    fn claim(
        paths: &[(PathBuf, Settings)],
        shares: &Shares,
        events: Arc<EventLog>,
        keys: Option<Arc<MetadataKeys>>,
    ) -> Result<Arc<Self>, OpenError> {
        let shared = Shared {
            index: Arc::new(Index::new(Level::G3, events)),
            next: Arc::default(),
            pool: Pool::default(),
            paths: paths.len() as u32,
            division: shares.at(Level::G3, 1),
            capacity: paths.iter().map(|(_, settings)| settings.capacity_bytes).sum(),
            damaged: Arc::default(),
            max_block: Arc::new(AtomicU64::new(Header::MAX_LENGTH)),
            keys,
            spill: Arc::default(),
            #[cfg(test)]
            rig: tests::Rig::default(),
        };
        Self::claim_sharing(paths, shared)
    }

    fn claim_sharing(paths: &[(PathBuf, Settings)], shared: Shared) -> Result<Arc<Self>, OpenError> {
        assert!((1..=usize::from(u8::MAX)).contains(&paths.len()), "one to 255 paths");
        let tasks = TaskTracker::new();
        let volume = |(number, (folder, settings)): (usize, &(PathBuf, Settings))| {
            Volume::new(number as u8, folder, *settings, shared.clone(), tasks.clone())
        };
        let volumes: Vec<Arc<Volume>> = paths.iter().enumerate().map(volume).collect();
        let mut down = Vec::new();
        for (volume, opened) in volumes.iter().zip(open_all(&volumes)) {
            match opened {
                Ok(()) => {}
                Err(error @ OpenError::Io { .. }) => down.push((volume, error)),
                Err(error) => return Err(error),
            }
        }
        if down.len() == volumes.len() {
            return Err(down.swap_remove(0).1);
        }
        for (volume, error) in down {
            tracing::warn!(folder = %volume.folder.display(), %error, "cannot open a G3 path; G3 continues without it");
            // One that is still being opened comes back by itself.
            match &error {
                OpenError::Io { source, .. } if source.kind() == io::ErrorKind::TimedOut => {
                    volume.count_failure(&error.to_string());
                }
                error => volume.fail(&error.to_string()),
            }
        }
        let (recovered, _) = watch::channel(false);
        let (spread, claims, runtime) = (Mutex::default(), Claims::default(), Handle::current());
        Ok(Arc::new(Self { volumes, shared, spread, claims, recovered, runtime, tasks }))
    }

    fn recover(&self) {
        thread::scope(|scope| {
            for volume in &self.volumes {
                scope.spawn(|| volume.recover());
            }
        });
        self.recovered.send_replace(true);
        self.write();
    }

    fn logs(&self) -> Vec<Option<Arc<Log>>> {
        self.volumes.iter().map(|volume| volume.log()).collect()
    }

    fn write(&self) {
        for volume in &self.volumes {
            if let Some(log) = volume.log().filter(|log| log.queue.wants_writer()) {
                let volume = volume.clone();
                // The handle is not kept: a writer ends by itself, and one that panics answers for what waits.
                let writing = move || volume.work(&log, Log::drain).unwrap_or_default();
                drop(self.tasks.spawn_blocking_on(writing, &self.runtime));
            }
        }
    }

    /// Queues a block on a path that it was not refused by before.
    fn offer(&self, block: &Block, refused_by: &[usize]) -> Offered {
        let (fingerprint, name) = (block.header.fingerprint, block.header.name);
        if self.shared.index.get(fingerprint, name).is_some() {
            return Offered::Answered(Ok(()));
        }
        let claim = match self.claims.claim(fingerprint, name) {
            Ok(claim) => claim,
            Err(other) => return Offered::Coming(other),
        };
        let mut logs = self.logs();
        if logs.iter().flatten().next().is_some() && !logs.iter().flatten().any(|log| log.fits(block.header.length)) {
            return Offered::Answered(Err(StoreError::Full));
        }
        let takes = |path: usize, log: &Log| {
            !refused_by.contains(&path) && log.fits(block.header.length) && !log.rests() && log.queue.has_room(block)
        };
        let weight = |(path, log): (usize, &Option<Arc<Log>>)| {
            let log = log.as_ref().filter(|log| takes(path, log));
            log.map(|log| log.capacity())
        };
        let weights: Vec<Option<u64>> = logs.iter().enumerate().map(weight).collect();
        let turn = self.spread.lock().unwrap_or_else(PoisonError::into_inner).next(block.header.length, &weights);
        let chosen = turn.and_then(|path| Some((path, logs[path].take()?)));
        let Some((path, log)) = chosen else { return Offered::Answered(Err(StoreError::Busy)) };
        match log.queue.offer(block.clone(), Some(claim)) {
            Ok(answer) => Offered::Waits { path, failed: log.failed.clone(), answer },
            Err(error) => Offered::Answered(Err(error)),
        }
    }

    /// How an offer ends; a refusal says which path it came from.
    async fn end(&self, block: &Block, offered: Offered) -> (Result<(), StoreError>, Option<usize>) {
        match offered {
            Offered::Answered(answer) => (answer, None),
            Offered::Waits { path, failed, answer } => {
                let answer = tokio::select! {
                    biased;
                    answer = answer => answer.ok(),
                    // A device that does not answer may do so in an hour.
                    () = failed.cancelled() => None,
                };
                let answer = answer.unwrap_or_else(|| {
                    self.claims.revoke(block.header.fingerprint, block.header.name);
                    Err(io::Error::other("the G3 path has failed").into())
                });
                let refused = answer.is_err().then_some(path);
                (answer, refused)
            }
            Offered::Coming(other) => {
                other.cancelled().await;
                let rests = self.shared.index.get(block.header.fingerprint, block.header.name).is_some();
                (if rests { Ok(()) } else { Err(StoreError::Busy) }, None)
            }
        }
    }
}

/// Delivers how opening a path ended.
type Opening = Receiver<Result<(), OpenError>>;

/// Opens each path on a thread of its own: one that does not answer holds up none of the others, nor the start.
fn open_all(volumes: &[Arc<Volume>]) -> Vec<Result<(), OpenError>> {
    let open = |volume: &Arc<Volume>| {
        let (done, opened) = sync_channel(0);
        let (volume, runtime) = (volume.clone(), Handle::current());
        let opening = move || {
            let _inside = runtime.enter();
            if let Err(SendError(late)) = done.send(volume.open()) {
                volume.opened_late(late);
            }
        };
        thread::Builder::new().name("g3-open".into()).spawn(opening).map(|_| opened)
    };
    let opening: Vec<_> = volumes.iter().map(open).collect();
    let deadline = Instant::now() + NO_ANSWER;
    let wait = |(volume, opened): (&Arc<Volume>, io::Result<Opening>)| {
        let failed = |source| OpenError::Io { path: volume.folder.clone(), source };
        let left = deadline.saturating_duration_since(Instant::now());
        match opened.map_err(failed)?.recv_timeout(left) {
            Ok(opened) => opened,
            Err(RecvTimeoutError::Timeout) => Err(failed(io::ErrorKind::TimedOut.into())),
            Err(RecvTimeoutError::Disconnected) => Err(failed(io::Error::other("opening the G3 path panicked"))),
        }
    };
    volumes.iter().zip(opening).map(wait).collect()
}

/// What became of a block that was offered.
enum Offered {
    Answered(Result<(), StoreError>),
    /// It waits for a writer.
    Waits {
        path: usize,
        failed: CancellationToken,
        answer: oneshot::Receiver<Result<(), StoreError>>,
    },
    /// Somebody else brings it.
    Coming(CancellationToken),
}

impl Tier for DiskTier {
    fn level(&self) -> Level {
        Level::G3
    }

    fn holds(&self, fingerprint: Fingerprint, names: &[SequenceHash]) -> usize {
        self.shared.index.holds(fingerprint, names)
    }

    fn load(&self, fingerprint: Fingerprint, names: Vec<SequenceHash>) -> BoxStream<'static, Loaded> {
        let logs = self.logs();
        let (missing, parts) = load::plan(&self.shared, &logs, fingerprint, &names);
        let names: Arc<[SequenceHash]> = names.into();
        let paths = self.volumes.iter().zip(logs).zip(parts).filter_map(|((volume, log), parts)| {
            let (volume, log, names) = (volume.clone(), log?, names.clone());
            let read = move |part: Part| read(volume.clone(), log.clone(), fingerprint, names.clone(), part);
            Some(stream::iter(parts).map(read).buffer_unordered(READERS).flatten().boxed())
        });
        let misses = stream::iter(missing.into_iter().map(|index| (index, Ok(None))));
        misses.chain(stream::select_all(paths)).boxed()
    }

    fn store(&self, blocks: Vec<Block>) -> BoxFuture<'_, Vec<Result<(), StoreError>>> {
        let offered: Vec<Offered> = blocks.iter().map(|block| self.offer(block, &[])).collect();
        self.write();
        async move {
            let mut answers = Vec::with_capacity(blocks.len());
            for (block, mut offered) in blocks.into_iter().zip(offered) {
                let mut refused_by = Vec::new();
                answers.push(loop {
                    let (answer, refused) = self.end(&block, offered).await;
                    refused_by.extend(refused);
                    if refused.is_none() || refused_by.len() == self.volumes.len() {
                        break answer;
                    }
                    // A path that fails costs a block another try, not its place.
                    offered = match self.offer(&block, &refused_by) {
                        Offered::Answered(Err(StoreError::Busy)) => break answer,
                        offered => offered,
                    };
                    self.write();
                });
            }
            answers
        }
        .boxed()
    }

    fn discard(&self, fingerprint: Fingerprint, name: SequenceHash) {
        let Some(place) = self.shared.index.get(fingerprint, name) else { return };
        if self.shared.index.remove([(fingerprint, name)], |_| true) > 0 {
            // Every path may have a copy: blocks are stored again where there is room while a path is down.
            for log in self.logs().into_iter().flatten() {
                log.queue.discard(place.group, fingerprint, name);
            }
            self.write();
        }
    }

    fn expire(&self, now: Date) -> usize {
        self.shared.index.expire(now)
    }

    fn usage(&self) -> Usage {
        let bytes = self.logs().into_iter().flatten().map(|log| log.taken()).sum();
        let capacity = self.volumes.iter().map(|volume| volume.settings.capacity_bytes).sum();
        Usage { blocks: self.shared.index.len() as u64, bytes, capacity: Some(capacity) }
    }
}

/// Reads a part of one path, off the async threads.
async fn read(
    volume: Arc<Volume>,
    log: Arc<Log>,
    fingerprint: Fingerprint,
    names: Arc<[SequenceHash]>,
    part: Part,
) -> impl futures::Stream<Item = Loaded> {
    let indices: Vec<usize> = part.run.wanted.iter().map(|wanted| wanted.index).collect();
    let failed = log.failed.clone();
    let reading = async {
        let pass = volume.readers.enter(part.group, part.run.end() - part.run.start()).await;
        let reading = volume.clone().spawn_blocking(move || {
            let loaded = volume.work(&log, |log| log.load(fingerprint, &names, &part));
            drop(pass);
            loaded
        });
        // Dropping the stream calls off what has not started.
        AbortOnDropHandle::new(reading).await.ok().flatten()
    };
    let loaded = tokio::select! {
        biased;
        loaded = reading => loaded,
        () = failed.cancelled() => None,
    };
    let loaded = loaded.unwrap_or_else(|| {
        let error = io::Error::other("the G3 path has failed");
        indices.into_iter().map(|index| (index, Err(LoadError::Io(again(&error))))).collect()
    });
    stream::iter(loaded)
}
