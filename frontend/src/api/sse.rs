//! Server-sent events: one write per item of the engine, comments while nothing comes, `[DONE]` at the end, and an error as
//! an event when it is too late for a status.

use crate::error::Error;
use crate::http::{Shutdown, Ticket, panicked};
use crate::output::{Generation, Piece};
use crate::params::StreamUsage;
use async_openai::types::chat::CompletionUsage;
use axum::body::Body;
use axum::http::HeaderName;
use axum::http::header::{CACHE_CONTROL, CONTENT_TYPE};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures::{FutureExt, StreamExt, stream};
use serde::Serialize;
use std::convert::Infallible;
use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{Instant, Sleep, sleep};
use tracing::Instrument;

/// A long prefill sends nothing; proxies and clients give up on a silent connection after 30 to 60 s.
const KEEP_ALIVE: Duration = Duration::from_secs(10);

/// Events, collected for one write.
#[derive(Default)]
pub(crate) struct Events(Vec<u8>);

impl Events {
    /// Adds one.
    pub(crate) fn push(&mut self, event: &impl Serialize) {
        self.0.extend_from_slice(b"data: ");
        serde_json::to_writer(&mut self.0, event).expect("an event has string keys and goes to memory");
        self.0.extend_from_slice(b"\n\n");
    }
}

/// A chunk's `usage`: absent unless asked for, and then `null` until the last chunk.
#[derive(Serialize)]
pub(crate) struct UsageSlot(pub(crate) Option<CompletionUsage>);

impl UsageSlot {
    /// Of a chunk with choices.
    pub(crate) fn of(which: StreamUsage, so_far: &CompletionUsage) -> Option<Self> {
        match which {
            StreamUsage::Never => None,
            StreamUsage::Last => Some(Self(None)),
            StreamUsage::Each => Some(Self(Some(so_far.clone()))),
        }
    }
}

/// Writes an endpoint's chunks.
pub(crate) trait Chunks: Send + 'static {
    /// The events of one piece, with the usage so far.
    fn piece(&mut self, piece: Piece, usage: &CompletionUsage, events: &mut Events);
    /// The events after the last piece, before `[DONE]`.
    fn end(&mut self, generation: &Generation, events: &mut Events);
}

struct Stream<C> {
    generation: Generation,
    chunks: C,
    /// What was awaited before the head was sent.
    ready: std::vec::IntoIter<Piece>,
    ticket: Arc<Ticket>,
    shutdown: Shutdown,
    /// When something was written last, and a timer that fires no later than a comment is due. It is set anew when it fires,
    /// not for each token.
    written: Instant,
    silence: Pin<Box<Sleep>>,
}

/// The response that streams a generation. `ready` are pieces that were taken from it already.
pub(crate) fn response(
    generation: Generation,
    ready: Vec<Piece>,
    chunks: impl Chunks,
    ticket: Arc<Ticket>,
    shutdown: Shutdown,
) -> Response {
    ticket.stream_begins();
    let span = ticket.span.clone();
    let stream = Stream {
        generation,
        chunks,
        ready: ready.into_iter(),
        ticket,
        shutdown,
        written: Instant::now(),
        silence: Box::pin(sleep(KEEP_ALIVE)),
    };
    let step = move |stream: Option<Stream<_>>| {
        let step = async move {
            let mut stream = stream?;
            // A panic must end this stream with words, not the connection without.
            let written = AssertUnwindSafe(stream.write()).catch_unwind().await;
            let Written { bytes, more } = written.unwrap_or_else(|_| stream.fail(&panicked()));
            Some((Ok::<_, Infallible>(bytes), more.then_some(stream)))
        };
        step.instrument(span.clone())
    };
    let body = Body::from_stream(stream::unfold(Some(stream), step).boxed());
    // The last header tells nginx not to collect the stream.
    let headers = [
        (CONTENT_TYPE, "text/event-stream; charset=utf-8"),
        (CACHE_CONTROL, "no-cache"),
        (HeaderName::from_static("x-accel-buffering"), "no"),
    ];
    (headers, body).into_response()
}

struct Written {
    bytes: Bytes,
    more: bool,
}

impl<C: Chunks> Stream<C> {
    /// Waits for something to write.
    async fn write(&mut self) -> Written {
        let mut events = Events::default();
        loop {
            let next = if let Some(piece) = self.ready.next() {
                Some(Ok(piece))
            } else {
                tokio::select! {
                    biased;
                    next = self.generation.next() => next,
                    () = self.shutdown.cut() => Some(Err(Error::ShuttingDown)),
                    () = &mut self.silence => {
                        let (now, due) = (Instant::now(), self.written + KEEP_ALIVE);
                        if now < due {
                            self.silence.as_mut().reset(due);
                            continue;
                        }
                        self.written = now;
                        self.silence.as_mut().reset(now + KEEP_ALIVE);
                        return Written { bytes: Bytes::from_static(b": keep-alive\n\n"), more: true };
                    }
                }
            };
            match next {
                Some(Ok(piece)) => self.chunks.piece(piece, &self.generation.usage(), &mut events),
                Some(Err(error)) => return self.fail(&error),
                None => return self.fail(&Error::Failed("a choice ended without a finish reason".into())),
            }
            let over = self.ready.len() == 0 && self.generation.is_over();
            if over {
                self.chunks.end(&self.generation, &mut events);
                events.0.extend_from_slice(b"data: [DONE]\n\n");
                self.ticket.stream_ends();
            }
            // An item may hold back all of its text.
            if !events.0.is_empty() {
                self.written = Instant::now();
                return Written { bytes: events.0.into(), more: !over };
            }
        }
    }

    fn fail(&mut self, error: &Error) -> Written {
        self.generation.fail();
        let mut events = Events::default();
        events.push(&error.body());
        self.ticket.stream_fails(error);
        Written { bytes: events.0.into(), more: false }
    }
}
