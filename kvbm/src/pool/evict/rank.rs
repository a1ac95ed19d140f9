//! When a block goes, beside others of its domain and priority. In one word:
//!
//! ```text
//!   grown   0 │ height, 21 bits │ time, 42 bits
//!   young   1 │ time, 42 bits   │ height, 21 bits
//! ```
//! The height is what its uses give it ([`height`](super::frequency_sketch::Frequency::height)), the time when it was last let go:
//! 42 bits count a million blocks let go each second for fifty days. What comes round then is in the wrong order, and no
//! worse.

/// When a block goes: the lower first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Turn(u64);

impl Turn {
    const TIME: u32 = 42;
    const HEIGHT: u32 = 21;
    /// Of a slot that was never filled.
    pub(super) const NEVER: Self = Self(0);
    /// The first turn of the young.
    pub(super) const YOUNG: Self = Self(1 << 63);
    pub(super) const LAST: Self = Self(u64::MAX);

    pub(super) const fn new(young: bool, height: u32, time: u64) -> Self {
        let (height, time) = (height as u64 & ((1 << Self::HEIGHT) - 1), time & ((1 << Self::TIME) - 1));
        if young { Self(Self::YOUNG.0 | time << Self::HEIGHT | height) } else { Self(height << Self::TIME | time) }
    }

    pub(super) const fn is_young(self) -> bool {
        self.0 >= Self::YOUNG.0
    }

    pub(super) const fn height(self) -> u32 {
        let bits = if self.is_young() { self.0 } else { self.0 >> Self::TIME };
        (bits & ((1 << Self::HEIGHT) - 1)) as u32
    }

    pub(super) const fn time(self) -> u64 {
        let bits = if self.is_young() { self.0 >> Self::HEIGHT } else { self.0 };
        bits & ((1 << Self::TIME) - 1)
    }
}
