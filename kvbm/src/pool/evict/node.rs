//! The state of one slot in the eviction index.

use super::frequency_sketch::Uses;
use super::rank::EvictionRank;
use crate::block::{Priority, SequenceHash};

/// A leaf in eviction order: the smallest is the next victim.
pub(super) type Leaf = (Priority, EvictionRank, u32);

/// The state of a slot, in one cache line.
#[derive(Clone)]
#[repr(align(64))]
pub(super) struct Node {
    pub(super) hash: SequenceHash,
    pub(super) parent: Option<SequenceHash>,
    pub(super) resident: bool,
    /// The slot in which the parent was last seen; valid only if that node still has the parent's hash.
    pub(super) parent_at: u32,
    /// Number of guards outside the index.
    pub(super) holds: u32,
    pub(super) children: Children,
    pub(super) rank: EvictionRank,
    /// As of the rank's `aged_frequency`.
    pub(super) uses: Uses,
    pub(super) priority: Priority,
    pub(super) group: u16,
}

const _: () = assert!(size_of::<Node>() == 64);

#[derive(Clone, Copy, Default)]
pub(super) struct Children {
    pub(super) resident: u32,
    pub(super) held: u32,
}

impl Node {
    pub(super) const EMPTY: Self = Self {
        hash: SequenceHash::from_bytes([0; 16]),
        parent: None,
        resident: false,
        parent_at: 0,
        holds: 0,
        children: Children { resident: 0, held: 0 },
        rank: EvictionRank::NEVER,
        uses: 0,
        priority: Priority::Normal,
        group: 0,
    };

    pub(super) fn leaf(&self, slot: u32) -> Leaf {
        (self.priority, self.rank, slot)
    }

    pub(super) fn held(&self) -> bool {
        self.holds > 0 || self.children.held > 0
    }
}
