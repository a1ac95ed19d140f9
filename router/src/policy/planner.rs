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
//! **Advice** is the need in whole workers within a bound (`plan.rs`).
//!
//! **Pressure** of a role is need over workers; the pressure of a split is the larger of its two. A worker changes its
//! role when another split is better by a margin, has been for a while, and pressure is not low: an idle fleet does not
//! change. Workers with the role `both` are never changed.

mod plan;

pub(crate) use plan::Plan;
pub use plan::{Outlook, PlanStatus};

use crate::config::{Problem, Slo};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use units::HumanDuration;
use worker::plane::{Role, WorkerId};

/// Whether workers change between prefill and decode as traffic shifts.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Settings {
    /// Use of the plan. Default `recommend`: metrics show it, and workers keep their roles.
    pub mode: Mode,
    /// Maximum number of workers of a model that the plan asks for, prefill and decode together. Default none: twice
    /// the workers that there are.
    pub max_workers: Option<u32>,
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

/// Prompts that queue in front of the prefill workers.
struct PrefillQueue {
    /// Workers that the prompts keep busy.
    busy: f64,
    /// Seconds of a mean prompt.
    seconds: f64,
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

/// Targets where `[router.slo]` sets none, in seconds: readers notice a longer wait for the first token …
const DEFAULT_TTFT: f64 = 1.0;
/// … and 50 ms between tokens are faster than people read.
const DEFAULT_ITL: f64 = 0.05;
/// Planned utilization of a worker: targets are averages, and load varies.
const TARGET_UTILIZATION: f64 = 0.85;
/// Planned utilization when a prompt alone takes longer than its target: more workers cannot help, but it should seldom
/// queue.
const MAX_UTILIZATION: f64 = 0.7;
/// Upper bound of the need, where bisection ends: above any fleet.
const WORKERS_MAX: f64 = 10_000.0;
/// Accepted values of `max_workers`: at least one of each role.
const MAX_WORKERS: RangeInclusive<u32> = 2..=10_000;
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

impl Settings {
    /// Problems with the values.
    pub(crate) fn check(&self) -> Option<Problem> {
        Problem::unless_within("router.planner.max_workers", self.max_workers?, MAX_WORKERS)
    }
}

impl Targets {
    /// The configured targets, or the defaults.
    pub(crate) fn of(slo: &Slo) -> Self {
        let seconds = |target: HumanDuration| target.as_secs_f64();
        Self { ttft: slo.ttft.map_or(DEFAULT_TTFT, seconds), itl: slo.itl.map_or(DEFAULT_ITL, seconds) }
    }

    /// The target of the first token divided by that between tokens: a number of tokens.
    pub(crate) fn ratio(&self) -> f64 {
        self.ttft / self.itl
    }
}

impl Need {
    /// The number of workers that meets the targets.
    pub(crate) fn of(workload: &Workload, capacity: &Capacity, targets: &Targets) -> Self {
        Self {
            prefill: PrefillQueue::of(workload, capacity).need(targets.ttft),
            decode: decode(workload, capacity, targets.itl),
        }
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

impl PrefillQueue {
    fn of(workload: &Workload, capacity: &Capacity) -> Self {
        let busy = workload.prompt_tokens / capacity.prefill;
        if busy.is_nan() || busy <= 0.0 {
            return Self { busy: 0.0, seconds: 0.0 };
        }
        Self { busy, seconds: busy / workload.prompts.max(f64::MIN_POSITIVE) }
    }

    /// Mean wait in front of this many workers; infinite if they cannot keep up.
    fn wait(&self, workers: f64) -> f64 {
        let used = self.busy / workers;
        if used >= 1.0 {
            f64::INFINITY
        } else {
            self.seconds * used.powf((2.0 * (workers + 1.0)).sqrt() - 1.0) / (workers * (1.0 - used))
        }
    }

    /// Workers for which the mean time to first token stays within the target.
    fn need(&self, ttft: f64) -> f64 {
        if self.busy <= 0.0 {
            return 0.0;
        }
        let max_wait = ttft - self.seconds;
        if max_wait <= 0.0 {
            return (self.busy / MAX_UTILIZATION).min(WORKERS_MAX);
        }
        // The wait decreases with the number of workers, so bisection finds it; the fraction distinguishes splits.
        let (mut few, mut enough) = (self.busy, WORKERS_MAX);
        while enough - few > 0.01 {
            let middle = f64::midpoint(few, enough);
            *(if self.wait(middle) > max_wait { &mut few } else { &mut enough }) = middle;
        }
        enough
    }
}

/// Sequences that a worker decodes within the target, and that fit into its memory.
fn decode_batch(workload: &Workload, capacity: &Capacity, itl: f64) -> f64 {
    let slope = capacity.step_per_sequence.max(1e-9);
    // If even one sequence takes longer than the target, more workers cannot help. Then a step takes twice as long as
    // an empty one, which gives half of the highest throughput.
    let by_latency = if itl < capacity.step + slope { capacity.step / slope } else { (itl - capacity.step) / slope };
    let by_memory =
        if capacity.blocks > 0.0 { capacity.blocks / workload.sequence_blocks.max(1.0) } else { f64::INFINITY };
    by_latency.min(by_memory).max(1.0)
}

fn decode(workload: &Workload, capacity: &Capacity, itl: f64) -> f64 {
    let batch = decode_batch(workload, capacity, itl);
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
