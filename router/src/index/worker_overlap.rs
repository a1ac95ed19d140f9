//! What a worker has of a prompt, and the answer of a lookup: that of each worker.

use super::bits::each;
use super::source::LEVELS;
use kvbm::Level;
use std::ops::{AddAssign, Sub};

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

    /// Blocks per level, in the order of [`LEVELS`].
    #[inline]
    pub(crate) fn blocks(&self) -> &[u32; LEVELS.len()] {
        &self.0
    }

    /// Leading blocks that lie in G1.
    #[inline]
    pub(crate) fn resident(self) -> u32 {
        self.0[0]
    }

    #[cfg(test)]
    pub(crate) fn of(blocks: [u32; LEVELS.len()]) -> Self {
        Self(blocks)
    }
}

/// Differences may be less than nothing at some level, modulo 2³².
impl AddAssign for Held {
    #[inline]
    fn add_assign(&mut self, other: Self) {
        self.0.iter_mut().zip(other.0).for_each(|(sum, more)| *sum = sum.wrapping_add(more));
    }
}

impl Sub for Held {
    type Output = Self;

    #[inline]
    fn sub(self, other: Self) -> Self {
        Self(std::array::from_fn(|level| self.0[level].wrapping_sub(other.0[level])))
    }
}

/// The answer: what there is, each thing once, and which of it each worker has.
#[derive(Default)]
pub(super) struct Answer {
    /// The first is nothing.
    pub(super) kinds: Vec<Held>,
    /// By the number of a worker's slot; a few more, so that it ends with a word of bits.
    pub(super) kind: Vec<u32>,
    /// Workers that have a kind of their own.
    apart: Vec<u64>,
}

const WORD: usize = u64::BITS as usize;
/// Room at once for one worker in so many to have a kind of its own; an answer that is not used again does not grow bit by bit.
const FRESH: usize = 4;

impl Answer {
    /// Nothing, for so many words of workers.
    pub(super) fn reset(&mut self, words: usize) {
        self.kinds.clear();
        self.kinds.reserve(words * WORD / FRESH);
        self.kinds.push(Held::default());
        self.kind.clear();
        self.kind.resize(words * WORD, 0);
        self.apart.clear();
        self.apart.resize(words, 0);
    }

    #[inline]
    pub(super) fn at(&self, worker: usize) -> Held {
        self.kind.get(worker).map_or_else(Held::default, |kind| self.kinds[*kind as usize])
    }

    /// Gives one worker more, apart from all others.
    #[inline]
    pub(super) fn add(&mut self, worker: usize, held: Held) {
        match self.kind[worker] {
            0 => {
                self.kind[worker] = self.kinds.len() as u32;
                self.kinds.push(held);
                self.apart[worker / WORD] |= 1 << (worker % WORD);
            }
            own => self.kinds[own as usize] += held,
        }
    }

    /// Gives the same to a set of workers, besides what some of them have apart.
    pub(super) fn give(&mut self, set: &[u64], held: Held) {
        if held == Held::default() {
            return;
        }
        let alike = self.kinds.len() as u32;
        self.kinds.push(held);
        for ((members, apart), kind) in set.iter().zip(&self.apart).zip(self.kind.chunks_exact_mut(WORD)) {
            for worker in each(members & apart) {
                self.kinds[kind[worker as usize] as usize] += held;
            }
            match members & !apart {
                0 => {}
                u64::MAX => kind.fill(alike),
                members => each(members).for_each(|worker| kind[worker as usize] = alike),
            }
        }
    }
}
