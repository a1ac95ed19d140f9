//! Policies of other routers, for comparison. They are written from public documentation, not from code, and run on the
//! same simulated fleet. Where the documentation is silent, the choice favours the other router.
//!
//! - `dynamo-cost`: the cost function in NVIDIA Dynamo's router documentation ("Routing Concepts"): lowest
//!   `overlap_score_weight × prefill_blocks + decode_blocks`, with the default weight 1 and temperature 0. It uses the
//!   same exact index as `kv`, and its own count of active blocks, as documented.
//!
//! - `smg-cache-aware`: the rule in SMG's documentation ("Cache-Aware Routing"), shared by `SGLang`'s router: if `max −
//!   min > balance_abs_threshold` and `max > balance_rel_threshold × min` requests, the least loaded worker; otherwise
//!   the worker with the longest prefix in a tree of sent requests, if that exceeds `cache_threshold`; otherwise the
//!   least loaded worker. Documented defaults: 64, 1.5, 0.3. The tree here evicts nothing, which favours the rule at
//!   this size.

use super::trace::{BLOCK_TOKENS, RequestSpec};
use std::collections::{HashMap, HashSet};

/// A policy of another router, with its state.
pub(super) enum Baseline {
    Dynamo(DynamoCost),
    Smg(CacheAware),
}

/// Dynamo's documented cost function.
pub(super) struct DynamoCost {
    /// Blocks to be prefilled and blocks in use, by worker.
    active: Vec<(f64, f64)>,
    /// Blocks that a request has to prefill, by request.
    prefills: HashMap<u32, f64>,
}

/// SMG's documented rule.
pub(super) struct CacheAware {
    /// Requests in flight, by worker.
    requests: Vec<u64>,
    /// Blocks of the prompts sent to each worker.
    sent_blocks: Vec<HashSet<u32>>,
}

impl Baseline {
    pub(super) fn dynamo(workers: usize) -> Self {
        Self::Dynamo(DynamoCost { active: vec![(0.0, 0.0); workers], prefills: HashMap::new() })
    }

    pub(super) fn smg(workers: usize) -> Self {
        Self::Smg(CacheAware { requests: vec![0; workers], sent_blocks: vec![HashSet::new(); workers] })
    }

    /// Chooses a worker and updates the state. `cached_blocks`: leading blocks that a worker has, according to the
    /// exact index.
    pub(super) fn choose(&mut self, request: u32, spec: &RequestSpec, cached_blocks: impl Fn(usize) -> u32) -> usize {
        match self {
            Self::Dynamo(baseline) => baseline.choose(request, spec, cached_blocks),
            Self::Smg(baseline) => baseline.choose(spec),
        }
    }

    /// The request has its first token.
    pub(super) fn started(&mut self, worker: usize, request: u32) {
        if let Self::Dynamo(baseline) = self {
            baseline.active[worker].0 -= baseline.prefills.remove(&request).unwrap_or_default();
        }
    }

    /// The request has ended.
    pub(super) fn finished(&mut self, worker: usize, spec: &RequestSpec) {
        match self {
            Self::Dynamo(baseline) => baseline.active[worker].1 -= spec.blocks.len() as f64,
            Self::Smg(baseline) => baseline.requests[worker] -= 1,
        }
    }
}

impl DynamoCost {
    const OVERLAP_SCORE_WEIGHT: f64 = 1.0;

    fn choose(&mut self, request: u32, spec: &RequestSpec, cached_blocks: impl Fn(usize) -> u32) -> usize {
        let blocks = spec.blocks.len() as f64;
        let uncached_blocks = |worker: usize| {
            spec.input_tokens.saturating_sub(u64::from(cached_blocks(worker)) * BLOCK_TOKENS) as f64
                / BLOCK_TOKENS as f64
        };
        let cost = |worker: usize| {
            let (prefill, decode) = self.active[worker];
            Self::OVERLAP_SCORE_WEIGHT * (prefill + uncached_blocks(worker)) + decode + blocks
        };
        let worker = argmin(self.active.len(), cost);
        let prefill = uncached_blocks(worker);
        self.active[worker].0 += prefill;
        self.active[worker].1 += blocks;
        self.prefills.insert(request, prefill);
        worker
    }
}

impl CacheAware {
    const CACHE_THRESHOLD: f64 = 0.3;
    const BALANCE_ABS_THRESHOLD: u64 = 64;
    const BALANCE_REL_THRESHOLD: f64 = 1.5;

    fn choose(&mut self, spec: &RequestSpec) -> usize {
        let worker = self
            .longest_prefix_worker(spec)
            .unwrap_or_else(|| argmin(self.requests.len(), |at| self.requests[at] as f64));
        self.requests[worker] += 1;
        self.sent_blocks[worker].extend(&spec.blocks);
        worker
    }

    /// The worker with the longest prefix, if the load is balanced and the prefix is long enough.
    fn longest_prefix_worker(&self, spec: &RequestSpec) -> Option<usize> {
        let (min, max) = (self.requests.iter().min()?, self.requests.iter().max()?);
        if max - min > Self::BALANCE_ABS_THRESHOLD && *max as f64 > Self::BALANCE_REL_THRESHOLD * *min as f64 {
            return None;
        }
        let prefix = |at: usize| spec.blocks.iter().take_while(|block| self.sent_blocks[at].contains(*block)).count();
        let longest = argmin(self.sent_blocks.len(), |at| -(prefix(at) as f64));
        let tokens = (prefix(longest) as u64 * BLOCK_TOKENS).min(spec.input_tokens);
        (tokens as f64 / spec.input_tokens as f64 > Self::CACHE_THRESHOLD).then_some(longest)
    }
}

/// The index of the lowest value; the first one of equals.
fn argmin(n: usize, of: impl Fn(usize) -> f64) -> usize {
    (0..n).min_by(|a, b| of(*a).total_cmp(&of(*b))).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(blocks: &[u32]) -> RequestSpec {
        RequestSpec {
            arrival_ms: 0,
            input_tokens: blocks.len() as u64 * BLOCK_TOKENS,
            output_tokens: 1,
            blocks: blocks.to_vec(),
            session: 0,
            model: "".into(),
        }
    }

    #[test]
    fn dynamo_cost_weighs_new_and_active_blocks_alike() {
        let mut baseline = Baseline::dynamo(2);
        let (two, four) = (spec(&[1, 2]), spec(&[1, 2, 3, 4]));
        assert_eq!(baseline.choose(0, &two, |_| 0), 0, "the first of equals");
        // Worker 0: 2 to prefill, 2 in use, 4 - 3 new; worker 1: 4 new. 5 + 4 against 4 + 4.
        assert_eq!(baseline.choose(1, &four, |at| if at == 0 { 3 } else { 0 }), 1);
        baseline.started(0, 0);
        // 1 + 2 + 4 against 4 + 4 + 4 + 4.
        assert_eq!(baseline.choose(2, &four, |at| if at == 0 { 3 } else { 0 }), 0);
        baseline.finished(0, &four);
        baseline.finished(0, &two);
        let Baseline::Dynamo(state) = &baseline else { unreachable!() };
        assert!(state.active[0].1.abs() < 1e-9, "blocks are given back");
    }

    #[test]
    fn smg_follows_a_long_prefix_while_load_is_balanced() {
        let mut baseline = Baseline::smg(2);
        let long = spec(&[1, 2, 3, 4]);
        for request in 0..=64 {
            assert_eq!(baseline.choose(request, &long, |_| 0), 0);
        }
        assert_eq!(baseline.choose(65, &long, |_| 0), 1, "65 requests more than the other");
        assert_eq!(baseline.choose(66, &spec(&[1, 7, 8, 9]), |_| 0), 1, "a quarter is not enough");
    }
}
