//! The hash tables from block hashes to positions, for writers. Readers use the tables in the index snapshot.
//!
//! Each shard has a lock for writers, and its table grows and shrinks by one bucket at a time, as entries come and go:
//! no writer waits for more than the division of one bucket. Entries are inserted and removed in batches that are
//! sorted by shard, so a lock is taken once for many entries. A writer leaves shards that are locked for the end of its
//! batch.

use super::key::{Key, SHARDS};
use super::position::Position;
use super::sync::NoAddresses;
use super::table::{BUCKET_BYTES, BUCKET_SLOTS, Inserted, Place, State, Table};
use parking_lot::Mutex;
use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Load of a table of 2ⁿ buckets above which they are divided, one after the other. All of them are divided by the time
/// that the table has a fifth more entries, so it seldom has buckets of two sizes.
const FIRST_LOAD: f64 = 0.42;
/// Load of the last bucket that is divided. At half load one group in seventy overflows, at seven tenths one in eight.
const LAST_LOAD: f64 = 0.5;
/// Load of a bucket that was not divided from which the next group is prefetched as well.
const CROWDED_LOAD: f64 = 0.375;
/// Buckets are merged below this fraction of the entries at which the table grows, so the load is at least a fifth.
const SHRINK_AT: f64 = 0.5;

/// Bytes per entry right after all buckets were divided.
pub(super) const ENTRY_BYTES: usize = (BUCKET_BYTES as f64 / BUCKET_SLOTS as f64 / (LAST_LOAD / 2.0)) as usize + 1;

/// Maximum number of entries per batch.
pub(super) const BATCH: usize = 512;
/// Entries whose cache lines are prefetched: as many as a core has outstanding loads.
const PREFETCH_DISTANCE: usize = 24;
/// Distance at which a prefetched cache line has arrived.
const PREFETCHED: usize = 8;
/// The table of each shard.
pub(super) type Tables = [Table; SHARDS];

/// The shards.
pub(super) struct ShardedTable {
    tables: Arc<Tables>,
    shards: [AlignedShard; SHARDS],
}

/// A shard on a cache line of its own.
#[repr(align(64))]
struct AlignedShard {
    shard: Mutex<Shard>,
    /// Number of entries as of the last update, readable without the lock.
    live: AtomicUsize,
}

/// Number of entries of a table, and at which it grows and shrinks.
struct Shard {
    live: usize,
    grow_at: usize,
    shrink_at: usize,
    /// Number of entries from which some groups overflow.
    crowded_at: usize,
}

/// Entries that were not inserted.
#[derive(Default)]
pub(super) struct Refused {
    /// The tables have the same blocks at other positions.
    pub(super) known: Vec<Entry>,
    /// There is no space in the part of the table to which these belong.
    pub(super) full: Vec<Entry>,
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
    static SORTED_BUFFER: Cell<Vec<Placed>> = const { Cell::new(Vec::new()) };
}

/// An entry with its place in the table of its shard.
#[derive(Clone, Copy)]
struct Placed {
    entry: Entry,
    place: Place,
}

/// The part of a batch that belongs to one shard.
struct Part<'a> {
    tables: &'a Tables,
    table: &'a Table,
    entries: &'a mut [Placed],
    /// The entries of the following shards.
    following: &'a [Placed],
}

impl Part<'_> {
    /// Prefetches the home of the entry at the prefetch distance from an index, which may belong to another shard.
    #[inline]
    fn prefetch_after(&self, at: usize) {
        let at = at + PREFETCH_DISTANCE;
        if let Some(soon) = self.entries.get(at) {
            self.table.prefetch(soon.place);
        } else if let Some(soon) = self.following.get(at - self.entries.len()) {
            self.tables[Key::of(soon.entry.hash).shard].prefetch(soon.place);
        }
    }

    /// Finds the places of the entries from an index on for the size that the table has now.
    fn place_from(&mut self, at: usize) {
        let state = self.table.state(Ordering::Relaxed);
        for Placed { entry, place } in &mut self.entries[at..] {
            *place = state.place(Key::of(entry.hash).bits);
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

    /// Sorts the entries by shard (counting sort) and finds their places in tables of these sizes. Returns the end of
    /// each shard.
    fn sort_into(&self, sorted: &mut Vec<Placed>, sizes: &[State; SHARDS]) -> [usize; SHARDS] {
        let mut ends = [0; SHARDS];
        let mut sum = 0;
        for (end, count) in ends.iter_mut().zip(self.shards) {
            *end = sum;
            sum += count;
        }
        if let Some(first) = self.list.first() {
            let place = sizes[0].place(0);
            sorted.resize(sum, Placed { entry: *first, place });
        }
        for entry in &self.list {
            let key = Key::of(entry.hash);
            let end = &mut ends[key.shard];
            sorted[*end] = Placed { entry: *entry, place: sizes[key.shard].place(key.bits) };
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
    pub(super) fn new() -> Result<Self, NoAddresses> {
        let tables: Vec<Table> = (0..SHARDS).map(|_| Table::new()).collect::<Result<_, _>>()?;
        let tables = Tables::try_from(tables).ok().expect("there is one table per shard");
        let shards = std::array::from_fn(|shard| AlignedShard {
            shard: Mutex::new(Shard::of(&tables[shard])),
            live: AtomicUsize::new(0),
        });
        Ok(Self { tables: Arc::new(tables), shards })
    }

    /// Number of entries.
    pub(super) fn entries(&self) -> usize {
        self.shards.iter().map(|shared| shared.live.load(Ordering::Relaxed)).sum()
    }

    /// Bytes of all tables.
    pub(super) fn bytes(&self) -> usize {
        self.tables.iter().map(Table::buckets).sum::<usize>() * BUCKET_BYTES
    }

    /// The table of each shard.
    pub(super) fn tables(&self) -> Arc<Tables> {
        self.tables.clone()
    }

    /// Inserts entries. `same` says whether the block at an entered position has this hash; if so, the new entry is
    /// refused. `hashes` reads the hashes at entered positions.
    pub(super) fn insert(
        &self,
        entries: &WriteBatch,
        same: impl Fn(u64, Position) -> bool,
        hashes: impl Fn(&[u32]) -> Vec<u64>,
    ) -> Refused {
        let mut refused = Refused::default();
        self.for_each_shard(entries, |shard, part| {
            let crowded = shard.live >= shard.crowded_at;
            for at in 0..part.entries.len() {
                part.prefetch_after(at);
                if let Some(soon) = part.entries.get(at + PREFETCHED).filter(|_| crowded) {
                    part.table.prefetch_next(soon.place);
                }
                if shard.live >= shard.grow_at {
                    if part.table.grow(|positions| keys(&hashes(positions))) {
                        shard.set_limits(part.table);
                        part.place_from(at);
                    } else {
                        // It fills up then, and is not asked again until it has shrunk.
                        shard.grow_at = usize::MAX;
                    }
                }
                let Placed { entry, place } = part.entries[at];
                match part.table.insert(place, entry.position.0, |at| same(entry.hash, Position(at))) {
                    Inserted::New => shard.live += 1,
                    Inserted::Known => refused.known.push(entry),
                    Inserted::Full => refused.full.push(entry),
                }
            }
        });
        refused
    }

    /// Removes entries. Entries that are not in the table are skipped.
    pub(super) fn remove(&self, entries: &WriteBatch, hashes: impl Fn(&[u32]) -> Vec<u64>) {
        self.for_each_shard(entries, |shard, part| {
            for (at, Placed { entry, place }) in part.entries.iter().enumerate() {
                part.prefetch_after(at);
                shard.live -= usize::from(part.table.remove(*place, entry.position.0));
            }
            while shard.live < shard.shrink_at && part.table.shrink(|positions| keys(&hashes(positions))) {
                shard.set_limits(part.table);
            }
        });
    }

    /// Moves an entry to another position.
    pub(super) fn relocate(&self, hash: u64, from: Position, to: Position) {
        let key = Key::of(hash);
        let _guard = self.shards[key.shard].shard.lock();
        self.tables[key.shard].relocate(key.bits, from.0, to.0);
    }

    /// Sorts the entries by shard and calls `each` for each shard that has any, under its lock.
    fn for_each_shard(&self, entries: &WriteBatch, mut each: impl FnMut(&mut Shard, &mut Part<'_>)) {
        debug_assert!(entries.len() <= BATCH, "{} entries at once", entries.len());
        let tables = &*self.tables;
        let sizes = std::array::from_fn(|shard| tables[shard].state(Ordering::Acquire));
        let mut sorted = SORTED_BUFFER.take();
        let ends = entries.sort_into(&mut sorted, &sizes);
        for Placed { entry, place } in sorted.iter().take(PREFETCH_DISTANCE) {
            tables[Key::of(entry.hash).shard].prefetch(*place);
        }
        let of = |shard: usize| shard.checked_sub(1).map_or(0, |before| ends[before])..ends[shard];
        let mut call = |number: usize, shard: &mut Shard| {
            let (mine, following) = sorted.split_at_mut(ends[number]);
            let (table, entries) = (&tables[number], &mut mine[of(number).start..]);
            let mut part = Part { tables, table, entries, following };
            if table.state(Ordering::Relaxed) != sizes[number] {
                part.place_from(0);
            }
            each(shard, &mut part);
            self.shards[number].live.store(shard.live, Ordering::Relaxed);
        };
        let mut later = 0_u64;
        for shard in (0..SHARDS).filter(|shard| !of(*shard).is_empty()) {
            match self.shards[shard].shard.try_lock() {
                Some(mut guard) => call(shard, &mut guard),
                None => later |= 1 << shard,
            }
        }
        for shard in (0..SHARDS).filter(|shard| later >> shard & 1 == 1) {
            call(shard, &mut self.shards[shard].shard.lock());
        }
        sorted.clear();
        SORTED_BUFFER.set(sorted);
    }
}

impl Shard {
    /// The shard of an empty table.
    fn of(table: &Table) -> Self {
        let mut shard = Self { live: 0, grow_at: 0, shrink_at: 0, crowded_at: 0 };
        shard.set_limits(table);
        shard
    }

    /// Sets the limits for the size that the table has now.
    fn set_limits(&mut self, table: &Table) {
        let (level, divided) = table.size();
        let load = FIRST_LOAD + (LAST_LOAD - FIRST_LOAD) * divided;
        let slots = (BUCKET_SLOTS << level) as f64;
        let grow_at = slots * load;
        self.crowded_at = (slots * CROWDED_LOAD) as usize;
        (self.grow_at, self.shrink_at) = (grow_at as usize, (grow_at * SHRINK_AT) as usize);
    }
}

/// The keys of hashes.
fn keys(hashes: &[u64]) -> Vec<u64> {
    hashes.iter().map(|hash| Key::of(*hash).bits).collect()
}
