//! The device memory of a simulated worker: blocks that requests use, and blocks kept for the next, leaves given up first.

use crate::hash::NumberMap;
use std::collections::BTreeSet;

/// Blocks by their number in the trace.
#[derive(Default, Debug)]
pub(super) struct Pool {
    capacity: u64,
    /// Blocks that belong to one request: not computed yet, or its output.
    private: u64,
    cached: NumberMap<u32, Cached>,
    /// Cached blocks that nobody uses.
    unused: u64,
    /// Of those, the ones without a cached successor, by last use.
    leaves: BTreeSet<(u64, u32)>,
    clock: u64,
}

#[derive(Debug)]
struct Cached {
    parent: Option<u32>,
    children: u32,
    users: u32,
    used: u64,
}

impl Pool {
    pub(super) fn new(capacity: u64) -> Self {
        Self { capacity, ..Self::default() }
    }

    /// Leading blocks that are here.
    pub(super) fn matched(&self, blocks: &[u32]) -> usize {
        blocks.iter().take_while(|block| self.cached.contains_key(block)).count()
    }

    /// Takes `all` blocks for a request, of which `shared` are here already. `None`: there is no room now. Otherwise the
    /// blocks that had to go.
    pub(super) fn take(&mut self, shared: &[u32], all: u64) -> Option<Vec<u32>> {
        let need = all - shared.len() as u64;
        let idle = shared.iter().filter(|block| self.cached[block].users == 0).count() as u64;
        if self.in_use() + idle + need > self.capacity {
            return None;
        }
        for block in shared {
            self.hold(*block);
        }
        let mut gone = Vec::new();
        while self.capacity - self.private - (self.cached.len() as u64) < need {
            let Some((_, leaf)) = self.leaves.pop_first() else { break };
            self.forget(leaf);
            gone.push(leaf);
        }
        self.private += need;
        Some(gone)
    }

    /// A private block is computed and becomes everybody's. Whether it was not here before.
    pub(super) fn register(&mut self, block: u32, parent: Option<u32>) -> bool {
        self.private -= 1;
        if self.cached.contains_key(&block) {
            self.hold(block);
            return false;
        }
        if let Some(parent) = parent.and_then(|parent| self.cached.get_mut(&parent)) {
            parent.children += 1;
        }
        self.cached.insert(block, Cached { parent, children: 0, users: 1, used: 0 });
        true
    }

    /// A request ends: its shared blocks stay as cache, its private ones are free.
    pub(super) fn leave(&mut self, shared: &[u32], private: u64) {
        self.private -= private;
        self.clock += 1;
        for block in shared {
            let Some(cached) = self.cached.get_mut(block) else { continue };
            cached.users -= 1;
            cached.used = self.clock;
            if cached.users == 0 {
                self.unused += 1;
                if cached.children == 0 {
                    self.leaves.insert((cached.used, *block));
                }
            }
        }
    }

    /// Blocks that requests use.
    pub(super) fn in_use(&self) -> u64 {
        self.private + self.cached.len() as u64 - self.unused
    }

    /// All blocks that are here, in order.
    pub(super) fn blocks(&self) -> Vec<u32> {
        let mut blocks: Vec<u32> = self.cached.keys().copied().collect();
        blocks.sort_unstable();
        blocks
    }

    fn hold(&mut self, block: u32) {
        let Some(cached) = self.cached.get_mut(&block) else { return };
        cached.users += 1;
        if cached.users == 1 {
            self.unused -= 1;
            self.leaves.remove(&(cached.used, block));
        }
    }

    fn forget(&mut self, block: u32) {
        let Some(gone) = self.cached.remove(&block) else { return };
        self.unused -= 1;
        let Some(parent) = gone.parent else { return };
        if let Some(above) = self.cached.get_mut(&parent) {
            above.children -= 1;
            if above.children == 0 && above.users == 0 {
                self.leaves.insert((above.used, parent));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fill(pool: &mut Pool, blocks: &[u32]) -> Option<Vec<u32>> {
        let matched = pool.matched(blocks);
        let gone = pool.take(&blocks[..matched], blocks.len() as u64)?;
        for at in matched..blocks.len() {
            pool.register(blocks[at], at.checked_sub(1).map(|at| blocks[at]));
        }
        Some(gone)
    }

    #[test]
    fn leaves_go_first_and_the_oldest_of_them() {
        let mut pool = Pool::new(5);
        for chain in [[1, 2, 3].as_slice(), &[1, 4]] {
            assert_eq!(fill(&mut pool, chain), Some(vec![]));
            pool.leave(chain, 0);
        }
        // One place is free, two are needed, then two more.
        assert_eq!(fill(&mut pool, &[7, 8]), Some(vec![3]));
        pool.leave(&[7, 8], 0);
        assert_eq!(fill(&mut pool, &[9, 10]), Some(vec![2, 4]), "1 is everybody's parent");
        assert_eq!(pool.blocks(), [1, 7, 8, 9, 10]);
    }

    #[test]
    fn what_is_in_use_stays_and_a_request_without_room_waits() {
        let mut pool = Pool::new(3);
        assert_eq!(fill(&mut pool, &[1, 2]), Some(vec![]));
        assert_eq!(fill(&mut pool, &[5, 6]), None);
        assert_eq!(fill(&mut pool, &[1, 2, 3]), Some(vec![]), "two of the three are shared");
        assert_eq!(pool.in_use(), 3);
        pool.leave(&[1, 2], 0);
        pool.leave(&[1, 2, 3], 0);
        assert_eq!((pool.in_use(), fill(&mut pool, &[5, 6])), (0, Some(vec![3, 2])));
    }
}
