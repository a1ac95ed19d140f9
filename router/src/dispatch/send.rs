//! Sends a request to one worker, and waits for its first output.

use crate::booking::Booking;
use crate::fleet::Worker;
use futures::StreamExt;
use spans::Span;
use std::time::Duration;
use tokio::time::Instant;
use worker::engine::{Error, Output, OutputStream, Request};

/// Time that a worker which has left discovery gets for the first output of a request: it may still be finishing its
/// requests.
const LEAVE_GRACE: Duration = Duration::from_secs(2);

/// The first output of a request, and the rest of its stream.
pub(super) struct FirstOutput {
    pub(super) first: Output,
    pub(super) rest: OutputStream,
    /// Ends with the stream.
    pub(super) span: Span,
}

/// Sends a request to a worker and waits for the first output, or until the worker has left, or `stalled` resolves to
/// why the worker is not waited for.
pub(super) async fn start(
    member: &Worker,
    booking: &Booking,
    request: impl FnOnce() -> Request,
    stalled: impl Future<Output = Error>,
) -> Result<FirstOutput, Error> {
    booking.sent(Instant::now());
    first_output(member, request, stalled).await
}

/// [`start`] of a request that takes nothing of its worker yet. A worker that has refused the request counts as none of
/// its attempts.
pub(super) async fn first_output(
    member: &Worker,
    request: impl FnOnce() -> Request,
    stalled: impl Future<Output = Error>,
) -> Result<FirstOutput, Error> {
    let request = request();
    let (attempts, may_be_repeated) = (request.attributes.attempts.clone(), request.may_be_repeated());
    attempts.begin();
    let output = async {
        let mut rest = member.engine.generate(request).await?;
        match rest.next().await {
            Some(first) => Ok(FirstOutput { first: first?, rest, span: Span::default() }),
            None => Err(Error::Failed("the stream ended before the first output".to_owned())),
        }
    };
    tokio::select! {
        biased;
        started = output => {
            if started.as_ref().is_err_and(Error::is_refusal) {
                attempts.refused();
            }
            started
        }
        // It has refused nothing, and may have computed the prompt.
        () = left(member) => {
            let why = format!("worker {} left", member.id());
            Err(if may_be_repeated { Error::Unavailable(why) } else { Error::NoAnswer(why) })
        }
        error = stalled => Err(error),
    }
}

/// Resolves when a worker has left and had time to finish.
pub(super) async fn left(member: &Worker) {
    member.lease_ended.cancelled().await;
    tokio::time::sleep(LEAVE_GRACE).await;
}
