//! What to load and how long to wait for it, so that a hit is never slower than a miss. Pure functions of values.
//!
//! ```text
//!    blocks   0 ──────── head ─────────────────── tail ──────── end
//!             │ loaded    │ computed, front to back │ loaded,     │
//!             │ first     │ ───────▶        ◀────── │ last first  │
//! ```
//!
//! To compute a block, attention needs all blocks before it; to load one, it needs none. So the engine computes forward
//! from the head while the tiers deliver backward from the end, until both meet: with a tier as fast as computing, this
//! takes half the time. [`plan`] divides the blocks by measured speeds; tiers without measurements are tried.
//! [`WaitBudget`] limits the cost of wrong estimates: before it computes, a request waits for at most a fixed base
//! time, and beyond it only as long as the blocks *that have arrived* saved. After that it waits for nothing: late
//! blocks are skipped, missing ones are computed.
//!
//! With a deadline, a request that computing alone would finish in time does not wait past its slack, and blocks that
//! would arrive after the deadline are not loaded.

use std::time::Duration;

/// Consecutive blocks from one tier.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(in crate::manager) struct TierRun {
    /// The index of the tier; runs of one tier share its bandwidth.
    pub(in crate::manager) tier: usize,
    /// Number of blocks.
    pub(in crate::manager) blocks: usize,
    /// The speed of the tier.
    pub(in crate::manager) speed: TierSpeed,
}

/// What is known of a tier's speed.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(in crate::manager) enum TierSpeed {
    /// No measurement, or only old ones: worth a try.
    Unmeasured,
    /// The measured speed.
    Measured(MeasuredSpeed),
    /// The tier did not answer the last requests: it is asked, but not waited for.
    Unresponsive,
}

/// The measured speed of a tier.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(in crate::manager) struct MeasuredSpeed {
    /// Seconds until the first block, without other loads.
    pub(in crate::manager) latency: f64,
    /// Seconds for each further block.
    pub(in crate::manager) seconds_per_block: f64,
    /// Number of blocks that other loads wait for; they are served first.
    pub(in crate::manager) queued: usize,
}

impl MeasuredSpeed {
    /// Seconds until the first block, with other loads.
    fn first(&self) -> f64 {
        self.latency + self.queued as f64 * self.seconds_per_block
    }

    /// Seconds until `blocks` blocks have arrived.
    fn seconds(&self, blocks: usize) -> f64 {
        if blocks == 0 { 0.0 } else { self.first() + (blocks - 1) as f64 * self.seconds_per_block }
    }
}

/// Which blocks to load, and how long to wait.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(in crate::manager) struct Plan {
    /// Number of leading blocks to load before anything is computed.
    pub(in crate::manager) head: usize,
    /// Number of blocks to load from the end, the last first, while those before them are computed.
    pub(in crate::manager) tail: usize,
    /// How long to wait for the head.
    pub(in crate::manager) budget: WaitBudget,
}

/// How long to wait before computing, depending on what has arrived.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(in crate::manager) struct WaitBudget {
    /// The wait while no block has arrived.
    pub(in crate::manager) base: Duration,
    /// The extension for each leading block that arrived: the computing time that it saved.
    pub(in crate::manager) per_block: Duration,
    /// The longest wait since the last arrival.
    pub(in crate::manager) idle_timeout: Duration,
}

impl WaitBudget {
    /// The longest wait while nothing arrives: what a hit may lose against a miss, once, when a tier turns out to hang.
    /// Most stores answer within it, and later blocks can still be loaded from the end.
    pub(in crate::manager) const BASE: Duration = Duration::from_millis(100);

    /// The base as a share of the computing time of the head, where that is more than [`WaitBudget::BASE`].
    const BASE_SHARE: f64 = 0.05;

    /// While the cost of computing is unknown: bounded, and enough to read a gigabyte from one SSD that keeps
    /// delivering.
    const UNKNOWN_COST: Self =
        Self { base: Duration::from_secs(2), per_block: Duration::ZERO, idle_timeout: Self::BASE };

    /// For `head` blocks of `runs` that take `cost` seconds each to compute, with `slack` seconds to spare.
    fn of(runs: &[TierRun], head: usize, cost: f64, slack: f64) -> Self {
        let mut base = Self::BASE.max(duration(head as f64 * cost * Self::BASE_SHARE));
        if slack >= 0.0 {
            // A wait must not make a request late that computing alone would finish in time.
            base = base.min(duration(slack));
        }
        let mut left = head;
        let mut idle_timeout = Duration::ZERO;
        for run in runs {
            if left == 0 {
                break;
            }
            left = left.saturating_sub(run.blocks);
            idle_timeout = idle_timeout.max(match run.speed {
                // Four times the usual interval, and two scheduling delays.
                TierSpeed::Measured(measured) => {
                    duration(4.0 * measured.first().max(measured.seconds_per_block) + 2.0 * NEGLIGIBLE_SECONDS)
                }
                TierSpeed::Unmeasured | TierSpeed::Unresponsive => Self::BASE,
            });
        }
        Self { base, per_block: duration(cost), idle_timeout: idle_timeout.min(base) }
    }

    /// The wait since its start, when the first `arrived` blocks are in G1, the last of them `last_arrival` after the
    /// start.
    pub(in crate::manager) fn limit(&self, arrived: usize, last_arrival: Duration) -> Duration {
        let gained = self.per_block.saturating_mul(arrived.try_into().unwrap_or(u32::MAX));
        self.base.saturating_add(gained).min(last_arrival.saturating_add(self.idle_timeout))
    }
}

/// Seconds of loading that count as none: within scheduling delays, a tier that is a little slower than computing is
/// still used, since loading leaves the processor to other requests.
const NEGLIGIBLE_SECONDS: f64 = 0.02;

/// Loading from the end must save this share of the time: computing meanwhile takes steps from other requests.
const MIN_GAIN: f64 = 0.1;

/// Divides the blocks that tiers hold. `recompute`: seconds to compute one block, when known. `left`: seconds until the
/// last of them must be in G1, when there is a deadline.
pub(in crate::manager) fn plan(runs: &[TierRun], recompute: Option<f64>, left: Option<f64>) -> Plan {
    let total = runs.iter().map(|run| run.blocks).sum::<usize>();
    // Blocks after those of an unresponsive tier are of no use before the engine has computed the latter.
    let trusted = runs.iter().take_while(|run| run.speed != TierSpeed::Unresponsive).map(|s| s.blocks).sum();
    let left = left.unwrap_or(f64::INFINITY);
    let Some(cost) = recompute.filter(|cost| cost.is_finite() && *cost >= 0.0) else {
        return within_deadline(runs, trusted, total - trusted, left, WaitBudget::UNKNOWN_COST);
    };
    // Seconds that computing alone has to spare. Without slack no load counts as free.
    let slack = left - total as f64 * cost;
    let free = slack.clamp(0.0, NEGLIGIBLE_SECONDS);
    let candidates = || head_candidates(runs, free).filter(|head| *head <= trusted);
    let by =
        |seconds: &dyn Fn(usize) -> f64| candidates().min_by(|a, b| seconds(*a).total_cmp(&seconds(*b))).unwrap_or(0);
    let beyond = |head| (load_seconds(runs, head, 0) - free).max(0.0) + (total - head) as f64 * cost;
    let alone = by(&beyond);
    // Requests to an unresponsive tier cost nothing: the engine computes meanwhile, and skips blocks that arrive.
    let (mut head, mut tail) = (alone, if cost > 0.0 { total - alone.max(trusted) } else { 0 });
    if trusted == total {
        let met = |head| finish_seconds(runs, head, meeting_point(runs, head, cost), cost);
        let (both, one_end) = (by(&met), finish_seconds(runs, alone, 0, cost));
        let gain = one_end - met(both);
        if gain > 0.0 && one_end > left || gain > NEGLIGIBLE_SECONDS && gain > MIN_GAIN * one_end {
            (head, tail) = (both, meeting_point(runs, both, cost));
        }
    }
    within_deadline(runs, head, tail, left, WaitBudget::of(runs, head, cost, slack))
}

/// Limits a plan to blocks that the tiers deliver within `left` seconds: later ones would be of no use and delay
/// others.
fn within_deadline(runs: &[TierRun], head: usize, tail: usize, left: f64, budget: WaitBudget) -> Plan {
    let head = largest_fitting(head, |head| load_seconds(runs, head, 0) <= left);
    Plan { head, tail: largest_fitting(tail, |tail| load_seconds(runs, head, tail) <= left), budget }
}

/// The largest tail for which computing the blocks before it takes at least as long as loading it.
fn meeting_point(runs: &[TierRun], head: usize, cost: f64) -> usize {
    let total = runs.iter().map(|run| run.blocks).sum::<usize>();
    // A longer tail takes longer to load and leaves less to compute, so the two times cross once.
    largest_fitting(total - head, |tail| {
        let computed = load_seconds(runs, head, 0) + (total - head - tail) as f64 * cost;
        computed >= load_seconds(runs, head, tail)
    })
}

/// The largest number up to `limit` that fits, when all smaller ones fit too; 0 when none does.
fn largest_fitting(limit: usize, fits: impl Fn(usize) -> bool) -> usize {
    let (mut least, mut most) = (0, limit);
    while least < most {
        let middle = least.midpoint(most + 1);
        if fits(middle) {
            least = middle;
        } else {
            most = middle - 1;
        }
    }
    least
}

/// Seconds until all blocks are in G1: the head loaded, then the middle computed; and the tail loaded.
fn finish_seconds(runs: &[TierRun], head: usize, tail: usize, cost: f64) -> f64 {
    let total = runs.iter().map(|run| run.blocks).sum::<usize>();
    let computed = load_seconds(runs, head, 0) + (total - head - tail) as f64 * cost;
    computed.max(load_seconds(runs, head, tail))
}

/// Candidates for the head with the least time. Within a run, time is convex and bends only where the run's tier begins
/// to take longer than all others (and longer than `free`): so the minimum is at a bend, or at the end of a run.
fn head_candidates(runs: &[TierRun], free: f64) -> impl Iterator<Item = usize> {
    let mut candidates = Vec::with_capacity(3 * runs.len() + 1);
    let mut before = 0;
    candidates.push(before);
    for run in runs {
        if let TierSpeed::Measured(measured) = run.speed
            && measured.seconds_per_block > 0.0
        {
            let requested = blocks_from(runs, run.tier, before, 0);
            let hidden = load_seconds(runs, before, 0).max(free)
                - if requested == 0 { measured.first() } else { measured.seconds(requested) };
            // The tier's first block costs its latency alone.
            let first = f64::from(u8::from(requested == 0));
            let bend = (hidden / measured.seconds_per_block).floor() + first;
            // The time is piecewise linear, and its bend is between two blocks.
            candidates.extend([bend, bend + 1.0].map(|at| before + at.clamp(1.0, run.blocks as f64) as usize));
        }
        before += run.blocks;
        candidates.push(before);
    }
    candidates.into_iter()
}

/// Seconds until the first `head` and the last `tail` blocks are loaded: the tiers work at the same time.
fn load_seconds(runs: &[TierRun], head: usize, tail: usize) -> f64 {
    let times = runs.iter().map(|run| match run.speed {
        TierSpeed::Measured(measured) => measured.seconds(blocks_from(runs, run.tier, head, tail)),
        // Not measured: assumed to take no time, so that the tier is tried; the wait budget limits the cost.
        TierSpeed::Unmeasured | TierSpeed::Unresponsive => 0.0,
    });
    times.fold(0.0, f64::max)
}

/// How many of the first `head` and the last `tail` blocks come from `tier`.
fn blocks_from(runs: &[TierRun], tier: usize, head: usize, tail: usize) -> usize {
    let total: usize = runs.iter().map(|run| run.blocks).sum();
    let mut start = 0;
    let mut requested = 0;
    for run in runs {
        let end = start + run.blocks;
        if run.tier == tier {
            requested += end.min(head).saturating_sub(start) + end.saturating_sub(start.max(total - tail));
        }
        start = end;
    }
    requested
}

fn duration(seconds: f64) -> Duration {
    Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX)
}

#[cfg(test)]
mod tests;
