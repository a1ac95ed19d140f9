//! Serves a request: admission, attempts on one worker after the other, and the stream of its output.

use super::admit::admit;
use super::attempt::{MAX_FAILURES, also_unreachable, attempt, place_again, stream};
use super::continued::Continued;
use super::place::Placement;
use super::send::FirstOutput;
use crate::admission::Permit;
use crate::fleet::{HealthSignal, Worker};
use crate::state::Core;
use crate::telemetry::RequestTrace;
use futures::StreamExt;
use spans::LogLimit;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{Instant, timeout_at};
use worker::engine::{Error, OutputStream, Request, Work};

/// Failed attempts that are logged per second: enough to see which workers and why, few enough when all workers of a
/// fleet are busy.
static FAILED: LogLimit = LogLimit::new(50, Duration::from_secs(1));

/// A request whose first output has arrived.
struct Served {
    placement: Box<Placement>,
    permit: Arc<Permit>,
    first: FirstOutput,
    trace: Option<RequestTrace>,
}

/// The workers that have failed a request and may have computed it: each has closed the connection without an answer,
/// or answered with an error of its own. A broken worker does that, and so does each worker that gets a request which
/// no engine survives: only other workers show which it is.
///
/// **A request that several workers failed, and none has served, counts against none of them.** Else a client could
/// have all workers ejected. A worker that was failing before shows nothing of the request. A worker that cannot be
/// reached, or that stalls, is counted at once.
struct FailedBy<'a> {
    failures: Vec<(Arc<Worker>, Error)>,
    core: &'a Core,
    model: &'a str,
}

impl<'a> FailedBy<'a> {
    fn new(core: &'a Core, model: &'a str) -> Self {
        Self { failures: Vec::new(), core, model }
    }

    /// Records that the request has failed on a worker; not yet, if it may be the fault of the request.
    fn add(&mut self, worker: &Arc<Worker>, error: &Error) {
        let signal = HealthSignal::of(error);
        if signal == HealthSignal::Fault && !error.is_refusal() && !worker.is_failing() {
            self.failures.push((Arc::clone(worker), error.clone()));
        } else {
            worker.record_failure(signal, error);
        }
    }

    /// Another worker has served the request: these have failed. They may be none.
    fn served_by_another(mut self) {
        for (worker, error) in self.failures.drain(..) {
            worker.record_failure(HealthSignal::of(&error), &error);
        }
        self.core.failed_requests.served(self.model);
    }
}

impl Drop for FailedBy<'_> {
    fn drop(&mut self) {
        let is_of_request = self.failures.len() > 1;
        if is_of_request {
            self.core.failed_requests.failed(self.model, Instant::now());
        }
        for (worker, error) in self.failures.drain(..) {
            let signal = if is_of_request { HealthSignal::Neutral } else { HealthSignal::of(&error) };
            worker.record_failure(signal, &error);
        }
    }
}

/// Serves a request. Past its deadline the first output is worthless, so the request is cancelled.
pub(crate) async fn serve(core: &Arc<Core>, request: Request) -> Result<OutputStream, Error> {
    let served = match request.attributes.deadline {
        Some(deadline) => {
            timeout_at(deadline, try_workers(core, &request)).await.unwrap_or(Err(Error::DeadlineExceeded))
        }
        None => try_workers(core, &request).await,
    };
    Ok(continuable_stream(core, request, served?))
}

async fn try_workers(core: &Arc<Core>, request: &Request) -> Result<Served, Error> {
    let arrived = Instant::now();
    let mut trace = core.recorder.begin(arrived);
    let (first, permit) = admit(core, request, arrived).await?;
    let mut next = Some(first);
    let (mut tried, mut avoided, mut failures) = (Vec::new(), Vec::new(), 0);
    let mut failed_by = FailedBy::new(core, &request.model);
    // The last error, and why the request would be sent to another worker.
    let (mut last, mut retry_reason) = (None, None);
    let deadline = request.attributes.deadline;
    while failures < MAX_FAILURES {
        // An admitted request does not queue again.
        let placement = match next.take().map_or_else(|| place_again(core, request, &tried, &avoided, deadline), Ok) {
            Ok(placement) => placement,
            // The last worker's error says more than that there is no other worker.
            Err(error) => return Err(last.map_or(error, |last| without_address(last, request))),
        };
        // Not when the attempt fails: there may be no other worker.
        if let Some(reason) = retry_reason.take() {
            core.metrics.retries.with_label_values(&[reason]).inc();
        }
        if let Some(trace) = &mut trace {
            trace.dispatched();
        }
        match attempt(core, request, &placement, &tried).await {
            Ok(first) => {
                failed_by.served_by_another();
                return Ok(Served { placement, permit, first, trace });
            }
            Err(error) => {
                let verdict = HealthSignal::of(&error);
                failed_by.add(&placement.decode, &error);
                let (failed, run) = (Arc::clone(&placement.decode), placement.decode.run());
                tried.push(run);
                avoided.extend(also_unreachable(core, &failed, &error));
                failures += usize::from(core.fleet.snapshot().has(run));
                drop(placement);
                core.admission.notify();
                if verdict == HealthSignal::Neutral {
                    return Err(error);
                }
                retry_reason = Some(if matches!(verdict, HealthSignal::Busy(_)) { "busy" } else { "error" });
                if let Some(suppressed) = FAILED.admit() {
                    let address = failed.engine.address();
                    // Without the span of the request, which has its id too.
                    tracing::info!(
                        parent: None,
                        request_id = %request.id,
                        trace_id = request.attributes.trace.trace_id().map(tracing::field::display),
                        worker = %failed.id(), address = address.as_deref(), %error, suppressed,
                        "request failed on a worker"
                    );
                }
                if !request.may_be_repeated() && !error.is_unprocessed() {
                    return Err(not_repeated(error));
                }
                last = Some(preferred_error(last, error));
            }
        }
    }
    Err(match last {
        Some(last) => without_address(last, request),
        None => Error::Unavailable("no worker served the request".to_owned()),
    })
}

/// The error for the client. That of a worker which cannot be reached, or cannot be reached any more, may have its
/// address, which is for the log only.
fn without_address(error: Error, request: &Request) -> Error {
    match error {
        Error::Unavailable(_) | Error::NoAnswer(_) | Error::Unresponsive(_) => {
            Error::Unavailable(format!("no worker of the model `{}` answers now", request.model))
        }
        other => other,
    }
}

/// The error of a request that a worker may have carried out, and that is not sent again. Of no answer it does not say
/// that the service is unavailable, which asks clients to send the request again.
fn not_repeated(error: Error) -> Error {
    match error {
        Error::NoAnswer(_) | Error::Unresponsive(_) => {
            let why = "the server got the request and did not answer; the request may have been carried out, so it \
                       was not sent again";
            Error::Failed(why.to_owned())
        }
        other => other,
    }
}

/// Which of two errors to return: back-pressure tells the client what to do, so a later fault does not replace it. Of
/// two of that kind, the one with the shorter wait.
fn preferred_error(last: Option<Error>, error: Error) -> Error {
    match (last.as_ref().and_then(back_pressure), back_pressure(&error), last) {
        (Some(before), now, Some(last)) if now.is_none_or(|now| before <= now) => last,
        _ => error,
    }
}

/// The time to wait, if the error is back-pressure.
fn back_pressure(error: &Error) -> Option<Duration> {
    match HealthSignal::of(error) {
        HealthSignal::Busy(wait) => Some(wait),
        _ => None,
    }
}

/// The stream of a request, continued on another worker if its worker fails. A relayed stream only if its worker makes
/// that possible.
fn continuable_stream(core: &Arc<Core>, request: Request, served: Served) -> OutputStream {
    let Served { placement, permit, first, trace } = served;
    let worker = Arc::clone(&placement.decode);
    let stream = stream(core, &request, placement, Arc::clone(&permit), first, trace);
    let is_continued = match &request.work {
        Work::Generate => true,
        Work::Relay(http) => http.is_stream && worker.engine.continues_streams(),
        Work::Prefill | Work::Resume(_) => false,
    };
    if is_continued { Continued::new(core, request, permit, &worker, stream).boxed() } else { stream }
}
