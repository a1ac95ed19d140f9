//! Tables keyed by block names.
//!
//! Names are keyed hashes already, so nothing hashes them again: a few of their bytes say where in a table they belong.
//! A table of a million names is larger than any cache, so what matters is how many misses a look-up waits for, and
//! whether it waits for them one by one: [`Positions::find_of`] begins those that come later.

use crate::{SequenceHash, memory};
use std::collections::{HashMap, HashSet};
use std::hash::{BuildHasherDefault, Hasher};

/// A map keyed by block names.
pub(crate) type ByName<T> = HashMap<SequenceHash, T, BuildHasherDefault<NameHasher>>;

/// A set of names, likewise.
pub(crate) type NameSet = HashSet<SequenceHash, BuildHasherDefault<NameHasher>>;

/// Folds what is written into eight bytes; of a key with a name in it, that is as good as any hash. One multiplication
/// spreads names that were counted up: without it, each of them would look like the one before.
#[derive(Default)]
pub(crate) struct NameHasher(u64);

impl Hasher for NameHasher {
    fn finish(&self) -> u64 {
        let spread = u128::from(self.0) * u128::from(SPREAD);
        (spread >> 64) as u64 ^ spread as u64
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

/// Names looked up in one go, under one lock: a few microseconds.
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
        Self { entries: Self::empty((names * 2).next_power_of_two().max(Self::LEAST)), len: 0 }
    }

    fn empty(size: usize) -> Vec<u64> {
        let entries = vec![0; size];
        memory::enlarge(entries.as_slice());
        entries
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

    /// Where one of many names is that are looked up one after the other, from the first: begins the look-ups that follow.
    /// `place` is what stands at a position and bears a name, which `named` compares.
    pub(crate) fn find_of<'a, T: 'a>(
        &self,
        names: &[SequenceHash],
        at: usize,
        place: impl Fn(u32) -> &'a T,
        named: impl Fn(&T, &SequenceHash) -> bool,
    ) -> Option<u32> {
        /// So many look-ups before its turn a look-up begins, for each of the two places that it reads. About as many
        /// misses as a core waits for at once; with twice as many it took half as long again.
        const AHEAD: usize = 16;
        let fetch = |near: usize| {
            if let Some(position) = names.get(near).and_then(|name| self.guess(name)) {
                memory::fetch(place(position));
            }
        };
        if at == 0 {
            names.iter().take(2 * AHEAD).for_each(|name| self.fetch(name));
            (0..AHEAD).for_each(fetch);
        }
        if let Some(far) = names.get(at + 2 * AHEAD) {
            self.fetch(far);
        }
        fetch(at + AHEAD);
        let name = &names[at];
        let guess = self.guess(name).filter(|position| named(place(*position), name));
        guess.or_else(|| self.find(name, |position| named(place(position), name)))
    }

    /// Where a name probably is: good enough to look there first. Never branches on what it reads, since a wrong turn costs
    /// as much as a look.
    fn guess(&self, name: &SequenceHash) -> Option<u32> {
        /// Nine of ten names are as near to where they belong.
        const NEAR: usize = 4;
        let (tag, mut near) = (tag(name), 0);
        let last = self.entries.len().checked_sub(1)?;
        for step in (0..NEAR).rev() {
            let entry = self.entries[(self.home(tag) + step) & last];
            near = if (entry >> 32) as u32 == tag { entry } else { near };
        }
        (near as u32).checked_sub(1)
    }

    fn fetch(&self, name: &SequenceHash) {
        if let Some(entry) = self.entries.get(self.home(tag(name))) {
            memory::fetch(entry);
        }
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
        let larger = Self::empty((self.entries.len() * 2).max(Self::LEAST));
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

    /// All of them, in no order.
    pub(crate) fn names(&self) -> impl Iterator<Item = SequenceHash> {
        self.entries.iter().map(|(name, _)| *name)
    }

    pub(crate) fn get(&self, name: &SequenceHash) -> Option<&T> {
        self.position(name).map(|at| &self.entries[at as usize].1)
    }

    pub(crate) fn get_mut(&mut self, name: &SequenceHash) -> Option<&mut T> {
        self.position(name).map(|at| &mut self.entries[at as usize].1)
    }

    /// How many of `names`, counted from the first, are here.
    pub(crate) fn leading(&self, names: &[SequenceHash]) -> usize {
        (0..names.len()).take_while(|at| self.position_of(names, *at).is_some()).count()
    }

    /// The value of one of many names that are looked up one after the other, from the first.
    pub(crate) fn get_mut_of(&mut self, names: &[SequenceHash], at: usize) -> Option<&mut T> {
        self.position_of(names, at).map(|at| &mut self.entries[at as usize].1)
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

    fn position_of(&self, names: &[SequenceHash], at: usize) -> Option<u32> {
        let place = |position: u32| &self.entries[position as usize];
        self.positions.find_of(names, at, place, |(known, _), name| known == name)
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
