//! A tier below device memory with least-recently-used eviction.

use crate::hash::NumberMap;
use std::collections::BTreeSet;

#[derive(Clone, Default, Debug)]
pub(super) struct Lru {
    capacity: usize,
    last_use: NumberMap<u32, u64>,
    order: BTreeSet<(u64, u32)>,
    clock: u64,
}

impl Lru {
    pub(super) fn new(capacity: u64) -> Self {
        Self { capacity: capacity as usize, ..Self::default() }
    }

    /// Number of blocks that fit.
    pub(super) fn capacity(&self) -> usize {
        self.capacity
    }

    pub(super) fn contains(&self, block: u32) -> bool {
        self.last_use.contains_key(&block)
    }

    /// Inserts a block, or marks it as used now. Returns the evicted block, which is `block` itself when the capacity
    /// is 0.
    pub(super) fn insert(&mut self, block: u32) -> Option<u32> {
        self.clock += 1;
        if let Some(previous) = self.last_use.insert(block, self.clock) {
            self.order.remove(&(previous, block));
        }
        self.order.insert((self.clock, block));
        if self.last_use.len() <= self.capacity {
            return None;
        }
        let (_, evicted) = self.order.pop_first()?;
        self.last_use.remove(&evicted);
        Some(evicted)
    }

    /// All blocks, in ascending order.
    pub(super) fn blocks(&self) -> Vec<u32> {
        let mut blocks: Vec<u32> = self.last_use.keys().copied().collect();
        blocks.sort_unstable();
        blocks
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn least_recently_used_block_is_evicted() {
        let mut lru = Lru::new(2);
        assert_eq!([1, 2, 1, 3].map(|block| lru.insert(block)), [None, None, None, Some(2)]);
        assert_eq!(lru.blocks(), [1, 3]);
        assert_eq!(Lru::new(0).insert(5), Some(5));
    }
}
