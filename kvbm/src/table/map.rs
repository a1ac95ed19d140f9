//! Tables keyed by block names.
//!
//! Names are keyed hashes already, so nothing hashes them again: a few of their bytes say where in a table they belong.
//! A table of a million names is larger than any cache, so what matters is how many misses a look-up waits for, and
//! whether it waits for them one by one: [`positions`] has one for each name, begun before its turn.

mod positions;

use crate::block::SequenceHash;
pub(crate) use positions::{Ahead, Positions};
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
        let mut ahead = Ahead::default();
        (0..names.len()).take_while(|at| self.position_of(&mut ahead, names, *at).is_some()).count()
    }

    /// The value of one of many names that are looked up one after the other, from the first.
    pub(crate) fn get_mut_of(&mut self, ahead: &mut Ahead, names: &[SequenceHash], at: usize) -> Option<&mut T> {
        self.position_of(ahead, names, at).map(|at| &mut self.entries[at as usize].1)
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

    fn position_of(&self, ahead: &mut Ahead, names: &[SequenceHash], at: usize) -> Option<u32> {
        let place = |position: u32| self.entries.get(position as usize);
        self.positions.find_of(ahead, names, at, place, |(known, _), name| known == name)
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
        bytes[0] = n % 5;
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
