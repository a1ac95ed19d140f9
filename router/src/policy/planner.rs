//! Which workers prefill and which decode, and how many of each there ought to be. Pure: what was measured in, what
//! ought to be out; the clock is passed in.
//!
//! ```text
//!   load, speeds, targets ─▶ need (workers of each phase that meet the targets) ─▶ counts, for an outer autoscaler
//!                              └─▶ the split of the workers that are there with the least pressure ─▶ one flip at a time
//! ```
//! **Need.** Prefill is a queue: the least `c` workers for which a prompt's own time and Sakasegawa's approximation of the wait
//! in an M/M/c queue (1977), `s·ρ^(√(2(c+1)) − 1) / (c(1 − ρ))`, stay within the target. Decode is a batch: a step of `n`
//! sequences takes `base + slope·n`, so a worker carries as many as fit into the target between tokens, or into its memory.
//!
//! **Pressure** of a phase is need over workers; a split is as bad as the worse of its two. A worker changes sides when that
//! is better by a margin, has been for a while, and there is pressure at all: an idle fleet is left alone. Workers of phase
//! `both` do what comes and are nobody's to move.

use crate::problem::Problem;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::time::Duration;
use units::HumanDuration;
use worker::plane::{Phase, WorkerId};

/// From less than any step takes to a day.
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

/// What users are promised, seconds.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) struct Targets {
    /// To the first token, on average.
    pub(crate) ttft: f64,
    /// From token to token.
    pub(crate) itl: f64,
}

/// What a model's requests ask of its workers, measured.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub(crate) struct Demand {
    /// Prompts that have something to compute, per second.
    pub(crate) prompts: f64,
    /// Tokens of them that are not cached, per second.
    pub(crate) prompt_tokens: f64,
    /// Generated tokens per second.
    pub(crate) output_tokens: f64,
    /// Sequences that decode, or wait to.
    pub(crate) sequences: f64,
    /// Blocks that one sequence takes.
    pub(crate) sequence_blocks: f64,
}

/// What a typical worker can do, measured.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) struct Capacity {
    /// Prompt tokens per second.
    pub(crate) prefill: f64,
    /// Seconds of a decode step without sequences.
    pub(crate) step: f64,
    /// Seconds that each sequence adds.
    pub(crate) step_per_sequence: f64,
    /// G1 blocks.
    pub(crate) blocks: f64,
}

/// A worker, as far as its phase goes.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) struct Seat {
    pub(crate) id: WorkerId,
    pub(crate) phase: Phase,
    /// Requests that are on it.
    pub(crate) requests: u64,
}

/// How many workers of each phase; whole ones when they are to be started.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub(crate) struct Need {
    pub(crate) prefill: f64,
    pub(crate) decode: f64,
}

/// One worker's change of sides.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Flip {
    pub(crate) worker: WorkerId,
    pub(crate) to: Phase,
}

/// Decides, and remembers what keeps it from deciding too often.
#[derive(Debug, Default)]
pub(crate) struct Planner {
    /// Which way it has wanted to go, and since when.
    urge: Option<(Phase, f64)>,
    last: Option<f64>,
    /// When each worker changed sides.
    flips: BTreeMap<WorkerId, f64>,
}

/// Targets are averages, and load is not even: so much of what a worker could do is counted on.
const USED: f64 = 0.85;
/// A prompt that takes longer than its target alone cannot be helped by more workers; it shall at least seldom queue.
const BUSY_MAX: f64 = 0.7;
/// More workers than this are not asked for, whatever was measured.
const WORKERS_MAX: f64 = 10_000.0;
/// Below this pressure both phases have room, and changing sides costs more than it brings.
const EASY: f64 = 0.6;
/// Another split must be better by this factor: estimates are no better than that.
const MARGIN: f64 = 1.2;
/// Seconds that it must have been better: longer than a burst, shorter than a user's patience.
const HOLD: f64 = 15.0;
/// Seconds between two flips: what the first one changed must be seen first.
const GAP: f64 = 10.0;
/// Seconds that a worker keeps its new side.
const REST: f64 = 60.0;

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
    /// What meets the targets.
    pub(crate) fn of(demand: &Demand, capacity: &Capacity, targets: &Targets) -> Self {
        Self { prefill: prefill(demand, capacity, targets.ttft), decode: decode(demand, capacity, targets.itl) }
    }

    /// As whole workers, at least one of each.
    pub(crate) fn whole(&self) -> (u64, u64) {
        let whole = |need: f64| need.ceil().clamp(1.0, WORKERS_MAX) as u64;
        (whole(self.prefill), whole(self.decode))
    }

    /// How badly `prefills` of `all` workers, and the others for decode, do.
    fn pressure(&self, prefills: usize, all: usize) -> f64 {
        (self.prefill / prefills as f64).max(self.decode / (all - prefills) as f64)
    }

    /// How many of `all` should prefill: the least pressure, and of equals the nearest to `now`.
    fn split(&self, all: usize, now: usize) -> usize {
        let better = |a: &usize, b: &usize| {
            let pressure = self.pressure(*a, all).total_cmp(&self.pressure(*b, all));
            pressure.then(a.abs_diff(now).cmp(&b.abs_diff(now)))
        };
        (1..all).min_by(better).unwrap_or(now)
    }
}

fn prefill(demand: &Demand, capacity: &Capacity, ttft: f64) -> f64 {
    let busy = demand.prompt_tokens / capacity.prefill;
    if busy.is_nan() || busy <= 0.0 {
        return 0.0;
    }
    let own = demand.prompt_tokens / demand.prompts.max(f64::MIN_POSITIVE) / capacity.prefill;
    let patience = ttft - own;
    if patience <= 0.0 {
        return (busy / BUSY_MAX).min(WORKERS_MAX);
    }
    let wait = |workers: f64| {
        let used = busy / workers;
        if used >= 1.0 {
            f64::INFINITY
        } else {
            own * used.powf((2.0 * (workers + 1.0)).sqrt() - 1.0) / (workers * (1.0 - used))
        }
    };
    // The wait falls with every worker, so the least number can be found by halving; fractions tell splits apart.
    let (mut few, mut enough) = (busy, WORKERS_MAX);
    while enough - few > 0.01 {
        let middle = f64::midpoint(few, enough);
        *(if wait(middle) > patience { &mut few } else { &mut enough }) = middle;
    }
    enough
}

fn decode(demand: &Demand, capacity: &Capacity, itl: f64) -> f64 {
    let fit = (itl - capacity.step) / capacity.step_per_sequence.max(1e-9);
    let room = if capacity.blocks > 0.0 { capacity.blocks / demand.sequence_blocks.max(1.0) } else { f64::INFINITY };
    let carried = fit.min(room).max(1.0);
    let step = capacity.step + capacity.step_per_sequence * carried;
    // By what comes, and by what is there: a backlog is demand too.
    let coming = demand.output_tokens * step / carried;
    let here = demand.sequences / carried;
    let need = coming.max(here) / USED;
    if need.is_finite() { need.min(WORKERS_MAX) } else { 0.0 }
}

impl Planner {
    /// Who shall change sides now, if anybody. `now`: seconds on any clock that does not go back.
    pub(crate) fn step(&mut self, now: f64, need: &Need, seats: &[Seat]) -> Option<Flip> {
        self.flips.retain(|id, at| now - *at < REST && seats.iter().any(|seat| seat.id == *id));
        let movable: Vec<&Seat> = seats.iter().filter(|seat| seat.phase != Phase::Both).collect();
        let prefills = movable.iter().filter(|seat| seat.phase == Phase::Prefill).count();
        let to = direction(need, prefills, movable.len());
        self.urge = to.map(|to| self.urge.filter(|(before, _)| *before == to).unwrap_or((to, now)));
        let (to, since) = self.urge?;
        if now - since < HOLD || self.last.is_some_and(|last| now - last < GAP) {
            return None;
        }
        let from = movable.into_iter().filter(|seat| seat.phase != to && !self.flips.contains_key(&seat.id));
        let worker = from.min_by_key(|seat| (seat.requests, seat.id))?.id;
        self.last = Some(now);
        self.flips.insert(worker, now);
        Some(Flip { worker, to })
    }
}

/// The phase that ought to gain a worker.
fn direction(need: &Need, prefills: usize, all: usize) -> Option<Phase> {
    if all < 2 {
        return None;
    }
    // A fleet that somebody started without one phase has infinite pressure there, if it is needed at all.
    let now = if prefills == 0 || prefills == all { f64::INFINITY } else { need.pressure(prefills, all) };
    if now < EASY || need.prefill + need.decode <= 0.0 {
        return None;
    }
    let best = need.split(all, prefills);
    let better = now > MARGIN * need.pressure(best, all);
    (better && best != prefills).then_some(if best > prefills { Phase::Prefill } else { Phase::Decode })
}

#[cfg(test)]
mod tests;
