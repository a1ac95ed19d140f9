//! How much of a prompt each worker has within reach.

use super::LEVELS;
use super::seat::Slot;
use kvbm::Level;

/// Leading blocks of a prompt that a worker has within reach, by the fastest level that each rests at.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Held(pub(super) [u32; LEVELS.len()]);

impl Held {
    /// Leading blocks, whatever the level.
    pub fn run(&self) -> u32 {
        self.0.iter().sum()
    }

    /// Blocks per level, fastest first, those that have any.
    pub fn by_level(self) -> impl Iterator<Item = (Level, u32)> {
        LEVELS.into_iter().zip(self.0).filter(|(_, blocks)| *blocks > 0)
    }

    /// Leading blocks that lie in G1.
    #[inline]
    pub(crate) fn resident(self) -> u32 {
        self.0[0]
    }

    /// Blocks per level, in the order of [`LEVELS`].
    #[inline]
    pub(crate) fn blocks(self) -> [u32; LEVELS.len()] {
        self.0
    }

    #[cfg(test)]
    pub(crate) fn of(blocks: [u32; LEVELS.len()]) -> Self {
        Self(blocks)
    }
}

/// What each worker holds of one prompt. Asked with the same one again, nothing is allocated.
#[derive(Default)]
pub struct Overlap {
    /// By the number of a worker's slot.
    pub(super) held: Vec<Held>,
    /// Leading blocks of each worker, so far.
    pub(super) depths: Vec<u32>,
    /// What of one page each worker reaches, level by level, when a store has a part in it.
    pub(super) shares: Vec<[u64; LEVELS.len()]>,
}

impl Overlap {
    /// What the worker in this slot holds.
    pub fn at(&self, slot: Slot) -> Held {
        self.held.get(slot.number()).copied().unwrap_or_default()
    }

    /// The worker in this slot will have the block at `position`, too: it counts when all before it do.
    pub(crate) fn lengthen(&mut self, slot: Slot, position: u32) {
        if let Some(held) = self.held.get_mut(slot.number()).filter(|held| held.run() == position) {
            held.0[0] += 1;
        }
    }

    /// Nothing, for so many workers.
    pub(super) fn reset(&mut self, workers: usize) {
        self.held.clear();
        self.held.resize(workers, Held::default());
        self.depths.clear();
        self.depths.resize(workers, 0);
    }
}
