//! The hash tables from block hashes to positions, for writers. Readers use the tables in the index snapshot.
//!
//! Each shard has a lock for writers, and its table is resized independently. Entries are inserted and removed in
//! batches that are sorted by shard, so a lock is taken once for many entries. A writer leaves shards that are locked
//! for the end of its batch.

use super::key::{Key, SHARDS};
use super::position::Position;
use super::snapshot::IndexSnapshot;
use super::table::{SLOT_BYTES, Table};
use parking_lot::{Mutex, MutexGuard};
use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A table grows above this load. At half load one group in seventy overflows, at seven tenths one in eight.
const MAX_LOAD: f64 = 0.5;
/// A table shrinks below this load.
const MIN_LOAD: f64 = 0.2;
/// Bytes per entry right after a table has grown.
pub(super) const ENTRY_BYTES: usize = (SLOT_BYTES / (MAX_LOAD / 2.0)) as usize + 1;

/// Maximum number of entries per batch.
pub(super) const BATCH: usize = 512;
/// Entries whose cache lines are prefetched: as many as a core has outstanding loads.
const PREFETCH_DISTANCE: usize = 24;
/// Distance at which a prefetched cache line has arrived.
const PREFETCHED: usize = 8;
/// Number of hashes that are read at once while a table is resized.
const REHASH_BATCH: usize = 512;

/// The shards.
pub(super) struct ShardedTable([AlignedShard; SHARDS]);

/// A shard on a cache line of its own.
#[repr(align(64))]
struct AlignedShard {
    shard: Mutex<Shard>,
    /// Number of entries as of the last update, readable without the lock.
    live: AtomicUsize,
}

struct Shard {
    table: Arc<Table>,
    live: usize,
    /// Number of entries at which the table grows.
    grow_at: usize,
}

/// A hash and its position.
#[derive(Clone, Copy)]
pub(super) struct Entry {
    pub(super) hash: u64,
    pub(super) position: Position,
}

/// Entries to be inserted or removed, with their number per shard.
pub(super) struct WriteBatch {
    list: Vec<Entry>,
    shards: [usize; SHARDS],
}

thread_local! {
    /// Buffer for the entries of a batch, empty while a batch uses it.
    static ENTRIES_BUFFER: Cell<Vec<Entry>> = const { Cell::new(Vec::new()) };
    /// Buffer for the sorted entries of a batch.
    static SORTED_BUFFER: Cell<Vec<Entry>> = const { Cell::new(Vec::new()) };
}

/// The entries that follow a shard's entries at the prefetch distance.
#[derive(Clone, Copy)]
struct Upcoming<'a> {
    snapshot: &'a IndexSnapshot,
    entries: &'a [Entry],
}

impl Upcoming<'_> {
    /// Prefetches the entry at an index.
    fn prefetch(self, at: usize) {
        if let Some(entry) = self.entries.get(at) {
            self.snapshot.prefetch(entry.hash);
        }
    }
}

impl WriteBatch {
    pub(super) fn new() -> Self {
        Self { list: ENTRIES_BUFFER.take(), shards: [0; SHARDS] }
    }

    pub(super) fn push(&mut self, hash: u64, position: Position) {
        self.shards[Key::of(hash).shard] += 1;
        self.list.push(Entry { hash, position });
    }

    pub(super) fn last(&self) -> Option<&Entry> {
        self.list.last()
    }

    pub(super) fn len(&self) -> usize {
        self.list.len()
    }

    /// Sorts the entries by shard (counting sort). Returns the end of each shard.
    fn sort_into(&self, sorted: &mut Vec<Entry>) -> [usize; SHARDS] {
        let mut ends = [0; SHARDS];
        let mut sum = 0;
        for (end, count) in ends.iter_mut().zip(self.shards) {
            *end = sum;
            sum += count;
        }
        sorted.clear();
        sorted.resize(sum, Entry { hash: 0, position: Position::NONE });
        for entry in &self.list {
            let end = &mut ends[Key::of(entry.hash).shard];
            sorted[*end] = *entry;
            *end += 1;
        }
        ends
    }
}

impl Drop for WriteBatch {
    fn drop(&mut self) {
        self.list.clear();
        ENTRIES_BUFFER.set(std::mem::take(&mut self.list));
    }
}

impl ShardedTable {
    pub(super) fn new() -> Self {
        Self(std::array::from_fn(|_| AlignedShard {
            shard: Mutex::new(Shard::of(Table::new(0), 0)),
            live: AtomicUsize::new(0),
        }))
    }

    /// Number of entries.
    pub(super) fn entries(&self) -> usize {
        self.0.iter().map(|shared| shared.live.load(Ordering::Relaxed)).sum()
    }

    /// The table of each shard.
    pub(super) fn tables(&self) -> [Arc<Table>; SHARDS] {
        std::array::from_fn(|shard| self.lock(shard).table.clone())
    }

    /// Inserts entries. `same` says whether the block at an entered position has this hash; if so, the new entry is
    /// refused. `hashes` reads the hashes at entered positions, and `on_grow` receives each new table. Returns the
    /// refused entries.
    pub(super) fn insert(
        &self,
        snapshot: &IndexSnapshot,
        entries: &WriteBatch,
        same: impl Fn(u64, Position) -> bool,
        hashes: impl Fn(&[u32]) -> Vec<u64>,
        on_grow: impl Fn(usize, Arc<Table>),
    ) -> Vec<Entry> {
        let mut refused = Vec::new();
        self.for_each_shard(snapshot, entries, |number, shard, entries, upcoming| {
            let near_full = shard.live >= shard.grow_at / 4 * 3;
            for (at, entry) in entries.iter().enumerate() {
                upcoming.prefetch(at);
                if let Some(soon) = entries.get(at + PREFETCHED).filter(|_| near_full) {
                    shard.table.prefetch_next(Key::of(soon.hash).bits);
                }
                if shard.live >= shard.grow_at {
                    shard.replace(true, &hashes);
                    on_grow(number, shard.table.clone());
                }
                let same = |position| same(entry.hash, Position(position));
                if shard.table.insert(Key::of(entry.hash).bits, entry.position.0, same) {
                    shard.live += 1;
                } else {
                    refused.push(*entry);
                }
            }
        });
        refused
    }

    /// Removes entries. Entries that are not in the table are skipped.
    pub(super) fn remove(
        &self,
        snapshot: &IndexSnapshot,
        entries: &WriteBatch,
        hashes: impl Fn(&[u32]) -> Vec<u64>,
        on_shrink: impl Fn(usize, Arc<Table>),
    ) {
        self.for_each_shard(snapshot, entries, |number, shard, entries, upcoming| {
            for (at, entry) in entries.iter().enumerate() {
                upcoming.prefetch(at);
                shard.live -= usize::from(shard.table.remove(Key::of(entry.hash).bits, entry.position.0));
            }
            if !shard.table.is_smallest() && (shard.live as f64) < shard.table.slots() as f64 * MIN_LOAD {
                shard.replace(false, &hashes);
                on_shrink(number, shard.table.clone());
            }
        });
    }

    /// Moves an entry to another position.
    pub(super) fn relocate(&self, hash: u64, from: Position, to: Position) {
        let key = Key::of(hash);
        self.lock(key.shard).table.relocate(key.bits, from.0, to.0);
    }

    /// Sorts the entries by shard and calls `each` for each shard that has any. `each` reports its progress to
    /// [`Upcoming`], so that later entries, also of the next shards, are prefetched.
    fn for_each_shard(
        &self,
        snapshot: &IndexSnapshot,
        entries: &WriteBatch,
        mut each: impl FnMut(usize, &mut Shard, &[Entry], Upcoming<'_>),
    ) {
        debug_assert!(entries.len() <= BATCH, "{} entries at once", entries.len());
        let mut sorted = SORTED_BUFFER.take();
        let ends = entries.sort_into(&mut sorted);
        sorted.iter().take(PREFETCH_DISTANCE).for_each(|entry| snapshot.prefetch(entry.hash));
        let mut later = 0_u64;
        let of = |shard: usize| shard.checked_sub(1).map_or(0, |before| ends[before])..ends[shard];
        let mut call = |number: usize, shard: &mut Shard| {
            let range = of(number);
            let upcoming =
                Upcoming { snapshot, entries: sorted.get(range.start + PREFETCH_DISTANCE..).unwrap_or_default() };
            each(number, shard, &sorted[range], upcoming);
            self.0[number].live.store(shard.live, Ordering::Relaxed);
        };
        for shard in (0..SHARDS).filter(|shard| !of(*shard).is_empty()) {
            match self.0[shard].shard.try_lock() {
                Some(mut guard) => call(shard, &mut guard),
                None => later |= 1 << shard,
            }
        }
        for shard in (0..SHARDS).filter(|shard| later >> shard & 1 == 1) {
            call(shard, &mut self.lock(shard));
        }
        SORTED_BUFFER.set(sorted);
    }

    fn lock(&self, shard: usize) -> MutexGuard<'_, Shard> {
        self.0[shard].shard.lock()
    }
}

impl Shard {
    fn of(table: Table, live: usize) -> Self {
        let grow_at = (table.slots() as f64 * MAX_LOAD) as usize;
        Self { table: Arc::new(table), live, grow_at }
    }

    /// Replaces the table by one of twice or half the size.
    fn replace(&mut self, larger: bool, hashes: impl Fn(&[u32]) -> Vec<u64>) {
        let mut rehash = Vec::new();
        let next = self.table.resized(larger, |position| rehash.push(position));
        for positions in rehash.chunks(REHASH_BATCH) {
            let hashes = hashes(positions);
            for hash in &hashes {
                next.prefetch(Key::of(*hash).bits);
            }
            for (hash, position) in hashes.iter().zip(positions) {
                next.insert(Key::of(*hash).bits, *position, |_| false);
            }
        }
        *self = Self::of(next, self.live);
    }
}
