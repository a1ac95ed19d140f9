//! The tables from names to places, as those see them who change them.
//!
//! Shards have a lock each, for writers only, and grow and shrink by themselves. What is entered or removed comes in batches,
//! which are sorted by shard, so that a lock is taken for many names at once; whoever finds a shard busy does the others
//! first.

use super::key::{Key, SHARDS};
use super::position::Place;
use super::snapshot::Body;
use super::table::{SLOT_BYTES, Table};
use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A table is replaced by a larger one once it is fuller than this. Fuller, groups overflow: one in seventy does here, one in eight at
/// seven tenths.
const FULL: f64 = 0.5;
/// And by a smaller one once it is emptier than this.
const SPARSE: f64 = 0.2;
/// What an entry costs in the emptiest table that growing makes.
pub(super) const ENTRY_BYTES: usize = (SLOT_BYTES / (FULL / 2.0)) as usize + 1;

/// Entries that are entered or removed at once, at most.
pub(super) const BATCH: usize = 512;
/// Entries that are on their way to the core's cache at a time: as many as it can wait for.
const AHEAD: usize = 24;
/// Entries whose line has come by now.
const NEAR: usize = 8;
/// Names that are read at once while a table is laid out anew.
const AT_ONCE: usize = 512;

/// The shards.
pub(super) struct Locator([Shared; SHARDS]);

/// A shard, on a cache line that no other lies on.
#[repr(align(64))]
struct Shared {
    shard: Mutex<Shard>,
    /// Entries since somebody last changed it, for who does not want to wait.
    live: AtomicUsize,
}

struct Shard {
    table: Arc<Table>,
    live: usize,
    /// Entries at which it is replaced.
    full: usize,
}

/// A name and its place.
#[derive(Clone, Copy)]
pub(super) struct Entry {
    pub(super) name: u64,
    pub(super) place: Place,
}

/// Entries to be entered or removed, and how many of each shard.
pub(super) struct Entries {
    list: Vec<Entry>,
    shards: [usize; SHARDS],
}

thread_local! {
    /// Room for a batch of entries, as long as nobody has it.
    static ROOM: Cell<Vec<Entry>> = const { Cell::new(Vec::new()) };
    /// Room for them once more, sorted.
    static SORTED: Cell<Vec<Entry>> = const { Cell::new(Vec::new()) };
}

/// The entries that come some time after those of a shard, in order.
#[derive(Clone, Copy)]
struct Ahead<'a> {
    body: &'a Body,
    entries: &'a [Entry],
}

impl Ahead<'_> {
    /// Begins to bring near what will be wanted some time after the entry at a position.
    fn fetch(self, at: usize) {
        if let Some(entry) = self.entries.get(at) {
            self.body.fetch(entry.name);
        }
    }
}

impl Entries {
    pub(super) fn new() -> Self {
        Self { list: ROOM.take(), shards: [0; SHARDS] }
    }

    pub(super) fn push(&mut self, name: u64, place: Place) {
        self.shards[Key::of(name).shard] += 1;
        self.list.push(Entry { name, place });
    }

    pub(super) fn last(&self) -> Option<&Entry> {
        self.list.last()
    }

    pub(super) fn len(&self) -> usize {
        self.list.len()
    }

    /// Those of one shard after those of another, and where the first of each is, and the end.
    fn sort_into(&self, sorted: &mut Vec<Entry>) -> [usize; SHARDS] {
        let mut ends = [0; SHARDS];
        let mut sum = 0;
        for (end, count) in ends.iter_mut().zip(self.shards) {
            *end = sum;
            sum += count;
        }
        sorted.clear();
        sorted.resize(sum, Entry { name: 0, place: Place::NOWHERE });
        for entry in &self.list {
            let end = &mut ends[Key::of(entry.name).shard];
            sorted[*end] = *entry;
            *end += 1;
        }
        ends
    }
}

impl Drop for Entries {
    fn drop(&mut self) {
        self.list.clear();
        ROOM.set(std::mem::take(&mut self.list));
    }
}

impl Locator {
    pub(super) fn new() -> Self {
        Self(std::array::from_fn(|_| Shared {
            shard: Mutex::new(Shard::of(Table::new(0), 0)),
            live: AtomicUsize::new(0),
        }))
    }

    /// Entries in all.
    pub(super) fn entries(&self) -> usize {
        self.0.iter().map(|shared| shared.live.load(Ordering::Relaxed)).sum()
    }

    /// The table of each shard.
    pub(super) fn tables(&self) -> [Arc<Table>; SHARDS] {
        std::array::from_fn(|shard| self.lock(shard).table.clone())
    }

    /// Enters names. `same` says whether a block of the name is in a place that is entered already; such a name is refused.
    /// `names` reads the names in places that are entered, `grown` hears of each table that was replaced. Answers with those that were refused.
    pub(super) fn enter(
        &self,
        body: &Body,
        entries: &Entries,
        same: impl Fn(u64, Place) -> bool,
        names: impl Fn(&[u32]) -> Vec<u64>,
        grown: impl Fn(usize, Arc<Table>),
    ) -> Vec<Entry> {
        let mut refused = Vec::new();
        self.for_each_shard(body, entries, |number, shard, entries, ahead| {
            let crowded = shard.live >= shard.full / 4 * 3;
            for (at, entry) in entries.iter().enumerate() {
                ahead.fetch(at);
                if let Some(soon) = entries.get(at + NEAR).filter(|_| crowded) {
                    shard.table.fetch_next(Key::of(soon.name).tag);
                }
                if shard.live >= shard.full {
                    shard.replace(true, &names);
                    grown(number, shard.table.clone());
                }
                let same = |place| same(entry.name, Place(place));
                if shard.table.enter(Key::of(entry.name).tag, entry.place.0, same) {
                    shard.live += 1;
                } else {
                    refused.push(*entry);
                }
            }
        });
        refused
    }

    /// Removes names. Those that are not entered under their place are skipped.
    pub(super) fn remove(
        &self,
        body: &Body,
        entries: &Entries,
        names: impl Fn(&[u32]) -> Vec<u64>,
        shrunk: impl Fn(usize, Arc<Table>),
    ) {
        self.for_each_shard(body, entries, |number, shard, entries, ahead| {
            for (at, entry) in entries.iter().enumerate() {
                ahead.fetch(at);
                shard.live -= usize::from(shard.table.take(Key::of(entry.name).tag, entry.place.0));
            }
            if !shard.table.is_least() && (shard.live as f64) < shard.table.slots() as f64 * SPARSE {
                shard.replace(false, &names);
                shrunk(number, shard.table.clone());
            }
        });
    }

    /// Moves a name to another place.
    pub(super) fn point(&self, name: u64, from: Place, to: Place) {
        let key = Key::of(name);
        self.lock(key.shard).table.point(key.tag, from.0, to.0);
    }

    /// Sorts entries by shard, and calls for each that has any. Whoever is called says at which entry he is, so that later ones
    /// are brought near meanwhile, of the next shards as well.
    fn for_each_shard(
        &self,
        body: &Body,
        entries: &Entries,
        mut each: impl FnMut(usize, &mut Shard, &[Entry], Ahead<'_>),
    ) {
        debug_assert!(entries.len() <= BATCH, "{} entries at once", entries.len());
        let mut sorted = SORTED.take();
        let ends = entries.sort_into(&mut sorted);
        sorted.iter().take(AHEAD).for_each(|entry| body.fetch(entry.name));
        let mut later = 0_u64;
        let of = |shard: usize| shard.checked_sub(1).map_or(0, |before| ends[before])..ends[shard];
        let mut call = |number: usize, shard: &mut Shard| {
            let range = of(number);
            let ahead = Ahead { body, entries: sorted.get(range.start + AHEAD..).unwrap_or_default() };
            each(number, shard, &sorted[range], ahead);
            self.0[number].live.store(shard.live, Ordering::Relaxed);
        };
        for shard in (0..SHARDS).filter(|shard| !of(*shard).is_empty()) {
            match self.0[shard].shard.try_lock() {
                Ok(mut guard) => call(shard, &mut guard),
                Err(_) => later |= 1 << shard,
            }
        }
        for shard in (0..SHARDS).filter(|shard| later >> shard & 1 == 1) {
            call(shard, &mut self.lock(shard));
        }
        SORTED.set(sorted);
    }

    fn lock(&self, shard: usize) -> MutexGuard<'_, Shard> {
        self.0[shard].shard.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Shard {
    fn of(table: Table, live: usize) -> Self {
        let full = (table.slots() as f64 * FULL) as usize;
        Self { table: Arc::new(table), live, full }
    }

    /// A larger or a smaller table of what there is.
    fn replace(&mut self, larger: bool, names: impl Fn(&[u32]) -> Vec<u64>) {
        let mut unsure = Vec::new();
        let next = self.table.relaid(larger, |place| unsure.push(place));
        for places in unsure.chunks(AT_ONCE) {
            let names = names(places);
            for name in &names {
                next.fetch(Key::of(*name).tag);
            }
            for (name, place) in names.iter().zip(places) {
                next.enter(Key::of(*name).tag, *place, |_| false);
            }
        }
        *self = Self::of(next, self.live);
    }
}
