//! Guards of blocks that everyone may read: of one, of a run, of none.
//!
//! A run has one guard for all its blocks, so that holding a thousand costs no allocation and no shared counter for each.

use super::device::BlockId;
use super::{Pool, Shared};
use crate::block::{Custody, SequenceHash};
use crate::table::BATCH;
use std::fmt;
use std::sync::{Arc, Weak};

/// A block that everyone may read, found by its name, and not given up while anybody holds it. A clone holds it too.
#[must_use = "dropping it lets the block be evicted"]
pub struct CachedBlock {
    pool: Arc<Shared>,
    block: Held,
}

/// Blocks that everyone may read, in the order in which they were asked for, all held by one guard.
#[derive(Default)]
#[must_use = "dropping it lets the blocks be evicted"]
pub struct CachedBlocks {
    /// `None` while there are no blocks.
    pool: Option<Arc<Shared>>,
    blocks: Vec<Held>,
}

/// One of the blocks that a guard holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Held {
    pub(super) id: u32,
    pub(super) name: SequenceHash,
}

impl Held {
    /// Where the bytes are.
    pub fn slot(&self) -> BlockId {
        BlockId(self.id)
    }

    /// What they are.
    pub fn name(&self) -> SequenceHash {
        self.name
    }
}

impl CachedBlock {
    /// The caller has held the block.
    pub(super) fn new(pool: Arc<Shared>, block: Held) -> Self {
        Self { pool, block }
    }

    /// Where the bytes are.
    pub fn slot(&self) -> BlockId {
        self.block.slot()
    }

    /// What they are.
    pub fn name(&self) -> SequenceHash {
        self.block.name
    }

    /// What precedes them; `None` at the root.
    pub fn parent(&self) -> Option<SequenceHash> {
        self.pool.lock().residents.block(self.block.id).1
    }

    /// Whose it is, and how long it is kept.
    pub fn custody(&self) -> Custody {
        self.pool.lock().keeping.of(self.block.id)
    }

    /// Lets go of the block, but remembers it.
    pub fn downgrade(&self) -> WeakBlock {
        WeakBlock { pool: Arc::downgrade(&self.pool), name: self.block.name }
    }
}

impl Clone for CachedBlock {
    fn clone(&self) -> Self {
        self.pool.lock().residents.hold(self.block.id);
        Self { pool: self.pool.clone(), block: self.block }
    }
}

impl Drop for CachedBlock {
    fn drop(&mut self) {
        self.pool.release(&[self.block]);
    }
}

impl CachedBlocks {
    /// The caller has held the blocks.
    pub(super) fn new(pool: &Arc<Shared>, blocks: Vec<Held>) -> Self {
        Self { pool: (!blocks.is_empty()).then(|| pool.clone()), blocks }
    }

    /// How many.
    pub fn len(&self) -> usize {
        self.blocks.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    /// The blocks in order.
    pub fn iter(&self) -> std::slice::Iter<'_, Held> {
        self.blocks.iter()
    }

    /// Whose each of them is, and how long it is kept.
    pub fn custody(&self) -> Vec<Custody> {
        let Some(pool) = &self.pool else { return Vec::new() };
        let state = pool.lock();
        self.blocks.iter().map(|block| state.keeping.of(block.id)).collect()
    }

    /// What precedes each of them; `None` at the root.
    pub(crate) fn parents(&self) -> Vec<Option<SequenceHash>> {
        let Some(pool) = &self.pool else { return Vec::new() };
        let state = pool.lock();
        self.blocks.iter().map(|block| state.residents.block(block.id).1).collect()
    }

    /// Holds the blocks of `more` too, which are of the same memory, after its own.
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
    type Item = &'a Held;
    type IntoIter = std::slice::Iter<'a, Held>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

/// Each block with a guard of its own.
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

/// So many blocks before its turn what is known of a block begins to come.
const AHEAD: usize = 8;

impl Shared {
    /// One guard less of each block. From the last to the first: a block lets go of its parent before that is let go of,
    /// so that each costs the same, and the deepest is the oldest of them.
    fn release(&self, blocks: &[Held]) {
        for some in blocks.rchunks(BATCH) {
            let mut state = self.lock();
            for (at, block) in some.iter().enumerate().rev() {
                if let Some(next) = at.checked_sub(AHEAD) {
                    state.residents.fetch(some[next].id);
                }
                if state.residents.release(block.id) {
                    state.free.push(block.id);
                }
            }
            state.shed();
        }
    }
}

/// A block that may be given up at any time.
#[derive(Clone)]
pub struct WeakBlock {
    pool: Weak<Shared>,
    name: SequenceHash,
}

impl WeakBlock {
    /// What it was.
    pub fn name(&self) -> SequenceHash {
        self.name
    }

    /// Holds the block again, while it is still resident. It may meanwhile have been given up and come back elsewhere:
    /// ask the result for its slot.
    pub fn upgrade(&self) -> Option<CachedBlock> {
        Pool(self.pool.upgrade()?).found(&[self.name]).pop()?
    }
}

impl fmt::Debug for CachedBlock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CachedBlock({} in {} slot {})", self.block.name, self.pool.level, self.block.id)
    }
}

impl fmt::Debug for CachedBlocks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(&self.blocks).finish()
    }
}

impl fmt::Debug for WeakBlock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "WeakBlock({})", self.name)
    }
}
