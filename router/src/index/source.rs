//! Who can hold blocks, as small numbers.

use kvbm::Level;

/// The levels that are indexed: a peer's memory is indexed as that peer's own.
pub(crate) const LEVELS: [Level; 5] = [Level::G1, Level::G2, Level::G3, Level::G3_5, Level::G4];

/// A dense number for a worker or a store, reused once it is forgotten.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Slot(u32);

/// A source at a level: where a block can rest. Stores come after all workers, and the levels of one source together.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) struct Seat(u32);

/// Bits that say which level.
const LEVEL: u32 = 3;
const STORE: u32 = 1 << (31 - LEVEL);

impl Slot {
    pub(super) fn worker(number: usize) -> Self {
        Self(number as u32)
    }

    pub(super) fn store(number: usize) -> Self {
        Self(number as u32 | STORE)
    }

    pub(super) fn is_store(self) -> bool {
        self.0 & STORE != 0
    }

    /// Its place among the workers, or among the stores.
    pub(super) fn number(self) -> usize {
        (self.0 & !STORE) as usize
    }

    pub(super) fn raw(self) -> u32 {
        self.0
    }
}

impl Seat {
    /// On no page.
    pub(super) const NOBODY: Self = Self(u32::MAX);
    /// Stands for several.
    pub(super) const SEVERAL: Self = Self(u32::MAX - 1);

    /// `None` for a level that is not indexed.
    pub(super) fn new(slot: Slot, level: Level) -> Option<Self> {
        let level = LEVELS.iter().position(|at| *at == level)?;
        Some(Self::at(slot, level))
    }

    /// At the level in this position of [`LEVELS`].
    pub(super) fn at(slot: Slot, level: usize) -> Self {
        Self(slot.0 << LEVEL | level as u32)
    }

    pub(super) fn from_raw(raw: u32) -> Self {
        Self(raw)
    }

    pub(super) fn raw(self) -> u32 {
        self.0
    }

    pub(super) fn slot(self) -> Slot {
        Slot(self.0 >> LEVEL)
    }

    /// The position of the level in [`LEVELS`].
    pub(super) fn level(self) -> usize {
        (self.0 & ((1 << LEVEL) - 1)) as usize
    }
}
