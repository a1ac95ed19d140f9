//! How much of a prompt each worker has within reach.

use super::partition::Partition;
use super::source::Slot;
use super::worker_overlap::{Answer, Held};

/// What each worker holds of one prompt. Asked with the same one again, nothing is allocated.
#[derive(Default)]
pub struct Overlap {
    pub(super) answer: Answer,
    /// Of the walk that makes the answer.
    pub(super) partition: Partition,
}

impl Overlap {
    /// What the worker in this slot holds.
    pub fn at(&self, slot: Slot) -> Held {
        self.answer.at(slot.number())
    }

    /// What there is, each thing once.
    pub(crate) fn kinds(&self) -> &[Held] {
        &self.answer.kinds
    }

    /// Which of it the worker in this slot has, by its place among the kinds.
    #[inline]
    pub(crate) fn kind(&self, slot: Slot) -> usize {
        self.answer.kind.get(slot.number()).map_or(0, |kind| *kind as usize)
    }

    /// The worker in this slot will have so many leading blocks, if it has not got more.
    pub(crate) fn lengthen(&mut self, slot: Slot, blocks: u32) {
        let Answer { kinds, kind, .. } = &mut self.answer;
        let Some(kind) = kind.get_mut(slot.number()) else { return };
        let mut held = kinds[*kind as usize];
        let run = held.run();
        if run < blocks {
            held.0[0] += blocks - run;
            *kind = kinds.len() as u32;
            kinds.push(held);
        }
    }
}
