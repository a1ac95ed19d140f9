//! All that is known of the block in a slot.

use super::frequency_sketch::Uses;
use super::rank::Turn;
use crate::block::{Priority, SequenceHash};

/// A leaf among others: the first goes first. Ends in its slot.
pub(super) type Leaf = (Priority, Turn, u32);

/// All that is known of a slot, in one line of the cache.
#[derive(Clone)]
#[repr(align(64))]
pub(super) struct Node {
    pub(super) name: SequenceHash,
    pub(super) parent: Option<SequenceHash>,
    pub(super) resident: bool,
    /// Where the parent was last seen; true only if that node still bears its name.
    pub(super) parent_at: u32,
    /// Guards that outsiders have.
    pub(super) holds: u32,
    pub(super) followers: Followers,
    pub(super) turn: Turn,
    /// As of the turn's height.
    pub(super) uses: Uses,
    pub(super) priority: Priority,
    pub(super) group: u16,
}

const _: () = assert!(size_of::<Node>() == 64);

#[derive(Clone, Copy, Default)]
pub(super) struct Followers {
    pub(super) resident: u32,
    pub(super) held: u32,
}

impl Node {
    pub(super) const EMPTY: Self = Self {
        name: SequenceHash::from_bytes([0; 16]),
        parent: None,
        resident: false,
        parent_at: 0,
        holds: 0,
        followers: Followers { resident: 0, held: 0 },
        turn: Turn::NEVER,
        uses: 0,
        priority: Priority::Normal,
        group: 0,
    };

    pub(super) fn leaf(&self, slot: u32) -> Leaf {
        (self.priority, self.turn, slot)
    }

    pub(super) fn held(&self) -> bool {
        self.holds > 0 || self.followers.held > 0
    }
}
