//! Server-sent events: one write per item of the engine's stream, keep-alive comments while there is no output, and
//! `[DONE]` at the end. An error after the response's head is an event.

mod events;

pub(crate) use events::{ChunkHead, Events, UsageSlot};

use crate::error::Error;
use crate::http::{RequestContext, panicked};
use crate::output::{ChoiceDelta, Generation};
use async_openai::types::chat::CompletionUsage;
use axum::body::Body;
use axum::http::HeaderName;
use axum::http::header::{CACHE_CONTROL, CONTENT_TYPE};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures::future::BoxFuture;
use futures::{FutureExt, StreamExt, stream};
use std::convert::Infallible;
use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{Instant, Sleep, sleep};

/// Time without output after which a comment is sent: proxies and clients close a silent connection after 30 to 60 s.
const KEEP_ALIVE: Duration = Duration::from_secs(10);

/// Encodes the output of an endpoint as chunks.
pub(crate) trait ChunkWriter: Send + 'static {
    /// Appends the events of one delta. `usage` is the usage so far.
    fn delta(&mut self, delta: ChoiceDelta, usage: &CompletionUsage, events: &mut Events);
    /// Appends the events between the last delta and `[DONE]`.
    fn end(&mut self, generation: &Generation, events: &mut Events);
}

struct EventStream<C> {
    generation: Generation,
    chunks: C,
    /// Deltas that arrived before the head was sent.
    ready: std::vec::IntoIter<ChoiceDelta>,
    events: Events,
    context: Arc<RequestContext>,
    /// Resolves when the stream must end, with the reason. One future for the whole stream, because registering it
    /// takes a lock that all streams share.
    ends: BoxFuture<'static, Error>,
    /// Time of the last write.
    last_write: Instant,
    /// Fires no later than the next comment is due. It is reset when it fires, not on each write.
    keep_alive: Pin<Box<Sleep>>,
}

/// The response that streams a generation. `ready` are deltas that were already taken from it; `ends` resolves when it
/// must end, with the reason.
pub(crate) fn response(
    generation: Generation,
    ready: Vec<ChoiceDelta>,
    chunks: impl ChunkWriter,
    context: Arc<RequestContext>,
    ends: BoxFuture<'static, Error>,
) -> Response {
    context.stream_started();
    // In a box, because every write moves it.
    let stream = Box::new(EventStream {
        generation,
        chunks,
        ready: ready.into_iter(),
        events: Events::new(),
        context,
        ends,
        last_write: Instant::now(),
        keep_alive: Box::pin(sleep(KEEP_ALIVE)),
    });
    // The request's span is not entered for each write: it would cost more than the encoding, and writes log nothing.
    let step = |stream: Option<Box<EventStream<_>>>| async move {
        let mut stream = stream?;
        // A panic ends the stream with an error event instead of closing the connection.
        let written = AssertUnwindSafe(stream.write()).catch_unwind().await;
        let Write { bytes, more } = written.unwrap_or_else(|_| stream.fail_after_panic());
        Some((Ok::<_, Infallible>(bytes), more.then_some(stream)))
    };
    let body = Body::from_stream(stream::unfold(Some(stream), step).boxed());
    // The last header tells nginx not to buffer the stream.
    let headers = [
        (CONTENT_TYPE, "text/event-stream; charset=utf-8"),
        (CACHE_CONTROL, "no-cache"),
        (HeaderName::from_static("x-accel-buffering"), "no"),
    ];
    (headers, body).into_response()
}

/// The next bytes of the body.
struct Write {
    bytes: Bytes,
    more: bool,
}

impl<C: ChunkWriter> EventStream<C> {
    /// Waits for output and encodes it.
    async fn write(&mut self) -> Write {
        loop {
            let next = if let Some(delta) = self.ready.next() {
                Some(Ok(delta))
            } else {
                tokio::select! {
                    biased;
                    next = self.generation.next() => next,
                    error = &mut self.ends => Some(Err(error)),
                    () = &mut self.keep_alive => {
                        let now = Instant::now();
                        let due = self.last_write + KEEP_ALIVE;
                        if now < due {
                            self.keep_alive.as_mut().reset(due);
                            continue;
                        }
                        self.last_write = now;
                        self.keep_alive.as_mut().reset(now + KEEP_ALIVE);
                        return Write { bytes: Bytes::from_static(b": keep-alive\n\n"), more: true };
                    }
                }
            };
            match next {
                Some(Ok(delta)) => self.chunks.delta(delta, &self.generation.usage(), &mut self.events),
                Some(Err(error)) => return self.fail(&error),
                None => return self.fail(&Error::Failed("a choice ended without a finish reason".into())),
            }
            let over = self.ready.len() == 0 && self.generation.is_finished();
            if over {
                self.chunks.end(&self.generation, &mut self.events);
                self.events.push_done();
                self.context.stream_finished();
            }
            // A delta may have no text yet, and then no event.
            if !self.events.is_empty() {
                self.last_write = Instant::now();
                return Write { bytes: self.events.take(), more: !over };
            }
        }
    }

    fn fail(&mut self, error: &Error) -> Write {
        self.generation.fail();
        // A panic may have left part of an event.
        drop(self.events.take());
        self.events.push(&error.body());
        self.context.stream_failed(error);
        Write { bytes: self.events.take(), more: false }
    }

    fn fail_after_panic(&mut self) -> Write {
        let error = self.context.span.in_scope(panicked);
        self.fail(&error)
    }
}
