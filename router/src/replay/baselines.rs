//! Policies of other routers, for comparison. They are written from public documentation and papers, not from code, and
//! run on the same simulated fleet. Where a source is silent, the choice favours the other router: all of them see the
//! exact index, and what they count themselves is up to date.
//!
//! Each source is in the head of the rule. Not here: what a rule needs beside the worker of a request, like a second
//! queue or its own profile of the fleet.

mod bounded_hash;
mod dynamo;
mod scores;
mod smg;
mod vllm_router;

#[cfg(test)]
mod tests;

use super::random::Random;
use super::trace::{BLOCK_TOKENS, RequestSpec};
use std::collections::HashMap;

/// A policy of another router, or of a paper.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Peer {
    /// NVIDIA Dynamo.
    Dynamo,
    /// The router of vLLM, and SMG until the middle of 2026.
    VllmRouter,
    /// SMG since then.
    Smg,
    /// llm-d.
    LlmD,
    /// `LMetric`, a paper.
    LMetric,
    /// `loadaware` of vLLM's production stack.
    LoadAware,
    /// Consistent hashing with bounded loads, as in `KubeAI`.
    BoundedHash,
}

impl Peer {
    /// All of them.
    pub const ALL: [Self; 7] =
        [Self::Dynamo, Self::VllmRouter, Self::Smg, Self::LlmD, Self::LMetric, Self::LoadAware, Self::BoundedHash];

    /// Name in output.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Dynamo => "dynamo-cost",
            Self::VllmRouter => "vllm-router",
            Self::Smg => "smg",
            Self::LlmD => "llm-d",
            Self::LMetric => "lmetric",
            Self::LoadAware => "loadaware",
            Self::BoundedHash => "bounded-hash",
        }
    }
}

/// A router of another project: its rule, and what it has counted.
pub(super) struct Baseline {
    rule: Rule,
    random: Random,
    /// Requests in flight, by worker.
    requests: Vec<u64>,
    /// Prompt tokens to be computed of requests that have no first token yet, by worker.
    prefill_tokens: Vec<u64>,
    /// The last report, by worker.
    reports: Vec<Report>,
    /// Prompt tokens that a request without a first token has to compute, by request.
    prefills: HashMap<u32, u64>,
}

/// What a worker has reported.
#[derive(Clone, Copy, Default)]
pub(super) struct Report {
    /// Requests in its queue.
    pub(super) waiting: u32,
    /// Share of its KV cache that requests use, from 0 to 1.
    pub(super) kv_usage: f64,
}

enum Rule {
    Dynamo(dynamo::ActiveBlocks),
    VllmRouter(vllm_router::SentPrefixes),
    BoundedHash(bounded_hash::Ring),
    Smg,
    LlmD,
    LMetric,
    LoadAware,
}

/// What a rule chooses by.
struct View<'a> {
    spec: &'a RequestSpec,
    /// Leading blocks of the prompt that a worker has, by worker.
    cached_blocks: &'a [u64],
    requests: &'a [u64],
    prefill_tokens: &'a [u64],
    reports: &'a [Report],
}

impl Baseline {
    pub(super) fn new(peer: Peer, workers: usize, seed: u64) -> Self {
        let rule = match peer {
            Peer::Dynamo => Rule::Dynamo(dynamo::ActiveBlocks::new(workers)),
            Peer::VllmRouter => Rule::VllmRouter(vllm_router::SentPrefixes::new(workers)),
            Peer::BoundedHash => Rule::BoundedHash(bounded_hash::Ring::new(workers)),
            Peer::Smg => Rule::Smg,
            Peer::LlmD => Rule::LlmD,
            Peer::LMetric => Rule::LMetric,
            Peer::LoadAware => Rule::LoadAware,
        };
        Self {
            rule,
            random: Random::new(seed),
            requests: vec![0; workers],
            prefill_tokens: vec![0; workers],
            reports: vec![Report::default(); workers],
            prefills: HashMap::new(),
        }
    }

    /// Chooses a worker and counts the request. `cached_blocks`: leading blocks that each worker has, according to the
    /// exact index.
    pub(super) fn choose(&mut self, request: u32, spec: &RequestSpec, cached_blocks: &[u64]) -> usize {
        let Self { rule, random, requests, prefill_tokens, reports, prefills } = self;
        let view = View { spec, cached_blocks, requests, prefill_tokens, reports };
        let worker = match rule {
            Rule::Dynamo(active) => active.choose(&view, random),
            Rule::VllmRouter(sent) => sent.choose(&view),
            Rule::BoundedHash(ring) => ring.choose(&view),
            Rule::Smg => smg::choose(&view, random),
            Rule::LlmD => view.least(random, scores::llm_d(&view)),
            Rule::LMetric => view.least(random, scores::lmetric(&view)),
            Rule::LoadAware => view.least(random, scores::load_aware(&view)),
        };
        let uncached = view.uncached_tokens(worker);
        requests[worker] += 1;
        prefill_tokens[worker] += uncached;
        prefills.insert(request, uncached);
        worker
    }

    /// A worker reports its load.
    pub(super) fn reported(&mut self, worker: usize, report: Report) {
        self.reports[worker] = report;
    }

    /// The request has its first token.
    pub(super) fn started(&mut self, worker: usize, request: u32) {
        self.prefill_tokens[worker] -= self.prefills.remove(&request).unwrap_or_default();
    }

    /// The request ends, or was rejected after it was placed.
    pub(super) fn finished(&mut self, worker: usize, request: u32, spec: &RequestSpec) {
        self.started(worker, request);
        self.requests[worker] -= 1;
        if let Rule::Dynamo(active) = &mut self.rule {
            active.finished(worker, spec);
        }
    }
}

impl View<'_> {
    fn workers(&self) -> usize {
        self.requests.len()
    }

    /// Prompt tokens that a worker has to compute. At least one: the last token is always computed.
    fn uncached_tokens(&self, worker: usize) -> u64 {
        self.spec.input_tokens.saturating_sub(self.cached_blocks[worker] * BLOCK_TOKENS).max(1)
    }

    /// Share of the prompt that a worker has, from 0 to 1.
    fn cached_share(&self, worker: usize) -> f64 {
        let tokens = self.cached_blocks[worker] * BLOCK_TOKENS;
        tokens.min(self.spec.input_tokens) as f64 / self.spec.input_tokens as f64
    }

    /// Mean number of requests in flight per worker.
    fn mean_requests(&self) -> f64 {
        self.requests.iter().sum::<u64>() as f64 / self.workers() as f64
    }

    /// The worker of the lowest cost; a random one of equals.
    fn least(&self, random: &mut Random, cost: impl Fn(usize) -> f64) -> usize {
        least_of(0..self.workers(), random, cost).unwrap_or(0)
    }
}

/// The candidate of the lowest cost, a random one of equals.
fn least_of(
    candidates: impl Iterator<Item = usize>,
    random: &mut Random,
    cost: impl Fn(usize) -> f64,
) -> Option<usize> {
    let (mut best, mut lowest, mut equals) = (None, f64::INFINITY, 0_u64);
    for at in candidates {
        let cost = cost(at);
        if cost < lowest {
            (best, lowest, equals) = (Some(at), cost, 1);
        } else if cost <= lowest {
            // Reservoir sampling: each of n equals stays with probability 1/n.
            equals += 1;
            if random.among(0..equals) == 0 {
                best = Some(at);
            }
        }
    }
    best
}
