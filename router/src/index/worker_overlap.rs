//! How much of a prompt each worker can reuse: the result of a lookup.

use super::bits::each;
use super::holder::LEVELS;
use kvbm::Level;
use std::ops::{AddAssign, Sub};

/// Number of leading blocks of a prompt that a worker can read, by the fastest level of each block.
#[derive(Clone, Copy, Eq, Debug, Default)]
pub struct WorkerOverlap(pub(super) [u32; LEVELS.len()]);

impl WorkerOverlap {
    /// Leading blocks at all levels.
    pub fn total(&self) -> u32 {
        self.0.iter().sum()
    }

    /// Levels with blocks, fastest first, and the number of blocks.
    pub fn by_level(self) -> impl Iterator<Item = (Level, u32)> {
        LEVELS.into_iter().zip(self.0).filter(|(_, blocks)| *blocks > 0)
    }

    /// Number of blocks per level, in the order of [`LEVELS`].
    #[inline]
    pub(crate) fn per_level(&self) -> &[u32; LEVELS.len()] {
        &self.0
    }

    /// Leading blocks in G1.
    #[inline]
    pub(crate) fn in_g1(self) -> u32 {
        self.0[0]
    }

    /// Leading blocks in G1 or G2.
    #[inline]
    pub(crate) fn in_memory(self) -> u32 {
        self.0[0] + self.0[1]
    }

    #[cfg(test)]
    pub(crate) fn of(blocks: [u32; LEVELS.len()]) -> Self {
        Self(blocks)
    }
}

/// Compares in registers. The derived comparison loads what was just stored in parts as a whole, which stalls.
impl PartialEq for WorkerOverlap {
    #[inline]
    fn eq(&self, other: &Self) -> bool {
        self.0.iter().zip(other.0).fold(0, |differ, (own, other)| differ | (own ^ other)) == 0
    }
}

/// Also adds differences, which may be negative at some levels: arithmetic is modulo 2³².
impl AddAssign for WorkerOverlap {
    #[inline]
    fn add_assign(&mut self, other: Self) {
        self.0.iter_mut().zip(other.0).for_each(|(sum, more)| *sum = sum.wrapping_add(more));
    }
}

impl Sub for WorkerOverlap {
    type Output = Self;

    #[inline]
    fn sub(self, other: Self) -> Self {
        Self(std::array::from_fn(|level| self.0[level].wrapping_sub(other.0[level])))
    }
}

/// The overlap of each worker. Workers with the same overlap share one entry.
#[derive(Default)]
pub(super) struct WorkerOverlaps {
    /// Distinct overlaps. The first is empty.
    pub(super) distinct: Vec<WorkerOverlap>,
    /// Entry of each worker, by the index of its holder id; padded to a multiple of 64.
    pub(super) index_of: Vec<u32>,
    /// Bitmap of the workers whose entry no other worker shares.
    exclusive: Vec<u64>,
}

const WORD: usize = u64::BITS as usize;
/// Capacity is reserved for one exclusive entry per this many workers, so that a result that is used once is not
/// reallocated often.
const INITIAL_SHARE: usize = 4;

impl WorkerOverlaps {
    /// Sets all workers to the empty overlap; `words` is the number of workers divided by 64.
    pub(super) fn reset(&mut self, words: usize) {
        self.distinct.clear();
        self.distinct.reserve(words * WORD / INITIAL_SHARE);
        self.distinct.push(WorkerOverlap::default());
        self.index_of.clear();
        self.index_of.resize(words * WORD, 0);
        self.exclusive.clear();
        self.exclusive.resize(words, 0);
    }

    #[inline]
    pub(super) fn at(&self, worker: usize) -> WorkerOverlap {
        self.index_of.get(worker).map_or_else(WorkerOverlap::default, |index_of| self.distinct[*index_of as usize])
    }

    /// Adds to the overlap of one worker, which gets an entry of its own.
    #[inline]
    pub(super) fn add(&mut self, worker: usize, held: WorkerOverlap) {
        match self.index_of[worker] {
            0 => {
                self.index_of[worker] = self.distinct.len() as u32;
                self.distinct.push(held);
                self.exclusive[worker / WORD] |= 1 << (worker % WORD);
            }
            own => self.distinct[own as usize] += held,
        }
    }

    /// Adds to the overlap of each worker in a bitmap.
    pub(super) fn add_to_set(&mut self, set: &[u64], held: WorkerOverlap) {
        if held == WorkerOverlap::default() {
            return;
        }
        let alike = self.distinct.len() as u32;
        self.distinct.push(held);
        for ((members, exclusive), index_of) in
            set.iter().zip(&self.exclusive).zip(self.index_of.chunks_exact_mut(WORD))
        {
            for worker in each(members & exclusive) {
                self.distinct[index_of[worker as usize] as usize] += held;
            }
            match members & !exclusive {
                0 => {}
                u64::MAX => index_of.fill(alike),
                members => each(members).for_each(|worker| index_of[worker as usize] = alike),
            }
        }
    }
}
