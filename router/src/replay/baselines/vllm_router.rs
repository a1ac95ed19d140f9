//! The cache-aware rule of vLLM's router, which began as a fork of `SGLang`'s, and of SMG until the middle of 2026
//! (SMG's documentation, "Cache-Aware Routing"): if `max − min > balance_abs_threshold` and
//! `max > balance_rel_threshold × min` requests, the least loaded worker; otherwise the worker with the longest prefix
//! in a tree of sent requests, if that exceeds `cache_threshold`; otherwise the least loaded worker. Documented
//! defaults: 64, 1.5, 0.3. The tree here evicts nothing, which favours the rule at this size.

use super::View;
use crate::replay::trace::BLOCK_TOKENS;
use std::collections::HashSet;

/// Blocks of the prompts sent to each worker.
pub(super) struct SentPrefixes(Vec<HashSet<u32>>);

const CACHE_THRESHOLD: f64 = 0.3;
const BALANCE_ABS_THRESHOLD: u64 = 64;
const BALANCE_REL_THRESHOLD: f64 = 1.5;

impl SentPrefixes {
    pub(super) fn new(workers: usize) -> Self {
        Self(vec![HashSet::new(); workers])
    }

    pub(super) fn choose(&mut self, view: &View<'_>) -> usize {
        let least_loaded = || (0..view.workers()).min_by_key(|at| view.requests[*at]).unwrap_or(0);
        let worker = self.longest_prefix_worker(view).unwrap_or_else(least_loaded);
        self.0[worker].extend(&view.spec.blocks);
        worker
    }

    /// The worker with the longest prefix, if the load is balanced and the prefix is long enough.
    fn longest_prefix_worker(&self, view: &View<'_>) -> Option<usize> {
        let (min, max) = (*view.requests.iter().min()?, *view.requests.iter().max()?);
        if max - min > BALANCE_ABS_THRESHOLD && max as f64 > BALANCE_REL_THRESHOLD * min as f64 {
            return None;
        }
        let spec = view.spec;
        // A worker that was sent a block was sent all blocks before it.
        let prefix = |at: usize| spec.blocks.partition_point(|block| self.0[at].contains(block)) as u64;
        // The first one of equals.
        let (longest, blocks) =
            (0..view.workers()).rev().map(|at| (at, prefix(at))).max_by_key(|(_, length)| *length)?;
        let tokens = (blocks * BLOCK_TOKENS).min(spec.input_tokens);
        (tokens as f64 / spec.input_tokens as f64 > CACHE_THRESHOLD).then_some(longest)
    }
}
