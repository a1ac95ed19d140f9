//! Device memory of a simulated worker: blocks referenced by requests, and cached blocks, of which leaves are evicted
//! first, the least recently used before the others.

use crate::hash::NumberMap;
use std::collections::BTreeSet;

/// Blocks are identified by their numbers in the trace.
#[derive(Clone, Default, Debug)]
pub(super) struct Pool {
    capacity: u64,
    /// Blocks that belong to one request: prompt blocks not computed yet, and output.
    private: u64,
    cached: NumberMap<u32, Cached>,
    /// Number of cached blocks that no request references.
    unreferenced: u64,
    /// Unreferenced blocks without a cached child, as (last use, block).
    leaves: BTreeSet<(u64, u32)>,
    clock: u64,
}

#[derive(Clone, Debug)]
struct Cached {
    parent: Option<u32>,
    children: u32,
    users: u32,
    last_use: u64,
}

impl Pool {
    pub(super) fn new(capacity: u64) -> Self {
        Self { capacity, ..Self::default() }
    }

    /// Whether a block is cached.
    pub(super) fn contains(&self, block: u32) -> bool {
        self.cached.contains_key(&block)
    }

    /// Number of leading blocks that are cached.
    pub(super) fn cached_prefix(&self, blocks: &[u32]) -> usize {
        blocks.iter().take_while(|block| self.cached.contains_key(block)).count()
    }

    /// Allocates `all` blocks for a request, of which `shared` are cached. Returns the evicted blocks, or `None` when
    /// there is not enough free memory.
    pub(super) fn allocate(&mut self, shared: &[u32], all: u64) -> Option<Vec<u32>> {
        let need = all - shared.len() as u64;
        let unreferenced = shared.iter().filter(|block| self.cached[block].users == 0).count() as u64;
        if self.in_use() + unreferenced + need > self.capacity {
            return None;
        }
        for block in shared {
            self.acquire(*block);
        }
        let mut evicted = Vec::new();
        while self.capacity - self.private - (self.cached.len() as u64) < need {
            let Some((_, leaf)) = self.leaves.pop_first() else { break };
            self.remove(leaf);
            evicted.push(leaf);
        }
        self.private += need;
        Some(evicted)
    }

    /// Turns a private block, now computed, into a cached one that the request references. Returns whether it was not
    /// cached yet.
    pub(super) fn register(&mut self, block: u32, parent: Option<u32>) -> bool {
        self.private -= 1;
        if self.cached.contains_key(&block) {
            self.acquire(block);
            return false;
        }
        if let Some(parent) = parent.and_then(|parent| self.cached.get_mut(&parent)) {
            parent.children += 1;
        }
        self.cached.insert(block, Cached { parent, children: 0, users: 1, last_use: 0 });
        true
    }

    /// A request ends: its shared blocks stay cached and its private blocks are freed.
    pub(super) fn release(&mut self, shared: &[u32], private: u64) {
        self.private -= private;
        self.clock += 1;
        for block in shared {
            let Some(cached) = self.cached.get_mut(block) else { continue };
            cached.users -= 1;
            cached.last_use = self.clock;
            if cached.users == 0 {
                self.unreferenced += 1;
                if cached.children == 0 {
                    self.leaves.insert((cached.last_use, *block));
                }
            }
        }
    }

    /// Number of blocks that requests reference.
    pub(super) fn in_use(&self) -> u64 {
        self.private + self.cached.len() as u64 - self.unreferenced
    }

    /// All cached blocks, in ascending order.
    pub(super) fn blocks(&self) -> Vec<u32> {
        let mut blocks: Vec<u32> = self.cached.keys().copied().collect();
        blocks.sort_unstable();
        blocks
    }

    fn acquire(&mut self, block: u32) {
        let Some(cached) = self.cached.get_mut(&block) else { return };
        cached.users += 1;
        if cached.users == 1 {
            self.unreferenced -= 1;
            self.leaves.remove(&(cached.last_use, block));
        }
    }

    fn remove(&mut self, block: u32) {
        let Some(evicted) = self.cached.remove(&block) else { return };
        self.unreferenced -= 1;
        let Some(parent) = evicted.parent else { return };
        if let Some(parent_block) = self.cached.get_mut(&parent) {
            parent_block.children -= 1;
            if parent_block.children == 0 && parent_block.users == 0 {
                self.leaves.insert((parent_block.last_use, parent));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fill(pool: &mut Pool, blocks: &[u32]) -> Option<Vec<u32>> {
        let cached_prefix = pool.cached_prefix(blocks);
        let evicted = pool.allocate(&blocks[..cached_prefix], blocks.len() as u64)?;
        for at in cached_prefix..blocks.len() {
            pool.register(blocks[at], at.checked_sub(1).map(|at| blocks[at]));
        }
        Some(evicted)
    }

    #[test]
    fn least_recently_used_leaves_are_evicted_first() {
        let mut pool = Pool::new(5);
        for chain in [[1, 2, 3].as_slice(), &[1, 4]] {
            assert_eq!(fill(&mut pool, chain), Some(vec![]));
            pool.release(chain, 0);
        }
        // One block is free and two are needed; then two more.
        assert_eq!(fill(&mut pool, &[7, 8]), Some(vec![3]));
        pool.release(&[7, 8], 0);
        assert_eq!(fill(&mut pool, &[9, 10]), Some(vec![2, 4]), "1 is the parent of cached blocks");
        assert_eq!(pool.blocks(), [1, 7, 8, 9, 10]);
    }

    #[test]
    fn referenced_blocks_are_not_evicted() {
        let mut pool = Pool::new(3);
        assert_eq!(fill(&mut pool, &[1, 2]), Some(vec![]));
        assert_eq!(fill(&mut pool, &[5, 6]), None);
        assert_eq!(fill(&mut pool, &[1, 2, 3]), Some(vec![]), "two of the three are shared");
        assert_eq!(pool.in_use(), 3);
        pool.release(&[1, 2], 0);
        pool.release(&[1, 2, 3], 0);
        assert_eq!((pool.in_use(), fill(&mut pool, &[5, 6])), (0, Some(vec![3, 2])));
    }
}
