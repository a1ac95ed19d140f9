//! Slots that have one owner, before everyone may read what is in them.

use super::Shared;
use super::device::BlockId;
use crate::block::{Custody, SequenceHash};
use std::fmt;
use std::sync::Arc;

/// A slot that has one owner and no name.
pub(super) struct Slot {
    /// `None` once the slot is the index's.
    pub(super) pool: Option<Arc<Shared>>,
    pub(super) id: u32,
}

impl Slot {
    pub(super) fn is_of(&self, pool: &Arc<Shared>) -> bool {
        self.pool.as_ref().is_some_and(|own| Arc::ptr_eq(own, pool))
    }

    /// The slot becomes the index's, which gives it back when it evicts or discards the block.
    pub(super) fn keep(mut self) -> u32 {
        self.pool = None;
        self.id
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        if let Some(pool) = &self.pool {
            pool.lock().free.push(self.id);
        }
    }
}

/// A slot that is being filled. Dropping it returns the slot.
#[must_use = "dropping it returns the slot"]
pub struct PartialBlock(pub(super) Slot);

impl PartialBlock {
    /// Where the bytes go.
    pub fn slot(&self) -> BlockId {
        BlockId(self.0.id)
    }

    /// The slot is full, and its content has a name.
    pub fn complete(self, name: SequenceHash, parent: Option<SequenceHash>, custody: Custody) -> FullBlock {
        FullBlock { slot: self.0, name, parent, custody }
    }
}

/// A full block that only its owner can use. Dropping it returns the slot.
#[must_use = "dropping it returns the slot"]
pub struct FullBlock {
    pub(super) slot: Slot,
    pub(super) name: SequenceHash,
    pub(super) parent: Option<SequenceHash>,
    pub(super) custody: Custody,
}

impl FullBlock {
    /// Where the bytes are.
    pub fn slot(&self) -> BlockId {
        BlockId(self.slot.id)
    }

    /// What they are.
    pub fn name(&self) -> SequenceHash {
        self.name
    }

    /// What precedes them; `None` at the root.
    pub fn parent(&self) -> Option<SequenceHash> {
        self.parent
    }
}

impl fmt::Debug for PartialBlock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PartialBlock(slot {})", self.0.id)
    }
}

impl fmt::Debug for FullBlock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "FullBlock({} in slot {})", self.name, self.slot.id)
    }
}
