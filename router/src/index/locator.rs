//! The tables from names to places, as those see them who change them.
//!
//! Shards have a lock each, for writers only, and grow and shrink by themselves. What is entered or removed comes in batches,
//! which are sorted by shard, so that a lock is taken for many names at once; whoever finds a shard busy does the others
//! first.

use super::body::Place;
use super::table::Table;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Shards: two writers seldom meet in one, a batch has several names for each, and none is long in growing.
pub(super) const SHARDS: usize = 1 << SHARD_BITS;
const SHARD_BITS: u32 = 5;
/// Slots of an empty shard.
const SLOTS_MIN: usize = 64;
/// A table is replaced once it is fuller than this: beyond, groups of twelve overflow too often.
const FULL: f64 = 0.7;
/// How full its successor is.
const FILLED: f64 = 0.36;
/// And it is replaced once it is emptier than this.
const SPARSE: f64 = 0.2;

/// Names that are read at once while a table is laid out anew.
const AT_ONCE: usize = 512;

/// The shards.
pub(super) struct Locator([Mutex<Shard>; SHARDS]);

struct Shard {
    table: Arc<Table>,
    live: usize,
    /// Entries at which it is replaced.
    full: usize,
}

/// A name, as the tables know it. Multiplying spreads names that are no hashes.
#[derive(Clone, Copy)]
pub(super) struct Key {
    pub(super) shard: usize,
    pub(super) tag: u32,
}

/// A name and its place.
#[derive(Clone, Copy)]
pub(super) struct Entry {
    pub(super) name: u64,
    pub(super) place: Place,
}

impl Key {
    pub(super) fn of(name: u64) -> Self {
        let spread = name.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        Self { shard: (spread >> (64 - SHARD_BITS)) as usize, tag: (spread >> (32 - SHARD_BITS)) as u32 }
    }
}

impl Locator {
    pub(super) fn new() -> Self {
        Self(std::array::from_fn(|_| Mutex::new(Shard::new(SLOTS_MIN))))
    }

    /// The table of each shard.
    pub(super) fn tables(&self) -> [Arc<Table>; SHARDS] {
        std::array::from_fn(|shard| self.lock(shard).table.clone())
    }

    /// Enters names. `same` says whether a block of the name is in a place that is entered already; such a name is refused.
    /// `names` reads the names in places that are entered, `grown` hears of each table that was replaced. Answers with those that were refused.
    pub(super) fn enter(
        &self,
        entries: &[Entry],
        same: impl Fn(u64, Place) -> bool,
        names: impl Fn(&[u32]) -> Vec<u64>,
        grown: impl Fn(usize, Arc<Table>),
    ) -> Vec<Entry> {
        let mut refused = Vec::new();
        self.for_each_shard(entries, |number, shard, entries| {
            for entry in entries {
                if shard.live >= shard.full {
                    shard.replace(&names);
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
        entries: &[Entry],
        names: impl Fn(&[u32]) -> Vec<u64>,
        shrunk: impl Fn(usize, Arc<Table>),
    ) {
        self.for_each_shard(entries, |number, shard, entries| {
            for entry in entries {
                shard.live -= usize::from(shard.table.take(Key::of(entry.name).tag, entry.place.0));
            }
            let slots = shard.table.slots();
            if slots > SLOTS_MIN && (shard.live as f64) < slots as f64 * SPARSE {
                shard.replace(&names);
                shrunk(number, shard.table.clone());
            }
        });
    }

    /// Moves a name to another place.
    pub(super) fn point(&self, name: u64, from: Place, to: Place) {
        let key = Key::of(name);
        self.lock(key.shard).table.point(key.tag, from.0, to.0);
    }

    /// Bytes of the tables.
    pub(super) fn bytes(&self) -> usize {
        (0..SHARDS).map(|shard| self.lock(shard).table.bytes()).sum()
    }

    /// Sorts entries by shard, and calls for each that has any.
    fn for_each_shard(&self, entries: &[Entry], mut each: impl FnMut(usize, &mut Shard, &[Entry])) {
        let Some(first) = entries.first() else { return };
        let mut ends = [0; SHARDS];
        for entry in entries {
            ends[Key::of(entry.name).shard] += 1;
        }
        let mut sum = 0;
        for end in &mut ends {
            sum += std::mem::replace(end, sum);
        }
        let mut sorted = vec![*first; entries.len()];
        for entry in entries {
            let end = &mut ends[Key::of(entry.name).shard];
            sorted[*end] = *entry;
            *end += 1;
        }
        let mut later = 0_u64;
        let of = |shard: usize| shard.checked_sub(1).map_or(0, |before| ends[before])..ends[shard];
        for shard in (0..SHARDS).filter(|shard| !of(*shard).is_empty()) {
            match self.0[shard].try_lock() {
                Ok(mut guard) => each(shard, &mut guard, &sorted[of(shard)]),
                Err(_) => later |= 1 << shard,
            }
        }
        for shard in (0..SHARDS).filter(|shard| later >> shard & 1 == 1) {
            each(shard, &mut self.lock(shard), &sorted[of(shard)]);
        }
    }

    fn lock(&self, shard: usize) -> MutexGuard<'_, Shard> {
        self.0[shard].lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Shard {
    fn new(slots: usize) -> Self {
        let table = Table::new(slots);
        let full = (table.slots() as f64 * FULL) as usize;
        Self { table: Arc::new(table), live: 0, full }
    }

    /// A table that fits what there is.
    fn replace(&mut self, names: impl Fn(&[u32]) -> Vec<u64>) {
        let next = Self::new(((self.live as f64 / FILLED) as usize).max(SLOTS_MIN));
        let mut places = Vec::with_capacity(AT_ONCE);
        let enter = |places: &mut Vec<u32>| {
            for (name, place) in names(places).into_iter().zip(places.drain(..)) {
                next.table.enter(Key::of(name).tag, place, |_| false);
            }
        };
        self.table.for_each(|place| {
            places.push(place);
            if places.len() == AT_ONCE {
                enter(&mut places);
            }
        });
        enter(&mut places);
        *self = Self { live: self.live, ..next };
    }
}
