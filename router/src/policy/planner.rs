//! Planner of roles: how many workers should prefill and decode, and which one changes its role. Pure: measurements and
//! time in, plan out.
//!
//! ```text
//!   load, speeds, targets ─▶ need (workers of each role that meet the targets) ─▶ counts, for an outer autoscaler
//!                              └─▶ the split of the workers with the least pressure ─▶ one role change at a time
//! ```
//! **Need.** Prefill is a queue: the least `c` workers for which a prompt's own time and Sakasegawa's approximation of
//! the wait in an M/M/c queue (1977), `s·ρ^(√(2(c+1)) − 1) / (c(1 − ρ))`, stay within the target. Decode is a batch: a
//! step of `n` sequences takes `base + slope·n`, so a worker carries as many as fit into the target between tokens, or
//! into its memory.
//!
//! **Pressure** of a role is need over workers; the pressure of a split is the larger of its two. A worker changes its
//! role when another split is better by a margin, has been for a while, and pressure is not low: an idle fleet does not
//! change. Workers with the role `both` are never changed.

use crate::problem::Problem;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::time::Duration;
use units::HumanDuration;
use worker::plane::{Role, WorkerId};

/// Accepted range of targets: from less than any decode step to a day.
const TARGETS: RangeInclusive<HumanDuration> =
    HumanDuration(Duration::from_micros(100))..=HumanDuration(Duration::from_hours(24));

/// Whether workers change between prefill and decode as traffic shifts, and their latency targets.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Settings {
    /// Use of the plan. Default `recommend`: metrics show it, and workers keep their roles.
    pub mode: Mode,
    /// Target of the mean time to first token, for the number of prefill workers. Default 1 s: readers notice longer
    /// waits.
    pub ttft: HumanDuration,
    /// Target of the time between tokens, for the number of decode workers. Default 50 ms: faster than people read.
    pub itl: HumanDuration,
}

/// Use of the plan.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Mode {
    /// There is no plan.
    Off,
    /// Metrics show the plan.
    #[default]
    Recommend,
    /// Workers change their role as planned.
    Apply,
}

/// Latency targets in seconds.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) struct Targets {
    /// Mean time to first token.
    pub(crate) ttft: f64,
    /// Time between tokens.
    pub(crate) itl: f64,
}

/// Measured workload of a model.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub(crate) struct Workload {
    /// Prompts with tokens to compute, per second.
    pub(crate) prompts: f64,
    /// Prompt tokens that are not cached, per second.
    pub(crate) prompt_tokens: f64,
    /// Generated tokens per second.
    pub(crate) output_tokens: f64,
    /// Sequences that decode or wait to decode.
    pub(crate) sequences: f64,
    /// Mean blocks per sequence.
    pub(crate) sequence_blocks: f64,
}

/// Measured capacity of an average worker.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) struct Capacity {
    /// Prompt tokens per second.
    pub(crate) prefill: f64,
    /// Seconds of a decode step without sequences.
    pub(crate) step: f64,
    /// Seconds that each sequence adds to a step.
    pub(crate) step_per_sequence: f64,
    /// G1 blocks per worker.
    pub(crate) blocks: f64,
}

/// A worker as the planner sees it.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) struct PlannedWorker {
    pub(crate) id: WorkerId,
    pub(crate) role: Role,
    /// Requests on the worker.
    pub(crate) requests: u64,
}

/// Number of workers needed in each role.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub(crate) struct Need {
    pub(crate) prefill: f64,
    pub(crate) decode: f64,
}

/// Change of one worker's role.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct RoleChange {
    pub(crate) worker: WorkerId,
    pub(crate) to: Role,
}

/// Planner with the state that limits the rate of changes.
#[derive(Debug, Default)]
pub(crate) struct Planner {
    /// The role that should gain a worker, and since when, in seconds.
    pending: Option<(Role, f64)>,
    last: Option<f64>,
    /// Time of each worker's last change, in seconds.
    changes: BTreeMap<WorkerId, f64>,
}

/// Planned utilization of a worker: targets are averages, and load varies.
const TARGET_UTILIZATION: f64 = 0.85;
/// Planned utilization when a prompt alone takes longer than its target: more workers cannot help, but it should seldom
/// queue.
const MAX_UTILIZATION: f64 = 0.7;
/// Upper bound of the plan.
const WORKERS_MAX: f64 = 10_000.0;
/// Below this pressure both roles have spare capacity, and a change costs more than it brings.
const LOW_PRESSURE: f64 = 0.6;
/// Factor by which another split must be better: estimates are not more accurate than that.
const MARGIN: f64 = 1.2;
/// Seconds for which another split must have been better: longer than a burst, shorter than users accept.
const HOLD_SECONDS: f64 = 15.0;
/// Seconds between two changes: the effect of the first must be measured before the second.
const MIN_INTERVAL: f64 = 10.0;
/// Seconds for which a worker keeps its new role.
const COOLDOWN: f64 = 60.0;

impl Default for Settings {
    fn default() -> Self {
        Self { mode: Mode::Recommend, ttft: HumanDuration::secs(1), itl: HumanDuration::millis(50) }
    }
}

impl Settings {
    /// What is wrong with the values, naming the key.
    pub(crate) fn check(&self) -> Vec<Problem> {
        let keys = [("router.planner.ttft", self.ttft), ("router.planner.itl", self.itl)];
        keys.into_iter().filter_map(|(key, target)| Problem::unless_within(key, target, TARGETS)).collect()
    }
}

impl Need {
    /// The number of workers that meets the targets.
    pub(crate) fn of(workload: &Workload, capacity: &Capacity, targets: &Targets) -> Self {
        Self { prefill: prefill(workload, capacity, targets.ttft), decode: decode(workload, capacity, targets.itl) }
    }

    /// As whole workers, at least one of each.
    pub(crate) fn whole(&self) -> (u64, u64) {
        let whole = |need: f64| need.ceil().clamp(1.0, WORKERS_MAX) as u64;
        (whole(self.prefill), whole(self.decode))
    }

    /// Pressure with `prefill_workers` of `all` workers for prefill and the others for decode.
    fn pressure(&self, prefill_workers: usize, all: usize) -> f64 {
        (self.prefill / prefill_workers as f64).max(self.decode / (all - prefill_workers) as f64)
    }

    /// How many of `all` should prefill: the least pressure, and among equals the nearest to `now`.
    fn split(&self, all: usize, now: usize) -> usize {
        let better = |a: &usize, b: &usize| {
            let pressure = self.pressure(*a, all).total_cmp(&self.pressure(*b, all));
            pressure.then(a.abs_diff(now).cmp(&b.abs_diff(now)))
        };
        (1..all).min_by(better).unwrap_or(now)
    }
}

fn prefill(workload: &Workload, capacity: &Capacity, ttft: f64) -> f64 {
    let busy = workload.prompt_tokens / capacity.prefill;
    if busy.is_nan() || busy <= 0.0 {
        return 0.0;
    }
    let prefill_seconds = workload.prompt_tokens / workload.prompts.max(f64::MIN_POSITIVE) / capacity.prefill;
    let max_wait = ttft - prefill_seconds;
    if max_wait <= 0.0 {
        return (busy / MAX_UTILIZATION).min(WORKERS_MAX);
    }
    let wait = |workers: f64| {
        let used = busy / workers;
        if used >= 1.0 {
            f64::INFINITY
        } else {
            prefill_seconds * used.powf((2.0 * (workers + 1.0)).sqrt() - 1.0) / (workers * (1.0 - used))
        }
    };
    // The wait decreases with the number of workers, so bisection finds it; the fraction distinguishes splits.
    let (mut few, mut enough) = (busy, WORKERS_MAX);
    while enough - few > 0.01 {
        let middle = f64::midpoint(few, enough);
        *(if wait(middle) > max_wait { &mut few } else { &mut enough }) = middle;
    }
    enough
}

fn decode(workload: &Workload, capacity: &Capacity, itl: f64) -> f64 {
    let by_latency = (itl - capacity.step) / capacity.step_per_sequence.max(1e-9);
    let by_memory =
        if capacity.blocks > 0.0 { capacity.blocks / workload.sequence_blocks.max(1.0) } else { f64::INFINITY };
    let batch = by_latency.min(by_memory).max(1.0);
    let step = capacity.step + capacity.step_per_sequence * batch;
    // By arrival rate and by present sequences: a backlog is demand, too.
    let by_rate = workload.output_tokens * step / batch;
    let by_backlog = workload.sequences / batch;
    let need = by_rate.max(by_backlog) / TARGET_UTILIZATION;
    if need.is_finite() { need.min(WORKERS_MAX) } else { 0.0 }
}

impl Planner {
    /// The next role change, if one is due. `now`: seconds on any monotonic clock.
    pub(crate) fn step(&mut self, now: f64, need: &Need, workers: &[PlannedWorker]) -> Option<RoleChange> {
        self.changes.retain(|id, at| now - *at < COOLDOWN && workers.iter().any(|worker| worker.id == *id));
        let candidates: Vec<&PlannedWorker> = workers.iter().filter(|worker| worker.role != Role::Both).collect();
        let prefill_workers = candidates.iter().filter(|worker| worker.role == Role::Prefill).count();
        let to = direction(need, prefill_workers, candidates.len());
        self.pending = to.map(|to| self.pending.filter(|(before, _)| *before == to).unwrap_or((to, now)));
        let (to, since) = self.pending?;
        if now - since < HOLD_SECONDS || self.last.is_some_and(|last| now - last < MIN_INTERVAL) {
            return None;
        }
        let from = candidates.into_iter().filter(|worker| worker.role != to && !self.changes.contains_key(&worker.id));
        let worker = from.min_by_key(|worker| (worker.requests, worker.id))?.id;
        self.last = Some(now);
        self.changes.insert(worker, now);
        Some(RoleChange { worker, to })
    }
}

/// The role that should gain a worker.
fn direction(need: &Need, prefill_workers: usize, all: usize) -> Option<Role> {
    if all < 2 {
        return None;
    }
    // A fleet started without one role has infinite pressure there, if it is needed at all.
    let now = if prefill_workers == 0 || prefill_workers == all {
        f64::INFINITY
    } else {
        need.pressure(prefill_workers, all)
    };
    if now < LOW_PRESSURE || need.prefill + need.decode <= 0.0 {
        return None;
    }
    let best = need.split(all, prefill_workers);
    let better = now > MARGIN * need.pressure(best, all);
    (better && best != prefill_workers).then_some(if best > prefill_workers { Role::Prefill } else { Role::Decode })
}

#[cfg(test)]
mod tests;
