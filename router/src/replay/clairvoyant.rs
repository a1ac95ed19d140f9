//! What routing could achieve at best: an offline search that knows all arrivals and all output lengths.
//!
//! The search begins with an assignment of requests to workers that a policy has made, and improves it by coordinate
//! descent: for each request, in the order of arrival, it tries several workers. It simulates each of them alone for a
//! while, with and without the request, together with all requests that the assignment gives it in that time. The
//! request goes where the sum of costs grows least: costs of requests already there and of those to come included.
//!
//! The result is an assignment that exists, so the best one is at least as good; it is no proof that nothing better
//! exists. The workers must have the role `both` and no shared store, so that they do not depend on each other.

mod isolated;

#[cfg(test)]
mod tests;

use super::engine::Engine;
use super::options::{Options, PolicyUnderTest};
use super::results::{Histogram, RequestRecord, Results, RunOutcome, Slo};
use super::simulation::{RunError, Simulation};
use super::trace::{RequestSpec, Trace};
use isolated::{IsolatedWorker, Shared};
use std::collections::VecDeque;

/// What the search minimizes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Objective {
    /// The sum of all times to first token.
    FirstToken,
    /// The sum of their squares, which the latest ones dominate.
    LateFirstToken,
    /// The number of requests that miss the SLO; of equals the earlier first tokens.
    Misses,
}

const OBJECTIVES: [Objective; 3] = [Objective::FirstToken, Objective::LateFirstToken, Objective::Misses];

/// Virtual time for which a worker is simulated after a request arrives. Requests end, and queues below capacity drain,
/// within it.
const WINDOW_NS: u64 = 20_000_000_000;
/// Requests that arrive at the worker in that time; further ones are left out.
const WINDOW_ARRIVALS: usize = 32;
/// Workers that are tried with the longest cached prefix, and with the least load, besides the one of the assignment.
const LONGEST_PREFIXES: usize = 2;
const LEAST_LOADED: usize = 2;

/// The best results found at a rate: of each time and of goodput the best of all policies and of an assignment that was
/// searched for it. `policies` are the policies that were replayed at this rate and seed, with their results.
pub(super) fn best_found(
    trace: &Trace,
    options: &Options,
    rate: f64,
    seed: u64,
    policies: &[(&PolicyUnderTest, &Results)],
) -> Result<Results, RunError> {
    let arrivals = trace.arrivals(rate, seed);
    let mut all: Vec<Results> = policies.iter().map(|(_, results)| (*results).clone()).collect();
    for objective in OBJECTIVES {
        let by_objective =
            |(_, a): &&(_, &Results), (_, b): &&(_, &Results)| objective.of(a).total_cmp(&objective.of(b));
        let Some((policy, _)) = policies.iter().min_by(by_objective) else { break };
        let outcome = Simulation::new(trace, options, policy, rate, seed)?.run()?;
        let assignment: Vec<usize> = outcome.requests.iter().map(|record| record.worker).collect();
        all.push(improve(trace, options, &arrivals, &assignment, objective).results(rate, options.slo));
    }
    let best = |objective: Objective| all.iter().min_by(|a, b| objective.of(a).total_cmp(&objective.of(b)));
    let [first, late, misses] = OBJECTIVES.map(|objective| best(objective).cloned().unwrap_or_default());
    Ok(Results {
        ttft_p99_s: late.ttft_p99_s,
        slo_attainment: misses.slo_attainment,
        goodput_rps: misses.goodput_rps,
        ..first
    })
}

impl Objective {
    /// The result that it stands for; less is better.
    fn of(self, results: &Results) -> f64 {
        match self {
            Self::FirstToken => results.ttft_mean_s,
            Self::LateFirstToken => results.ttft_p99_s,
            Self::Misses => -results.slo_attainment,
        }
    }
}

/// Improves an assignment, which has a worker for each request. Returns what happens under the improved one.
fn improve(
    trace: &Trace,
    options: &Options,
    arrivals: &[(u64, u32)],
    assignment: &[usize],
    objective: Objective,
) -> RunOutcome {
    let requests = &trace.requests;
    let mut search = Search {
        shared: Shared::new(requests, &options.profile, arrivals),
        workers: options.workers.iter().map(|_| IsolatedWorker::new(options)).collect(),
        planned: vec![VecDeque::new(); options.workers.len()],
        gaps: Histogram::default(),
        objective,
        slo: options.slo,
    };
    let fits = |(_, request): &&(u64, u32)| Engine::fits(&options.profile, &requests[*request as usize]);
    for (at, request) in arrivals.iter().filter(fits) {
        search.planned[assignment[*request as usize]].push_back((*at, *request));
    }
    let mut served: Vec<RequestRecord> = requests.iter().map(RequestRecord::of).collect();
    for (at, request) in arrivals {
        served[*request as usize].arrived_ns = *at;
        if fits(&&(*at, *request)) {
            let worker = search.place(*at, *request, assignment[*request as usize]);
            served[*request as usize].worker = worker;
        }
    }
    search.finish(served)
}

struct Search<'a> {
    shared: Shared<'a>,
    workers: Vec<IsolatedWorker>,
    /// Requests that the assignment gives each worker and that have not arrived yet.
    planned: Vec<VecDeque<(u64, u32)>>,
    gaps: Histogram,
    objective: Objective,
    slo: Slo,
}

impl Search<'_> {
    /// Chooses the worker of an arriving request and sends it there.
    fn place(&mut self, now_ns: u64, request: u32, planned_at: usize) -> usize {
        self.planned[planned_at].pop_front();
        self.advance(now_ns);
        let candidates = self.candidates(request, planned_at);
        let growth = |search: &mut Self, worker: usize| {
            search.window_cost(now_ns, worker, Some(request)) - search.window_cost(now_ns, worker, None)
        };
        let (mut best, mut least) = (planned_at, f64::INFINITY);
        for worker in candidates {
            let growth = growth(self, worker);
            if growth < least {
                (best, least) = (worker, growth);
            }
        }
        self.workers[best].accept(&mut self.shared, now_ns, request);
        best
    }

    /// Runs all workers up to a moment. Returns the time of the last event.
    fn advance(&mut self, until_ns: u64) -> u64 {
        let mut last_ns = 0;
        for worker in &mut self.workers {
            last_ns = last_ns.max(worker.advance(&mut self.shared, until_ns));
            // Windows clone the worker, so it keeps none of them.
            worker.gaps.drain(..).for_each(|(gap, times)| self.gaps.add(gap, times));
        }
        last_ns
    }

    /// The workers to try. The one of the assignment is the first, so that it wins when others are as good.
    fn candidates(&self, request: u32, planned_at: usize) -> Vec<usize> {
        let blocks = &self.shared.requests[request as usize].blocks;
        let mut workers: Vec<(usize, f64, usize)> = (0..self.workers.len())
            .map(|at| (self.workers[at].engine.cached_prefix(blocks), self.workers[at].load_s(&self.shared), at))
            .collect();
        let mut candidates = vec![planned_at];
        let mut take = |workers: &[(usize, f64, usize)], count: usize| {
            for (.., at) in workers.iter().take(count) {
                if !candidates.contains(at) {
                    candidates.push(*at);
                }
            }
        };
        workers.sort_by(|a, b| b.0.cmp(&a.0).then(a.1.total_cmp(&b.1)));
        take(&workers, LONGEST_PREFIXES);
        workers.sort_by(|a, b| a.1.total_cmp(&b.1));
        take(&workers, LEAST_LOADED);
        candidates
    }

    /// The cost of all requests on the `nth` worker within the window, with `request` if it is given.
    fn window_cost(&mut self, now_ns: u64, nth: usize, request: Option<u32>) -> f64 {
        let Self { shared, workers, planned, objective, slo, .. } = self;
        let mut worker = workers[nth].clone();
        let until_ns = now_ns + WINDOW_NS;
        let mut tracked = worker.requests();
        if let Some(request) = request {
            tracked.push(request);
            worker.accept(shared, now_ns, request);
        }
        for (at, request) in planned[nth].iter().take(WINDOW_ARRIVALS).take_while(|(at, _)| *at < until_ns) {
            tracked.push(*request);
            worker.advance(shared, *at);
            worker.accept(shared, *at, *request);
        }
        worker.advance(shared, until_ns);
        let cost = |request: &u32| cost(shared, *request, until_ns, *objective, *slo);
        let cost = tracked.iter().map(cost).sum::<f64>() + worker.backlog_s(shared);
        shared.reset(&tracked, now_ns);
        cost
    }

    /// Runs all workers to the end.
    fn finish(mut self, mut served: Vec<RequestRecord>) -> RunOutcome {
        let end_ns = self.advance(u64::MAX);
        for (record, times) in served.iter_mut().zip(&self.shared.times) {
            (record.first_token_ns, record.finished_ns, record.hits) = (times.first_ns, times.finished_ns, times.hits);
        }
        RunOutcome {
            too_long: served.iter().filter(|record| record.finished_ns == 0).count(),
            requests: served,
            inter_token_gaps: self.gaps,
            busy_ns: self.workers.iter().map(|worker| worker.engine.busy_ns).collect(),
            end_ns,
            disaggregated: false,
            planned: None,
            role_changes: None,
            copies: None,
        }
    }
}

/// The cost of a request at the end of a window. A time that has not ended counts as far as it has come.
fn cost(shared: &Shared<'_>, request: u32, until_ns: u64, objective: Objective, slo: Slo) -> f64 {
    let (times, spec) = (shared.times[request as usize], &shared.requests[request as usize]);
    let first_ns = if times.first_ns == 0 { until_ns } else { times.first_ns };
    let ttft_s = first_ns.saturating_sub(times.arrived_ns) as f64 / 1e9;
    match objective {
        Objective::FirstToken => ttft_s,
        Objective::LateFirstToken => ttft_s * ttft_s,
        Objective::Misses => {
            let finished_ns = if times.finished_ns == 0 { until_ns } else { times.finished_ns };
            let gaps = spec.output_tokens.saturating_sub(1).max(1) as f64;
            let itl_s = finished_ns.saturating_sub(first_ns) as f64 / 1e9 / gaps;
            let misses = ttft_s > slo.ttft.as_secs_f64() || itl_s > slo.itl.as_secs_f64();
            // Less than a miss, however late the first token is within the window.
            f64::from(u8::from(misses)) + 0.1 * ttft_s / (WINDOW_NS as f64 / 1e9)
        }
    }
}

impl RequestRecord {
    fn of(spec: &RequestSpec) -> Self {
        Self { blocks: spec.blocks.len() as u64, output_tokens: spec.output_tokens, ..Self::default() }
    }
}
