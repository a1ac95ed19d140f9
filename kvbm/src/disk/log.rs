//! The log: segments in order, a head of each group that is written, an index of what rests where.
//!
//! This is what the log has and whether it can be used; what is done with it stands beside: `write`, `space`, `load`,
//! `recover`. All of it blocks, and is called off the async threads.

use super::direct::{Access, Pool};
use super::file_io::FileIo;
use super::footer::Listing;
use super::lock::Owner;
use super::queue::Queue;
use super::segment::{self, Head, Segment};
use super::{OpenError, Settings, record};
use crate::block::{Block, Fingerprint, Header, SequenceHash};
use crate::tier::{Division, Index, Resting};
use crate::transform::crypt::MetadataKeys;
use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// Blocks that may wait for a writer, in bytes: about 50 ms of a fast device.
const QUEUE: u64 = 64 << 20;
/// After a failed write the device is left alone for so long, then tried again.
pub(super) const REST: Duration = Duration::from_secs(1);
/// So many reads that fail in a row are no bad sector.
const STRIKES: u32 = 3;

/// Where a block rests.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Place {
    pub(super) segment: u32,
    /// In units of [`Access::UNIT`].
    pub(super) offset: u32,
    /// Payload bytes.
    pub(super) length: u32,
    /// Whose segment it is, as far as domains are told apart.
    pub(super) group: u16,
    /// Which path.
    pub(super) volume: u8,
    /// Read, or built upon by a later segment, since it was written here.
    pub(super) hot: bool,
}

/// What the logs of a tier have in common.
#[derive(Clone)]
pub(super) struct Shared {
    pub(super) index: Arc<Index<Place>>,
    /// The next segment's number. One sequence for all paths, so that a higher number is a later segment.
    pub(super) next: Arc<AtomicU32>,
    pub(super) pool: Pool,
    pub(super) paths: u32,
    /// What domains are promised of all paths together, and how many bytes those are.
    pub(super) division: Division,
    pub(super) capacity: u64,
    pub(super) damaged: Arc<Damage>,
    /// Payload bytes of a block that is loaded, at most.
    pub(super) max_block: Arc<AtomicU64>,
    /// What footers are sealed with, if they are.
    pub(super) keys: Option<Arc<MetadataKeys>>,
    /// Who takes what is in use and has no room here any more.
    pub(super) spill: Arc<OnceLock<Spill>>,
    #[cfg(test)]
    pub(super) rig: super::tests::Rig,
}

/// Where blocks go that are in use, and for which there is no room in the log any more.
pub(super) struct Spill {
    pub(super) wants: Box<dyn Fn(Fingerprint, SequenceHash) -> bool + Send + Sync>,
    pub(super) to: mpsc::Sender<Block>,
}

/// What was found to be damaged while logs were recovered.
#[derive(Default)]
pub(super) struct Damage {
    /// Stretches of segments that held no sound record.
    pub(super) stretches: AtomicU64,
    /// Footers that are not what they were.
    pub(super) footers: AtomicU64,
}

pub(super) struct Log {
    pub(super) volume: u8,
    pub(super) folder: PathBuf,
    pub(super) access: Access,
    pub(super) io: Arc<FileIo>,
    pub(super) shared: Shared,
    pub(super) queue: Queue,
    pub(super) settings: Settings,
    /// What domains are promised of this path.
    pub(super) division: Division,
    pub(super) taken: Arc<AtomicU64>,
    // Dropped before the owner: the head is sealed while nobody else can open the log.
    pub(super) state: Mutex<State>,
    /// What rests in the folder is known, or a roll is over.
    changed: Condvar,
    resting_until: Mutex<Option<Instant>>,
    /// Reads that failed, none having succeeded in between.
    strikes: AtomicU32,
    /// Writes fail; said once, until one succeeds.
    failing: AtomicBool,
    /// The folder cannot be used, and why.
    failure: OnceLock<String>,
    /// Cancelled with that: nobody waits for an answer of the device any more.
    pub(super) failed: CancellationToken,
    /// Nothing of this log is to be in the index any more.
    withdrawn: AtomicBool,
    /// `None` once the log is closed.
    owner: Mutex<Option<Owner>>,
}

pub(super) struct State {
    pub(super) recovered: bool,
    /// Somebody makes a segment, and room for the next one.
    pub(super) rolling: bool,
    /// What is written, one of each group that has written.
    pub(super) heads: BTreeMap<u16, Open>,
    pub(super) segments: BTreeMap<u32, Arc<Segment>>,
}

/// A segment that is written.
pub(super) struct Open {
    pub(super) head: Arc<Head>,
    /// Where the next record goes, and how many there are.
    pub(super) end: u64,
    pub(super) records: usize,
    /// Not to be written yet: it may have to be given up for want of space.
    pub(super) reserved: bool,
}

impl Open {
    /// A place for so many records of so many bytes in one write.
    pub(super) fn take(&mut self, bytes: u64, records: usize) -> u64 {
        let at = self.end;
        self.end += bytes.next_multiple_of(Access::BLOCK);
        self.records += records;
        at
    }
}

/// The one who rolls.
#[must_use]
pub(super) struct Rolling<'a>(&'a Log);

impl Drop for Rolling<'_> {
    fn drop(&mut self) {
        // Also when who rolls panics: the others must not wait for it.
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner).rolling = false;
        self.0.tell();
    }
}

impl Log {
    /// Takes possession of a folder. Nothing is written before [`Log::recover`] has looked at what rests there.
    pub(super) fn open(volume: u8, folder: &Path, settings: Settings, shared: Shared) -> Result<Self, OpenError> {
        let failed = |source| OpenError::Io { path: folder.to_owned(), source };
        let owner = Owner::claim(folder)?;
        let access = Access::probe(folder).map_err(failed)?;
        #[cfg(test)]
        let access = shared.rig.access().unwrap_or(access);
        let numbers = segment::numbers(folder).map_err(failed)?;
        segment::narrow(folder, &numbers);
        let last = numbers.last().copied();
        shared.next.fetch_max(last.map_or(0, |last| last + 1), Ordering::Relaxed);
        let io = FileIo::default();
        #[cfg(test)]
        let io = io.with_faults(shared.rig.faults(volume));
        let state = State { recovered: false, rolling: false, heads: BTreeMap::new(), segments: BTreeMap::new() };
        let division = shared.division.part(settings.capacity_bytes, shared.capacity);
        Ok(Self {
            volume,
            folder: folder.to_owned(),
            access,
            io: Arc::new(io),
            shared,
            queue: Queue::new(QUEUE, division.clone()),
            settings: settings.in_blocks(division.bounds.len())?,
            division,
            taken: Arc::default(),
            state: Mutex::new(state),
            changed: Condvar::new(),
            resting_until: Mutex::default(),
            strikes: AtomicU32::new(0),
            failing: AtomicBool::new(false),
            failure: OnceLock::new(),
            failed: CancellationToken::new(),
            withdrawn: AtomicBool::new(false),
            owner: Mutex::new(Some(owner)),
        })
    }

    /// The folder cannot be used any more; said once.
    pub(super) fn lose(&self, error: &io::Error) {
        if self.failure.set(error.to_string()).is_ok() {
            self.failed.cancel();
            tracing::error!(
                folder = %self.folder.display(), %error,
                "G3 path is down; its blocks are misses until it is usable again"
            );
        }
    }

    /// Why the folder cannot be used, if it cannot.
    pub(super) fn failure(&self) -> Option<&str> {
        self.failure.get().map(String::as_str)
    }

    /// An error when another folder lies where the log's own was: nothing of that is to be touched.
    pub(super) fn stands(&self) -> io::Result<()> {
        let owner = self.owner.lock().unwrap_or_else(PoisonError::into_inner);
        // A log that is closed has given its folder back.
        let ours = owner.as_ref().is_none_or(|owner| self.io.look(|| Ok(owner.holds(&self.folder))).unwrap_or(false));
        let why = "the folder was removed, moved away or mounted over";
        if ours { Ok(()) } else { Err(io::Error::new(io::ErrorKind::NotFound, why)) }
    }

    /// Writes what still waits, seals what is open, and gives the folder back. To be called when nobody else writes, and
    /// nobody will.
    pub(super) fn close(&self) {
        self.drain();
        let heads = std::mem::take(&mut self.lock().heads);
        drop(heads);
        self.owner.lock().unwrap_or_else(PoisonError::into_inner).take();
    }

    /// What a failed read or write says about the folder.
    pub(super) fn suspect(&self, error: &io::Error) {
        if self.stands().is_err() {
            self.lose(error);
        }
    }

    pub(super) fn read_failed(&self, error: &io::Error) {
        if self.strikes.fetch_add(1, Ordering::Relaxed) + 1 >= STRIKES {
            self.lose(error);
        }
        self.suspect(error);
    }

    pub(super) fn read_succeeded(&self) {
        self.strikes.store(0, Ordering::Relaxed);
    }

    /// Takes everything out of the index, and refuses what still waits. Waits for no device.
    pub(super) fn withdraw(&self) {
        self.withdrawn.store(true, Ordering::SeqCst);
        self.io.call_off();
        self.queue.clear();
        self.finish_recovery();
        self.shared.index.remove_all(|place| place.volume == self.volume);
    }

    /// Whether [`Log::withdraw`] was called.
    pub(super) fn is_withdrawn(&self) -> bool {
        self.withdrawn.load(Ordering::SeqCst)
    }

    /// The state. No operation of the device is waited for under this lock.
    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        // After a panic the log is lost, and what it has on disk is read back by another (`Volume::run`).
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until nothing holds up the caller any more.
    pub(super) fn wait<'a>(
        &self,
        state: MutexGuard<'a, State>,
        held_up: impl Fn(&State) -> bool,
    ) -> MutexGuard<'a, State> {
        self.changed.wait_while(state, |state| held_up(state)).unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells those who wait that the state is another.
    pub(super) fn tell(&self) {
        self.changed.notify_all();
    }

    /// The right to roll, until it is dropped.
    pub(super) fn begin_rolling(&self, state: &mut State) -> Rolling<'_> {
        state.rolling = true;
        Rolling(self)
    }

    /// Whether a place is in a segment of this log.
    pub(super) fn is_in(&self, place: &Place, segment: u32) -> bool {
        place.volume == self.volume && place.segment == segment
    }

    /// Lets the writers write.
    pub(super) fn finish_recovery(&self) {
        self.lock().recovered = true;
        self.tell();
    }

    /// Whether the device is left alone after a failed write.
    pub(super) fn rests(&self) -> bool {
        let until = self.resting_until.lock().unwrap_or_else(PoisonError::into_inner);
        until.is_some_and(|until| Instant::now() < until)
    }

    /// After a failed write the device is left alone for a while.
    pub(super) fn rest(&self, error: &io::Error) {
        *self.resting_until.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now() + REST);
        if !self.failing.swap(true, Ordering::Relaxed) {
            tracing::warn!(folder = %self.folder.display(), %error, "cannot write to G3; retrying every second");
        }
    }

    /// After a write that did not fail.
    pub(super) fn write_succeeded(&self) {
        if self.failing.load(Ordering::Relaxed) && self.failing.swap(false, Ordering::Relaxed) {
            tracing::info!(folder = %self.folder.display(), "writing to G3 works again");
        }
    }

    /// Bytes of all segments.
    pub(super) fn taken(&self) -> u64 {
        self.taken.load(Ordering::Relaxed)
    }

    pub(super) fn capacity(&self) -> u64 {
        self.settings.capacity_bytes
    }

    /// Whether a block of so many payload bytes fits into a segment.
    pub(super) fn fits(&self, payload: u64) -> bool {
        u32::try_from(payload).is_ok()
            && record::span(payload, self.access.grain()).next_multiple_of(Access::BLOCK) + Self::footer(1)
                <= self.settings.segment_bytes
    }

    /// Bytes of a footer of so many records.
    pub(super) fn footer(records: usize) -> u64 {
        // Each may be another owner's.
        Listing::footer_span(records, records)
    }

    /// Says that blocks rest.
    pub(super) fn index_blocks(&self, blocks: impl IntoIterator<Item = Resting<Place>>) {
        self.shared.index.insert(blocks, |parent, child| self.marks(parent, child.segment));
    }

    /// Says that blocks will rest in a segment.
    pub(super) fn build_upon<'a>(&self, blocks: impl Iterator<Item = &'a Header>, segment: u32) {
        let parents = blocks.filter_map(|block| Some((block.fingerprint, block.parent?)));
        self.shared.index.touch(parents, |parent| self.marks(parent, segment));
    }

    /// A block that a later segment builds upon must not go before its children; segments that are written side by side are of
    /// one age.
    fn marks(&self, parent: &mut Place, child: u32) {
        let aside = self.shared.paths * self.division.bounds.len() as u32 - 1;
        parent.hot |= parent.segment.saturating_add(aside) < child;
    }

    pub(super) fn resting(&self, block: &Block, segment: &Segment, offset: u64) -> Resting<Place> {
        let (offset, length) = ((offset / Access::UNIT) as u32, block.header.length as u32);
        let Header { fingerprint, name, parent, keep, .. } = block.header;
        let (segment, group) = (segment.number(), segment.group());
        let place = Place { segment, offset, length, group, volume: self.volume, hot: false };
        Resting { fingerprint, name, parent, keep, place }
    }
}
