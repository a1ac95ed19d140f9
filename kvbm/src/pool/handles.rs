//! Guards of cached blocks, for one block and for a list of blocks.
//!
//! A list has one guard for all its blocks: holding a thousand blocks costs no allocation and no shared counter for
//! each.

use super::device::BlockId;
use super::state::Shared;
use crate::block::{BlockAttrs, SequenceHash};
use crate::table::BATCH;
use std::fmt;
use std::sync::{Arc, Weak};

/// A block that can be found by hash, and that is not evicted while a guard holds it. A clone is another guard.
#[must_use = "dropping it lets the block be evicted"]
pub struct CachedBlock {
    pool: Arc<Shared>,
    block: BlockRef,
}

/// Cached blocks in the order of the request, all held by one guard.
#[derive(Default)]
#[must_use = "dropping it lets the blocks be evicted"]
pub struct CachedBlocks {
    /// `None` while the list is empty.
    pool: Option<Arc<Shared>>,
    blocks: Vec<BlockRef>,
}

/// A block in a [`CachedBlocks`] guard: its slot and its hash.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BlockRef {
    pub(super) id: u32,
    pub(super) hash: SequenceHash,
}

impl BlockRef {
    /// The slot with the block's bytes.
    pub fn slot(&self) -> BlockId {
        BlockId(self.id)
    }

    /// The block's hash.
    pub fn hash(&self) -> SequenceHash {
        self.hash
    }
}

impl CachedBlock {
    /// Takes over a hold that the caller has added.
    pub(super) fn new(pool: Arc<Shared>, block: BlockRef) -> Self {
        Self { pool, block }
    }

    /// The slot with the block's bytes.
    pub fn slot(&self) -> BlockId {
        self.block.slot()
    }

    /// The block's hash.
    pub fn hash(&self) -> SequenceHash {
        self.block.hash
    }

    /// The hash of the block before it; `None` at the root.
    pub fn parent(&self) -> Option<SequenceHash> {
        self.pool.lock().index.block(self.block.id).1
    }

    /// The block's cache domain and retention.
    pub fn attrs(&self) -> BlockAttrs {
        self.pool.lock().retention.of(self.block.id)
    }

    /// The checksum of the block's bytes, if it is known. The bytes do not change while the block can be found.
    pub(crate) fn checksum(&self) -> Option<u64> {
        self.pool.lock().checksum(self.block.id)
    }

    /// Notes the checksum of the block's bytes, if none is noted.
    pub(crate) fn note_checksum(&self, checksum: u64) {
        self.pool.lock().note_checksum(self.block.id, checksum);
    }

    /// Releases the block and returns a weak handle.
    pub fn downgrade(&self) -> WeakBlock {
        WeakBlock { pool: Arc::downgrade(&self.pool), hash: self.block.hash }
    }
}

impl Clone for CachedBlock {
    fn clone(&self) -> Self {
        self.pool.lock().index.hold(self.block.id);
        Self { pool: self.pool.clone(), block: self.block }
    }
}

impl Drop for CachedBlock {
    fn drop(&mut self) {
        self.pool.release(&[self.block]);
    }
}

impl CachedBlocks {
    /// Takes over the holds that the caller has added.
    pub(super) fn new(pool: &Arc<Shared>, blocks: Vec<BlockRef>) -> Self {
        Self { pool: (!blocks.is_empty()).then(|| pool.clone()), blocks }
    }

    /// Number of blocks.
    pub fn len(&self) -> usize {
        self.blocks.len()
    }

    /// Whether there are no blocks.
    pub fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    /// The blocks in order.
    pub fn iter(&self) -> std::slice::Iter<'_, BlockRef> {
        self.blocks.iter()
    }

    /// Cache domain and retention of each block.
    pub fn attrs(&self) -> Vec<BlockAttrs> {
        let Some(pool) = &self.pool else { return Vec::new() };
        let state = pool.lock();
        self.blocks.iter().map(|block| state.retention.of(block.id)).collect()
    }

    /// The hash before each block; `None` at the root.
    pub(super) fn parents(&self) -> Vec<Option<SequenceHash>> {
        let Some(pool) = &self.pool else { return Vec::new() };
        let state = pool.lock();
        self.blocks.iter().map(|block| state.index.block(block.id).1).collect()
    }

    /// The checksum of each block's bytes, if it is known.
    pub(super) fn checksums(&self) -> Vec<Option<u64>> {
        let Some(pool) = &self.pool else { return Vec::new() };
        let state = pool.lock();
        self.blocks.iter().map(|block| state.checksum(block.id)).collect()
    }

    /// Notes the checksums of the blocks' bytes, in their order, where none is noted.
    pub(super) fn note_checksums(&self, checksums: &[Option<u64>]) {
        let Some(pool) = &self.pool else { return };
        let mut state = pool.lock();
        for (block, checksum) in self.blocks.iter().zip(checksums) {
            if let Some(checksum) = checksum {
                state.note_checksum(block.id, *checksum);
            }
        }
    }

    /// Appends the blocks of `more`, which must be of the same pool.
    pub fn extend(&mut self, mut more: Self) {
        let pool = more.pool.take();
        debug_assert!(self.pool.iter().zip(&pool).all(|(own, other)| Arc::ptr_eq(own, other)), "blocks of two pools");
        self.pool = self.pool.take().or(pool);
        self.blocks.append(&mut more.blocks);
    }
}

impl Drop for CachedBlocks {
    fn drop(&mut self) {
        if let Some(pool) = &self.pool {
            pool.release(&self.blocks);
        }
    }
}

impl<'a> IntoIterator for &'a CachedBlocks {
    type Item = &'a BlockRef;
    type IntoIter = std::slice::Iter<'a, BlockRef>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

/// Yields each block with a guard of its own.
impl IntoIterator for CachedBlocks {
    type Item = CachedBlock;
    type IntoIter = std::vec::IntoIter<CachedBlock>;

    fn into_iter(mut self) -> Self::IntoIter {
        let (pool, blocks) = (self.pool.take(), std::mem::take(&mut self.blocks));
        let guard = |pool: Arc<Shared>| {
            blocks.into_iter().map(move |block| CachedBlock::new(pool.clone(), block)).collect::<Vec<_>>()
        };
        pool.map(guard).unwrap_or_default().into_iter()
    }
}

/// How many blocks ahead a release prefetches nodes.
const PREFETCH_DISTANCE: usize = 8;

impl Shared {
    /// Drops one hold of each block, from the last to the first: a child releases its parent before the parent is
    /// released, so each step costs the same, and the deepest block becomes the least recently released.
    fn release(&self, blocks: &[BlockRef]) {
        for batch in blocks.rchunks(BATCH) {
            let mut state = self.lock();
            for (at, block) in batch.iter().enumerate().rev() {
                if let Some(next) = at.checked_sub(PREFETCH_DISTANCE) {
                    state.index.prefetch_node(batch[next].id);
                }
                if state.index.release(block.id) {
                    state.free.push(block.id);
                }
            }
            state.evict_over_limits();
        }
    }
}

/// A handle that does not keep its block from being evicted.
#[derive(Clone)]
pub struct WeakBlock {
    pool: Weak<Shared>,
    hash: SequenceHash,
}

impl WeakBlock {
    /// The block's hash.
    pub fn hash(&self) -> SequenceHash {
        self.hash
    }

    /// Holds the block again if it is still resident. It may be in another slot than before.
    pub fn upgrade(&self) -> Option<CachedBlock> {
        let pool = self.pool.upgrade()?;
        let mut state = pool.lock_and_expire();
        let id = state.index.find(self.hash)?;
        state.index.hold(id);
        drop(state);
        Some(CachedBlock::new(pool, BlockRef { id, hash: self.hash }))
    }
}

impl fmt::Debug for CachedBlock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CachedBlock({} in {} slot {})", self.block.hash, self.pool.level, self.block.id)
    }
}

impl fmt::Debug for CachedBlocks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(&self.blocks).finish()
    }
}

impl fmt::Debug for WeakBlock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "WeakBlock({})", self.hash)
    }
}
