//! Places a request: looks up its prefix in the index, has policy choose workers, and reserves their capacity.

use super::copy_ahead;
use super::prediction::HitPrediction;
use crate::booking::Booking;
use crate::fleet::{PromptTokens, Worker, WorkerRun};
use crate::hash::{hash_str, splitmix64};
use crate::load::{Demand, ExpectedOutput, ModelStats, Totals};
use crate::policy::{
    Decision, FleetView, Overlaps, PlacementRequest, Policy, Replication, ScoredWorker, SelectionContext, decide,
    explain,
};
use crate::state::Core;
use crate::telemetry::Line;
use kvbm::Level;
use spans::{Kind, Span};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;
use worker::engine::{EndpointKind, Error, Request, Work};

/// Where a request goes, with its reservations.
pub(crate) struct Placement {
    /// When it was decided.
    pub(crate) placed: Instant,
    /// The worker that decodes.
    pub(crate) decode: Arc<Worker>,
    /// The name of the policy that chose it.
    pub(crate) policy: &'static str,
    pub(crate) booking: Booking,
    /// Reservations for the other choices of its group, until their requests come.
    pub(crate) sibling_bookings: Vec<Booking>,
    /// Counts its output tokens, for the planner.
    pub(crate) totals: Arc<Totals>,
    /// Learns the length of its output.
    pub(crate) stats: Arc<ModelStats>,
    /// Expected output tokens of each choice.
    pub(crate) output_tokens: u64,
    /// Reserved on `decode`, for all choices of the group.
    pub(crate) amount: Demand,
    /// Estimated seconds to the first output: the first token, or all of a relayed response that is not a stream.
    pub(crate) first_output: f64,
    /// The part of the time to the first token that is not queueing, in seconds.
    pub(crate) min_service_seconds: f64,
    /// The prefill worker, if another than `decode` computes the prompt.
    pub(crate) prefill: Option<RemotePrefill>,
    /// Prompt tokens that `decode` would compute itself.
    pub(crate) uncached: u64,
    /// Predicted cache hits on `decode`.
    pub(crate) prediction: HitPrediction,
    /// The decision as one line of JSON, if the client requested it or the log has level debug.
    pub(crate) explanation: Option<Arc<str>>,
    /// The line for the trace file, if there is one.
    pub(crate) line: Option<Line>,
}

/// Prefill on another worker than the one that decodes.
pub(crate) struct RemotePrefill {
    pub(crate) member: Arc<Worker>,
    pub(crate) booking: Booking,
    /// Reserved on `member`.
    pub(crate) amount: Demand,
    /// Time after which the prefill counts as failed.
    pub(crate) stall_timeout: Duration,
    /// Estimated seconds to transfer the blocks.
    pub(crate) transfer_seconds: f64,
    pub(crate) prediction: HitPrediction,
}

/// Upper limit of a stall timeout, however wrong the estimate.
const STALL_SECONDS_MAX: f64 = 600.0;

/// Why a request is not placed whose object is at a server without an entry.
const CORDONED_SERVER: &str = "the server that stores the object which the request names is cordoned";

/// Time without output after which a worker that should take `seconds` counts as stalled: ten times as long plus ten
/// seconds.
pub(crate) fn stall_timeout(seconds: f64) -> Duration {
    Duration::from_secs_f64((seconds * 10.0 + 10.0).clamp(10.0, STALL_SECONDS_MAX))
}

/// Whether a relayed response is no stream: its server sends nothing before all of the response is computed.
pub(super) fn comes_whole(request: &Request) -> bool {
    matches!(&request.work, Work::Relay(http) if !http.is_stream)
}

/// Estimated seconds from the first token to the end of a response that comes whole; 0 for others.
fn rest_of_response(request: &Request, row: &ScoredWorker<'_>, stats: &ModelStats, output: &ExpectedOutput) -> f64 {
    let (Work::Relay(http), true) = (&request.work, comes_whole(request)) else { return 0.0 };
    let estimate = &row.snapshot.estimate;
    if http.kind() == Some(EndpointKind::Pooling) {
        return estimate.mean_duration;
    }
    let step = estimate.step(&stats.step_time());
    generation_seconds(output.tokens(), request.stop.max_tokens, step, estimate.mean_duration)
}

/// Seconds to generate an output. `mean_duration`: of the worker's requests, which shows how slow it is if it serves
/// no streams, so that its step is not measured. `max_tokens` bounds the result.
fn generation_seconds(tokens: f64, max_tokens: Option<u32>, step: f64, mean_duration: f64) -> f64 {
    let longest = max_tokens.map_or(f64::INFINITY, |max| f64::from(max) * step);
    (tokens * step).max(mean_duration).min(longest)
}

/// Chooses workers and reserves their capacity. `is_new`: the request was not placed before; `tried`: workers that it
/// was sent to before; `until`: when the first token should be there.
pub(crate) fn place(
    core: &Core,
    request: &Request,
    is_new: bool,
    tried: &[WorkerRun],
    until: Option<Instant>,
) -> Result<Box<Placement>, Error> {
    let mut span = request.attributes.trace.span("route", Kind::Internal);
    let placed = choose(core, request, is_new, tried, until, &mut span);
    if let Err(error) = &placed {
        span.fail(error);
    }
    placed
}

fn choose(
    core: &Core,
    request: &Request,
    is_new: bool,
    tried: &[WorkerRun],
    until: Option<Instant>,
    span: &mut Span,
) -> Result<Box<Placement>, Error> {
    let since = std::time::Instant::now();
    let fleet = core.fleet.snapshot();
    let pool = fleet.pool(&request.model).ok_or_else(|| match fleet.absence(&request.model) {
        Some(why) => Error::Unavailable(why),
        None => Error::UnknownModel(request.model.to_string()),
    })?;
    // The pool was another one when the request was parsed.
    if !pool.takes(request) {
        let problem = format!("the model `{}` has passed between workers and upstreams; send it again", request.model);
        return Err(Error::Unavailable(problem));
    }
    let (prompt, context) = (request.tokens.len(), pool.context());
    // The length of a relayed prompt is an estimate, and its engine knows better: what seems too long for all is sent
    // to one with the longest context.
    let length = if matches!(request.work, Work::Relay(_)) { prompt.min(context.saturating_sub(1)) } else { prompt };
    if length >= context {
        return Err(Error::PromptTooLong { prompt, context });
    }
    // Servers of other programs often refuse a prompt that leaves no room for `max_tokens`. If that is so on each of
    // them, or none has such a limit, all are alike.
    let whole = request.stop.max_tokens.map_or(length, |max| length.saturating_add(max as usize));
    let whole = if matches!(request.work, Work::Relay(_)) && whole <= context { whole } else { length };
    if pool.entries().is_empty() {
        return Err(Error::Unavailable("every worker of the model is cordoned".to_owned()));
    }
    // Hashing and the index lookup take the most time, so they come before the lock that serializes decisions. A
    // request for the prompt's log-probabilities uses no cached block.
    let cacheable = if request.sampling.prompt_logprobs.is_some() { &[] } else { &*request.tokens };
    let estimated = request.attributes.has_estimated_tokens;
    let known = if estimated { PromptTokens::Estimated } else { PromptTokens::Known };
    let mut overlaps = Overlaps::of(cacheable, known, &request.domain, pool, &core.hash_cache, &core.index);
    let mut scratch = core.scratch.lock();
    overlaps.extend(&core.inflight);
    let now = Instant::now();
    let needs = pool.needs(request);
    let view = FleetView::new(pool, &overlaps, length, needs, tried, now).preferring_context(whole);
    let (resolved, session) = (core.settings(), request.attributes.session.as_deref().map(hash_str));
    let (tuning, draw) =
        (resolved.of(&request.model), splitmix64(resolved.settings.seed ^ core.rng_seed ^ core.fleet.choices()));
    let shared = pool.schemes().first().and_then(|card| {
        let hashes = overlaps.hashes(0);
        pool.stats().shared_prefix(hashes.len(), card.block_size, |at| hashes[at].short(), is_new, now.into())
    });
    let (output, mean_output_tokens) = pool.stats().expect_output(&request.attributes.tenant, request.stop.max_tokens);
    let decision = decide(
        tuning,
        PlacementRequest { shared, ..PlacementRequest::of(request, until, output.tokens(), mean_output_tokens, now) },
        view,
        &mut scratch,
        SelectionContext { random: draw, session },
    )
    .ok_or_else(|| {
        let is_cordoned = needs.server().is_some() && tried.is_empty();
        let why = if is_cordoned { CORDONED_SERVER } else { "every worker of the model has been tried" };
        Error::Unavailable(why.to_owned())
    })?;
    if span.is_recorded() {
        describe(span, tuning.policy.name(), &decision);
    }
    // A server of another program shares its memory with no other.
    if resolved.settings.prefetch && !matches!(request.work, Work::Relay(_)) {
        copy_ahead::order(&core.copies, &core.index, &decision, &overlaps, now);
    }
    let placement = book(core, &tuning.policy, request, &overlaps, &decision, tried, (now, pool.stats(), &output));
    core.metrics.decision_seconds.observe(since.elapsed().as_secs_f64());
    Ok(placement)
}

/// Adds the decision to the span of the routing.
fn describe(span: &mut Span, policy: &str, decision: &Decision<'_>) {
    let row = &decision.chosen;
    span.set("blockyard.routing.policy", policy);
    span.set("blockyard.routing.reason", decision.why.name());
    span.set("blockyard.routing.candidates", decision.candidate_count);
    span.set("blockyard.routing.predicted_cached_tokens", row.cached());
    span.set("blockyard.routing.cost_s", row.cost().total());
    span.set("blockyard.worker", &row.worker().name);
    span.set_some("blockyard.prefill_worker", decision.prefill_worker(row).map(|prefill| &prefill.worker().name));
}

impl Placement {
    /// All its reservations.
    pub(crate) fn bookings(&self) -> impl Iterator<Item = &Booking> {
        let remote = self.prefill.iter().map(|remote| &remote.booking);
        [&self.booking].into_iter().chain(&self.sibling_bookings).chain(remote)
    }
}

/// The decision as one line of JSON, if the client requested it or the log has level debug.
fn explanation(
    core: &Core,
    policy: &Policy,
    request: &Request,
    overlaps: &Overlaps,
    decision: &Decision<'_>,
    tried: &[WorkerRun],
    output: &ExpectedOutput,
) -> Option<Arc<str>> {
    if !request.explain && !tracing::enabled!(tracing::Level::DEBUG) {
        return None;
    }
    let copying = copy_ahead::on_the_way(core, decision, overlaps);
    let mut line = explain::line(policy, decision, tried, copying, output);
    if let Some(id) = request.attributes.trace.trace_id() {
        line = explain::traced(&line, &id);
    }
    tracing::debug!(request_id = %request.id, decision = %line, "request placed");
    Some(line)
}

/// Reserves the capacity that a decision needs.
fn book(
    core: &Core,
    policy: &Policy,
    request: &Request,
    overlaps: &Overlaps,
    decision: &Decision<'_>,
    tried: &[WorkerRun],
    (now, stats, output): (Instant, &Arc<ModelStats>, &ExpectedOutput),
) -> Box<Placement> {
    let row = &decision.chosen;
    let explanation = explanation(core, policy, request, overlaps, decision, tried, output);
    let prefill_row = decision.prefill_worker(row);
    let uncached = row.uncached();
    let totals = core.traffic.of(&request.model);
    totals.prompt(uncached);
    let (member, siblings) = (row.worker(), 1..request.choices());
    let whole = row.demand();
    let sibling = Demand {
        sequences: 1,
        blocks: row.prompt.output_blocks() / u64::from(request.choices()),
        context_tokens: whole.context_tokens,
        ..Demand::default()
    };
    let amount = Demand {
        sequences: u64::from(!matches!(request.work, Work::Prefill)),
        blocks: whole.blocks.saturating_sub(sibling.blocks * siblings.len() as u64),
        ..whole
    };
    let prediction = |row: &ScoredWorker<'_>| HitPrediction::of(request, &core.inflight, decision, row, overlaps, now);
    let (decode_prediction, prefill_prediction) = (prediction(row), prefill_row.map(prediction));
    let inflight_prefix = |row: &ScoredWorker<'_>| {
        let hashes = overlaps.hashes(row.entry.scheme);
        core.inflight.add(overlaps.slot(row.entry), hashes, row.prompt.block_size as usize, row.held.total())
    };
    let slot = overlaps.slot(row.entry);
    // Blocks that are handed over arrive late: an event will announce them, and no request should queue behind this
    // one for them.
    let prefix = if prefill_row.is_some() { core.inflight.add(slot, &[], 1, 0) } else { inflight_prefix(row) };
    let sibling_booking = |_| {
        let prefix = core.inflight.add(slot, &[], 1, 0);
        Booking::new(member, sibling, None, output.clone(), prefix, &core.outbox, now)
    };
    let line = core.recorder.is_on().then(|| {
        let random = splitmix64(core.fleet.choices());
        let hashes = overlaps.hashes(row.entry.scheme);
        Line::placed(request, row, hashes, prefill_row.is_some(), random, core.rng_seed)
    });
    // A relayed response that is not a stream says nothing of the first token, and neither do the cached tokens of one
    // worker if another computes the prompt.
    let is_timed = prefill_row.is_none() && decode_prediction.is_of_one_worker() && !comes_whole(request);
    let cached_tokens = is_timed.then(|| row.cached());
    core.fleet.choose(member);
    if let Some(Replication { shared, copies, .. }) = decision.replication() {
        core.metrics.shared_prefix_copies.observe(f64::from(*copies));
        core.metrics.replications.inc_by(u64::from(*copies > 0 && row.held.total() < shared.blocks));
    }
    // Boxed, because it is handed on several times and has a kilobyte.
    Box::new(Placement {
        placed: now,
        decode: member.clone(),
        policy: policy.name(),
        booking: Booking::new(member, amount, cached_tokens, output.clone(), prefix, &core.outbox, now),
        totals,
        stats: stats.clone(),
        output_tokens: output.tokens() as u64,
        amount: siblings.clone().fold(amount, |all, _| all.plus(sibling)),
        sibling_bookings: siblings.map(sibling_booking).collect(),
        first_output: row.cost().first_token() + rest_of_response(request, row, stats, output),
        min_service_seconds: decision.min_service_seconds(row),
        prefill: prefill_row.zip(prefill_prediction).map(|(prefill, prediction)| {
            let prefill_worker = prefill.worker();
            core.fleet.choose(prefill_worker);
            let amount = prefill.prefill_demand();
            RemotePrefill {
                member: prefill_worker.clone(),
                booking: Booking::new(
                    prefill_worker,
                    amount,
                    Some(prefill.cached()),
                    ExpectedOutput::default(),
                    inflight_prefix(prefill),
                    &core.outbox,
                    now,
                ),
                amount,
                stall_timeout: stall_timeout(prefill.aggregated.first_token()),
                transfer_seconds: row.snapshot.estimate.transfer(Level::Peer, row.missing() as u32),
                prediction,
            }
        }),
        uncached,
        prediction: decode_prediction,
        explanation,
        line,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_response_that_comes_whole_takes_the_time_of_its_expected_output() {
        let seconds = |max_tokens, mean_duration| generation_seconds(500.0, max_tokens, 0.02, mean_duration);
        assert!((seconds(None, 0.2) - 10.0).abs() < 1e-9, "longer than the mean of short requests");
        assert!((seconds(None, 30.0) - 30.0).abs() < 1e-9, "the worker is slower than its step says");
        assert!((seconds(Some(10), 30.0) - 0.2).abs() < 1e-9, "at most what `max_tokens` allows");
        assert!((seconds(Some(4000), 0.2) - 10.0).abs() < 1e-9);
    }
}
