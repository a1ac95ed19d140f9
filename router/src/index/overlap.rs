//! How much of a prompt each worker has within reach: a walk over the prompt's blocks, all workers at once.
//!
//! The walk keeps, per level, the set of workers whose fastest copy of the current block is there, and touches a worker
//! only when that changes. A step costs a few word operations per 64 workers, whatever they hold.

use super::bits::{Bits, ones};
use super::holders::{Holders, Seat};
use super::shard::Found;
use super::{LEVELS, Slot};
use kvbm::Level;

/// Leading blocks of a prompt that a worker has within reach, by the fastest level that each rests at.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Held([u32; LEVELS.len()]);

impl Held {
    /// Leading blocks, whatever the level.
    pub(crate) fn run(&self) -> u32 {
        self.0.iter().sum()
    }

    /// Blocks per level, fastest first, those that have any.
    pub(crate) fn by_level(self) -> impl Iterator<Item = (Level, u32)> {
        LEVELS.into_iter().zip(self.0).filter(|(_, blocks)| *blocks > 0)
    }

    #[cfg(test)]
    pub(crate) fn of(blocks: [u32; LEVELS.len()]) -> Self {
        Self(blocks)
    }
}

/// What each worker holds of one prompt.
#[derive(Default)]
pub(crate) struct Overlap(Vec<Held>);

impl Overlap {
    /// What the worker in this slot holds.
    pub(crate) fn at(&self, slot: Slot) -> Held {
        self.0.get(slot.0 as usize).copied().unwrap_or_default()
    }

    /// The worker in this slot will have the block at `position`, too: it counts when all before it do.
    pub(crate) fn lengthen(&mut self, slot: Slot, position: u32) {
        if let Some(held) = self.0.get_mut(slot.0 as usize).filter(|held| held.run() == position) {
            held.0[0] += 1;
        }
    }
}

/// The walk.
pub(super) struct Walk<'a> {
    reach: &'a [Bits],
    workers: &'a Bits,
    /// Workers that had every block so far.
    active: Vec<u64>,
    /// Of those, by level, the workers whose fastest copy of the latest block is there.
    fastest: [Vec<u64>; LEVELS.len()],
    /// The latest block's holders, by level, stores spelled out as the workers that reach them.
    now: [Vec<u64>; LEVELS.len()],
    /// By slot: the position from which `fastest` has held.
    since: Vec<u32>,
    held: Vec<Held>,
    position: u32,
    /// The single holder of the latest block, if it had one: another block of the same holder changes nothing.
    single: Option<Seat>,
}

impl<'a> Walk<'a> {
    pub(super) fn new(workers: &'a Bits, reach: &'a [Bits]) -> Self {
        let words = reach.len().div_ceil(64);
        let blank = || vec![0; words];
        Self {
            reach,
            workers,
            active: (0..words).map(|word| workers.word(word)).collect(),
            fastest: std::array::from_fn(|_| blank()),
            now: std::array::from_fn(|_| blank()),
            since: vec![0; reach.len()],
            held: vec![Held::default(); reach.len()],
            position: 0,
            single: None,
        }
    }

    /// Takes the next block. `false`: nobody is left, the walk may end.
    pub(super) fn step(&mut self, found: Found<'_>) -> bool {
        match found {
            Found::Nobody => return false,
            Found::One(seat) if self.single == Some(seat) => {
                self.position += 1;
                return true;
            }
            Found::One(seat) => {
                self.single = Some(seat);
                self.blank();
                self.note(seat);
            }
            Found::Several(holders) => {
                self.single = None;
                self.blank();
                match holders {
                    Holders::Few { len, seats } => seats[..*len as usize].iter().for_each(|seat| self.note(*seat)),
                    Holders::Some(list) => list.iter().for_each(|seat| self.note(*seat)),
                    Holders::Many(levels) => self.note_all(levels),
                }
            }
        }
        let alive = self.turn();
        self.position += 1;
        alive
    }

    /// Closes the books.
    pub(super) fn finish(mut self) -> Overlap {
        self.blank();
        // A step at which nobody holds anything: every run that is still open ends here.
        self.turn();
        Overlap(self.held)
    }

    fn blank(&mut self) {
        self.now.iter_mut().for_each(|level| level.fill(0));
    }

    /// A holder of the block. A store's copy is within reach of each worker that lists the store.
    fn note(&mut self, seat: Seat) {
        let (now, slot) = (&mut self.now[seat.level()], seat.slot());
        if self.workers.has(slot) {
            now[slot as usize / 64] |= 1 << (slot % 64);
        } else if let Some(reach) = self.reach.get(slot as usize) {
            now.iter_mut().enumerate().for_each(|(word, bits)| *bits |= reach.word(word));
        }
    }

    fn note_all(&mut self, levels: &[Bits; LEVELS.len()]) {
        for (level, slots) in levels.iter().enumerate() {
            for word in 0..slots.words().min(self.active.len()) {
                let here = slots.word(word);
                self.now[level][word] |= here & self.workers.word(word);
                for store in ones(here & !self.workers.word(word)) {
                    let reach = &self.reach[word * 64 + store as usize];
                    self.now[level].iter_mut().enumerate().for_each(|(at, bits)| *bits |= reach.word(at));
                }
            }
        }
    }

    /// Moves every active worker to the level of the block just noted, or out. Whether anyone is left.
    fn turn(&mut self) -> bool {
        let mut alive = false;
        for word in 0..self.active.len() {
            let mut rest = self.active[word];
            if rest == 0 {
                continue;
            }
            for level in 0..LEVELS.len() {
                let here = self.now[level][word] & rest;
                rest &= !here;
                let before = std::mem::replace(&mut self.fastest[level][word], here);
                for bit in ones(before & !here) {
                    let slot = word * 64 + bit as usize;
                    self.held[slot].0[level] += self.position - self.since[slot];
                    self.since[slot] = self.position;
                }
            }
            self.active[word] &= !rest;
            alive |= self.active[word] != 0;
        }
        alive
    }
}
