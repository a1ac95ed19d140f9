//! The tables from names to places, as those see them who change them.
//!
//! Shards have a lock each, for writers only, and grow and shrink by themselves. What is entered or removed comes in batches,
//! which are sorted by shard, so that a lock is taken for many names at once.

use super::body::Place;
use super::table::{Entered, Table, Taken};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Shards: two writers seldom meet in one, and a batch has several names for each.
pub(super) const SHARDS: usize = 16;
/// Slots of an empty shard.
const SLOTS_MIN: usize = 64;
/// A table is replaced once it is fuller than this, graves counted: beyond, groups of eight overflow too often.
const FULL: f64 = 0.8;
/// How full its successor is.
const FILLED: f64 = 0.55;
/// And it is replaced once it is emptier than this.
const SPARSE: f64 = 0.3;

/// The shards.
pub(super) struct Locator([Mutex<Shard>; SHARDS]);

struct Shard {
    table: Arc<Table>,
    live: usize,
    graves: usize,
    /// Entries and graves at which it is replaced.
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
        Self { shard: (spread >> 60) as usize, tag: (spread >> 28) as u32 }
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
    /// `grown` hears of each table that was replaced. Answers with those that were refused.
    pub(super) fn enter(
        &self,
        entries: &[Entry],
        same: impl Fn(u64, Place) -> bool,
        grown: impl Fn(usize, Arc<Table>),
    ) -> Vec<Entry> {
        let mut refused = Vec::new();
        for_each_shard(entries, |number, entries| {
            let mut shard = self.lock(number);
            for entry in entries {
                if shard.live + shard.graves >= shard.full {
                    shard.replace();
                    grown(number, shard.table.clone());
                }
                let same = |place| same(entry.name, Place(place));
                match shard.table.enter(Key::of(entry.name).tag, entry.place.0, same) {
                    Entered::Refused => refused.push(*entry),
                    outcome => {
                        shard.live += 1;
                        shard.graves -= usize::from(outcome == Entered::OnGrave);
                    }
                }
            }
        });
        refused
    }

    /// Removes names. Those that are not entered under their place are skipped.
    pub(super) fn remove(&self, entries: &[Entry], shrunk: impl Fn(usize, Arc<Table>)) {
        for_each_shard(entries, |number, entries| {
            let mut shard = self.lock(number);
            for entry in entries {
                match shard.table.take(Key::of(entry.name).tag, entry.place.0) {
                    Taken::Emptied => shard.live -= 1,
                    Taken::Buried => {
                        shard.live -= 1;
                        shard.graves += 1;
                    }
                    Taken::Absent => {}
                }
            }
            let slots = shard.table.slots();
            if slots > SLOTS_MIN && (shard.live as f64) < slots as f64 * SPARSE {
                shard.replace();
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
        (0..SHARDS).map(|shard| self.lock(shard).table.slots() * size_of::<u64>()).sum()
    }

    fn lock(&self, shard: usize) -> MutexGuard<'_, Shard> {
        self.0[shard].lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Shard {
    fn new(slots: usize) -> Self {
        let table = Table::new(slots);
        let full = (table.slots() as f64 * FULL) as usize;
        Self { table: Arc::new(table), live: 0, graves: 0, full }
    }

    /// A table that fits what there is, without graves.
    fn replace(&mut self) {
        let next = Self::new(((self.live as f64 / FILLED) as usize).max(SLOTS_MIN));
        for (tag, place) in self.table.entries() {
            next.table.enter(tag, place, |_| false);
        }
        *self = Self { live: self.live, ..next };
    }
}

/// Sorts entries by shard, and calls for each that has any.
fn for_each_shard(entries: &[Entry], mut each: impl FnMut(usize, &[Entry])) {
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
    let mut from = 0;
    for (shard, end) in ends.into_iter().enumerate() {
        if end > from {
            each(shard, &sorted[from..end]);
        }
        from = end;
    }
}
