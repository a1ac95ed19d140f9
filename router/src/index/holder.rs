//! The holders of blocks, and the small numbers under which the index knows them.

use kvbm::Level;
use std::hash::{Hash, Hasher};
use worker::plane::{StoreId, WorkerId};

/// A holder of blocks. Its blocks come from the events of a worker or a store, or from an estimate of this router.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Holder {
    /// The memory of a worker, G1 and G2, according to its events.
    Worker(WorkerId),
    /// The cache of a worker, as estimated from the prompts that were sent to it.
    Estimate(WorkerId),
    /// A store that several workers may read.
    Store(StoreId),
}

/// One number: a map of holders is searched for every event.
impl Hash for Holder {
    fn hash<H: Hasher>(&self, state: &mut H) {
        let (kind, id) = match self {
            Self::Worker(id) => (0, id.0),
            Self::Estimate(id) => (1, id.0),
            Self::Store(id) => (2, id.0),
        };
        state.write_u64(id.rotate_left(2) ^ kind);
    }
}

/// The indexed levels. A peer's memory is not a level of its own: it is indexed as the G1 of that peer.
pub(crate) const LEVELS: [Level; 5] = [Level::G1, Level::G2, Level::G3, Level::G3_5, Level::G4];

/// Dense number of a holder. It is reused after the holder was removed.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct HolderId(u32);

/// A holder at a level. Stores sort after all workers and estimates, and the levels of one holder are adjacent.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) struct HolderLevel(u32);

/// Bits of the level.
const LEVEL_BITS: u32 = 3;
const STORE: u32 = 1 << (31 - LEVEL_BITS);

impl HolderId {
    pub(super) fn worker(index: usize) -> Self {
        Self(index as u32)
    }

    pub(super) fn store(index: usize) -> Self {
        Self(index as u32 | STORE)
    }

    pub(super) fn is_store(self) -> bool {
        self.0 & STORE != 0
    }

    /// Index among the workers and estimates, or among the stores.
    pub(super) fn index(self) -> usize {
        (self.0 & !STORE) as usize
    }

    pub(super) fn raw(self) -> u32 {
        self.0
    }

    /// This holder at each level.
    pub(super) fn levels(self) -> impl Iterator<Item = HolderLevel> {
        (0..LEVELS.len()).map(move |level| HolderLevel::at(self, level))
    }
}

impl HolderLevel {
    /// No holder.
    pub(super) const NONE: Self = Self(u32::MAX);
    /// More than one holder.
    pub(super) const MANY: Self = Self(u32::MAX - 1);

    /// `None` for a level that is not indexed.
    pub(super) fn new(holder_id: HolderId, level: Level) -> Option<Self> {
        let level = LEVELS.iter().position(|at| *at == level)?;
        Some(Self::at(holder_id, level))
    }

    /// At the level with this index in [`LEVELS`].
    pub(super) fn at(holder_id: HolderId, level: usize) -> Self {
        Self(holder_id.0 << LEVEL_BITS | level as u32)
    }

    pub(super) fn from_raw(raw: u32) -> Self {
        Self(raw)
    }

    pub(super) fn raw(self) -> u32 {
        self.0
    }

    pub(super) fn holder_id(self) -> HolderId {
        HolderId(self.0 >> LEVEL_BITS)
    }

    /// Index of the level in [`LEVELS`].
    pub(super) fn level(self) -> usize {
        (self.0 & ((1 << LEVEL_BITS) - 1)) as usize
    }
}
