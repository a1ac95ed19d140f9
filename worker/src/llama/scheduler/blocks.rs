//! The KV blocks of one sequence: their hashes, and the slots that hold them.

use kvbm::{BlockAttrs, BlockId, BlockManager, BlockRef, CachedBlocks, ChainKey, PartialBlock, SequenceHash};
use std::collections::VecDeque;

/// The hashes of the full blocks of a sequence that grows.
pub(super) struct HashChain {
    key: ChainKey,
    pub(super) block_size: usize,
    pub(super) hashes: Vec<SequenceHash>,
}

impl HashChain {
    pub(super) fn new(root: ChainKey, block_size: usize, tokens: &[u32]) -> Self {
        let mut chain = Self { key: root, block_size, hashes: Vec::with_capacity(tokens.len() / block_size + 1) };
        chain.extend(tokens);
        chain
    }

    /// Hashes the blocks that became full. `tokens` are all tokens of the sequence.
    pub(super) fn extend(&mut self, tokens: &[u32]) {
        let hashed = self.hashes.len() * self.block_size;
        for block in tokens[hashed..].chunks_exact(self.block_size) {
            let hash = self.key.push(block);
            self.hashes.push(hash);
        }
    }
}

/// The slots that hold the sequence's KV: full blocks shared through the cache, then blocks that only this sequence
/// fills.
#[derive(Default)]
pub(super) struct BlockTable {
    pub(super) cached: CachedBlocks,
    filling: VecDeque<PartialBlock>,
}

impl BlockTable {
    pub(super) fn attach(&mut self, found: CachedBlocks) {
        debug_assert!(self.filling.is_empty(), "blocks from a cache precede those that are filled");
        self.cached.extend(found);
    }

    /// Number of blocks, shared ones and those being filled.
    pub(super) fn len(&self) -> usize {
        self.cached.len() + self.filling.len()
    }

    pub(super) fn is_filling(&self) -> bool {
        !self.filling.is_empty()
    }

    pub(super) fn extend(&mut self, fresh: Vec<PartialBlock>) {
        self.filling.extend(fresh);
    }

    /// The slots in the order of positions.
    pub(super) fn slots(&self) -> Vec<BlockId> {
        let filling = self.filling.iter().map(PartialBlock::slot);
        self.cached.iter().map(BlockRef::slot).chain(filling).collect()
    }

    /// Registers the blocks that `computed` tokens filled, so that other requests find them.
    pub(super) fn publish(&mut self, computed: usize, chain: &HashChain, attrs: BlockAttrs, manager: &BlockManager) {
        let held = self.cached.len();
        let full = (held..computed / chain.block_size).map(|at| {
            let block = self.filling.pop_front().expect("computed tokens have blocks");
            let parent = at.checked_sub(1).map(|before| chain.hashes[before]);
            block.complete(chain.hashes[at], parent, attrs)
        });
        let full = full.collect();
        self.cached.extend(manager.register_all(full));
    }
}
