//! Use counts of blocks, resident and evicted: a count-min sketch with aging, after `TinyLFU` (Einziger, Friedman,
//! Manes, 2017).
//!
//! A resident block counts its own uses, so a hit writes no memory but the block's node. The uses of an evicted block
//! go into the sketch: four 4-bit counters per hash, of which the smallest is the estimate. It may be too high, never
//! too low. Counts are halved with every *aging period*, which lasts for a number of uses, not of seconds.
//!
//! The sketch decides which block is evicted. It is not an admission filter: every new block is admitted.

use crate::block::SequenceHash;
use crate::table::{hugepages, prefetch};

/// A saturating use count, 0 to 15.
pub(super) type Uses = u8;

/// The aging clock, and the counts of evicted blocks.
pub(super) struct FrequencySketch {
    /// Sixteen counters per word; the length is a power of two.
    counters: Vec<u64>,
    /// Number of periods that have ended.
    periods: u32,
    /// Uses in the current period.
    uses: u64,
    period: u64,
}

impl FrequencySketch {
    const MAX_USES: Uses = 15;
    /// Uses in a period, per slot of the pool. A shorter period lets a scan of its length make hot blocks look cold; a
    /// longer one keeps blocks that are no longer used for too long.
    const USES_PER_SLOT: u64 = 10;
    const COUNTERS_PER_WORD: usize = 16;
    /// Clears the bit that a shift moves in from the next counter.
    const HALVING_MASK: u64 = 0x7777_7777_7777_7777;

    /// For a pool of `capacity` blocks: one word per block, of which a period fills about a quarter of the counters.
    pub(super) fn new(capacity: usize) -> Self {
        let counters = vec![0; capacity.next_power_of_two()];
        hugepages::advise_hugepages(counters.as_slice());
        Self { counters, periods: 0, uses: 0, period: (capacity as u64 * Self::USES_PER_SLOT).max(1) }
    }

    /// The part of the eviction order that comes from use: period plus log2 of the uses.
    ///
    /// Halving a count subtracts one from its logarithm. So instead of lowering the value of all resident blocks in
    /// every period, later uses get a higher value, and a value once computed stays valid.
    pub(super) fn aged_frequency(&self, uses: Uses) -> u32 {
        self.periods.saturating_add(uses.max(1).ilog2())
    }

    /// The uses that are left of `uses`, which had this `aged_frequency`.
    pub(super) fn decayed(&self, uses: Uses, aged_frequency: u32) -> Uses {
        let since = aged_frequency.saturating_sub(uses.max(1).ilog2());
        uses.checked_shr(self.periods.saturating_sub(since)).unwrap_or(0)
    }

    /// Counts a use of a block that had `before` uses.
    pub(super) fn count_use(&mut self, before: Uses) -> Uses {
        self.uses += 1;
        if self.uses >= self.period {
            self.uses = 0;
            self.periods = self.periods.saturating_add(1);
            self.counters.iter_mut().for_each(|word| *word = (*word >> 1) & Self::HALVING_MASK);
        }
        (before + 1).min(Self::MAX_USES)
    }

    /// The estimated uses of a block that is not resident.
    pub(super) fn estimate(&self, hash: &SequenceHash) -> Uses {
        let count = |at: usize| (self.counters[at / Self::COUNTERS_PER_WORD] >> shift(at)) as Uses & Self::MAX_USES;
        self.counter_positions(hash).map(count).into_iter().min().unwrap_or(0)
    }

    /// Stores the uses of a block that is evicted.
    pub(super) fn record(&mut self, hash: &SequenceHash, uses: Uses) {
        for at in self.counter_positions(hash) {
            let word = &mut self.counters[at / Self::COUNTERS_PER_WORD];
            if (*word >> shift(at)) as Uses & Self::MAX_USES < uses {
                *word = *word & !(u64::from(Self::MAX_USES) << shift(at)) | u64::from(uses) << shift(at);
            }
        }
    }

    /// Prefetches the counters of a hash.
    pub(super) fn prefetch(&self, hash: &SequenceHash) {
        self.counter_positions(hash)
            .into_iter()
            .for_each(|at| prefetch::prefetch(&self.counters[at / Self::COUNTERS_PER_WORD]));
    }

    /// A block hash is a keyed hash; its own bits are as good as four seeded hashes of it.
    fn counter_positions(&self, hash: &SequenceHash) -> [usize; 4] {
        let (first, step) = hash.halves();
        let mask = self.counters.len() * Self::COUNTERS_PER_WORD - 1;
        std::array::from_fn(|n| first.wrapping_add(step.wrapping_mul(n as u64)) as usize & mask)
    }
}

fn shift(at: usize) -> usize {
    at % FrequencySketch::COUNTERS_PER_WORD * 4
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hash(n: u64) -> SequenceHash {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&n.to_le_bytes());
        SequenceHash::from_bytes(*blake3::hash(&bytes).as_bytes().first_chunk().unwrap())
    }

    #[test]
    fn estimates_are_never_below_the_true_uses() {
        let mut sketch = FrequencySketch::new(100);
        (0..200).for_each(|n| sketch.record(&hash(n), (n % 15) as Uses + 1));
        assert!((0..200).all(|n| sketch.estimate(&hash(n)) > (n % 15) as Uses));
        let mistaken = (1_000..2_000).filter(|n| sketch.estimate(&hash(*n)) > 0).count();
        assert!(mistaken < 100, "{mistaken} of 1,000 unknown hashes have an estimate");
    }

    #[test]
    fn a_period_halves_stored_and_resident_counts() {
        let mut sketch = FrequencySketch::new(8);
        sketch.record(&hash(1), 13);
        let aged_frequency = sketch.aged_frequency(13);
        (0..80).for_each(|_| _ = sketch.count_use(0));
        assert_eq!((sketch.estimate(&hash(1)), sketch.decayed(13, aged_frequency)), (6, 6));
        assert_eq!(sketch.aged_frequency(6), aged_frequency, "as many uses now give the same value");
        assert_eq!(sketch.count_use(15), 15);
    }
}
