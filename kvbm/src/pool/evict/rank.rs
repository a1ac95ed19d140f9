//! The eviction rank of a block among others of its group and priority, in one word:
//!
//! ```text
//!   main       0 │ aged frequency, 21 bits │ time, 42 bits
//!   probation  1 │ time, 42 bits           │ aged frequency, 21 bits
//! ```
//! The aged frequency is [`aged_frequency`](super::frequency_sketch::FrequencySketch::aged_frequency), the time a
//! counter of releases: 42 bits last for fifty days at a million releases per second. A wrapped counter only makes the
//! order wrong for a while.

/// Eviction order: the lowest is evicted first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct EvictionRank(u64);

impl EvictionRank {
    const TIME: u32 = 42;
    const FREQUENCY: u32 = 21;
    /// Of a slot that was never filled.
    pub(super) const NEVER: Self = Self(0);
    /// The lowest rank in probation.
    pub(super) const PROBATION: Self = Self(1 << 63);
    pub(super) const LAST: Self = Self(u64::MAX);

    pub(super) const fn new(probation: bool, aged_frequency: u32, time: u64) -> Self {
        let (aged_frequency, time) =
            (aged_frequency as u64 & ((1 << Self::FREQUENCY) - 1), time & ((1 << Self::TIME) - 1));
        if probation {
            Self(Self::PROBATION.0 | time << Self::FREQUENCY | aged_frequency)
        } else {
            Self(aged_frequency << Self::TIME | time)
        }
    }

    pub(super) const fn is_probationary(self) -> bool {
        self.0 >= Self::PROBATION.0
    }

    pub(super) const fn aged_frequency(self) -> u32 {
        let bits = if self.is_probationary() { self.0 } else { self.0 >> Self::TIME };
        (bits & ((1 << Self::FREQUENCY) - 1)) as u32
    }

    pub(super) const fn time(self) -> u64 {
        let bits = if self.is_probationary() { self.0 >> Self::FREQUENCY } else { self.0 };
        bits & ((1 << Self::TIME) - 1)
    }
}
