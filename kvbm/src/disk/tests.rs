//! Tests of the disk tier: the contract, restarts and crashes, corruption, space.

use super::direct::BufferPool;
use super::log::Shared;
use super::*;
use crate::block::{Fingerprint, Header, Level, Verified};
use crate::event::{BlockEvent, Epoch, EventLog};
use crate::tier::conformance::{self, Subject, announced, chain, chain_of, fingerprint, hashes, load, store};
use crate::tier::{Index, LoadError, Quotas, StoreError, Tier};
use futures::stream::StreamExt;
use parking_lot::{Condvar, Mutex, MutexGuard};
use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;
use tempfile::TempDir;
use tokio::sync::mpsc;

mod crash;
mod damage;
mod paths;
mod shares;
mod space;
mod stop;
mod verify;

/// Test hooks of a tier: errors of writes and reads by path, faults of file operations, the kind of access, and free
/// space.
#[derive(Clone, Default)]
pub(super) struct TestHooks(Arc<HooksState>);

#[derive(Default)]
struct HooksState {
    writes: [AtomicI32; 4],
    data: [AtomicI32; 4],
    reads: [AtomicI32; 4],
    access: Mutex<Option<direct::Access>>,
    faults: [Faults; 4],
    /// Bytes that the filesystem leaves to the log, instead of the real value.
    space: Mutex<Option<u64>>,
    /// The most that the filesystem lets the log reserve, with what it uses.
    reservable: Mutex<Option<u64>>,
    /// Number of attempts to reserve a segment.
    reservations: AtomicUsize,
    /// The fewest bytes that a new segment has left free.
    lowest: Mutex<Option<u64>>,
}

impl TestHooks {
    pub(super) fn access(&self) -> Option<direct::Access> {
        *self.0.access.lock()
    }

    pub(super) fn faults(&self, path: u8) -> Faults {
        self.0.faults[usize::from(path)].clone()
    }

    /// Free bytes when the log uses `taken`.
    pub(super) fn free(&self, taken: u64) -> Option<u64> {
        self.0.space.lock().map(|space| space.saturating_sub(taken))
    }

    /// Leaves so many bytes to the log from now on, including those that it uses. The rest counts as taken by other
    /// programs.
    pub(super) fn leave_space(&self, bytes: u64) {
        (*self.0.space.lock(), *self.0.lowest.lock()) = (Some(bytes), None);
    }

    /// The fewest bytes that a new segment has left free since [`TestHooks::leave_space`].
    pub(super) fn lowest_free(&self) -> Option<u64> {
        *self.0.lowest.lock()
    }

    /// Fills the disk, so that no segment can be created that takes more than this, with the others.
    pub(super) fn fill_disk(&self, left: u64) {
        self.leave_space(left);
        *self.0.reservable.lock() = Some(left);
    }

    /// Makes the filesystem refuse any new segment, whatever is free.
    pub(super) fn refuse_segments(&self) {
        *self.0.reservable.lock() = Some(0);
    }

    /// Ends [`TestHooks::fill_disk`].
    pub(super) fn clear_disk(&self) {
        (*self.0.space.lock(), *self.0.reservable.lock()) = (None, None);
    }

    /// Whether a segment of so many bytes can be created when the log uses `taken`.
    pub(super) fn reserve(&self, bytes: u64, taken: u64) -> io::Result<()> {
        self.0.reservations.fetch_add(1, Ordering::Relaxed);
        let most = self.0.reservable.lock().unwrap_or(u64::MAX);
        if taken.saturating_add(bytes) > most {
            return Err(io::Error::from_raw_os_error(libc::ENOSPC));
        }
        if let Some(left) = self.free(taken.saturating_add(bytes)) {
            let mut lowest = self.0.lowest.lock();
            *lowest = Some(lowest.map_or(left, |lowest| lowest.min(left)));
        }
        Ok(())
    }

    /// Number of attempts to reserve a segment so far.
    pub(super) fn reservations(&self) -> usize {
        self.0.reservations.load(Ordering::Relaxed)
    }

    pub(super) fn write(&self, path: u8) -> io::Result<()> {
        fault(&self.0.writes[usize::from(path)])
    }

    pub(super) fn write_data(&self, path: u8) -> io::Result<()> {
        self.write(path)?;
        fault(&self.0.data[usize::from(path)])
    }

    pub(super) fn read(&self, path: u8) -> io::Result<()> {
        fault(&self.0.reads[usize::from(path)])
    }

    /// Makes writes of this path fail from now on; 0 ends that.
    pub(super) fn fail_writes(&self, path: u8, code: i32) {
        self.0.writes[usize::from(path)].store(code, Ordering::Relaxed);
    }

    /// Makes writes of blocks fail, while files can be created.
    pub(super) fn fail_data(&self, path: u8, code: i32) {
        self.0.data[usize::from(path)].store(code, Ordering::Relaxed);
    }

    pub(super) fn fail_reads(&self, path: u8, code: i32) {
        self.0.reads[usize::from(path)].store(code, Ordering::Relaxed);
    }
}

/// Faults of the file operations of one path: the process ends after some of them, the device does not answer, or the
/// caller panics.
#[derive(Clone, Default)]
pub(super) struct Faults(Arc<(Mutex<FaultsState>, Condvar)>);

#[derive(Default)]
struct FaultsState {
    /// Changing operations since [`Faults::end_after`].
    changes: usize,
    end: Option<(usize, Progress)>,
    ended: bool,
    held: bool,
    /// Only operations that change the folder are held.
    changes_held: bool,
    /// Number of operations that are being held.
    waiting: usize,
    panics: usize,
}

/// How much of the last operation of a process is executed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Progress {
    Nothing,
    /// Half of a write; nothing of another operation.
    Half,
    All,
}

impl Faults {
    /// Ends the process after so many more operations that change its folder, during the next one. All later ones
    /// fail.
    pub(super) fn end_after(&self, changes: usize, progress: Progress) {
        let mut state = self.state();
        (state.changes, state.end, state.ended) = (0, Some((changes, progress)), false);
    }

    /// Whether the process has ended.
    pub(super) fn has_ended(&self) -> bool {
        self.state().ended
    }

    /// Holds every operation until [`Faults::release`].
    pub(super) fn hold(&self) {
        self.state().held = true;
    }

    /// Holds every operation that changes the folder until [`Faults::release`].
    pub(super) fn hold_changes(&self) {
        self.state().changes_held = true;
    }

    /// Blocks until an operation is held.
    pub(super) fn wait_for_a_held_operation(&self) {
        self.0.1.wait_while(&mut self.state(), |state| state.waiting == 0);
    }

    pub(super) fn release(&self) {
        let mut state = self.state();
        (state.held, state.changes_held) = (false, false);
        drop(state);
        self.0.1.notify_all();
    }

    /// Makes the next operation panic.
    pub(super) fn panic_once(&self) {
        self.state().panics = 1;
    }

    /// Called before an operation that changes nothing.
    pub(super) fn query(&self) {
        self.wait(|state| state.held);
    }

    fn wait(&self, is_held: impl Fn(&FaultsState) -> bool) {
        let mut state = self.state();
        if state.panics > 0 {
            state.panics -= 1;
            drop(state);
            panic!("injected");
        }
        if !is_held(&state) {
            return;
        }
        state.waiting += 1;
        self.0.1.notify_all();
        self.0.1.wait_while(&mut state, |state| is_held(state));
        state.waiting -= 1;
    }

    pub(super) fn mutate<T>(&self, work: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
        self.wait(|state| state.held || state.changes_held);
        match self.next() {
            None => work(),
            Some(Progress::All) => work().and(Err(Self::ended())),
            Some(_) => Err(Self::ended()),
        }
    }

    pub(super) fn write(&self, file: &fs::File, bytes: &[u8], at: u64) -> io::Result<()> {
        self.wait(|state| state.held || state.changes_held);
        let done = match self.next() {
            None => return file.write_all_at(bytes, at),
            Some(Progress::Nothing) => 0,
            Some(Progress::Half) => bytes.len() / 2 / 512 * 512,
            Some(Progress::All) => bytes.len(),
        };
        file.write_all_at(&bytes[..done], at).and(Err(Self::ended()))
    }

    /// How much of the next operation is executed, if the process ends in it or has ended.
    fn next(&self) -> Option<Progress> {
        let mut state = self.state();
        if state.ended {
            return Some(Progress::Nothing);
        }
        let (end, progress) = state.end?;
        state.changes += 1;
        state.ended = state.changes > end;
        state.ended.then_some(progress)
    }

    fn ended() -> io::Error {
        io::Error::other("the process has ended")
    }

    fn state(&self) -> MutexGuard<'_, FaultsState> {
        self.0.0.lock()
    }
}

fn fault(code: &AtomicI32) -> io::Result<()> {
    match code.load(Ordering::Relaxed) {
        0 => Ok(()),
        code => Err(io::Error::from_raw_os_error(code)),
    }
}

/// A tier on one path with this kind of access.
fn open_accessing(folder: &Path, access: direct::Access) -> Arc<DiskTier> {
    let hooks = TestHooks::default();
    *hooks.0.access.lock() = Some(access);
    open_with_hooks(folder, settings(), hooks)
}

/// A tier on one path with test hooks.
fn open_with_hooks(folder: &Path, settings: Settings, hooks: TestHooks) -> Arc<DiskTier> {
    let tier = open_logs_with_hooks(folder, settings, hooks);
    tier.recover();
    tier
}

/// A tier on one path with test hooks, before its recovery.
fn open_logs_with_hooks(folder: &Path, settings: Settings, hooks: TestHooks) -> Arc<DiskTier> {
    let index = Arc::new(Index::new(Level::G3, Arc::new(EventLog::new(Epoch(1)))));
    let shared = Shared {
        index,
        next: Arc::default(),
        pool: BufferPool::default(),
        paths: 1,
        quotas: crate::tier::TierQuotas::default(),
        capacity: settings.capacity_bytes,
        corruption: Arc::default(),
        max_block: Arc::new(Header::MAX_LENGTH.into()),
        keys: None,
        spill: Arc::default(),
        hooks,
    };
    DiskTier::open_logs(&[(folder.to_owned(), settings)], shared).unwrap()
}

/// Settings with small segments, so that a test fills several.
pub(super) fn settings() -> Settings {
    Settings { capacity_bytes: 64 << 20, segment_bytes: 64 << 10, min_free_bytes: 0 }
}

pub(super) fn open_with(folder: &Path, settings: Settings) -> (Arc<DiskTier>, Arc<EventLog>) {
    let events = Arc::new(EventLog::new(Epoch(1)));
    (DiskTier::open(folder, settings, events.clone()).unwrap(), events)
}

pub(super) fn open(folder: &Path) -> (Arc<DiskTier>, Arc<EventLog>) {
    open_with(folder, settings())
}

/// Waits until all blocks and tombstones are written.
pub(super) async fn idle(tier: &DiskTier) {
    while tier.logs().iter().flatten().any(|log| !log.queue.is_idle()) {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

/// The folder as a process that is killed now would leave it.
pub(super) fn crashed(folder: &Path) -> TempDir {
    let copy = tempfile::tempdir().unwrap();
    for file in fs::read_dir(folder).unwrap() {
        let file = file.unwrap();
        // A segment may be reclaimed between the listing and the copy.
        let _ = fs::copy(file.path(), copy.path().join(file.file_name()));
    }
    copy
}

pub(super) fn all(loaded: &[Option<Verified>]) -> bool {
    loaded.iter().all(Option::is_some)
}

fn subject(settings: Settings) -> Subject {
    let folder = tempfile::tempdir().unwrap();
    let (tier, events) = open_with(folder.path(), settings);
    Subject::with_resources(tier, events, folder)
}

conformance::suite!(async || subject(settings()));

#[tokio::test]
async fn the_capacity_holds() {
    let capacity_bytes = 400_000;
    conformance::older_blocks_are_evicted_within_the_capacity(subject(Settings { capacity_bytes, ..settings() })).await;
}

#[tokio::test]
async fn a_second_open_names_the_folder_and_its_owner() {
    let folder = tempfile::tempdir().unwrap();
    let (first, _) = open(folder.path());
    let refused = DiskTier::open(folder.path(), settings(), Arc::new(EventLog::new(Epoch(2)))).err().unwrap();
    let message = refused.to_string();
    assert!(message.contains(folder.path().to_str().unwrap()), "{message}");
    assert!(message.contains(&std::process::id().to_string()), "{message}");
    drop(first);
    open(folder.path());
}

#[tokio::test]
async fn a_capacity_below_the_minimum_is_rejected() {
    let folder = tempfile::tempdir().unwrap();
    let settings = Settings { capacity_bytes: 4 * Settings::MIN_SEGMENT_BYTES - 1, ..settings() };
    let refused = DiskTier::open(folder.path(), settings, Arc::new(EventLog::new(Epoch(1))));
    assert!(matches!(refused, Err(OpenError::TooSmall { .. })));
}

#[tokio::test]
async fn a_block_larger_than_a_segment_is_rejected_alone() {
    let folder = tempfile::tempdir().unwrap();
    let (tier, _) = open(folder.path());
    let large = chain_of(fingerprint(), 1, 1, 70_000);
    let small = chain(2, 1);
    let answers = tier.store([large, small].concat()).await;
    assert!(matches!(answers[..], [Err(StoreError::TooLarge(70_000..)), Ok(())]));
}

#[tokio::test]
async fn the_least_capacity_for_a_block_takes_it() {
    let block_bytes = 1 << 20;
    let check = |capacity_bytes| {
        let settings = Settings { capacity_bytes, min_free_bytes: 0, ..Settings::default() };
        settings.check_block(&Quotas::default(), block_bytes).map(|()| settings)
    };
    let Err(OpenError::BlockTooLarge { least, .. }) = check(4 << 20) else { panic!("a block and its header") };
    assert!((4 << 20..5 << 20).contains(&least), "{least}");
    assert!(check(least - 1).is_err());
    let folder = tempfile::tempdir().unwrap();
    let (tier, _) = open_with(folder.path(), check(least).unwrap());
    store(&*tier, vec![chain_of(fingerprint(), 0, 1, block_bytes as usize).remove(0)]).await;
    assert!(Settings::default().check_block(&Quotas::default(), Header::MAX_LENGTH).is_err());
}

#[tokio::test]
async fn buffered_access_works_where_direct_access_is_rejected() {
    let folder = tempfile::tempdir().unwrap();
    let tier = open_accessing(folder.path(), direct::Access::Buffered);
    let blocks = chain(1, 100);
    store(&*tier, blocks.clone()).await;
    assert!(all(&load(&*tier, fingerprint(), hashes(&blocks)).await));
    drop(tier);
    let (tier, _) = open(folder.path());
    assert!(all(&load(&*tier, fingerprint(), hashes(&blocks)).await));
}

#[tokio::test]
async fn a_log_with_a_finer_alignment_than_the_device_is_read() {
    let folder = tempfile::tempdir().unwrap();
    let blocks = chain(1, 50);
    let (tier, _) = open(folder.path());
    store(&*tier, blocks.clone()).await;
    drop(tier);
    let tier = open_accessing(folder.path(), direct::Access::Direct { alignment: 4096 });
    assert!(all(&load(&*tier, fingerprint(), hashes(&blocks)).await));
}

#[tokio::test]
async fn aligned_and_unaligned_payloads_round_trip() {
    let folder = tempfile::tempdir().unwrap();
    let settings = Settings { segment_bytes: 16 << 20, ..settings() };
    let (tier, _) = open_with(folder.path(), settings);
    let memory: bytes::Bytes = (0..2 << 20).map(|at: u32| (at / 7 + at / 4099) as u8).collect();
    let page = memory.as_ptr().align_offset(4096);
    // Whole sectors at the start of a page, at a sector, and unaligned; parts of a sector; small payloads.
    let mib = 1 << 20;
    let shapes = [(0, mib), (512, mib + 4_096), (1_024, mib + 512), (16, mib), (0, mib + 1), (8_192, 512), (0, 73_728)];
    let slices = |n: usize| shapes.map(|(at, length)| memory.slice(page + at + n * 512..page + at + n * 512 + length));
    let payloads = (0..3).flat_map(slices);
    let seal = |(block, payload): (crate::block::Block, bytes::Bytes)| {
        crate::block::Block::new(block.header.hash, block.header.parent, fingerprint(), payload)
    };
    let blocks: Vec<_> = chain(1, 3 * shapes.len()).into_iter().zip(payloads).map(seal).collect();
    store(&*tier, blocks.clone()).await;
    let held = async |tier: &DiskTier| {
        let loaded = load(tier, fingerprint(), hashes(&blocks)).await;
        let same = loaded
            .iter()
            .zip(&blocks)
            .filter(|(loaded, block)| loaded.as_ref().is_some_and(|loaded| loaded.payload() == block.payload));
        same.count()
    };
    assert_eq!(held(&tier).await, blocks.len());
    let image = crashed(folder.path());
    let (scanned, _) = open_with(image.path(), settings);
    assert_eq!((held(&scanned).await, scanned.corrupt_ranges()), (blocks.len(), 0));
}
