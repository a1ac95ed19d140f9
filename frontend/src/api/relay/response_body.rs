//! The body of a relayed response.
//!
//! Each part is polled from the connection of the engine to that of the client, without a task or a channel in between.

use crate::error::Error;
use crate::http::RequestContext;
use crate::limits::RunningChoices;
use crate::output::RelayMeter;
use axum::body::HttpBody;
use bytes::Bytes;
use futures::StreamExt;
use futures::future::BoxFuture;
use hyper::body::Frame;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::time::timeout;
use worker::engine::{self, Output, OutputStream, RelayReport};

/// The end of a stream of chat or completions.
const DONE: &[u8] = b"data: [DONE]\n\n";
/// Time for the end of an engine's response after [`DONE`]. It is the next packet.
const REST_TIMEOUT: Duration = Duration::from_secs(1);

/// A response that is being relayed.
pub(super) struct Relay {
    pub(super) outputs: OutputStream,
    /// An output that was read before its turn.
    pub(super) ahead: Option<Result<Output, engine::Error>>,
    pub(super) meter: RelayMeter,
    pub(super) context: Arc<RequestContext>,
    /// Resolves when the server no longer waits for running requests.
    pub(super) forced: BoxFuture<'static, ()>,
    pub(super) is_stream: bool,
    /// The stream's `[DONE]` was relayed: the response is complete, and the client may disconnect.
    pub(super) is_done: bool,
    pub(super) _running: RunningChoices,
}

/// The body of a response. A stream that fails ends with an event that says why; any other body is cut off. `None` once
/// its end was relayed.
pub(super) struct RelayBody(pub(super) Option<Relay>);

impl Relay {
    fn poll_output(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<Output, engine::Error>>> {
        if let Some(output) = self.ahead.take() {
            return Poll::Ready(Some(output));
        }
        if let Poll::Ready(output) = self.outputs.poll_next_unpin(context) {
            return Poll::Ready(output);
        }
        let forced = self.forced.as_mut().poll(context);
        forced.map(|()| Some(Err(engine::Error::Failed("the server is shutting down".into()))))
    }

    fn finish(&mut self, report: RelayReport) {
        self.meter.finish(report);
        self.context.stream_finished();
    }

    fn fail(&mut self, error: &Error) -> io::Result<Bytes> {
        self.meter.mark_failed();
        self.context.stream_failed(error);
        if !self.is_stream {
            return Err(io::Error::other(error.to_string()));
        }
        let object = serde_json::to_string(&error.body()).expect("an error object has string keys");
        Ok(format!("data: {object}\n\n").into())
    }
}

impl RelayBody {
    fn finish(&mut self, report: RelayReport) {
        if let Some(mut relay) = self.0.take() {
            relay.finish(report);
        }
    }

    fn fail(&mut self, error: &Error) -> Option<io::Result<Bytes>> {
        Some(self.0.take()?.fail(error))
    }
}

impl HttpBody for RelayBody {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, io::Error>>> {
        let Some(relay) = &mut self.0 else { return Poll::Ready(None) };
        let part = match std::task::ready!(relay.poll_output(context)) {
            Some(Ok(Output::Body(bytes))) => {
                relay.meter.body(&bytes);
                relay.is_done = relay.is_stream && bytes.ends_with(DONE);
                // A body with a length is not polled after its last byte, so its end is taken with that.
                let may_be_last = !relay.is_stream || relay.is_done;
                if may_be_last && let Poll::Ready(Some(next)) = relay.poll_output(context) {
                    match next {
                        Ok(Output::End(report)) => self.finish(report),
                        other => relay.ahead = Some(other),
                    }
                }
                Some(Ok(bytes))
            }
            Some(Ok(Output::End(report))) => {
                self.finish(report);
                None
            }
            Some(Err(error)) => self.fail(&error.into()),
            _ => self.fail(&Error::Failed("the engine's response has no end".into())),
        };
        Poll::Ready(part.map(|part| part.map(Frame::data)))
    }

    fn is_end_stream(&self) -> bool {
        self.0.is_none()
    }
}

impl Drop for RelayBody {
    /// Clients may leave after `[DONE]`. What the engine says after it is read all the same: the usage is counted, and
    /// the connection to the engine can be used again. Without an end in time the request counts as cancelled.
    fn drop(&mut self) {
        if let Some(mut relay) = self.0.take().filter(|relay| relay.is_done) {
            tokio::spawn(timeout(REST_TIMEOUT, async move {
                while let Some(Ok(output)) = relay.outputs.next().await {
                    if let Output::End(report) = output {
                        return relay.finish(report);
                    }
                }
            }));
        }
    }
}
