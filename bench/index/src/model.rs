//! A naive model: a set of hashes per worker. The usable part of a prompt ends at the first missing block.

use crate::seam::{Block, Index, Size};
use std::collections::HashSet;
use std::sync::{Mutex, MutexGuard};

/// The blocks of each worker.
pub(crate) struct Model(Vec<Mutex<HashSet<u64>>>);

impl Model {
    /// Number of pairs of a worker and a block.
    pub(crate) fn entries(&self) -> usize {
        (0..self.0.len() as u32).map(|worker| self.of(worker).len()).sum()
    }

    /// The blocks of a worker, in no particular order.
    pub(crate) fn held(&self, worker: u32) -> Vec<u64> {
        self.of(worker).iter().copied().collect()
    }

    pub(crate) fn holds(&self, worker: u32, block: Block) -> bool {
        self.of(worker).contains(&block.sequence)
    }

    pub(crate) fn depth(&self, worker: u32, prompt: &[Block]) -> u32 {
        let held = self.of(worker);
        prompt.iter().take_while(|block| held.contains(&block.sequence)).count() as u32
    }

    fn of(&self, worker: u32) -> MutexGuard<'_, HashSet<u64>> {
        self.0[worker as usize].lock().expect("no holder of this lock panics")
    }
}

impl Index for Model {
    type Query = ();
    type Answer = ();

    fn new(size: Size) -> Self {
        Self((0..size.workers).map(|_| Mutex::default()).collect())
    }

    fn stored(&self, worker: u32, _: Option<u64>, blocks: &[Block]) {
        self.of(worker).extend(blocks.iter().map(|block| block.sequence));
    }

    fn removed(&self, worker: u32, sequences: &[u64]) {
        let mut held = self.of(worker);
        for sequence in sequences {
            held.remove(sequence);
        }
    }

    fn query(_: &[Block]) {}

    fn overlap(&self, (): &(), (): &mut ()) {}

    fn depths(&self, (): &()) -> Vec<(u32, u32)> {
        Vec::new()
    }
}
