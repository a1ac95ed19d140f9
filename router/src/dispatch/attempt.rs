//! One attempt of a request: on one worker, or on two after a remote prefill; and the stream of its output.

use super::handoff;
use super::place::{Placement, RemotePrefill, comes_whole, place, stall_timeout};
use super::send::{FirstOutput, start};
use crate::admission::Permit;
use crate::booking::Booking;
use crate::fleet::{Fleet, FleetSnapshot, HealthSignal, Worker, WorkerRun};
use crate::load::{ModelStats, OutputEnd};
use crate::state::Core;
use crate::telemetry::RequestTrace;
use futures::{StreamExt, future, stream};
use spans::{Kind, Span};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;
use worker::engine::{Error, Output, OutputStream, Request, RequestAttributes, Work};

/// Workers that may fail one request before its client gets an error. Two workers may fail at once; a third failure is
/// probably the request's own fault. A worker that has left, as in a rolling restart, does not count: that says nothing
/// of the request, and it is not tried again.
pub(super) const MAX_FAILURES: usize = 3;
/// Interval at which it is examined whether a request that waits should be moved: of a server from the start, of
/// another worker once the request is overdue.
const STALL_POLL_INTERVAL: Duration = Duration::from_secs(1);

/// Gets the first output: from the decode worker alone, or after a remote prefill.
pub(super) async fn attempt(
    core: &Core,
    request: &Request,
    placement: &Placement,
    tried: &[WorkerRun],
) -> Result<FirstOutput, Error> {
    let Placement { decode, policy, booking, sibling_bookings, prefill, first_output, .. } = placement;
    sibling_bookings.iter().for_each(Booking::dequeued);
    decode.request_sent(Instant::now());
    // Not at its placement: admission may reject it, or place it again, before any worker gets it.
    core.metrics.requests.with_label_values(&[&*decode.name, *policy]).inc();
    let or_stalled = stalled(&core.fleet, decode, request, tried, *first_output);
    let mut unanswered = Unanswered { fleet: &core.fleet, worker: decode, since: Instant::now(), has_outcome: false };
    let mut span = attempt_span(request, placement, tried.len() + 1);
    let sent = || {
        let mut sent = request.clone();
        sent.attributes.trace = span.context();
        sent
    };
    let outcome = match prefill {
        None => start(decode, booking, sent, or_stalled).await,
        // Boxed, because few requests need its kilobytes.
        Some(remote) => Box::pin(after_prefill(core, sent(), placement, remote, or_stalled)).await,
    };
    unanswered.has_outcome = true;
    if let Err(error) = &outcome {
        span.fail(error);
    }
    outcome.map(|first| FirstOutput { span, ..first })
}

/// An attempt without an outcome yet. If its client leaves and the server has sent no output of any request meanwhile,
/// the server is checked: it may hang, and clients whose time limit is short leave before a request is overdue. While
/// there is always another request, the server is not idle either.
struct Unanswered<'a> {
    fleet: &'a Fleet,
    worker: &'a Worker,
    since: Instant,
    has_outcome: bool,
}

impl Drop for Unanswered<'_> {
    fn drop(&mut self) {
        // The check of a worker would wait behind the requests of one that is overloaded, which clients leave too.
        let is_free = || self.worker.engine.probed_server().is_some();
        if !self.has_outcome && is_free() && !self.worker.active_since(self.since) {
            current_entry(&self.fleet.snapshot(), self.worker).request_checks(Instant::now());
        }
    }
}

/// The entry of a worker in the list, which is replaced when its role or the view of its cache changes.
fn current_entry<'a>(snapshot: &'a FleetSnapshot, worker: &'a Worker) -> &'a Worker {
    snapshot.get(worker.id()).filter(|entry| entry.run() == worker.run()).map_or(worker, |entry| &**entry)
}

/// The other workers of the process of a worker, if its error says that the process cannot be reached or does not
/// answer. A process may have more workers than a request has attempts, so others are tried first.
pub(super) fn also_unreachable(core: &Core, worker: &Worker, error: &Error) -> Vec<WorkerRun> {
    match error {
        Error::Unavailable(_) | Error::NoAnswer(_) | Error::Unresponsive(_) => core.fleet.snapshot().neighbours(worker),
        _ => Vec::new(),
    }
}

/// Places a request that has failed on the workers in `tried`. One in `avoided` gets it if there is no other.
pub(super) fn place_again(
    core: &Core,
    request: &Request,
    tried: &[WorkerRun],
    avoided: &[WorkerRun],
    until: Option<Instant>,
) -> Result<Box<Placement>, Error> {
    if !avoided.is_empty()
        && let Ok(placement) = place(core, request, false, &[tried, avoided].concat(), until)
    {
        return Ok(placement);
    }
    place(core, request, false, tried, until)
}

/// The span of one attempt, from its prefill to its last output.
fn attempt_span(request: &Request, placement: &Placement, number: usize) -> Span {
    let mut span = request.attributes.trace.span("attempt", Kind::Client);
    if span.is_recorded() {
        span.set("gen_ai.request.model", &request.model);
        span.set("blockyard.worker", &placement.decode.name);
        span.set("blockyard.attempt", number);
        if request.generated_tokens > 0 {
            span.set("blockyard.continued_after_tokens", request.generated_tokens);
        }
    }
    span
}

/// Gets the first output of the decode worker after a remote prefill.
async fn after_prefill(
    core: &Core,
    request: Request,
    placement: &Placement,
    remote: &RemotePrefill,
    or_stalled: impl Future<Output = Error>,
) -> Result<FirstOutput, Error> {
    let Placement { decode, booking, uncached, .. } = placement;
    booking.dequeued();
    match handoff::begin(remote, &request).await {
        Ok(prefill) => handoff::resume(core, placement, prefill, request, or_stalled).await,
        Err(error) => {
            handoff::failed(core, remote, &request, &error);
            booking.revise(*uncached);
            start(decode, booking, || request, or_stalled).await
        }
    }
}

/// Resolves when a worker has sent no output of any request for much longer than expected, or when the health check of
/// a server has failed and it has sent none since, while another worker could serve this request. When all workers are
/// slow none is better, and the request stays where it is. A server that computes a response that comes whole sends
/// nothing meanwhile, so its health check must have failed in both cases.
async fn stalled(fleet: &Fleet, member: &Worker, request: &Request, tried: &[WorkerRun], expected: f64) -> Error {
    if !request.may_be_repeated() {
        return future::pending().await;
    }
    let (sent, limit) = (Instant::now(), stall_timeout(expected));
    // The health check of other workers is a request, which waits behind those of a worker that is overloaded.
    let server = member.engine.probed_server();
    tokio::time::sleep(if server.is_some() { STALL_POLL_INTERVAL } else { limit }).await;
    loop {
        let (now, snapshot) = (Instant::now(), fleet.snapshot());
        let current = current_entry(&snapshot, member);
        // Also a worker stalls that has sent output of others after it got the request.
        let silent_since = member.last_output().max(sent);
        let (is_overdue, has_failed_check) =
            (silent_since + limit <= now, server.is_some() && current.has_failed_check());
        let is_better = |other: &&Arc<Worker>| {
            // No prompt that was sent to it still waits for its first token.
            let free = || other.load.stats(now).prompts == 0;
            // Before the request is overdue, it is moved only to another server that answers.
            let answers = || !other.is_ejected(now) && other.engine.probed_server() != server;
            *other.instance.model.id == *request.model
                && other.run() != member.run()
                && (other.takes(request) || !member.takes(request))
                && !tried.contains(&other.run())
                && !snapshot.is_cordoned(other.id())
                && (!other.is_ejected(now) || member.is_ejected(now))
                && (is_overdue || answers())
                && (other.active_since(silent_since) || free())
        };
        if (is_overdue || has_failed_check) && snapshot.workers().find(is_better).is_some() {
            if has_failed_check {
                return Error::Unresponsive(format!("worker {} failed its health check", member.id()));
            }
            if !comes_whole(request) {
                member.record_failure(HealthSignal::TimedOut, &"no output in time");
                return Error::Failed(format!("worker {} sent no output in time", member.id()));
            }
            current.request_checks(now);
        }
        tokio::time::sleep(STALL_POLL_INTERVAL).await;
    }
}

/// The reservation of a request that generates. Dropping it records the length of the output.
struct Generation {
    booking: Booking,
    stats: Arc<ModelStats>,
    tenant: Arc<str>,
    /// Choices that one relayed response contains.
    choices: u64,
    /// Tokens that another worker has generated before.
    before: u64,
    /// Whether another worker continues the output if this one fails.
    is_continued: bool,
    /// How the output ends if it is dropped now. `None`: the attempt that continues it will record it.
    end: Option<OutputEnd>,
}

impl Generation {
    fn new(request: &Request, booking: Booking, stats: Arc<ModelStats>, choices: u64) -> Self {
        let RequestAttributes { tenant, has_stop_strings, .. } = &request.attributes;
        Self {
            booking,
            stats,
            tenant: tenant.clone(),
            choices,
            // The end of a relayed response reports all of them.
            before: if matches!(request.work, Work::Relay(_)) { 0 } else { request.generated_tokens as u64 },
            is_continued: matches!(request.work, Work::Generate),
            // A stream is dropped at a stop string, and when its client disconnects. The former is more frequent.
            end: Some(if *has_stop_strings { OutputEnd::Complete } else { OutputEnd::Censored }),
        }
    }

    /// Records how the output ends with this item of its stream. Returns whether it does.
    fn ends_with(&mut self, item: &Result<Output, Error>) -> bool {
        self.end = match item {
            Ok(Output::Tokens(tokens)) if tokens.finish.is_some() => Some(OutputEnd::Complete),
            Ok(Output::Rest(_)) => {
                self.is_continued = true;
                return false;
            }
            Ok(Output::End(report)) if report.failed => Some(OutputEnd::Censored),
            Ok(Output::End(_)) => Some(OutputEnd::Complete),
            Ok(_) => return false,
            Err(error) if self.is_continued && HealthSignal::of(error).is_failure() => None,
            Err(_) => Some(OutputEnd::Censored),
        };
        true
    }
}

impl Drop for Generation {
    fn drop(&mut self) {
        let tokens = self.before + self.booking.output_tokens() / self.choices;
        if let Some(end) = self.end
            && tokens > 0
        {
            self.stats.output_ended(&self.tenant, tokens, end);
        }
    }
}

/// The stream of one worker: the first output with the explanation, then the rest. It holds the reservation and the
/// permit.
pub(super) fn stream(
    core: &Core,
    request: &Request,
    placement: Box<Placement>,
    permit: Arc<Permit>,
    FirstOutput { mut first, rest, span }: FirstOutput,
    trace: Option<RequestTrace>,
) -> OutputStream {
    let Placement { decode, booking, sibling_bookings, totals, stats, explanation, prediction, prefill, line, .. } =
        *placement;
    drop(prefill);
    // The requests for the other choices are placed now, and reserve for themselves. A relayed request contains all
    // choices, so it keeps these reservations.
    let is_relayed = matches!(first, Output::Head(_));
    let sibling_bookings = is_relayed.then_some(sibling_bookings);
    let now = Instant::now();
    booking.started(now);
    let choices = if is_relayed { u64::from(request.choices()).max(1) } else { 1 };
    let generation = Generation::new(request, booking, stats, choices);
    sibling_bookings.iter().flatten().for_each(|sibling| sibling.started(now));
    core.admission.notify();
    decode.succeeded(now);
    let report = match &first {
        Output::Tokens(tokens) => tokens.prompt.as_ref(),
        _ => None,
    };
    let mut trace = trace.zip(line).map(|(mut trace, line)| {
        trace.started(line, report);
        trace
    });
    let found = report.map(|report| u64::from(report.cached_tokens()));
    prediction.computed(&core.index, &decode, found, now);
    if let Some(found) = found {
        prediction.compare(&core.metrics, &decode, found);
    }
    let worker = Arc::clone(&decode.name);
    match &mut first {
        Output::Tokens(tokens) => {
            tokens.explain = explanation;
            if let Some(report) = &mut tokens.prompt {
                report.worker = Some(worker);
            }
        }
        Output::Head(head) => {
            (head.worker, head.server, head.explain) = (Some(worker), decode.engine.probed_server(), explanation);
        }
        Output::Handoff(_) | Output::Prefilled | Output::Body(_) | Output::Rest(_) | Output::End(_) => {}
    }
    let metrics = Arc::clone(&core.metrics);
    let mut held = Some((generation, sibling_bookings, permit, span));
    let mut is_first = true;
    stream::once(future::ready(Ok(first)))
        .chain(rest)
        .inspect(move |item| {
            let tokens = match item {
                Ok(Output::Tokens(tokens)) => tokens.ids.len(),
                // The end of a relayed response reports what the first output of another does.
                Ok(Output::End(report)) => {
                    if let Some(found) = report.cached_tokens {
                        prediction.compare(&metrics, &decode, found.into());
                    }
                    if report.failed {
                        decode.record_failure(HealthSignal::Fault, &"the response ended with an error");
                    }
                    report.completion_tokens.unwrap_or_default() as usize
                }
                Ok(Output::Handoff(_) | Output::Prefilled | Output::Head(_) | Output::Body(_) | Output::Rest(_)) => 0,
                Err(error) => {
                    decode.record_failure(HealthSignal::of(error), error);
                    if let Some((.., span)) = &mut held {
                        span.fail(error);
                    }
                    0
                }
            };
            if item.is_ok() {
                // The first output was recorded above.
                if !std::mem::take(&mut is_first) {
                    decode.record_output(Instant::now());
                }
                totals.output(tokens);
                if let Some((generation, ..)) = &held {
                    generation.booking.add_output(tokens);
                }
                if let Some(trace) = &mut trace {
                    trace.output(tokens);
                }
            }
            // Released at the last item, although a client may hold the stream for longer.
            if held.as_mut().is_some_and(|(generation, ..)| generation.ends_with(item)) {
                drop((held.take(), trace.take()));
            }
        })
        .boxed()
}
