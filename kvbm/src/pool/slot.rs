//! Slots with one owner, before their content can be found by hash.

use super::device::BlockId;
use super::state::Shared;
use crate::block::{BlockAttrs, SequenceHash};
use std::fmt;
use std::sync::Arc;

/// A slot with one owner. Dropping it frees the slot.
pub(super) struct Slot {
    /// `None` once the index owns the slot.
    pub(super) pool: Option<Arc<Shared>>,
    pub(super) id: u32,
}

impl Slot {
    pub(super) fn is_of(&self, pool: &Arc<Shared>) -> bool {
        self.pool.as_ref().is_some_and(|own| Arc::ptr_eq(own, pool))
    }

    /// Hands the slot over to the index, which frees it when the block is evicted or removed.
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

/// A slot that is being filled. Dropping it frees the slot.
#[must_use = "dropping it returns the slot"]
pub struct PartialBlock(pub(super) Slot);

impl PartialBlock {
    /// The slot to write to.
    pub fn slot(&self) -> BlockId {
        BlockId(self.0.id)
    }

    /// Declares the slot full, and gives its content a hash.
    pub fn complete(self, hash: SequenceHash, parent: Option<SequenceHash>, attrs: BlockAttrs) -> FullBlock {
        FullBlock { slot: self.0, hash, parent, attrs, checksum: None }
    }
}

/// A full block that only its owner can use. Dropping it frees the slot.
#[must_use = "dropping it returns the slot"]
pub struct FullBlock {
    pub(super) slot: Slot,
    pub(super) hash: SequenceHash,
    pub(super) parent: Option<SequenceHash>,
    pub(super) attrs: BlockAttrs,
    /// The checksum of its bytes, if it is known.
    pub(super) checksum: Option<u64>,
}

impl FullBlock {
    /// The block with the checksum of its bytes, which need not be read for it again.
    pub(crate) fn with_checksum(self, checksum: u64) -> Self {
        Self { checksum: Some(checksum), ..self }
    }

    /// The slot with the block's bytes.
    pub fn slot(&self) -> BlockId {
        BlockId(self.slot.id)
    }

    /// The block's hash.
    pub fn hash(&self) -> SequenceHash {
        self.hash
    }

    /// The hash of the block before it; `None` at the root.
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
        write!(f, "FullBlock({} in slot {})", self.hash, self.slot.id)
    }
}
