//! Finds the candidates that can be chosen without the cost of every worker.
//!
//! A lower bound of a cost takes a few numbers of the worker and of the prefix that it has cached. The two workers with
//! the lowest bounds are scored first, then each one whose bound is not above the costs that matter: those that tie
//! with the lowest one, and the second lowest one, which tells the margin of the choice. The service times of all
//! others are not read. The selection among those that were scored is the selection among all.
//!
//! Not for what reads more than costs: the other policies, targets of a request, and prefill workers.

use super::{DecisionContext, PlacementRequest, candidate};
use crate::fleet::WorkerEntry;
use crate::load::{LeastTimes, PromptArrivals};
use crate::policy::composition::Policy;
use crate::policy::cost::RemainingWork;
use crate::policy::inputs::Eligibility;
use crate::policy::replication::Replication;
use crate::policy::select::{Candidate, SelectionContext, tie_limit};
use worker::engine::Work;
use worker::plane::Role;

/// Buffers of the search.
#[derive(Default)]
pub(super) struct Shortlist {
    works: Vec<LeastWork>,
    /// Of each candidate: the lower bound, and the index of the entry.
    bounds: Vec<(f64, u32)>,
}

/// What the bound of a cost reads of the work that is left.
#[derive(Clone, Copy)]
struct LeastWork {
    /// Seconds to compute it on an average worker, or tokens before prompts were measured.
    compute: f64,
    /// Share of it that a further copy of the shared prefix cannot save.
    unshared: f64,
}

/// What the bound of a cost reads of the request, the same for all workers.
struct LeastCost {
    is_measured: bool,
    /// Rate at which further prompts arrive.
    arrivals: PromptArrivals,
    /// Weight of other sequences.
    others_delay: f64,
    /// Seconds of the request's own decode steps on an idle average worker, by their weight.
    own_steps: f64,
    /// The most that a further copy of the shared prefix saves.
    saved: f64,
}

impl LeastCost {
    /// A lower bound of [`Cost::total`](super::Cost::total), but for the rounding of these operations.
    #[inline]
    fn bound(&self, work: &LeastWork, times: &LeastTimes) -> f64 {
        let compute = times.compute(work.compute, self.is_measured);
        // Prefill, and the delay of sequences and of later prompts by it.
        let prompts = times.prompts() + self.arrivals.behind(times.queue(), compute);
        let caused = compute * (1.0 + self.others_delay * times.sequences() + prompts);
        let caused = (caused - self.saved).max(caused * work.unshared);
        times.queue() + caused - self.own_steps * times.step_gain()
    }
}

impl DecisionContext<'_> {
    /// Whether the costs of a few workers decide.
    pub(super) fn may_shortlist(&self, request: &PlacementRequest<'_>, selection: SelectionContext) -> bool {
        let is_by_cost = match &self.tuning.policy {
            Policy::Kv => true,
            Policy::Session => selection.session.is_none(),
            _ => false,
        };
        let pricing = &self.pricing;
        is_by_cost
            && !matches!(request.work, Work::Prefill)
            && request.within.is_none()
            && pricing.others_delay >= 0.0
            && pricing.own_steps >= 0.0
    }

    /// Scores the workers that can be chosen. Returns the number of all candidates; `None` if there is none, or if no
    /// cost is finite.
    pub(super) fn shortlist(&self, scratch: &mut Shortlist, into: &mut Vec<Candidate>) -> Option<usize> {
        let Shortlist { works, bounds } = scratch;
        works.clear();
        works.extend(self.remaining.iter().map(LeastWork::of));
        let least = self.least_cost()?;
        let bound = |(at, (entry, times)): (usize, (&WorkerEntry, &LeastTimes))| {
            (least.bound(&works[self.work_at(entry)], times), at as u32)
        };
        bounds.clear();
        let all = self.entries.iter().zip(self.fleet.least_times()).enumerate();
        if self.fleet.are_all_eligible() && !self.fleet.pool().has_prefill_workers() {
            bounds.extend(all.map(bound));
        } else {
            let is_candidate = |at: usize, entry: &WorkerEntry| {
                let eligibility = self.fleet.eligibility(entry, &self.fleet.snapshots()[at]);
                entry.role != Role::Prefill && eligibility == Eligibility::Eligible
            };
            bounds.extend(all.filter(|(at, (entry, _))| is_candidate(*at, entry)).map(bound));
        }
        let score = |nth: usize, at: u32| {
            let (entry, snapshot) = (&self.entries[at as usize], &self.fleet.snapshots()[at as usize]);
            let cost = self.aggregated(at as usize, entry, self.work(entry), snapshot);
            Candidate { nth: nth as u32, ..candidate(at as usize, entry, snapshot, &cost) }
        };
        score_lowest(bounds, score, into).then_some(bounds.len())
    }

    fn least_cost(&self) -> Option<LeastCost> {
        let (pricing, (prompt, _)) = (&self.pricing, self.prompts.first()?);
        let own_context = prompt.tokens as f64 + prompt.output_tokens / 2.0;
        let step = pricing.step.seconds(1.0, own_context);
        Some(LeastCost {
            is_measured: pricing.prefill.is_some(),
            arrivals: pricing.arrivals,
            others_delay: pricing.others_delay,
            // On a worker that is full, every step counts.
            own_steps: step * (pricing.own_steps + prompt.output_tokens),
            saved: self.replication.as_ref().map_or(0.0, Replication::max_saved),
        })
    }
}

impl LeastWork {
    fn of(work: &RemainingWork) -> Self {
        Self { compute: work.average_compute(), unshared: 1.0 - work.shared.max(0.0) }
    }
}

/// The two lowest costs so far.
struct LowestCosts {
    first: f64,
    second: f64,
}

impl LowestCosts {
    fn add(&mut self, cost: f64) {
        if cost < self.first {
            (self.first, self.second) = (cost, self.first);
        } else if cost < self.second {
            self.second = cost;
        }
    }

    /// No higher cost matters.
    fn limit(&self) -> f64 {
        tie_limit(self.first).max(self.second)
    }
}

/// Scores the candidates with the two lowest bounds, and all others that can be chosen or be the second lowest. Returns
/// whether any cost is finite.
fn score_lowest(bounds: &[(f64, u32)], score: impl Fn(usize, u32) -> Candidate, into: &mut Vec<Candidate>) -> bool {
    into.clear();
    let mut lowest = LowestCosts { first: f64::INFINITY, second: f64::INFINITY };
    let mut consider = |nth: usize| {
        let candidate = score(nth, bounds[nth].1);
        into.push(candidate);
        lowest.add(candidate.cost);
        lowest.limit()
    };
    let likely = lowest_two(bounds);
    let mut limit = likely.into_iter().flatten().fold(f64::INFINITY, |_, nth| consider(nth));
    for (nth, (bound, _)) in bounds.iter().enumerate() {
        if *bound > limit || likely.contains(&Some(nth)) {
            continue;
        }
        limit = consider(nth);
    }
    lowest.first.is_finite()
}

/// Indexes of the two lowest bounds.
fn lowest_two(bounds: &[(f64, u32)]) -> [Option<usize>; 2] {
    let mut lowest = LowestCosts { first: f64::INFINITY, second: f64::INFINITY };
    let (mut first, mut second) = (None, None);
    for (nth, (bound, _)) in bounds.iter().enumerate() {
        if *bound < lowest.second {
            if *bound < lowest.first {
                (first, second) = (Some(nth), first);
            } else {
                second = Some(nth);
            }
            lowest.add(*bound);
        }
    }
    [first, second]
}

#[cfg(test)]
mod tests;
