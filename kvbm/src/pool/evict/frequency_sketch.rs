//! How often blocks are used, those that are here and those that left.
//!
//! A block that is here counts its own uses, so that a hit touches nothing but the block. What is remembered of a block
//! that leaves is a few bits in a sketch, four 4-bit counters of which the least is believed: it may claim more uses than
//! there were, never fewer. Counts fade: they halve with every *epoch*, which lasts for a number of uses, not of seconds.
//!
//! **Nobody is kept out.** Frequency says who leaves, never who comes in.

use crate::block::SequenceHash;
use crate::table::hugepages;

/// Uses, as far as they are told apart: 0 to 15.
pub(super) type Uses = u8;

/// The clock of fading, and the memory of what left.
pub(super) struct Frequency {
    /// Sixteen counters a word; a power of two.
    counters: Vec<u64>,
    epoch: u32,
    /// In this epoch.
    uses: u64,
    period: u64,
}

impl Frequency {
    const MOST: Uses = 15;
    /// An epoch sees every block of a full pool ten times. Shorter, and a scan as long as an epoch makes what was hot look
    /// as cold as itself; longer, and what was hot once stays for too long.
    const PERIOD: u64 = 10;
    /// Counters in a word.
    const WORD: usize = 16;
    /// Every other bit of four, once a counter.
    const LOW_BITS: u64 = 0x7777_7777_7777_7777;

    /// For a pool of so many blocks. A word for each, as many counters as an epoch fills to a quarter.
    pub(super) fn new(capacity: usize) -> Self {
        let counters = vec![0; capacity.next_power_of_two()];
        hugepages::enlarge(counters.as_slice());
        Self { counters, epoch: 0, uses: 0, period: (capacity as u64 * Self::PERIOD).max(1) }
    }

    /// Where the order of leaving begins for a block: the more often it was used and the less of that faded, the higher.
    ///
    /// Halving a count is one less in its logarithm. So instead of making those that rest less, epoch after epoch, what is
    /// used later starts higher, and what was computed once stays true.
    pub(super) fn height(&self, uses: Uses) -> u32 {
        self.epoch.saturating_add(uses.max(1).ilog2())
    }

    /// What is left of `uses` that gave this height.
    pub(super) fn faded(&self, uses: Uses, height: u32) -> Uses {
        let since = height.saturating_sub(uses.max(1).ilog2());
        uses.checked_shr(self.epoch.saturating_sub(since)).unwrap_or(0)
    }

    /// One more use of a block that had so many, or of one that was not here.
    pub(super) fn used(&mut self, before: Uses) -> Uses {
        self.uses += 1;
        if self.uses >= self.period {
            self.uses = 0;
            self.epoch = self.epoch.saturating_add(1);
            self.counters.iter_mut().for_each(|word| *word = (*word >> 1) & Self::LOW_BITS);
        }
        (before + 1).min(Self::MOST)
    }

    /// What is known of a block that is not here.
    pub(super) fn recall(&self, name: &SequenceHash) -> Uses {
        let count = |at: usize| (self.counters[at / Self::WORD] >> shift(at)) as Uses & Self::MOST;
        self.places(name).map(count).into_iter().min().unwrap_or(0)
    }

    /// A block leaves.
    pub(super) fn remember(&mut self, name: &SequenceHash, uses: Uses) {
        for at in self.places(name) {
            let word = &mut self.counters[at / Self::WORD];
            if (*word >> shift(at)) as Uses & Self::MOST < uses {
                *word = *word & !(u64::from(Self::MOST) << shift(at)) | u64::from(uses) << shift(at);
            }
        }
    }

    /// Begins to bring what is known of a name.
    pub(super) fn fetch(&self, name: &SequenceHash) {
        self.places(name).into_iter().for_each(|at| hugepages::fetch(&self.counters[at / Self::WORD]));
    }

    /// A name is a keyed hash, so its own bits are as good as four seeded hashes of it.
    fn places(&self, name: &SequenceHash) -> [usize; 4] {
        let (first, step) = name.halves();
        let mask = self.counters.len() * Self::WORD - 1;
        std::array::from_fn(|n| first.wrapping_add(step.wrapping_mul(n as u64)) as usize & mask)
    }
}

fn shift(at: usize) -> usize {
    at % Frequency::WORD * 4
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(n: u64) -> SequenceHash {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&n.to_le_bytes());
        SequenceHash::from_bytes(*blake3::hash(&bytes).as_bytes().first_chunk().unwrap())
    }

    #[test]
    fn what_left_is_remembered_with_no_fewer_uses_than_it_had() {
        let mut frequency = Frequency::new(100);
        (0..200).for_each(|n| frequency.remember(&name(n), (n % 15) as Uses + 1));
        assert!((0..200).all(|n| frequency.recall(&name(n)) > (n % 15) as Uses));
        let mistaken = (1_000..2_000).filter(|n| frequency.recall(&name(*n)) > 0).count();
        assert!(mistaken < 100, "{mistaken} of 1,000 strangers are taken for somebody");
    }

    #[test]
    fn an_epoch_halves_what_is_remembered_and_what_rests() {
        let mut frequency = Frequency::new(8);
        frequency.remember(&name(1), 13);
        let height = frequency.height(13);
        (0..80).for_each(|_| _ = frequency.used(0));
        assert_eq!((frequency.recall(&name(1)), frequency.faded(13, height)), (6, 6));
        assert_eq!(frequency.height(6), height, "who has as many uses now stands as high");
        assert_eq!(frequency.used(15), 15);
    }
}
