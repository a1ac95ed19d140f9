//! The `kv-index` of the Shepherd Model Gateway: callers apply events and keep a map of each worker's blocks.

use crate::seam::{Block, Index, Size};
use kv_index::{ChainBlockMap, ChainIndex, ContentHash, OverlapScores, SequenceHash, StoredBlock};
use std::sync::{Mutex, MutexGuard};

/// Queried with `find_matches`, which returns a hash map.
pub(crate) struct Chain {
    index: ChainIndex,
    /// By worker. These locks are never contended.
    maps: Vec<Mutex<ChainBlockMap>>,
}

/// Queried with `score_into`, its fastest way, which calls back for each worker.
pub(crate) struct ChainInto(Chain);

impl Chain {
    fn map(&self, worker: u32) -> MutexGuard<'_, ChainBlockMap> {
        self.maps[worker as usize].lock().expect("no holder of this lock panics")
    }
}

impl Index for Chain {
    type Query = Vec<ContentHash>;
    type Answer = OverlapScores;

    fn new(size: Size) -> Self {
        let index = ChainIndex::with_max_workers(size.workers as usize);
        for worker in 0..size.workers {
            assert_eq!(index.intern_worker(&worker.to_string()).ok(), Some(worker), "numbers are given in order");
        }
        Self { index, maps: (0..size.workers).map(|_| Mutex::default()).collect() }
    }

    fn stored(&self, worker: u32, parent: Option<u64>, blocks: &[Block]) {
        let block = |block: &Block| StoredBlock {
            seq_hash: SequenceHash(block.sequence),
            content_hash: ContentHash(block.content),
        };
        let blocks: Vec<_> = blocks.iter().map(block).collect();
        let outcome = self.index.apply_stored(worker, &blocks, parent.map(SequenceHash), &mut self.map(worker));
        outcome.expect("parents come before their children");
    }

    fn removed(&self, worker: u32, sequences: &[u64]) {
        let sequences: Vec<_> = sequences.iter().copied().map(SequenceHash).collect();
        self.index.apply_removed(worker, &sequences, &mut self.map(worker));
    }

    fn query(prompt: &[Block]) -> Self::Query {
        prompt.iter().map(|block| ContentHash(block.content)).collect()
    }

    fn overlap(&self, query: &Self::Query, answer: &mut OverlapScores) {
        *answer = self.index.find_matches(query, false);
    }

    fn depths(&self, answer: &OverlapScores) -> Vec<(u32, u32)> {
        answer.scores.iter().map(|(worker, depth)| (*worker, *depth)).collect()
    }
}

impl Index for ChainInto {
    type Query = Vec<ContentHash>;
    type Answer = Vec<(u32, u32)>;

    fn new(size: Size) -> Self {
        Self(Chain::new(size))
    }

    fn stored(&self, worker: u32, parent: Option<u64>, blocks: &[Block]) {
        self.0.stored(worker, parent, blocks);
    }

    fn removed(&self, worker: u32, sequences: &[u64]) {
        self.0.removed(worker, sequences);
    }

    fn query(prompt: &[Block]) -> Self::Query {
        Chain::query(prompt)
    }

    fn overlap(&self, query: &Self::Query, answer: &mut Self::Answer) {
        answer.clear();
        self.0.index.score_into(query, |content| content.0, false, |worker, depth| answer.push((worker, depth)));
    }

    fn depths(&self, answer: &Self::Answer) -> Vec<(u32, u32)> {
        answer.clone()
    }
}
