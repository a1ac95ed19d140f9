//! A decision as one line of JSON, short enough for a header: who was considered, what each would have cost, and why.

use crate::cost::Cost;
use crate::decide::{Decision, Row};
use crate::disaggregate::Split;
use crate::policy::{Composition, Filter, Policy, Term};
use crate::select::Candidate;
use serde::Serialize;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use worker::plane::WorkerId;

/// Workers shown: whoever asks wants to know the next best, and not the whole fleet …
const SHOWN: usize = 8;
/// … and fewer of those of whom there is much to tell: what a proxy takes of a server's headers is often 4 KiB, all together.
const BYTES_MAX: usize = 3_500;

/// Spells out a decision. Times are seconds, terms of less than a microsecond are left out.
pub(crate) fn line(policy: &Policy, decision: &Decision<'_>, tried: &[WorkerId]) -> Arc<str> {
    let Decision { candidates, chosen: row, why, prefill, .. } = decision;
    // The chosen one first, then by cost: those at the end may fall off.
    let mut order: Vec<&Candidate> = candidates.iter().collect();
    order.sort_by(|a, b| {
        let not = |candidate: &Candidate| candidate.seat as usize != row.at;
        not(a).cmp(&not(b)).then(a.cost.total_cmp(&b.cost))
    });
    order.truncate(SHOWN);
    let mut explanation = Explanation {
        policy: policy.name(),
        chosen: row.member().id().to_string(),
        why: why.name(),
        prompt_tokens: row.prompt.tokens,
        cached_tokens: row.cached(),
        tried: tried.iter().map(ToString::to_string).collect(),
        disaggregation: prefill.as_ref().zip(row.apart).map(|(prefill, apart)| Disaggregation {
            prefill: (row.split == Split::Apart).then(|| prefill.member().id().to_string()),
            together_s: round(row.together.total()),
            apart_s: round(apart.total()),
        }),
        prefill_worker: prefill.as_ref().map(|row| considered(row, policy)),
        candidates: order
            .iter()
            .map(|candidate| decision.row(candidate.seat))
            .map(|row| considered(&row, policy))
            .collect(),
        not_shown: candidates.len().saturating_sub(SHOWN),
    };
    loop {
        // Strings and numbers in plain structs: there is nothing in them that JSON could not say.
        let line = serde_json::to_string(&explanation).unwrap_or_default();
        if line.len() <= BYTES_MAX || explanation.candidates.len() < 2 {
            return line.into();
        }
        explanation.candidates.pop();
        explanation.not_shown += 1;
    }
}

/// Adds to an explanation how long the request waited before it went, and what there was too much of.
pub(crate) fn waited(line: &str, waited: Duration, on: &str) -> Arc<str> {
    let open = line.strip_suffix('}').unwrap_or(line);
    format!("{open},\"waited_s\":{},\"waited_on\":\"{on}\"}}", round(waited.as_secs_f64())).into()
}

#[derive(Serialize)]
struct Explanation {
    policy: &'static str,
    /// The worker that decodes.
    chosen: String,
    why: &'static str,
    prompt_tokens: u64,
    /// Expected to be cached where the request decodes.
    cached_tokens: u64,
    /// Workers that did not serve it before.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tried: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    disaggregation: Option<Disaggregation>,
    /// The best prefill worker, used or not.
    #[serde(skip_serializing_if = "Option::is_none")]
    prefill_worker: Option<Considered>,
    candidates: Vec<Considered>,
    #[serde(skip_serializing_if = "is_zero")]
    not_shown: usize,
}

#[derive(Serialize)]
struct Disaggregation {
    /// The worker that prefills; `null`: the one that decodes.
    prefill: Option<String>,
    together_s: f64,
    apart_s: f64,
}

#[derive(Serialize)]
struct Considered {
    worker: String,
    phase: String,
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    composed: Option<Composed>,
    cost_s: f64,
    /// The cost, term by term.
    terms_s: BTreeMap<&'static str, f64>,
    /// Leading blocks within reach, by tier.
    cached_blocks: BTreeMap<&'static str, u32>,
    uncached_tokens: u64,
    /// Why what is known of its cache is a guess.
    #[serde(skip_serializing_if = "Option::is_none")]
    index: Option<&'static str>,
}

/// What a composition makes of a worker.
#[derive(Serialize)]
struct Composed {
    score: f64,
    /// The score, term by term, each weighed.
    scores: BTreeMap<Term, f64>,
    /// The filters that the worker passes.
    passes: Vec<Filter>,
}

impl Composed {
    fn of(composition: &Composition, row: &Row<'_>) -> Self {
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

fn considered(row: &Row<'_>, policy: &Policy) -> Considered {
    let cost = row.cost();
    let Cost { queue, room, prefill, onboard, backlog, handover, decode, stall, crowd } = cost;
    let terms = [
        ("queue", queue),
        ("room", room),
        ("prefill", prefill),
        ("onboard", onboard),
        ("backlog", backlog),
        ("handover", handover),
        ("decode", decode),
        ("stall", stall),
        ("crowd", crowd),
    ];
    Considered {
        worker: row.member().id().to_string(),
        phase: row.seat.phase.to_string(),
        composed: match policy {
            Policy::Composed(composition) => Some(Composed::of(composition, row)),
            _ => None,
        },
        cost_s: round(cost.total()),
        terms_s: terms.into_iter().map(|(name, term)| (name, round(term))).filter(|(_, term)| *term > 0.0).collect(),
        cached_blocks: row.held.by_level().map(|(level, blocks)| (level.name(), blocks)).collect(),
        uncached_tokens: row.uncached(),
        index: row.member().mode.remark(),
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
