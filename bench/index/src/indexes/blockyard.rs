//! The router's own index, used as the router uses it.

use crate::seam::{self, Block, Size};
use kvbm::{BlockEvent, Level, SequenceHash};
use router::index::{Holder, HolderId, Index, Overlap};
use worker::plane::WorkerId;

/// The index, and the id of each worker in it.
pub(crate) struct Blockyard {
    index: Index,
    workers: Vec<HolderId>,
}

/// Block hashes have 128 bits.
fn hash(sequence: u64) -> SequenceHash {
    let wide = u128::from(!sequence) << 64 | u128::from(sequence);
    SequenceHash::from_bytes(wide.to_le_bytes())
}

impl seam::Index for Blockyard {
    type Query = Vec<SequenceHash>;
    type Answer = Overlap;

    fn new(size: Size) -> Self {
        let index = Index::new();
        let workers = (0..size.workers).map(|worker| index.join(WorkerId(u64::from(worker)), &[])).collect();
        Self { index, workers }
    }

    fn stored(&self, worker: u32, parent: Option<u64>, blocks: &[Block]) {
        let blocks = blocks.iter().map(|block| hash(block.sequence)).collect();
        let event = BlockEvent::Stored { level: Level::G1, parent: parent.map(hash), blocks };
        self.index.apply(Holder::Worker(WorkerId(u64::from(worker))), &event);
    }

    fn removed(&self, worker: u32, sequences: &[u64]) {
        let blocks = sequences.iter().copied().map(hash).collect();
        let event = BlockEvent::Removed { level: Level::G1, blocks };
        self.index.apply(Holder::Worker(WorkerId(u64::from(worker))), &event);
    }

    fn query(prompt: &[Block]) -> Self::Query {
        prompt.iter().map(|block| hash(block.sequence)).collect()
    }

    fn overlap(&self, query: &Self::Query, answer: &mut Overlap) {
        self.index.overlap_into(query, answer);
    }

    fn depths(&self, answer: &Overlap) -> Vec<(u32, u32)> {
        (0..).zip(&self.workers).map(|(worker, id)| (worker, answer.at(*id).total())).collect()
    }
}
