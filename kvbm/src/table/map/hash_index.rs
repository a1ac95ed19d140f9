//! A hash table whose buckets are cache lines. It maps each block hash to its position in an array of the caller.
//!
//! A bucket is one cache line with eight ways of a 32-bit tag and a 32-bit position. A hash belongs to the bucket
//! that its tag selects, and overflows to the next one with a free way (linear probing); at a load of at most one
//! half nearly every hash is in its home bucket. So a lookup reads one line here and one array entry, which holds the
//! whole hash. A [`Prefetcher`] begins both reads of a batch of lookups ahead of time.
//!
//! Not here: `hashbrown`. It has no prefetching of batches: with its `HashTable` in place of this one, matching 1,000
//! of a million blocks (`examples/match_speed.rs`) took 6.2 to 7.9 times as long (median, five alternating pairs of
//! runs).

use super::tag;
use crate::block::SequenceHash;
use crate::table::{hugepages, prefetch};

/// Hashes per bucket.
const WAYS: usize = 8;
/// Words per bucket: the tag of each way, then the position plus one of each way, where 0 marks a free way.
const BUCKET: usize = 2 * WAYS;

/// Maps each block hash to its position in an array of the caller, which holds the hashes themselves.
#[derive(Default)]
pub struct HashIndex {
    words: Vec<u32>,
    /// Index in `words` of the first bucket, which is aligned to a cache line.
    start: usize,
    /// Number of buckets: zero or a power of two.
    buckets: usize,
    /// Number of hashes.
    len: usize,
}

/// State of a batch of lookups in order: the guessed positions of the next hashes. See [`HashIndex::find_batched`].
#[derive(Default)]
pub struct Prefetcher([u32; Prefetcher::DISTANCE]);

impl Prefetcher {
    /// Number of lookups by which the array entry is prefetched ahead; the bucket is prefetched twice as far ahead.
    /// This is about the number of cache misses that a core can have outstanding; twice as many took half as long
    /// again.
    const DISTANCE: usize = 16;
}

impl HashIndex {
    const MIN_BUCKETS: usize = 2;

    /// An index with room for `hashes` without growing. The memory is reserved now, and touched as hashes are inserted.
    pub(crate) fn with_capacity(hashes: usize) -> Self {
        Self::empty((hashes * 2).div_ceil(WAYS).next_power_of_two().max(Self::MIN_BUCKETS))
    }

    fn empty(buckets: usize) -> Self {
        let words = vec![0; buckets * BUCKET + BUCKET - 1];
        hugepages::advise_hugepages(words.as_slice());
        let start = words.as_ptr().align_offset(BUCKET * size_of::<u32>()).min(BUCKET - 1);
        Self { words, start, buckets, len: 0 }
    }

    /// Number of hashes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is no hash.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The position of a hash. `is_at` tells whether a position holds the hash, because two hashes may share a tag.
    pub(crate) fn find(&self, hash: &SequenceHash, is_at: impl Fn(u32) -> bool) -> Option<u32> {
        let tag = tag(hash);
        let mut bucket = self.home(tag);
        loop {
            let (tags, positions) = self.bucket(bucket)?;
            for (known, stored) in tags.iter().zip(positions) {
                if *known == tag
                    && let Some(position) = stored.checked_sub(1)
                    && is_at(position)
                {
                    return Some(position);
                }
            }
            if positions.contains(&0) {
                return None;
            }
            bucket = self.next(bucket);
        }
    }

    /// The position of `hashes[at]`, as one of a batch of lookups: `at` counts up from zero. Prefetches for the
    /// lookups that follow. `entry` returns the array entry at a position, and `matches` tells whether it holds a
    /// hash. The index and the array may change between two lookups.
    pub fn find_batched<'a, T: 'a>(
        &self,
        prefetcher: &mut Prefetcher,
        hashes: &[SequenceHash],
        at: usize,
        entry: impl Fn(u32) -> Option<&'a T>,
        matches: impl Fn(&T, &SequenceHash) -> bool,
    ) -> Option<u32> {
        const DISTANCE: usize = Prefetcher::DISTANCE;
        let mut prefetch_entry = |at: usize| {
            let guess = hashes.get(at).map_or(0, |hash| self.guess(hash));
            if let Some(entry) = guess.checked_sub(1).and_then(&entry) {
                prefetch::prefetch_for_write(entry);
            }
            std::mem::replace(&mut prefetcher.0[at % DISTANCE], guess)
        };
        if at == 0 {
            hashes.iter().take(2 * DISTANCE).for_each(|hash| self.prefetch(hash));
            (0..DISTANCE).for_each(|at| _ = prefetch_entry(at));
        }
        if let Some(hash) = hashes.get(at + 2 * DISTANCE) {
            self.prefetch(hash);
        }
        let (hash, guess) = (&hashes[at], prefetch_entry(at + DISTANCE).checked_sub(1));
        let is_at = |position: &u32| entry(*position).is_some_and(|entry| matches(entry, hash));
        guess.filter(&is_at).or_else(|| self.find(hash, |position| is_at(&position)))
    }

    /// One more than the probable position of a hash, or 0; the caller verifies it. Does not branch on what it reads,
    /// because a mispredicted branch costs as much as a lookup.
    fn guess(&self, hash: &SequenceHash) -> u32 {
        let tag = tag(hash);
        let Some((tags, positions)) = self.bucket(self.home(tag)) else { return 0 };
        let equal = u64::from_le_bytes(tags.map(|known| u8::from(known == tag)));
        positions[equal.trailing_zeros() as usize / 8 % WAYS]
    }

    /// Prefetches the bucket that a lookup, an insertion or a removal of the hash reads first.
    pub(crate) fn prefetch(&self, hash: &SequenceHash) {
        if let Some(bucket) = self.words.get(self.start + self.home(tag(hash)) * BUCKET) {
            prefetch::prefetch(bucket);
        }
    }

    /// Adds a hash that the index does not contain.
    pub fn insert(&mut self, hash: &SequenceHash, position: u32) {
        if self.buckets * WAYS < (self.len + 1) * 2 {
            self.grow();
        }
        self.put(tag(hash), position + 1);
    }

    /// Removes a hash that the index maps to `position`.
    pub fn remove(&mut self, hash: &SequenceHash, position: u32) {
        let (mut bucket, mut way) = self.way_of(hash, position);
        self.len -= 1;
        loop {
            let was_full = self.bucket(bucket).is_some_and(|(_, positions)| !positions.contains(&0));
            self.set(bucket, way, 0, 0);
            if !was_full {
                return;
            }
            // A hash that had overflowed from this bucket moves back, which frees a way in turn.
            let Some((from, from_way, tag, stored)) = self.overflowed(bucket) else { return };
            self.set(bucket, way, tag, stored);
            (bucket, way) = (from, from_way);
        }
    }

    /// The next hash that overflowed from this bucket or an earlier one: its bucket, way, tag and stored position.
    fn overflowed(&self, bucket: usize) -> Option<(usize, usize, u32, u32)> {
        let mut next = self.next(bucket);
        while next != bucket {
            let (tags, positions) = self.bucket(next)?;
            let overflowed = |way: &usize| {
                positions[*way] != 0 && self.distance(self.home(tags[*way]), next) >= self.distance(bucket, next)
            };
            if let Some(way) = (0..WAYS).find(overflowed) {
                return Some((next, way, tags[way], positions[way]));
            }
            if positions.contains(&0) {
                return None;
            }
            next = self.next(next);
        }
        None
    }

    /// Changes the position of a hash.
    pub(super) fn relocate(&mut self, hash: &SequenceHash, from: u32, to: u32) {
        let (bucket, way) = self.way_of(hash, from);
        self.set(bucket, way, tag(hash), to + 1);
    }

    /// The bucket and the way of a hash that the index maps to `position`.
    fn way_of(&self, hash: &SequenceHash, position: u32) -> (usize, usize) {
        let mut bucket = self.home(tag(hash));
        loop {
            let (_, positions) = self.bucket(bucket).expect("a hash that has a position has a bucket");
            if let Some(way) = positions.iter().position(|stored| *stored == position + 1) {
                return (bucket, way);
            }
            assert!(!positions.contains(&0), "{hash} is not at {position}");
            bucket = self.next(bucket);
        }
    }

    fn put(&mut self, tag: u32, stored: u32) {
        let mut bucket = self.home(tag);
        let way = loop {
            let (_, positions) = self.bucket(bucket).expect("there is room for one more");
            match positions.iter().position(|stored| *stored == 0) {
                Some(way) => break way,
                None => bucket = self.next(bucket),
            }
        };
        self.set(bucket, way, tag, stored);
        self.len += 1;
    }

    fn grow(&mut self) {
        let old = std::mem::replace(self, Self::empty((self.buckets * 2).max(Self::MIN_BUCKETS)));
        for (tags, positions) in (0..old.buckets).filter_map(|bucket| old.bucket(bucket)) {
            for (tag, stored) in tags.iter().zip(positions).filter(|(_, stored)| **stored != 0) {
                self.put(*tag, *stored);
            }
        }
    }

    fn bucket(&self, bucket: usize) -> Option<(&[u32; WAYS], &[u32; WAYS])> {
        let bucket: &[u32; BUCKET] = self.words.get(self.start + bucket * BUCKET..)?.first_chunk()?;
        bucket.first_chunk().zip(bucket.last_chunk())
    }

    fn set(&mut self, bucket: usize, way: usize, tag: u32, stored: u32) {
        let at = self.start + bucket * BUCKET + way;
        self.words[at] = tag;
        self.words[at + WAYS] = stored;
    }

    fn home(&self, tag: u32) -> usize {
        tag as usize & self.buckets.wrapping_sub(1)
    }

    fn next(&self, bucket: usize) -> usize {
        (bucket + 1) & (self.buckets - 1)
    }

    /// Number of buckets from one to another, going up.
    fn distance(&self, from: usize, to: usize) -> usize {
        to.wrapping_sub(from) & (self.buckets - 1)
    }
}
