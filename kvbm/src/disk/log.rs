//! The log of one path: its segments, the open head segment of each group, and the health of its folder.
//!
//! The operations of the log are in `write`, `space`, `load` and `recover`. All of them block, and run on blocking
//! threads.

use super::direct::{self, Access, BufferPool};
use super::file_io::FileIo;
use super::footer::RecordList;
use super::lock::FolderLock;
use super::queue::Queue;
use super::segment::{self, Head, Segment};
use super::settings::segment_of;
use super::{OpenError, Settings};
use crate::block::{Block, Fingerprint, Header, SequenceHash};
use crate::tier::{Change, Index, IndexEntry, IoHealth, TierQuotas};
use crate::transform::crypt::MetadataKeys;
use parking_lot::{Condvar, Mutex, MutexGuard};
use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// Capacity of the write queue in bytes: about 50 ms of a fast device.
const QUEUE_BYTES: u64 = 64 << 20;
/// Time after a failed write before the next attempt.
pub(super) const COOLDOWN: Duration = Duration::from_secs(1);
/// Why a log whose folder is no longer in its place cannot be used.
pub(super) const REPLACED: &str = "the folder was removed, moved away or mounted over";
/// Consecutive failed reads after which the path counts as failed; a single bad sector causes fewer.
const MAX_READ_FAILURES: u32 = 3;

/// Location of a block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Location {
    pub(super) segment: u32,
    /// In units of [`Access::UNIT`].
    pub(super) offset: u32,
    /// Payload length in bytes.
    pub(super) length: u32,
    /// Quota group of the segment.
    pub(super) group: u16,
    /// Number of the path.
    pub(super) path: u8,
    /// Whether the block was read, or a later segment contains a child of it, since it was written here.
    pub(super) hot: bool,
}

/// State that the logs of a tier share.
#[derive(Clone)]
pub(super) struct Shared {
    pub(super) index: Arc<Index<Location>>,
    /// Number of the next segment. One sequence for all paths, so that a higher number is a later segment.
    pub(super) next: Arc<AtomicU32>,
    pub(super) pool: BufferPool,
    pub(super) paths: u32,
    /// Quotas of all paths together, and the capacity that they refer to, in bytes.
    pub(super) quotas: TierQuotas,
    pub(super) capacity: u64,
    pub(super) corruption: Arc<CorruptionCounters>,
    /// Maximum payload length of a loaded block, in bytes.
    pub(super) max_block: Arc<AtomicU64>,
    /// Keys that authenticate the footers, if any.
    pub(super) keys: Option<Arc<MetadataKeys>>,
    /// Receiver of blocks in use that do not fit into the log.
    pub(super) spill: Arc<OnceLock<Spill>>,
    #[cfg(test)]
    pub(super) hooks: super::tests::TestHooks,
}

/// Receiver of blocks in use that do not fit into the log when their segment is reclaimed.
pub(super) struct Spill {
    /// Whether the receiver has no such block yet.
    pub(super) accepts: Box<dyn Fn(Fingerprint, SequenceHash) -> bool + Send + Sync>,
    pub(super) to: mpsc::Sender<Block>,
}

/// Corruption of files.
#[derive(Default)]
pub(super) struct CorruptionCounters {
    /// Corrupt byte ranges of segments, found during recovery.
    pub(super) ranges: AtomicU64,
    /// Footers that do not match their checksums or tags, found during recovery.
    pub(super) footers: AtomicU64,
    /// Segments whose files disappeared while the log was open.
    pub(super) missing_segments: AtomicU64,
}

pub(super) struct Log {
    pub(super) path: u8,
    pub(super) folder: PathBuf,
    pub(super) access: Access,
    pub(super) io: Arc<FileIo>,
    pub(super) shared: Shared,
    pub(super) queue: Queue,
    pub(super) settings: Settings,
    /// Quotas of this path.
    pub(super) quotas: TierQuotas,
    pub(super) used_bytes: Arc<AtomicU64>,
    // Declared before `folder_lock`, so that heads are sealed while the folder is still locked.
    pub(super) state: Mutex<State>,
    /// Notified when recovery ends, a head is replaced or a rotation ends.
    changed: Condvar,
    cooldown_until: Mutex<Option<Instant>>,
    /// Consecutive failed reads.
    read_failures: AtomicU32,
    /// Whether writes fail. Logged once, until a write succeeds.
    writes: IoHealth,
    /// The disk has too little free space for the log to grow. Logged once.
    disk_is_full: AtomicBool,
    /// A segment was reclaimed on a full disk, and no head could be created in its space.
    pub(super) reclaim_gave_no_space: AtomicBool,
    /// Why the folder cannot be used; set once.
    failure: OnceLock<String>,
    /// Cancelled when `failure` is set, so that no caller waits for the device any more.
    pub(super) failed: CancellationToken,
    /// No block of this log may be in the index any more.
    withdrawn: AtomicBool,
    /// `None` once the log is closed.
    folder_lock: Mutex<Option<FolderLock>>,
}

pub(super) struct State {
    pub(super) recovered: bool,
    /// A writer is creating the next head segment and reclaiming old ones.
    pub(super) rotating: bool,
    /// The open head segment of each group that has written.
    pub(super) heads: BTreeMap<u16, OpenHead>,
    pub(super) segments: BTreeMap<u32, Arc<Segment>>,
}

/// A segment that is being written.
pub(super) struct OpenHead {
    pub(super) head: Arc<Head>,
    /// Offset of the next record in bytes, and number of records.
    pub(super) end: u64,
    pub(super) records: usize,
}

impl OpenHead {
    /// Reserves `bytes` for one write of so many records and returns its offset.
    pub(super) fn take(&mut self, bytes: u64, records: usize) -> u64 {
        let at = self.end;
        self.end += bytes.next_multiple_of(Access::BLOCK);
        self.records += records;
        at
    }
}

/// The exclusive right to rotate heads, until dropped.
#[must_use]
pub(super) struct Rotation<'a>(&'a Log);

impl Drop for Rotation<'_> {
    fn drop(&mut self) {
        // Also after a panic, because other writers wait for the end of the rotation.
        self.0.state.lock().rotating = false;
        self.0.notify();
    }
}

impl Log {
    /// Locks a folder. Nothing is written before [`Log::recover`] has read its segments.
    pub(super) fn open(path: u8, folder: &Path, settings: Settings, shared: Shared) -> Result<Self, OpenError> {
        let failed = |source| OpenError::Io { path: folder.to_owned(), source };
        let folder_lock = FolderLock::acquire(folder)?;
        let access = Access::probe(folder).map_err(failed)?;
        #[cfg(test)]
        let access = shared.hooks.access().unwrap_or(access);
        let numbers = segment::numbers(folder).map_err(failed)?;
        segment::restrict_modes(folder, &numbers);
        let last = numbers.last().copied();
        shared.next.fetch_max(last.map_or(0, |last| last + 1), Ordering::Relaxed);
        let io = FileIo::default();
        #[cfg(test)]
        let io = io.with_faults(shared.hooks.faults(path));
        let state = State { recovered: false, rotating: false, heads: BTreeMap::new(), segments: BTreeMap::new() };
        let quotas = shared.quotas.scaled(settings.capacity_bytes, shared.capacity);
        Ok(Self {
            path,
            folder: folder.to_owned(),
            access,
            io: Arc::new(io),
            shared,
            queue: Queue::new(QUEUE_BYTES, quotas.clone()),
            settings: settings.in_blocks(quotas.bounds.len())?,
            quotas,
            used_bytes: Arc::default(),
            state: Mutex::new(state),
            changed: Condvar::new(),
            cooldown_until: Mutex::default(),
            read_failures: AtomicU32::new(0),
            writes: IoHealth::default(),
            disk_is_full: AtomicBool::new(false),
            reclaim_gave_no_space: AtomicBool::new(false),
            failure: OnceLock::new(),
            failed: CancellationToken::new(),
            withdrawn: AtomicBool::new(false),
            folder_lock: Mutex::new(Some(folder_lock)),
        })
    }

    /// Marks the folder as unusable. Logged once.
    pub(super) fn mark_failed(&self, error: &io::Error) {
        if self.failure.set(error.to_string()).is_ok() {
            self.failed.cancel();
            tracing::error!(
                folder = %self.folder.display(), %error,
                "G3 path is down; its blocks are misses until it is usable again"
            );
        }
    }

    /// Why the folder is unusable, if it is.
    pub(super) fn failure(&self) -> Option<&str> {
        self.failure.get().map(String::as_str)
    }

    /// Fails when another folder is at the path of the log's own. That folder must not be touched.
    pub(super) fn check_folder(&self) -> io::Result<()> {
        let folder_lock = self.folder_lock.lock();
        // A closed log has unlocked its folder.
        let ours = folder_lock
            .as_ref()
            .is_none_or(|folder_lock| self.io.query(|| Ok(folder_lock.is_in(&self.folder))).unwrap_or(false));
        if ours { Ok(()) } else { Err(io::Error::new(io::ErrorKind::NotFound, REPLACED)) }
    }

    /// Writes the queued blocks, seals the heads and unlocks the folder. Call it when no other thread writes or will
    /// write.
    pub(super) fn close(&self) {
        self.drain();
        let heads = std::mem::take(&mut self.lock().heads);
        drop(heads);
        self.folder_lock.lock().take();
    }

    /// Checks the folder after a failed read or write. Returns whether the folder is usable.
    pub(super) fn check_folder_after(&self, error: &io::Error) -> bool {
        let Err(gone) = self.check_folder() else { return true };
        // A missing file says nothing about its folder; any other error is the reason why the folder is not found.
        self.mark_failed(if error.kind() == io::ErrorKind::NotFound { &gone } else { error });
        false
    }

    /// Removes a segment whose file is missing and that is not being reclaimed: all its blocks leave the index, and its
    /// bytes no longer count.
    pub(super) fn remove_missing(&self, number: u32) {
        let (segment, head) = {
            let mut state = self.lock();
            let is_lost = |segment: &Arc<Segment>| {
                // The records of a segment that is being deleted are taken before its file is.
                !segment.is_reclaiming() && !segment.is_deleted() && segment.record_list().len() > 0
            };
            if !state.segments.get(&number).is_some_and(is_lost) {
                return;
            }
            let Some(segment) = state.segments.remove(&number) else { return };
            let group = segment.group();
            let is_open = state.heads.get(&group).is_some_and(|open| open.head.segment().number() == number);
            (segment, if is_open { state.heads.remove(&group) } else { None })
        };
        let (records, bytes) = (std::mem::take(&mut *segment.record_list()), segment.bytes());
        // Without records, this leaves the file alone.
        drop(head);
        let blocks = records.iter().map(|(fingerprint, entry)| (fingerprint, entry.hash));
        let blocks = self.shared.index.remove(blocks, |location| self.is_in_segment(location, number));
        self.shared.corruption.missing_segments.fetch_add(1, Ordering::Relaxed);
        tracing::warn!(
            folder = %self.folder.display(), segment = number, bytes, blocks,
            "the file of a segment is missing; its blocks are computed again"
        );
    }

    pub(super) fn read_failed(&self, error: &io::Error) {
        if self.read_failures.fetch_add(1, Ordering::Relaxed) + 1 >= MAX_READ_FAILURES {
            self.mark_failed(error);
        }
        self.check_folder_after(error);
    }

    pub(super) fn read_succeeded(&self) {
        self.read_failures.store(0, Ordering::Relaxed);
    }

    /// Removes all blocks of the log from the index and rejects the queued ones. Does not wait for the device.
    pub(super) fn withdraw(&self) {
        self.withdrawn.store(true, Ordering::SeqCst);
        self.io.cancel_scans();
        self.queue.clear();
        self.finish_recovery();
        self.shared.index.remove_all(|location| location.path == self.path);
    }

    /// Whether [`Log::withdraw`] was called.
    pub(super) fn is_withdrawn(&self) -> bool {
        self.withdrawn.load(Ordering::SeqCst)
    }

    /// Locks the state. Code must not wait for the device while it holds this lock.
    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        // After a panic the log is marked as failed, and another one recovers what is on disk (`LogPath::work`).
        self.state.lock()
    }

    /// Waits on the condition variable while `must_wait` holds.
    pub(super) fn wait(&self, state: &mut MutexGuard<'_, State>, must_wait: impl Fn(&State) -> bool) {
        self.changed.wait_while(state, |state| must_wait(state));
    }

    /// Wakes all threads in [`Log::wait`].
    pub(super) fn notify(&self) {
        self.changed.notify_all();
    }

    /// Acquires the right to rotate.
    pub(super) fn begin_rotation(&self, state: &mut State) -> Rotation<'_> {
        state.rotating = true;
        Rotation(self)
    }

    /// Whether a location is in the given segment of this log.
    pub(super) fn is_in_segment(&self, location: &Location, segment: u32) -> bool {
        location.path == self.path && location.segment == segment
    }

    /// Lets the writers start.
    pub(super) fn finish_recovery(&self) {
        self.lock().recovered = true;
        self.notify();
    }

    /// Whether writes are suspended after a failed one.
    pub(super) fn in_cooldown(&self) -> bool {
        let until = self.cooldown_until.lock();
        until.is_some_and(|until| Instant::now() < until)
    }

    /// Suspends writes for [`COOLDOWN`] after a failed one.
    pub(super) fn start_cooldown(&self, error: &io::Error) {
        *self.cooldown_until.lock() = Some(Instant::now() + COOLDOWN);
        if self.writes.failed(self.writes.begin(), error.to_string()) == Change::Changed {
            tracing::warn!(
                folder = %self.folder.display(), %error,
                "cannot write to G3; its blocks are still read, and writing is tried again every second"
            );
        }
    }

    /// Ends the failing state after a successful write.
    pub(super) fn write_succeeded(&self) {
        if self.writes.succeeded() == Change::Changed {
            tracing::info!(folder = %self.folder.display(), "writing to G3 works again");
        }
    }

    /// Why the last write failed, if it did.
    pub(super) fn write_failure(&self) -> Option<String> {
        self.writes.failure()
    }

    /// Sets whether the disk has too little free space for the log to grow.
    pub(super) fn set_disk_is_full(&self, is_full: bool) {
        if self.disk_is_full.swap(is_full, Ordering::Relaxed) == is_full {
            return;
        }
        let (folder, used_bytes, capacity_bytes) = (self.folder.display(), self.used_bytes(), self.capacity());
        if is_full {
            tracing::warn!(
                %folder, used_bytes, capacity_bytes, min_free_bytes = self.settings.min_free_bytes,
                "the disk is full; G3 stays below its capacity, and new blocks replace its oldest ones"
            );
        } else {
            tracing::info!(%folder, used_bytes, capacity_bytes, "the disk has free space again; G3 grows");
        }
    }

    /// Bytes that the log is limited to, because the disk is full.
    pub(super) fn limited_to(&self) -> Option<u64> {
        self.disk_is_full.load(Ordering::Relaxed).then(|| self.used_bytes())
    }

    /// Checks whether a disk that was full has free space again.
    pub(super) fn check_space(&self) {
        if !self.disk_is_full.load(Ordering::Relaxed) {
            return;
        }
        let Settings { segment_bytes, min_free_bytes, .. } = self.settings;
        // With less, the next segment would be smaller than a whole one.
        let wanted = segment_bytes.max((Settings::MIN_SEGMENTS * segment_bytes).saturating_sub(self.used_bytes()));
        if self.free_bytes().is_ok_and(|free| direct::usable(free.saturating_sub(min_free_bytes)) >= wanted) {
            self.set_disk_is_full(false);
        }
    }

    /// Bytes of all segments.
    pub(super) fn used_bytes(&self) -> u64 {
        self.used_bytes.load(Ordering::Relaxed)
    }

    pub(super) fn capacity(&self) -> u64 {
        self.settings.capacity_bytes
    }

    /// Whether a block with a payload of this length fits into a segment.
    pub(super) fn fits(&self, payload: u64) -> bool {
        u32::try_from(payload).is_ok() && segment_of(payload) <= self.settings.segment_bytes
    }

    /// Length in bytes of a footer of so many records.
    pub(super) fn footer_bytes(records: usize) -> u64 {
        // Each record may be of another namespace.
        RecordList::footer_bytes(records, records)
    }

    /// Number of blocks that the index locates in this log. Scans the whole index.
    pub(super) fn held_blocks(&self) -> usize {
        self.shared.index.count(|location| location.path == self.path)
    }

    /// Adds stored blocks to the index.
    pub(super) fn index_blocks(&self, blocks: impl IntoIterator<Item = IndexEntry<Location>>) {
        self.shared.index.insert(blocks, |parent, child| self.mark_hot(parent, child.segment));
    }

    /// Adds recovered blocks to the index. The newest record of a block wins, also among several paths: it is the one
    /// that the last process could read, if it could not read the others.
    pub(super) fn index_recovered(&self, blocks: impl IntoIterator<Item = IndexEntry<Location>>) {
        let position = |location: &Location| (location.segment, location.offset);
        let is_newer = |new: &Location, known: &Location| position(new) >= position(known);
        self.shared.index.insert_if(is_newer, blocks, |parent, child| self.mark_hot(parent, child.segment));
    }

    /// Marks the parents of blocks that will be written to a segment.
    pub(super) fn mark_parents<'a>(&self, blocks: impl Iterator<Item = &'a Header>, segment: u32) {
        let parents = blocks.filter_map(|block| Some((block.fingerprint, block.parent?)));
        self.shared.index.touch(parents, |parent| self.mark_hot(parent, segment));
    }

    /// Marks a parent in an earlier segment as hot, so that it is not reclaimed before its child. Segments that are
    /// written side by side count as equally old.
    fn mark_hot(&self, parent: &mut Location, child: u32) {
        let aside = self.shared.paths * self.quotas.bounds.len() as u32 - 1;
        parent.hot |= parent.segment.saturating_add(aside) < child;
    }

    pub(super) fn index_entry(&self, block: &Block, segment: &Segment, offset: u64) -> IndexEntry<Location> {
        let (offset, length) = ((offset / Access::UNIT) as u32, block.header.length as u32);
        let Header { fingerprint, hash, parent, retention, .. } = block.header;
        let (segment, group) = (segment.number(), segment.group());
        let location = Location { segment, offset, length, group, path: self.path, hot: false };
        IndexEntry { fingerprint, hash, parent, retention, location }
    }
}
