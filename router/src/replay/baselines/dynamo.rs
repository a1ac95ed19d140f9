//! NVIDIA Dynamo: the cost function of its documentation ("Router Design" and "Routing Concepts", 1.3): the lowest
//! `overlap_score_weight × prefill_blocks + decode_blocks`, with the default weight 1 and temperature 0; a random one
//! of equals. Prefill blocks are those that the worker has still to compute, with the request. Decode blocks are those
//! that its requests would use, with the request. A block that several requests use counts once.

use super::{View, least_of};
use crate::hash::NumberMap;
use crate::replay::random::Random;
use crate::replay::trace::{BLOCK_TOKENS, RequestSpec};

/// Number of requests that use each block, by worker.
pub(super) struct ActiveBlocks(Vec<NumberMap<u32, u32>>);

const OVERLAP_SCORE_WEIGHT: f64 = 1.0;

impl ActiveBlocks {
    pub(super) fn new(workers: usize) -> Self {
        Self((0..workers).map(|_| NumberMap::default()).collect())
    }

    pub(super) fn choose(&mut self, view: &View<'_>, random: &mut Random) -> usize {
        let blocks = &view.spec.blocks;
        let cost = |worker: usize| {
            let active = &self.0[worker];
            // The blocks of a running request are all active, so those of this prompt that are active lead.
            let shared = blocks.partition_point(|block| active.contains_key(block));
            let decode_blocks = (active.len() + blocks.len() - shared) as f64;
            let prefill_tokens = view.prefill_tokens[worker] + view.uncached_tokens(worker);
            OVERLAP_SCORE_WEIGHT * prefill_tokens as f64 / BLOCK_TOKENS as f64 + decode_blocks
        };
        let worker = least_of(0..view.workers(), random, cost).unwrap_or(0);
        for block in blocks {
            *self.0[worker].entry(*block).or_default() += 1;
        }
        worker
    }

    pub(super) fn finished(&mut self, worker: usize, spec: &RequestSpec) {
        for block in &spec.blocks {
            if let Some(uses) = self.0[worker].get_mut(block) {
                *uses -= 1;
                if *uses == 0 {
                    self.0[worker].remove(block);
                }
            }
        }
    }
}
