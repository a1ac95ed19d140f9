//! A routing decision as one line of JSON, short enough for a header: the candidates, the cost of each, and the reason
//! for the choice.

use super::composition::{Composition, Filter, Policy, Term};
use super::cost::Cost;
use super::decide::{Decision, ScoredWorker};
use super::disaggregate::ServingMode;
use super::replication::Replication;
use super::select::Candidate;
use crate::fleet::{PromptTokens, WorkerRun};
use crate::load::ExpectedOutput;
use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// Largest number of candidates in the line: the next best workers matter, not the whole fleet …
const SHOWN: usize = 8;
/// … and fewer if their entries are long: many proxies accept 4 KiB of response headers in total.
const BYTES_MAX: usize = 3_500;

/// Formats a decision. Times are in seconds; terms of less than a microsecond are omitted. `excluded`: workers that
/// were tried before; `copying`: number of workers that get a copy of the shared prefix now; `output`: what is expected
/// of the output.
pub(crate) fn line(
    policy: &Policy,
    decision: &Decision<'_>,
    excluded: &[WorkerRun],
    copying: u32,
    output: &ExpectedOutput,
) -> Arc<str> {
    let Decision { chosen: row, why, prefill, .. } = decision;
    let candidates = decision.all_candidates();
    // The chosen worker first, then by cost: entries at the end may be omitted.
    let mut order: Vec<&Candidate> = candidates.iter().collect();
    order.sort_by(|a, b| {
        let not = |candidate: &Candidate| candidate.entry as usize != row.at;
        not(a).cmp(&not(b)).then(a.cost.total_cmp(&b.cost))
    });
    order.truncate(SHOWN);
    let mut explanation = Explanation {
        policy: policy.name(),
        chosen: row.worker().id().to_string(),
        why: why.name(),
        prompt_tokens: row.prompt.tokens,
        cached_tokens: row.cached(),
        excluded: excluded.iter().map(|run| run.worker.to_string()).collect(),
        disaggregation: prefill.as_ref().zip(row.disaggregated).map(|(prefill, disaggregated)| Disaggregation {
            prefill: (row.serving_mode == ServingMode::Disaggregated).then(|| prefill.worker().id().to_string()),
            aggregated_s: round(row.aggregated.total()),
            disaggregated_s: round(disaggregated.total()),
        }),
        prefill_worker: prefill.as_ref().map(|row| considered(row, policy, decision.prompt_tokens())),
        candidates: order
            .iter()
            .map(|candidate| decision.row(candidate.entry))
            .map(|row| considered(&row, policy, decision.prompt_tokens()))
            .collect(),
        not_shown: candidates.len().saturating_sub(SHOWN),
        expected_output_tokens: row.prompt.output_tokens as u64,
        output_quantiles: Quantiles { p50: output.quantile(0.5) as u64, p90: output.quantile(0.9) as u64 },
        shared_prefix: decision.replication().map(|Replication { shared, copies, .. }| Shared {
            tokens: u64::from(shared.blocks) * row.prompt.block_size,
            requests_per_minute: shared.requests as u64,
            copies: *copies,
            copies_in_memory: decision.copies_in_memory(),
            copies_on_the_way: (copying > 0).then_some(copying),
        }),
    };
    loop {
        // Strings and numbers in plain structs always serialize.
        let line = serde_json::to_string(&explanation).unwrap_or_default();
        if line.len() <= BYTES_MAX || explanation.candidates.len() < 2 {
            return line.into();
        }
        explanation.candidates.pop();
        explanation.not_shown += 1;
    }
}

/// Adds to an explanation the trace of the request.
pub(crate) fn traced(line: &str, trace_id: &dyn fmt::Display) -> Arc<str> {
    let open = line.strip_suffix('}').unwrap_or(line);
    format!("{open},\"trace_id\":\"{trace_id}\"}}").into()
}

/// Adds to an explanation how long the request was queued, for which reason, and whether it was late then.
pub(crate) fn waited(line: &str, waited: Duration, on: &str, is_late: bool) -> Arc<str> {
    let open = line.strip_suffix('}').unwrap_or(line);
    let late = if is_late { ",\"late\":true" } else { "" };
    format!("{open},\"queued_s\":{},\"queue_reason\":\"{on}\"{late}}}", round(waited.as_secs_f64())).into()
}

#[derive(Serialize)]
struct Explanation {
    policy: &'static str,
    /// The worker that decodes.
    chosen: String,
    why: &'static str,
    prompt_tokens: u64,
    /// Prompt tokens that are expected to be cached on the worker that decodes.
    cached_tokens: u64,
    /// Workers that failed this request before, and are not candidates any more.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    excluded: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    disaggregation: Option<Disaggregation>,
    /// The best prefill worker, used or not.
    #[serde(skip_serializing_if = "Option::is_none")]
    prefill_worker: Option<Considered>,
    candidates: Vec<Considered>,
    #[serde(skip_serializing_if = "is_zero")]
    not_shown: usize,
    /// Expected output tokens.
    expected_output_tokens: u64,
    output_quantiles: Quantiles,
    /// The prefix of the prompt that many requests share.
    #[serde(skip_serializing_if = "Option::is_none")]
    shared_prefix: Option<Shared>,
}

/// Output tokens that half and nine tenths of such outputs do not exceed.
#[derive(Serialize)]
struct Quantiles {
    p50: u64,
    p90: u64,
}

#[derive(Serialize)]
struct Shared {
    tokens: u64,
    requests_per_minute: u64,
    /// Workers that hold it.
    copies: u32,
    /// Of these, workers that have it in their own memory.
    copies_in_memory: usize,
    /// Workers that get a copy ahead of demand now.
    #[serde(skip_serializing_if = "Option::is_none")]
    copies_on_the_way: Option<u32>,
}

#[derive(Serialize)]
struct Disaggregation {
    /// The worker that prefills; `null` if it is the worker that decodes.
    prefill: Option<String>,
    /// Cost with prefill and decode on one worker, in seconds.
    aggregated_s: f64,
    /// Cost with prefill and decode on two workers, in seconds.
    disaggregated_s: f64,
}

#[derive(Serialize)]
struct Considered {
    worker: String,
    role: String,
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    composed: Option<Composed>,
    cost_s: f64,
    /// The cost by term, in seconds.
    terms_s: BTreeMap<&'static str, f64>,
    /// Number of leading prompt blocks that are cached, by tier.
    cached_blocks: BTreeMap<&'static str, u32>,
    uncached_tokens: u64,
    /// Why the view of the worker's cache is an estimate.
    #[serde(skip_serializing_if = "Option::is_none")]
    index: Option<&'static str>,
}

/// How a composed policy scores a worker.
#[derive(Serialize)]
struct Composed {
    score: f64,
    /// The score by term, each multiplied by its weight.
    scores: BTreeMap<Term, f64>,
    /// The filters that the worker passes.
    passes: Vec<Filter>,
}

impl Composed {
    fn of(composition: &Composition, row: &ScoredWorker<'_>) -> Self {
        let features = row.features();
        let mut scores = BTreeMap::new();
        for (term, score) in composition.scores(&features) {
            *scores.entry(term).or_default() += score;
        }
        for score in scores.values_mut() {
            *score = round(*score);
        }
        let bits = composition.passes(&features);
        let passes = composition.filter.iter().enumerate().filter(|(at, _)| bits >> at & 1 == 1);
        Self { score: round(composition.score(&features)), scores, passes: passes.map(|(_, filter)| *filter).collect() }
    }
}

fn considered(row: &ScoredWorker<'_>, policy: &Policy, tokens: PromptTokens) -> Considered {
    let cost = row.cost();
    let Cost { queue, memory_wait, prefill, onboard, tier_queue, kv_transfer, decode, decode_stall, .. } = cost;
    let terms = [
        ("queue", queue),
        ("memory_wait", memory_wait),
        ("batch_wait", cost.batch_wait),
        ("prefill", prefill),
        ("onboard", onboard),
        ("tier_queue", tier_queue),
        ("kv_transfer", kv_transfer),
        ("decode", decode),
        ("decode_slowdown", cost.decode_slowdown),
        ("decode_stall", decode_stall),
        ("queue_externality", cost.queue_externality),
        ("shared_device", cost.shared_device),
        ("eviction", cost.eviction),
        ("replication", cost.replication),
    ];
    Considered {
        worker: row.worker().id().to_string(),
        role: row.entry.role.to_string(),
        composed: match policy {
            Policy::Composed(composition) => Some(Composed::of(composition, row)),
            _ => None,
        },
        cost_s: round(cost.total()),
        terms_s: terms
            .into_iter()
            .map(|(name, term)| (name, round(term)))
            .filter(|(_, term)| term.abs() > 0.0)
            .collect(),
        cached_blocks: row.held.by_level().map(|(level, blocks)| (level.name(), blocks)).collect(),
        uncached_tokens: row.uncached(),
        index: row.entry.remark(tokens),
    }
}

/// To microseconds.
fn round(seconds: f64) -> f64 {
    (seconds * 1e6).round() / 1e6
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde asks with a reference")]
fn is_zero(count: &usize) -> bool {
    *count == 0
}
