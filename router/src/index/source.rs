//! Holders of blocks as small numbers.

use kvbm::Level;

/// The indexed levels. A peer's memory is not a level of its own: it is indexed as the G1 of that peer.
pub(crate) const LEVELS: [Level; 5] = [Level::G1, Level::G2, Level::G3, Level::G3_5, Level::G4];

/// Dense number of a worker or a store. It is reused after the source was removed.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct SourceId(u32);

/// A source at a level: what can hold a block. Stores sort after all workers, and the levels of one source are
/// adjacent.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) struct SourceLevel(u32);

/// Bits of the level.
const LEVEL_BITS: u32 = 3;
const STORE: u32 = 1 << (31 - LEVEL_BITS);

impl SourceId {
    pub(super) fn worker(index: usize) -> Self {
        Self(index as u32)
    }

    pub(super) fn store(index: usize) -> Self {
        Self(index as u32 | STORE)
    }

    pub(super) fn is_store(self) -> bool {
        self.0 & STORE != 0
    }

    /// Index among the workers, or among the stores.
    pub(super) fn index(self) -> usize {
        (self.0 & !STORE) as usize
    }

    pub(super) fn raw(self) -> u32 {
        self.0
    }
}

impl SourceLevel {
    /// No holder.
    pub(super) const NONE: Self = Self(u32::MAX);
    /// More than one holder.
    pub(super) const MANY: Self = Self(u32::MAX - 1);

    /// `None` for a level that is not indexed.
    pub(super) fn new(source_id: SourceId, level: Level) -> Option<Self> {
        let level = LEVELS.iter().position(|at| *at == level)?;
        Some(Self::at(source_id, level))
    }

    /// At the level with this index in [`LEVELS`].
    pub(super) fn at(source_id: SourceId, level: usize) -> Self {
        Self(source_id.0 << LEVEL_BITS | level as u32)
    }

    pub(super) fn from_raw(raw: u32) -> Self {
        Self(raw)
    }

    pub(super) fn raw(self) -> u32 {
        self.0
    }

    pub(super) fn source_id(self) -> SourceId {
        SourceId(self.0 >> LEVEL_BITS)
    }

    /// Index of the level in [`LEVELS`].
    pub(super) fn level(self) -> usize {
        (self.0 & ((1 << LEVEL_BITS) - 1)) as usize
    }
}
