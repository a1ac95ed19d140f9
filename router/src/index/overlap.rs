//! How much of a prompt each worker can reuse.

use super::holder::HolderId;
use super::partition::Partition;
use super::worker_overlap::{WorkerOverlap, WorkerOverlaps};

/// The overlap of one prompt with every worker. Its memory can be reused for the next lookup.
#[derive(Default)]
pub struct Overlap {
    pub(super) overlaps: WorkerOverlaps,
    /// Scratch space of a lookup.
    pub(super) partition: Partition,
}

impl Overlap {
    /// Overlap of a worker.
    pub fn at(&self, holder_id: HolderId) -> WorkerOverlap {
        self.overlaps.at(holder_id.index())
    }

    /// The distinct overlaps.
    pub(crate) fn distinct(&self) -> &[WorkerOverlap] {
        &self.overlaps.distinct
    }

    /// Index of a worker's overlap in [`distinct`](Self::distinct).
    #[inline]
    pub(crate) fn distinct_index(&self, holder_id: HolderId) -> usize {
        self.overlaps.index_of.get(holder_id.index()).map_or(0, |index| *index as usize)
    }

    /// Gives a holder the overlap of another one where that is more: more leading blocks, or as many of which more are
    /// in faster levels.
    pub(crate) fn raise(&mut self, holder_id: HolderId, other: HolderId) {
        let rank = |overlap: WorkerOverlap| (overlap.total(), overlap.in_memory(), overlap.in_g1());
        if rank(self.at(other)) <= rank(self.at(holder_id)) {
            return;
        }
        let index_of = &mut self.overlaps.index_of;
        let Some(index) = index_of.get(other.index()).copied() else { return };
        if let Some(own) = index_of.get_mut(holder_id.index()) {
            *own = index;
        }
    }

    /// Extends the overlap of a worker to this many leading blocks, if it has fewer. The additional blocks count as G1.
    pub(crate) fn extend(&mut self, holder_id: HolderId, blocks: u32) {
        let WorkerOverlaps { distinct, index_of, .. } = &mut self.overlaps;
        let Some(index) = index_of.get_mut(holder_id.index()) else { return };
        let mut held = distinct[*index as usize];
        let run = held.total();
        if run < blocks {
            held.0[0] += blocks - run;
            *index = distinct.len() as u32;
            distinct.push(held);
        }
    }
}
