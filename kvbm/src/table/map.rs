//! Hash maps and sets keyed by block hashes.
//!
//! Block hashes are keyed hashes already, so the tables do not hash them again: a few of their bytes select the
//! bucket. A table of a million hashes exceeds every cache, so the cost of a lookup is its cache misses.
//! [`hash_index`] takes one miss per lookup, and a batch of lookups overlaps the misses by prefetching.

mod hash_index;

use crate::block::SequenceHash;
pub use hash_index::{HashIndex, Prefetcher};
use std::collections::{HashMap, HashSet};
use std::hash::{BuildHasherDefault, Hasher};

/// A map keyed by block hashes.
pub(crate) type BlockMap<T> = HashMap<SequenceHash, T, BuildHasherDefault<BlockHasher>>;

/// A set of block hashes.
pub(crate) type BlockSet = HashSet<SequenceHash, BuildHasherDefault<BlockHasher>>;

/// Folds the written bytes into eight, which suffices for keys that contain a block hash. One multiplication (Fibonacci
/// hashing) spreads hashes that were counted up, as in tests.
#[derive(Default)]
pub(crate) struct BlockHasher(u64);

impl Hasher for BlockHasher {
    fn finish(&self) -> u64 {
        let product = u128::from(self.0) * u128::from(GOLDEN_RATIO);
        (product >> 64) as u64 ^ product as u64
    }

    fn write(&mut self, bytes: &[u8]) {
        for chunk in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.0 = self.0.rotate_left(32) ^ u64::from_le_bytes(word);
        }
    }

    // The length prefix of the array is the same for all keys.
    fn write_usize(&mut self, _: usize) {}
}

/// Maximum number of hashes looked up under one lock, which takes a few microseconds.
pub(crate) const BATCH: usize = 128;

/// The golden ratio as a 64-bit fraction (Knuth, TAOCP volume 3, section 6.4).
const GOLDEN_RATIO: u64 = 0x9E37_79B9_7F4A_7C15;

fn tag(hash: &SequenceHash) -> u32 {
    (hash.short().wrapping_mul(GOLDEN_RATIO) >> 32) as u32
}

/// A map keyed by block hashes with batched lookups that prefetch.
pub(crate) struct PrefetchMap<T> {
    /// Maps each hash to its position in `entries`.
    index: HashIndex,
    entries: Vec<(SequenceHash, T)>,
}

impl<T> Default for PrefetchMap<T> {
    fn default() -> Self {
        Self { index: HashIndex::default(), entries: Vec::new() }
    }
}

impl<T> PrefetchMap<T> {
    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    pub(crate) fn contains(&self, hash: &SequenceHash) -> bool {
        self.position(hash).is_some()
    }

    /// All hashes, in no particular order.
    pub(crate) fn hashes(&self) -> impl Iterator<Item = SequenceHash> {
        self.entries.iter().map(|(hash, _)| *hash)
    }

    /// All values, in no particular order.
    pub(crate) fn values(&self) -> impl Iterator<Item = &T> {
        self.entries.iter().map(|(_, value)| value)
    }

    pub(crate) fn get(&self, hash: &SequenceHash) -> Option<&T> {
        self.position(hash).map(|at| &self.entries[at as usize].1)
    }

    pub(crate) fn get_mut(&mut self, hash: &SequenceHash) -> Option<&mut T> {
        self.position(hash).map(|at| &mut self.entries[at as usize].1)
    }

    /// Length of the prefix of `hashes` that the map contains.
    pub(crate) fn prefix_len(&self, hashes: &[SequenceHash]) -> usize {
        let mut prefetcher = Prefetcher::default();
        (0..hashes.len()).take_while(|at| self.position_batched(&mut prefetcher, hashes, *at).is_some()).count()
    }

    /// The value of `hashes[at]`, as one of a batch of lookups: `at` counts up from zero.
    pub(crate) fn get_mut_batched(
        &mut self,
        prefetcher: &mut Prefetcher,
        hashes: &[SequenceHash],
        at: usize,
    ) -> Option<&mut T> {
        self.position_batched(prefetcher, hashes, at).map(|at| &mut self.entries[at as usize].1)
    }

    /// Sets the value of a hash and returns the previous one.
    pub(crate) fn insert(&mut self, hash: SequenceHash, value: T) -> Option<T> {
        if let Some(known) = self.get_mut(&hash) {
            return Some(std::mem::replace(known, value));
        }
        self.index.insert(&hash, self.entries.len() as u32);
        self.entries.push((hash, value));
        None
    }

    pub(crate) fn remove(&mut self, hash: &SequenceHash) -> Option<T> {
        let at = self.position(hash)?;
        self.index.remove(hash, at);
        let (_, value) = self.entries.swap_remove(at as usize);
        if let Some((moved, _)) = self.entries.get(at as usize) {
            self.index.relocate(moved, self.entries.len() as u32, at);
        }
        Some(value)
    }

    fn position_batched(&self, prefetcher: &mut Prefetcher, hashes: &[SequenceHash], at: usize) -> Option<u32> {
        let entry = |position: u32| self.entries.get(position as usize);
        self.index.find_batched(prefetcher, hashes, at, entry, |(known, _), hash| known == hash)
    }

    fn position(&self, hash: &SequenceHash) -> Option<u32> {
        self.index.find(hash, |at| self.entries[at as usize].0 == *hash)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Many hashes with few distinct tags, so that clusters form, wrap around and are closed again.
    fn hash(n: u8) -> SequenceHash {
        let mut bytes = [0; 16];
        bytes[0] = n % 5;
        bytes[15] = n;
        SequenceHash::from_bytes(bytes)
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn a_prefetch_map_agrees_with_a_std_hash_map(ops in prop::collection::vec((any::<bool>(), 0..60u8), 1..300)) {
            let mut map = PrefetchMap::default();
            let mut naive = HashMap::new();
            for (time, (insert, n)) in ops.into_iter().enumerate() {
                if insert {
                    prop_assert_eq!(map.insert(hash(n), time), naive.insert(n, time));
                } else {
                    prop_assert_eq!(map.remove(&hash(n)), naive.remove(&n));
                }
                prop_assert_eq!(map.len(), naive.len());
                for n in 0..60 {
                    prop_assert_eq!(map.get(&hash(n)), naive.get(&n));
                }
                let all: Vec<_> = (0..60).map(hash).collect();
                prop_assert_eq!(map.prefix_len(&all), (0..60).take_while(|n| naive.contains_key(n)).count());
            }
        }
    }
}
