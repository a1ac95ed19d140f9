//! A request of which one worker computes the prompt and another one decodes.
//!
//! ```text
//!   prefill worker   Prefill ──▶ Handoff ───── computes ─────▶ Prefilled      (its blocks are kept until the end)
//!   decode worker                   └─ Resume ▶ fetches blocks meanwhile ▶ first output
//! ```
//!
//! The decode worker gets the request with the hand-over, so that most blocks are there when the prompt is computed. It
//! notices a prefill that fails, and computes what is missing. A prefill worker that has left or hangs is not waited
//! for: then the decode worker gets the request anew, and finds the blocks that have arrived in its cache.

use super::place::{Placement, RemotePrefill};
use super::send::{FirstOutput, first_output, left, start};
use crate::fleet::HealthSignal;
use crate::state::Core;
use futures::{StreamExt, future};
use spans::{Kind, Span};
use std::pin::pin;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until, timeout_at};
use worker::engine::{Error, Handoff, Output, OutputStream, Request, Work};

/// A prefill whose first blocks are computed.
pub(super) struct Prefill<'a> {
    remote: &'a RemotePrefill,
    handoff: Handoff,
    /// The blocks are kept until it is dropped.
    stream: OutputStream,
    /// When the prefill counts as failed.
    until: Instant,
    /// Ends with the prefill.
    span: Span,
}

/// How a prefill ends.
enum End {
    /// The blocks are computed, and kept until the stream is dropped.
    Complete(OutputStream),
    /// The decode worker notices it.
    Failed(Error),
    /// The decode worker may not notice it soon.
    Lost(Error),
}

/// Has the prefill worker compute the prompt's blocks, and waits for the first of them.
pub(super) async fn begin<'a>(remote: &'a RemotePrefill, request: &Request) -> Result<Prefill<'a>, Error> {
    let mut request = Request { work: Work::Prefill, explain: false, ..request.clone() };
    let mut span = request.attributes.trace.span("remote prefill", Kind::Client);
    span.set("blockyard.worker", &remote.member.name);
    request.attributes.trace = span.context();
    let until = Instant::now() + remote.stall_timeout;
    match first_blocks(remote, request, until).await {
        Ok((handoff, stream)) => Ok(Prefill { remote, handoff, stream, until, span }),
        Err(error) => {
            span.fail(&error);
            Err(error)
        }
    }
}

/// The hand-over, once the first blocks are computed, and the rest of the prefill's stream.
async fn first_blocks(
    remote: &RemotePrefill,
    request: Request,
    until: Instant,
) -> Result<(Handoff, OutputStream), Error> {
    let started = timeout_at(until, start(&remote.member, &remote.booking, || request, future::pending())).await;
    let FirstOutput { first, rest, .. } = started.map_err(|_| timed_out(remote))??;
    match first {
        Output::Handoff(handoff) => Ok((handoff, rest)),
        _ => Err(unexpected()),
    }
}

/// Has the decode worker fetch the blocks and decode.
pub(super) async fn resume(
    core: &Core,
    placement: &Placement,
    prefill: Prefill<'_>,
    request: Request,
    stalled: impl Future<Output = Error>,
) -> Result<FirstOutput, Error> {
    let Placement { decode, booking, uncached, .. } = placement;
    let remote = prefill.remote;
    let resumed = Request { work: Work::Resume(prefill.handoff.clone()), ..request.clone() };
    let has_blocks = Notify::new();
    let mut stalled = pin!(stalled);
    let lost = {
        // The decode worker is not late before the prompt is computed.
        let late = async {
            has_blocks.notified().await;
            stalled.as_mut().await
        };
        let mut decoding = pin!(first_output(decode, || resumed, late));
        let end = tokio::select! {
            biased;
            end = ended(core, prefill) => end,
            // It refuses the request, or has computed the prompt itself because of a prefill without progress.
            started = &mut decoding => {
                if started.is_ok() {
                    core.metrics.disaggregated_requests.with_label_values(&["local_fallback"]).inc();
                }
                return started;
            }
        };
        booking.sent(Instant::now());
        has_blocks.notify_one();
        match end {
            End::Complete(blocks) => {
                let since = Instant::now();
                // Time in the decode worker's own queue does not belong to the hand-over, so it is measured on idle
                // workers only.
                let was_free = decode.is_free(since);
                let started = decoding.await?;
                // The decode worker has the blocks: the prefill worker may release them.
                drop(blocks);
                if was_free {
                    decode.load.handed_off(remote.transfer_seconds, since.elapsed().as_secs_f64());
                }
                core.metrics.disaggregated_requests.with_label_values(&["remote_prefill"]).inc();
                return Ok(started);
            }
            End::Failed(error) => {
                failed(core, remote, &request, &error);
                booking.revise(*uncached);
                return decoding.await;
            }
            End::Lost(error) => error,
        }
    };
    failed(core, remote, &request, &lost);
    booking.revise(*uncached);
    start(decode, booking, || request, stalled).await
}

/// Waits until the prompt is computed.
async fn ended(core: &Core, Prefill { remote, mut stream, until, mut span, .. }: Prefill<'_>) -> End {
    let end = tokio::select! {
        biased;
        item = stream.next() => match item {
            Some(Ok(Output::Prefilled)) => End::Complete(stream),
            Some(Err(error)) => End::Failed(error),
            _ => End::Failed(unexpected()),
        },
        () = left(&remote.member) => End::Lost(Error::Unavailable(format!("worker {} left", remote.member.id()))),
        () = sleep_until(until) => End::Lost(timed_out(remote)),
    };
    // What remains on the worker is blocks, not work.
    let now = Instant::now();
    remote.booking.started(now);
    core.admission.notify();
    match &end {
        End::Complete(_) => {
            remote.member.succeeded(now);
            remote.prediction.computed(&core.index, &remote.member, None, now);
        }
        End::Failed(error) | End::Lost(error) => span.fail(error),
    }
    end
}

/// The prefill has failed: the decode worker computes the prompt.
pub(super) fn failed(core: &Core, remote: &RemotePrefill, request: &Request, error: &Error) {
    tracing::info!(
        request_id = %request.id, trace_id = request.attributes.trace.trace_id().map(tracing::field::display),
        worker = %remote.member.id(), %error,
        "remote prefill failed; the decode worker computes the prompt"
    );
    remote.member.record_failure(HealthSignal::of(error), error);
    core.admission.notify();
    core.metrics.disaggregated_requests.with_label_values(&["local_fallback"]).inc();
}

/// The error of a prefill that timed out. Its worker's health counts it.
fn timed_out(remote: &RemotePrefill) -> Error {
    let error = Error::Failed(format!("no prefill within {:?}", remote.stall_timeout));
    remote.member.record_failure(HealthSignal::TimedOut, &error);
    error
}

fn unexpected() -> Error {
    Error::Failed("a prefill returned other output than a hand-over and its end".to_owned())
}
