//! The body of a relayed response.
//!
//! Each part is polled from the connection of the engine to that of the client, without a task or a channel in between.
//!
//! **A response that breaks off never looks complete, and the client never gets nothing.** A stream of events ends with
//! an event that says why. Any other body is cut off; if it breaks off at once, the client gets an error instead.

use crate::error::Error;
use crate::http::RequestContext;
use crate::limits::RunningChoices;
use crate::output::{BodyKind, RelayMeter};
use axum::body::HttpBody;
use axum::http::HeaderMap;
use axum::http::header::{CONTENT_ENCODING, CONTENT_TYPE};
use bytes::Bytes;
use futures::StreamExt;
use futures::future::BoxFuture;
use hyper::body::Frame;
use std::future::poll_fn;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::time::timeout;
use worker::engine::{Output, OutputStream, RelayReport};

/// The end of a stream of chat or completions.
const DONE: &[u8] = b"data: [DONE]\n\n";
/// How an event ends: with a line end of any kind, and an empty line.
const EVENT_ENDS: [&[u8]; 3] = [b"\n\n", b"\n\r\n", b"\r\r"];
/// Time for the end of an engine's response after [`DONE`]. It is the next packet.
const REST_TIMEOUT: Duration = Duration::from_secs(1);

/// Media types of one JSON object per line.
const LINES: [&str; 3] = ["application/x-ndjson", "application/ndjson", "application/jsonl"];

/// Outputs that were read before the response to the client was started, in order.
pub(super) type ReadAhead = [Option<Result<Output, Error>>; 2];

/// A response that is being relayed.
pub(super) struct Relay {
    pub(super) outputs: OutputStream,
    pub(super) ahead: ReadAhead,
    pub(super) meter: RelayMeter,
    pub(super) context: Arc<RequestContext>,
    /// Resolves when the response must end, with the reason.
    pub(super) ends: BoxFuture<'static, Error>,
    /// The body consists of events.
    pub(super) is_stream: bool,
    /// The last byte that was relayed of a stream is one within an event, which was too long to be held until its end.
    pub(super) is_within_event: bool,
    /// The stream's `[DONE]` was relayed: the response is complete, and the client may disconnect.
    pub(super) is_done: bool,
    /// Until the end of the response. The body of a stream may end later.
    pub(super) running: Option<RunningChoices>,
}

/// The body of a response.
pub(super) struct RelayBody {
    /// `None` once its end was relayed, or it has failed.
    relay: Option<Relay>,
    /// Cuts the body off when it is polled next.
    cut: Option<io::Error>,
}

/// What a body consists of. This is for the answer to say: an engine may answer a request for a stream with one JSON
/// object, and one that asks for none in a way that only the engine knows with a stream.
pub(super) fn kind_of(headers: &HeaderMap) -> BodyKind {
    let content_type = headers.get(CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let media_type = content_type.split(';').next().unwrap_or_default().trim();
    let is = |name: &str| media_type.eq_ignore_ascii_case(name);
    let begins_with = |part: &str| media_type.get(..part.len()).is_some_and(|head| head.eq_ignore_ascii_case(part));
    let ends_with = |part: &str| {
        let at = media_type.len().checked_sub(part.len());
        at.and_then(|at| media_type.get(at..)).is_some_and(|tail| tail.eq_ignore_ascii_case(part))
    };
    let is_compressed = headers.get(CONTENT_ENCODING).is_some_and(|coding| {
        let coding = coding.as_bytes().trim_ascii();
        !coding.is_empty() && !coding.eq_ignore_ascii_case(b"identity")
    });
    if is_compressed {
        BodyKind::Other
    } else if is("application/json") {
        BodyKind::Json
    } else if is("text/event-stream") {
        BodyKind::Events
    // What begins like JSON or events has got its type from the engine's connection.
    } else if begins_with("text/") || media_type.is_empty() {
        BodyKind::Text
    } else if ends_with("+json") {
        BodyKind::Json
    } else if LINES.iter().any(|name| is(name)) {
        BodyKind::Lines
    } else {
        BodyKind::Other
    }
}

/// Reads what has arrived of a response after its head: its first part and what follows that. The client has not got
/// anything yet, so a failure among it is an error of the request.
pub(super) async fn read_ahead(outputs: &mut OutputStream) -> Result<ReadAhead, Error> {
    let mut ahead = ReadAhead::default();
    for slot in &mut ahead {
        let next = poll_fn(|context| Poll::Ready(outputs.poll_next_unpin(context))).await;
        let Poll::Ready(output) = next else { break };
        let output = output.ok_or_else(no_end)??;
        let is_last = !matches!(output, Output::Body(_));
        *slot = Some(Ok(output));
        if is_last {
            break;
        }
    }
    Ok(ahead)
}

fn no_end() -> Error {
    Error::Failed("the engine's response has no end".into())
}

impl Relay {
    fn poll_output(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<Output, Error>>> {
        if let Some(output) = self.ahead.iter_mut().find_map(Option::take) {
            return Poll::Ready(Some(output));
        }
        if let Poll::Ready(output) = self.outputs.poll_next_unpin(context) {
            return Poll::Ready(output.map(|output| output.map_err(Error::from)));
        }
        self.ends.as_mut().poll(context).map(|error| Some(Err(error)))
    }

    /// The engine has reported the end.
    fn is_finished(&self) -> bool {
        self.running.is_none()
    }

    /// What the engine sends after it has reported the end. `None` at the end of its body.
    fn poll_rest(&mut self, context: &mut Context<'_>) -> Poll<Option<Bytes>> {
        match self.ahead.iter_mut().find_map(Option::take) {
            Some(Ok(Output::Body(bytes))) => return Poll::Ready(Some(bytes)),
            Some(_) => return Poll::Ready(None),
            None => {}
        }
        self.outputs
            .poll_next_unpin(context)
            .map(|next| if let Some(Ok(Output::Body(bytes))) = next { Some(bytes) } else { None })
    }

    fn finish(&mut self, report: RelayReport) {
        self.running = None;
        self.meter.finish(report);
        if report.failed {
            let error = Error::Failed("the server sent an error in its stream, which the client got".into());
            self.context.stream_failed(&error);
        } else {
            self.context.stream_finished();
        }
    }

    fn fail(&mut self, error: &Error) {
        self.meter.mark_failed();
        self.context.stream_failed(error);
    }
}

impl RelayBody {
    /// A body that has ended already is finished here, because hyper does not poll one that the headers say is empty.
    pub(super) fn new(mut relay: Relay) -> Self {
        let relay = if let Some(Ok(Output::End(report))) = relay.ahead[0] {
            relay.finish(report);
            None
        } else {
            Some(relay)
        };
        Self { relay, cut: None }
    }

    /// The engine has reported the end. What it sends after it passes too, if there may be anything.
    fn finish(&mut self, report: RelayReport, context: &mut Context<'_>) {
        let Some(relay) = &mut self.relay else { return };
        relay.finish(report);
        match relay.poll_rest(context) {
            Poll::Ready(Some(bytes)) => relay.ahead[0] = Some(Ok(Output::Body(bytes))),
            // A body with a length has ended.
            Poll::Pending if relay.is_stream => {}
            Poll::Pending | Poll::Ready(None) => self.relay = None,
        }
    }

    /// Ends the body with an event if it consists of events, else at the next poll with an error. In between hyper
    /// writes the head and the parts that it has, which it would drop together with the connection.
    fn fail(&mut self, error: &Error, context: &Context<'_>) -> Poll<Option<Result<Frame<Bytes>, io::Error>>> {
        let Some(mut relay) = self.relay.take() else { return Poll::Ready(None) };
        relay.fail(error);
        if relay.is_stream {
            let event = error.event(relay.context.error_form);
            // An event that has begun ends here: a client would read one that follows it as a part of it.
            let between = if relay.is_within_event { "\n\n" } else { "" };
            return Poll::Ready(Some(Ok(Frame::data(format!("{between}{event}").into()))));
        }
        self.cut = Some(io::Error::other(error.to_string()));
        context.waker().wake_by_ref();
        Poll::Pending
    }
}

impl HttpBody for RelayBody {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, io::Error>>> {
        if let Some(error) = self.cut.take() {
            return Poll::Ready(Some(Err(error)));
        }
        let Some(relay) = &mut self.relay else { return Poll::Ready(None) };
        if relay.is_finished() {
            let rest = std::task::ready!(relay.poll_rest(context));
            if rest.is_none() {
                self.relay = None;
            }
            return Poll::Ready(rest.map(|part| Ok(Frame::data(part))));
        }
        let part = match std::task::ready!(relay.poll_output(context)) {
            Some(Ok(Output::Body(bytes))) => {
                relay.meter.body(&bytes);
                relay.is_done = relay.is_stream && bytes.ends_with(DONE);
                relay.is_within_event = relay.is_stream && !EVENT_ENDS.iter().any(|end| bytes.ends_with(end));
                // A body with a length is not polled after its last byte, so its end is taken with that.
                let may_be_last = !relay.is_stream || relay.is_done;
                if may_be_last && let Poll::Ready(Some(next)) = relay.poll_output(context) {
                    match next {
                        Ok(Output::End(report)) => self.finish(report, context),
                        other => relay.ahead[0] = Some(other),
                    }
                }
                Some(bytes)
            }
            Some(Ok(Output::End(report))) => {
                self.finish(report, context);
                return self.poll_frame(context);
            }
            Some(Err(error)) => return self.fail(&error, context),
            _ => return self.fail(&no_end(), context),
        };
        Poll::Ready(part.map(|part| Ok(Frame::data(part))))
    }

    fn is_end_stream(&self) -> bool {
        self.relay.is_none() && self.cut.is_none()
    }
}

impl Drop for RelayBody {
    /// Clients may leave after `[DONE]`. What the engine says after it is read all the same: the usage is counted, and
    /// the connection to the engine can be used again. Without an end in time the request counts as cancelled.
    fn drop(&mut self) {
        if let Some(mut relay) = self.relay.take().filter(|relay| relay.is_done) {
            tokio::spawn(timeout(REST_TIMEOUT, async move {
                while let Some(Ok(output)) = relay.outputs.next().await {
                    if let Output::End(report) = output {
                        relay.finish(report);
                    }
                }
            }));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_media_type_says_what_a_body_consists_of() {
        let kind = |text: &str| kind_of(&HeaderMap::from_iter([(CONTENT_TYPE, text.parse().unwrap())]));
        for (text, expected) in [
            ("", BodyKind::Text),
            ("application/json", BodyKind::Json),
            (" Application/JSON ; charset=utf-8", BodyKind::Json),
            ("application/problem+Json", BodyKind::Json),
            ("Text/Event-Stream", BodyKind::Events),
            ("text/plain", BodyKind::Text),
            ("TEXT/x+json", BodyKind::Text),
            ("application/jsonl", BodyKind::Lines),
            ("application/x-NDJSON", BodyKind::Lines),
            ("audio/wav", BodyKind::Other),
            ("json", BodyKind::Other),
        ] {
            assert_eq!(kind(text), expected, "{text:?}");
        }
        assert_eq!(kind_of(&HeaderMap::new()), BodyKind::Text);
    }

    #[test]
    fn a_body_is_of_another_kind_only_if_it_is_compressed() {
        for (coding, expected) in [
            ("", BodyKind::Json),
            ("identity", BodyKind::Json),
            (" Identity", BodyKind::Json),
            ("gzip", BodyKind::Other),
            ("identity, gzip", BodyKind::Other),
        ] {
            let headers = HeaderMap::from_iter([
                (CONTENT_TYPE, "application/json".parse().unwrap()),
                (CONTENT_ENCODING, coding.parse().unwrap()),
            ]);
            assert_eq!(kind_of(&headers), expected, "{coding:?}");
        }
    }
}
