//! Rules that are one score per worker. Each returns the cost of a worker, of which the lowest wins.

use super::View;

/// llm-d: the default scorers and weights of its scheduler, as published with its guides for precise prefix-cache
/// routing (0.3 to 0.8): prefix cache 3, queue 2, KV cache utilization 2. Each score is from 0 to 1: the share of the
/// prompt that is cached; the length of the queue between the shortest (1) and the longest one (0); the free share of
/// the KV cache. The highest sum wins.
pub(super) fn llm_d(view: &View<'_>) -> impl Fn(usize) -> f64 {
    const PREFIX: f64 = 3.0;
    const QUEUE: f64 = 2.0;
    const KV_USAGE: f64 = 2.0;
    let queues = || view.reports.iter().map(|report| report.waiting);
    let (shortest, longest) = (queues().min().unwrap_or(0), queues().max().unwrap_or(0));
    move |at| {
        let report = view.reports[at];
        // 1 for all when all queues are alike.
        let queue =
            if longest == shortest { 1.0 } else { f64::from(longest - report.waiting) / f64::from(longest - shortest) };
        -(PREFIX * view.cached_share(at) + QUEUE * queue + KV_USAGE * (1.0 - report.kv_usage))
    }
}

/// `LMetric` (arXiv 2603.15202): the least product of the prompt tokens that a worker has still to compute and the
/// number of its requests, both with the request. It has no parameter.
pub(super) fn lmetric(view: &View<'_>) -> impl Fn(usize) -> f64 {
    move |at| {
        let tokens = view.prefill_tokens[at] + view.uncached_tokens(at);
        tokens as f64 * (view.requests[at] + 1) as f64
    }
}

/// `loadaware` of vLLM's production stack (vllm-project/production-stack 1035): the highest share of the prompt that is
/// cached, less `beta` × (load − mean load) / max(1, mean load). The load is the number of requests in flight; `beta`
/// is 1 by default.
pub(super) fn load_aware(view: &View<'_>) -> impl Fn(usize) -> f64 {
    const BETA: f64 = 1.0;
    let mean = view.mean_requests();
    move |at| BETA * (view.requests[at] as f64 - mean) / mean.max(1.0) - view.cached_share(at)
}
