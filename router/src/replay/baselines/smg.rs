//! SMG's cache-aware rule since the middle of 2026, as its pull requests describe it (smg-project/smg 1647, 2150, 2161,
//! 2341): among the workers with the longest cached prefix, of more than `cache_threshold` of the prompt, those that
//! are not overloaded; without any, all workers. Of these the one with the least expected wait:
//!
//! ```text
//!   (tokens queued + tokens sent since) / throughput + kv_pressure_weight × k / (1 − k)       k: KV usage
//! ```
//! A worker is overloaded when its requests exceed both 1.5 times the mean and the mean plus max(4, 2 √mean).
//! Documented defaults: `cache_threshold` 0.3, `kv_pressure_weight` 0.15 s, and 2,000 tokens per second where a backend
//! reports no throughput, as vLLM does not.

use super::{View, least_of};
use crate::replay::random::Random;

const CACHE_THRESHOLD: f64 = 0.3;
const KV_PRESSURE_WEIGHT: f64 = 0.15;
const THROUGHPUT: f64 = 2000.0;
/// Keeps the pressure of a full cache finite.
const KV_USAGE_MAX: f64 = 0.99;

pub(super) fn choose(view: &View<'_>, random: &mut Random) -> usize {
    let mean = view.mean_requests();
    let limit = (1.5 * mean).max(mean + (2.0 * mean.sqrt()).max(4.0));
    let longest = view.cached_blocks.iter().copied().max().unwrap_or(0);
    let holds = |at: &usize| view.cached_blocks[*at] == longest && view.cached_share(*at) > CACHE_THRESHOLD;
    let holders = (0..view.workers()).filter(|at| holds(at) && view.requests[*at] as f64 <= limit);
    let wait = |at: usize| {
        let usage = view.reports[at].kv_usage.min(KV_USAGE_MAX);
        view.prefill_tokens[at] as f64 / THROUGHPUT + KV_PRESSURE_WEIGHT * usage / (1.0 - usage)
    };
    least_of(holders, random, wait).unwrap_or_else(|| view.least(random, wait))
}
