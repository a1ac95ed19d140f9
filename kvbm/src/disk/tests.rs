//! The disk tier: the contract, restarts and crashes, damage, room.

use super::*;
use crate::block::Verified;
use crate::event::{BlockEvent, Epoch};
use crate::tier::conformance::{self, Subject, announced, chain, chain_of, fingerprint, load, names, store};
use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Condvar, MutexGuard};
use std::time::Duration;
use tempfile::TempDir;

mod crash;
mod damage;
mod paths;
mod shares;
mod space;
mod stop;
mod verify;

/// What tests do to the devices: by path, the error that its writes and its reads meet, and what happens to operations on its
/// files; how files are accessed, and how much space there is.
#[derive(Clone, Default)]
pub(super) struct Rig(Arc<Rigged>);

#[derive(Default)]
struct Rigged {
    writes: [AtomicI32; 4],
    data: [AtomicI32; 4],
    reads: [AtomicI32; 4],
    access: Mutex<Option<direct::Access>>,
    faults: [Faults; 4],
    /// Bytes that others leave to the log, if not what the filesystem says.
    space: Mutex<Option<u64>>,
}

impl Rig {
    pub(super) fn access(&self) -> Option<direct::Access> {
        *self.0.access.lock().unwrap()
    }

    pub(super) fn faults(&self, volume: u8) -> Faults {
        self.0.faults[usize::from(volume)].clone()
    }

    /// What is free when the log takes so much.
    pub(super) fn free(&self, taken: u64) -> Option<u64> {
        self.0.space.lock().unwrap().map(|space| space.saturating_sub(taken))
    }

    /// From now on others leave so many bytes to the log, those included that it has.
    pub(super) fn leave_space(&self, bytes: u64) {
        *self.0.space.lock().unwrap() = Some(bytes);
    }

    pub(super) fn write(&self, volume: u8) -> io::Result<()> {
        fault(&self.0.writes[usize::from(volume)])
    }

    pub(super) fn write_data(&self, volume: u8) -> io::Result<()> {
        self.write(volume)?;
        fault(&self.0.data[usize::from(volume)])
    }

    pub(super) fn read(&self, volume: u8) -> io::Result<()> {
        fault(&self.0.reads[usize::from(volume)])
    }

    /// From now on writes of this path fail; 0: no longer.
    pub(super) fn fail_writes(&self, volume: u8, code: i32) {
        self.0.writes[usize::from(volume)].store(code, Ordering::Relaxed);
    }

    /// The same of blocks alone: there is room for new files.
    pub(super) fn fail_data(&self, volume: u8, code: i32) {
        self.0.data[usize::from(volume)].store(code, Ordering::Relaxed);
    }

    pub(super) fn fail_reads(&self, volume: u8, code: i32) {
        self.0.reads[usize::from(volume)].store(code, Ordering::Relaxed);
    }
}

/// What happens to the operations on the files of one path: the process ends after some of them, the device does not answer, or
/// the code that asked panics.
#[derive(Clone, Default)]
pub(super) struct Faults(Arc<(Mutex<FaultsState>, Condvar)>);

#[derive(Default)]
struct FaultsState {
    /// Operations that changed the folder since [`Faults::end_after`].
    changes: usize,
    end: Option<(usize, Part)>,
    ended: bool,
    held: bool,
    /// Those that change the folder are.
    changes_held: bool,
    /// Operations that wait because of that.
    waiting: usize,
    panics: usize,
}

/// How much of the last operation of a process is done.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Part {
    Nothing,
    /// Of a write; nothing of anything else.
    Half,
    All,
}

impl Faults {
    /// The process ends after so many more operations that change its folder, with a part of the next one done: all that
    /// follow fail.
    pub(super) fn end_after(&self, changes: usize, part: Part) {
        let mut state = self.state();
        (state.changes, state.end, state.ended) = (0, Some((changes, part)), false);
    }

    /// Whether the process came that far, and so ended.
    pub(super) fn has_ended(&self) -> bool {
        self.state().ended
    }

    /// Holds up every operation until [`Faults::release`].
    pub(super) fn hold(&self) {
        self.state().held = true;
    }

    /// Holds up every operation that changes the folder until [`Faults::release`].
    pub(super) fn hold_changes(&self) {
        self.state().changes_held = true;
    }

    /// Blocks until an operation is held up.
    pub(super) fn wait_for_a_held_operation(&self) {
        drop(self.0.1.wait_while(self.state(), |state| state.waiting == 0).unwrap());
    }

    pub(super) fn release(&self) {
        let mut state = self.state();
        (state.held, state.changes_held) = (false, false);
        drop(state);
        self.0.1.notify_all();
    }

    /// The next operation panics.
    pub(super) fn panic_once(&self) {
        self.state().panics = 1;
    }

    /// Before an operation that changes nothing.
    pub(super) fn look(&self) {
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
        state = self.0.1.wait_while(state, |state| is_held(state)).unwrap();
        state.waiting -= 1;
    }

    pub(super) fn change<T>(&self, work: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
        self.wait(|state| state.held || state.changes_held);
        match self.next() {
            None => work(),
            Some(Part::All) => work().and(Err(Self::ended())),
            Some(_) => Err(Self::ended()),
        }
    }

    pub(super) fn write(&self, file: &fs::File, bytes: &[u8], at: u64) -> io::Result<()> {
        self.wait(|state| state.held || state.changes_held);
        let done = match self.next() {
            None => return file.write_all_at(bytes, at),
            Some(Part::Nothing) => 0,
            Some(Part::Half) => bytes.len() / 2 / 512 * 512,
            Some(Part::All) => bytes.len(),
        };
        file.write_all_at(&bytes[..done], at).and(Err(Self::ended()))
    }

    /// How much of the next operation is done, if not all of it and what follows.
    fn next(&self) -> Option<Part> {
        let mut state = self.state();
        if state.ended {
            return Some(Part::Nothing);
        }
        let (end, part) = state.end?;
        state.changes += 1;
        state.ended = state.changes > end;
        state.ended.then_some(part)
    }

    fn ended() -> io::Error {
        io::Error::other("the process has ended")
    }

    fn state(&self) -> MutexGuard<'_, FaultsState> {
        self.0.0.lock().unwrap()
    }
}

fn fault(code: &AtomicI32) -> io::Result<()> {
    match code.load(Ordering::Relaxed) {
        0 => Ok(()),
        code => Err(io::Error::from_raw_os_error(code)),
    }
}

/// A tier on one path whose files are accessed like this.
fn open_accessing(folder: &Path, access: direct::Access) -> Arc<DiskTier> {
    let rig = Rig::default();
    *rig.0.access.lock().unwrap() = Some(access);
    open_rigged(folder, settings(), rig)
}

/// A tier on one path to which something is done from its first moment on.
fn open_rigged(folder: &Path, settings: Settings, rig: Rig) -> Arc<DiskTier> {
    let tier = claim_rigged(folder, settings, rig);
    tier.recover();
    tier
}

/// The same before it is recovered.
fn claim_rigged(folder: &Path, settings: Settings, rig: Rig) -> Arc<DiskTier> {
    let index = Arc::new(Index::new(Level::G3, Arc::new(EventLog::new(Epoch(1)))));
    let shared = Shared {
        index,
        next: Arc::default(),
        pool: Pool::default(),
        paths: 1,
        division: crate::tier::Division::default(),
        capacity: settings.capacity_bytes,
        damaged: Arc::default(),
        max_block: Arc::new(Header::MAX_LENGTH.into()),
        keys: None,
        spill: Arc::default(),
        rig,
    };
    DiskTier::claim_sharing(&[(folder.to_owned(), settings)], shared).unwrap()
}

/// Small enough that a test meets several segments.
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

/// Waits until nothing is left to write, discards included.
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
    Subject::keeping(tier, events, folder)
}

conformance::suite!(async || subject(settings()));

#[tokio::test]
async fn the_budget_holds() {
    let capacity_bytes = 400_000;
    conformance::older_blocks_make_room_and_the_budget_holds(subject(Settings { capacity_bytes, ..settings() })).await;
}

#[tokio::test]
async fn a_second_owner_is_told_whose_folder_it_is() {
    let folder = tempfile::tempdir().unwrap();
    let (first, _) = open(folder.path());
    let refused = DiskTier::open(folder.path(), settings(), Arc::new(EventLog::new(Epoch(2)))).err().unwrap();
    let told = refused.to_string();
    assert!(told.contains(folder.path().to_str().unwrap()) && told.contains(&std::process::id().to_string()), "{told}");
    drop(first);
    open(folder.path());
}

#[tokio::test]
async fn a_capacity_without_room_for_segments_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let settings = Settings { capacity_bytes: 4 * Settings::SEGMENT_BYTES_MIN - 1, ..settings() };
    let refused = DiskTier::open(folder.path(), settings, Arc::new(EventLog::new(Epoch(1))));
    assert!(matches!(refused, Err(OpenError::TooSmall { .. })));
}

#[tokio::test]
async fn a_block_larger_than_a_segment_is_refused_and_the_rest_is_stored() {
    let folder = tempfile::tempdir().unwrap();
    let (tier, _) = open(folder.path());
    let large = chain_of(fingerprint(), 1, 1, 70_000);
    let small = chain(2, 1);
    let answers = tier.store([large, small].concat()).await;
    assert!(matches!(answers[..], [Err(StoreError::Full), Ok(())]));
}

#[tokio::test]
async fn everything_goes_through_the_page_cache_where_direct_access_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let tier = open_accessing(folder.path(), direct::Access::Buffered);
    let blocks = chain(1, 100);
    store(&*tier, blocks.clone()).await;
    assert!(all(&load(&*tier, fingerprint(), names(&blocks)).await));
    drop(tier);
    let (tier, _) = open(folder.path());
    assert!(all(&load(&*tier, fingerprint(), names(&blocks)).await));
}

#[tokio::test]
async fn a_log_of_a_finer_grain_is_read_on_a_coarser_device() {
    let folder = tempfile::tempdir().unwrap();
    let blocks = chain(1, 50);
    let (tier, _) = open(folder.path());
    store(&*tier, blocks.clone()).await;
    drop(tier);
    let tier = open_accessing(folder.path(), direct::Access::Direct { grain: 4096 });
    assert!(all(&load(&*tier, fingerprint(), names(&blocks)).await));
}

#[tokio::test]
async fn payloads_that_lie_well_in_memory_and_others_are_what_they_were() {
    let folder = tempfile::tempdir().unwrap();
    let settings = Settings { segment_bytes: 16 << 20, ..settings() };
    let (tier, _) = open_with(folder.path(), settings);
    let memory: bytes::Bytes = (0..2 << 20).map(|at: u32| (at / 7 + at / 4099) as u8).collect();
    let page = memory.as_ptr().align_offset(4096);
    // Whole sectors at a page, at a sector, beside one; parts of a sector; what is too small to be worth it.
    let mib = 1 << 20;
    let shapes = [(0, mib), (512, mib + 4_096), (1_024, mib + 512), (16, mib), (0, mib + 1), (8_192, 512), (0, 73_728)];
    let lies = |n: usize| shapes.map(|(at, length)| memory.slice(page + at + n * 512..page + at + n * 512 + length));
    let payloads = (0..3).flat_map(lies);
    let seal = |(block, payload): (crate::block::Block, bytes::Bytes)| {
        crate::block::Block::seal(block.header.name, block.header.parent, fingerprint(), payload)
    };
    let blocks: Vec<_> = chain(1, 3 * shapes.len()).into_iter().zip(payloads).map(seal).collect();
    store(&*tier, blocks.clone()).await;
    let held = async |tier: &DiskTier| {
        let loaded = load(tier, fingerprint(), names(&blocks)).await;
        let same = loaded
            .iter()
            .zip(&blocks)
            .filter(|(loaded, block)| loaded.as_ref().is_some_and(|loaded| loaded.payload() == block.payload));
        same.count()
    };
    assert_eq!(held(&tier).await, blocks.len());
    let image = crashed(folder.path());
    let (scanned, _) = open_with(image.path(), settings);
    assert_eq!((held(&scanned).await, scanned.damaged()), (blocks.len(), 0));
}
