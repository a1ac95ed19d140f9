//! Where blocks rest that fell out of device memory: the least recently used goes.

use crate::hash::NumberMap;
use std::collections::BTreeSet;

#[derive(Default, Debug)]
pub(super) struct Lru {
    capacity: usize,
    used: NumberMap<u32, u64>,
    order: BTreeSet<(u64, u32)>,
    clock: u64,
}

impl Lru {
    pub(super) fn new(capacity: u64) -> Self {
        Self { capacity: capacity as usize, ..Self::default() }
    }

    pub(super) fn holds(&self, block: u32) -> bool {
        self.used.contains_key(&block)
    }

    /// Keeps a block, or marks it as used now. What had to go for it; itself, when nothing fits.
    pub(super) fn keep(&mut self, block: u32) -> Option<u32> {
        self.clock += 1;
        if let Some(before) = self.used.insert(block, self.clock) {
            self.order.remove(&(before, block));
        }
        self.order.insert((self.clock, block));
        if self.used.len() <= self.capacity {
            return None;
        }
        let (_, gone) = self.order.pop_first()?;
        self.used.remove(&gone);
        Some(gone)
    }

    /// All blocks that are here, in order.
    pub(super) fn blocks(&self) -> Vec<u32> {
        let mut blocks: Vec<u32> = self.used.keys().copied().collect();
        blocks.sort_unstable();
        blocks
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_recently_used_goes() {
        let mut lru = Lru::new(2);
        assert_eq!([1, 2, 1, 3].map(|block| lru.keep(block)), [None, None, None, Some(2)]);
        assert_eq!(lru.blocks(), [1, 3]);
        assert_eq!(Lru::new(0).keep(5), Some(5));
    }
}
