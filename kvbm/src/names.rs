//! Tables keyed by block names.
//!
//! Names are keyed hashes already, so nothing hashes them again: a few of their bytes say where in a table they belong.
//! A table of a million names is larger than any cache, so what matters is how many misses a look-up waits for, and
//! whether it waits for them one by one: [`Positions::touch`] begins those of many look-ups at once.

use crate::SequenceHash;
use std::collections::{HashMap, HashSet};
use std::hash::{BuildHasherDefault, Hasher};
use std::hint::black_box;

/// A map keyed by block names.
pub(crate) type ByName<T> = HashMap<SequenceHash, T, BuildHasherDefault<NameHasher>>;

/// A set of names, likewise.
pub(crate) type NameSet = HashSet<SequenceHash, BuildHasherDefault<NameHasher>>;

/// Folds what is written into eight bytes; of a key with a name in it, that is as good as any hash.
#[derive(Default)]
pub(crate) struct NameHasher(u64);

impl Hasher for NameHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for chunk in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.0 = self.0.rotate_left(32) ^ u64::from_le_bytes(word);
        }
    }

    // The length prefix of the array, the same for all.
    fn write_usize(&mut self, _: usize) {}
}

/// Names looked up in one go: their lines of a table and of what it points to stay in the first-level cache.
pub(crate) const BATCH: usize = 128;

/// Which position in somebody's array each name has. Open addressing; the names themselves stand in the array.
#[derive(Default)]
pub(crate) struct Positions {
    /// The upper half of an entry is the name's tag, the lower half its position plus one; 0 is empty. A power of two.
    entries: Vec<u64>,
    len: usize,
}

impl Positions {
    const LEAST: usize = 16;

    /// Room for `names` without growing. The memory is reserved, and touched only as names come.
    pub(crate) fn with_capacity(names: usize) -> Self {
        Self { entries: vec![0; (names * 2).next_power_of_two().max(Self::LEAST)], len: 0 }
    }

    /// How many names have a position.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Where a name is. `at` says whether a position holds it: tags are short, and two names may share one.
    pub(crate) fn find(&self, name: &SequenceHash, at: impl Fn(u32) -> bool) -> Option<u32> {
        let mut slot = self.home(tag(name));
        loop {
            let entry = *self.entries.get(slot)?;
            let position = (entry as u32).checked_sub(1)?;
            if (entry >> 32) as u32 == tag(name) && at(position) {
                return Some(position);
            }
            slot = self.after(slot);
        }
    }

    /// A position that probably holds the name: good enough to look there in advance.
    pub(crate) fn guess(&self, name: &SequenceHash) -> Option<u32> {
        self.find(name, |_| true)
    }

    /// Brings what look-ups of `names` will read into the cache. Plain loads that nothing waits for: the processor has
    /// many of them under way at the same time.
    pub(crate) fn touch(&self, names: &[SequenceHash]) {
        let read = |name| self.entries.get(self.home(tag(name))).copied().unwrap_or(0);
        black_box(names.iter().map(read).fold(0, |all, entry| all ^ entry));
    }

    /// Adds a name that is not here.
    pub(crate) fn insert(&mut self, name: &SequenceHash, position: u32) {
        if self.entries.len() < (self.len + 1) * 2 {
            self.grow();
        }
        self.len += 1;
        self.put(u64::from(tag(name)) << 32 | (u64::from(position) + 1));
    }

    /// Removes a name from a position that holds it.
    pub(crate) fn remove(&mut self, name: &SequenceHash, position: u32) {
        let mut hole = self.slot_of(name, position);
        self.len -= 1;
        // Those behind it move up, unless that would put them before where they belong.
        let mut next = self.after(hole);
        while self.entries[next] != 0 {
            let home = self.home((self.entries[next] >> 32) as u32);
            let distance = |from: usize, to: usize| to.wrapping_sub(from) & (self.entries.len() - 1);
            if distance(home, next) >= distance(hole, next) {
                self.entries[hole] = self.entries[next];
                hole = next;
            }
            next = self.after(next);
        }
        self.entries[hole] = 0;
    }

    /// A name moves.
    fn relocate(&mut self, name: &SequenceHash, from: u32, to: u32) {
        let slot = self.slot_of(name, from);
        self.entries[slot] = u64::from(tag(name)) << 32 | (u64::from(to) + 1);
    }

    fn slot_of(&self, name: &SequenceHash, position: u32) -> usize {
        let entry = u64::from(tag(name)) << 32 | (u64::from(position) + 1);
        let mut slot = self.home(tag(name));
        while self.entries[slot] != entry {
            assert!(self.entries[slot] != 0, "{name} is not at {position}");
            slot = self.after(slot);
        }
        slot
    }

    fn put(&mut self, entry: u64) {
        let mut slot = self.home((entry >> 32) as u32);
        while self.entries[slot] != 0 {
            slot = self.after(slot);
        }
        self.entries[slot] = entry;
    }

    fn grow(&mut self) {
        let larger = vec![0; (self.entries.len() * 2).max(Self::LEAST)];
        for entry in std::mem::replace(&mut self.entries, larger) {
            if entry != 0 {
                self.put(entry);
            }
        }
    }

    fn home(&self, tag: u32) -> usize {
        tag as usize & self.entries.len().wrapping_sub(1)
    }

    fn after(&self, slot: usize) -> usize {
        (slot + 1) & (self.entries.len() - 1)
    }
}

/// The golden ratio in 64 bits: spreads names that were counted up rather than hashed, as in tests.
const SPREAD: u64 = 0x9E37_79B9_7F4A_7C15;

fn tag(name: &SequenceHash) -> u32 {
    (name.short().wrapping_mul(SPREAD) >> 32) as u32
}

/// A map keyed by block names that answers for many names at once.
pub(crate) struct NameMap<T> {
    positions: Positions,
    entries: Vec<(SequenceHash, T)>,
}

impl<T> Default for NameMap<T> {
    fn default() -> Self {
        Self { positions: Positions::default(), entries: Vec::new() }
    }
}

impl<T> NameMap<T> {
    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    pub(crate) fn contains(&self, name: &SequenceHash) -> bool {
        self.position(name).is_some()
    }

    pub(crate) fn get(&self, name: &SequenceHash) -> Option<&T> {
        self.position(name).map(|at| &self.entries[at as usize].1)
    }

    pub(crate) fn get_mut(&mut self, name: &SequenceHash) -> Option<&mut T> {
        self.position(name).map(|at| &mut self.entries[at as usize].1)
    }

    /// How many of `names`, counted from the first, are here.
    pub(crate) fn leading(&self, names: &[SequenceHash]) -> usize {
        let mut found = 0;
        for batch in names.chunks(BATCH) {
            self.touch(batch);
            let here = batch.iter().take_while(|name| self.contains(name)).count();
            found += here;
            if here < batch.len() {
                break;
            }
        }
        found
    }

    /// Begins the look-ups of up to [`BATCH`] names.
    pub(crate) fn touch(&self, names: &[SequenceHash]) {
        // One name is looked up as fast without.
        if names.len() > 1 {
            self.positions.touch(names);
            let read = |name| self.positions.guess(name).map_or(0, |at| self.entries[at as usize].0.as_bytes()[0]);
            black_box(names.iter().map(read).fold(0, |all, byte| all ^ byte));
        }
    }

    /// Gives a name a value; the one that it had, if any.
    pub(crate) fn insert(&mut self, name: SequenceHash, value: T) -> Option<T> {
        if let Some(known) = self.get_mut(&name) {
            return Some(std::mem::replace(known, value));
        }
        self.positions.insert(&name, self.entries.len() as u32);
        self.entries.push((name, value));
        None
    }

    pub(crate) fn remove(&mut self, name: &SequenceHash) -> Option<T> {
        let at = self.position(name)?;
        self.positions.remove(name, at);
        let (_, value) = self.entries.swap_remove(at as usize);
        if let Some((moved, _)) = self.entries.get(at as usize) {
            self.positions.relocate(moved, self.entries.len() as u32, at);
        }
        Some(value)
    }

    fn position(&self, name: &SequenceHash) -> Option<u32> {
        self.positions.find(name, |at| self.entries[at as usize].0 == *name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Few tags for many names, so that clusters form, wrap around and are closed again.
    fn name(n: u8) -> SequenceHash {
        let mut bytes = [0; 16];
        bytes[0] = n % 11;
        bytes[15] = n;
        SequenceHash::from_bytes(bytes)
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn a_name_map_agrees_with_a_hash_map(ops in prop::collection::vec((any::<bool>(), 0..60u8), 1..300)) {
            let mut map = NameMap::default();
            let mut naive = HashMap::new();
            for (time, (insert, n)) in ops.into_iter().enumerate() {
                if insert {
                    prop_assert_eq!(map.insert(name(n), time), naive.insert(n, time));
                } else {
                    prop_assert_eq!(map.remove(&name(n)), naive.remove(&n));
                }
                prop_assert_eq!(map.len(), naive.len());
                for n in 0..60 {
                    prop_assert_eq!(map.get(&name(n)), naive.get(&n));
                }
                let all: Vec<_> = (0..60).map(name).collect();
                prop_assert_eq!(map.leading(&all), (0..60).take_while(|n| naive.contains_key(n)).count());
            }
        }
    }
}
