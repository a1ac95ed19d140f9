//! Turns the answer of an engine into what the client gets, and reads its usage on the way.
//!
//! ```text
//!            output, [DONE], too much held        end of the body
//!   Holding ─────────────────────────────▶ Passing ───────────────▶ Ended
//!      │ error, or the end without output     │ broken off              ▲
//!      └──────────────────────────────────────┴─────────────────────────┘
//! ```
//!
//! **Nothing reaches the client before the first output.** Until then a failure is an error item and nothing else, so
//! the request can go to another engine. Afterwards chunks of output pass unread.
//!
//! **A stream is whole after `[DONE]`**, also if its body does not end then: the end is reported at once. What follows
//! within a second passes, and the connection of a body that ends within it can be used again.
//!
//! Dropping a [`Relay`] drops the body, which cancels the request at the engine.
//!
//! Not here: time limits of a request. The items carry none, so the caller can time them as it likes.

mod events;
mod frames;
mod kind;
mod plain;
mod total;

use super::error::RelayError;
use super::headers;
use super::transcript::{Broken, Transcript};
use bytes::Bytes;
use events::Events;
use frames::{HeldFrames, next_run};
use futures::Stream;
use http::{HeaderMap, HeaderValue, Response, StatusCode, header};
use http_body::Body;
use kind::{Start, has_type, is_readable_stream};
use plain::Plain;
use std::error::Error;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::time::{Sleep, sleep};

pub use super::chunk::Usage;

/// The answer of an engine as a stream of [`Item`]s. An error item is the last one.
#[derive(Debug)]
pub struct Relay<B> {
    /// Dropped at the end or at an error, which frees or closes its connection.
    body: Option<B>,
    content: Content,
    head: Option<Head>,
    /// Frames from before the first output, and the last one of a body.
    held: HeldFrames,
    /// What was received last.
    received: Bytes,
    /// The body has ended, and what was received last may have more events.
    is_ending: bool,
    /// A stream may end after any event.
    ends_anywhere: bool,
    /// Set once the end was reported of a stream whose body has not ended: how long the body may last.
    rest: Option<Pin<Box<Sleep>>>,
    phase: Phase,
}

/// A part of an answer, in this order: one head, frames, one end, and what follows the `[DONE]` of a stream.
#[derive(Debug)]
pub enum Item {
    /// Comes together with the first output.
    Head(Head),
    /// Bytes for the client: an event of a stream, or part of another body.
    Frame(Bytes),
    /// The answer is whole.
    End(Report),
}

/// The start of an answer, for the client.
#[derive(Clone, Debug)]
pub struct Head {
    /// The status of the engine's answer.
    pub status: StatusCode,
    /// The headers of the engine's answer that pass.
    pub headers: HeaderMap,
}

/// What was learned of a whole answer.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Report {
    /// The usage, if the engine said it.
    pub usage: Option<Usage>,
    /// A hash of the id of the response, if it has one.
    pub response_id: Option<u64>,
    /// The engine sent an error after output had begun. The client has got it as a part of the stream.
    pub failed: bool,
}

/// What is done with the usage that a stream has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum UsageInStream {
    /// It passes: the client asked for it.
    Keep,
    /// It is removed: the gateway asked for it.
    Strip,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Phase {
    Holding,
    Passing,
    Ended,
}

#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "a box for the other variant too would be an allocation for each answer")]
enum Content {
    Events(Box<Events>),
    Plain(Plain),
    /// The engine does not say what its body consists of, and neither does `start`, which is all of it that was
    /// received.
    Unknown {
        usage: UsageInStream,
        start: Bytes,
    },
}

/// Maximum number of bytes that are kept until they say what the body consists of. White space may come before.
const MAX_START: usize = 1024;

/// Maximum number of bytes held before the first output. Role chunks have 300 bytes. Streams of the Responses API begin
/// with two copies of the request's instructions; where those are longer, the head goes out before the first output.
const MAX_HELD: usize = 256 << 10;

/// Time for the end of a body after `[DONE]`. It is the next packet, which may have to be sent again.
const REST_TIMEOUT: Duration = Duration::from_secs(1);

impl<B> Relay<B>
where
    B: Body<Data = Bytes> + Unpin,
    B::Error: Into<Box<dyn Error + Send + Sync>>,
{
    /// Relays an answer whose status is a success; for others see [`Answer::read`](super::error::Answer::read).
    pub fn new(response: Response<B>, usage: UsageInStream) -> Self {
        let (parts, body) = response.into_parts();
        let content = if is_readable_stream(&parts.headers) {
            Content::events(usage)
        } else if has_type(&parts.headers) {
            Content::Plain(Plain::new())
        } else {
            Content::Unknown { usage, start: Bytes::new() }
        };
        let head = Head { status: parts.status, headers: headers::response(parts.headers, content.body()) };
        Self {
            body: Some(body),
            content,
            head: Some(head),
            held: HeldFrames::default(),
            received: Bytes::new(),
            is_ending: false,
            ends_anywhere: false,
            rest: None,
            phase: Phase::Holding,
        }
    }

    /// Takes the end of the body for the end of the stream, whatever the last event is: it is not known how streams of
    /// the endpoint end. By default a stream must end as those do that are known.
    #[must_use]
    pub fn ending_anywhere(self) -> Self {
        Self { ends_anywhere: true, ..self }
    }

    /// Whether the answer is a page for browsers, as of a proxy before the server that asks for a login.
    pub fn is_page(&self) -> bool {
        let value = self.head.as_ref().and_then(|head| head.headers.get(header::CONTENT_TYPE)?.to_str().ok());
        let media_type = value.and_then(|value| value.split(';').next()).unwrap_or_default();
        media_type.trim().eq_ignore_ascii_case("text/html")
    }

    /// What was learned up to the latest item of an answer that may not be whole.
    pub fn so_far(&self) -> Report {
        match &self.content {
            Content::Events(events) => events.report(),
            Content::Plain(plain) => plain.so_far(),
            Content::Unknown { .. } => Report::default(),
        }
    }

    /// Follows a stream of which nothing was read yet, so that another server can continue it. Returns whether it does:
    /// other bodies stay as they are.
    pub fn follow(&mut self, transcript: Box<Transcript>) -> bool {
        let Content::Events(events) = &mut self.content else { return false };
        events.follow(transcript);
        true
    }

    /// What another server needs to continue a stream that was followed and has failed, or why none can.
    pub fn broken(&self) -> Result<Broken, &'static str> {
        self.transcript().ok_or("it is no stream of events").and_then(Transcript::broken)
    }

    /// A stream that was followed has no token ids.
    pub fn lacks_ids(&self) -> bool {
        self.transcript().is_some_and(Transcript::lacks_ids)
    }

    fn transcript(&self) -> Option<&Transcript> {
        if let Content::Events(events) = &self.content { events.transcript() } else { None }
    }

    /// Takes what the content has of frames. Returns one that may pass at once.
    fn next_frame(&mut self) -> Result<Option<Bytes>, RelayError> {
        let Content::Events(events) = &mut self.content else { return Ok(None) };
        if self.phase == Phase::Passing {
            let run = next_run(events, &self.received, &mut self.held)?;
            // What came before the failure passes first.
            let failure = if run.is_none() { events.take_failure() } else { None };
            return failure.map_or(Ok(run), Err);
        }
        while let Some(event) = events.next() {
            let step = events.step(event, true)?;
            if let Some(frame) = step.frame {
                self.held.push_received(frame, &self.received);
            }
            if step.release || self.held.bytes > MAX_HELD {
                self.phase = Phase::Passing;
                return Ok(None);
            }
        }
        events.take_failure().map_or(Ok(None), Err)
    }

    /// The next item, without a read of the body. `None` if it needs one.
    fn buffered(&mut self) -> Result<Option<Item>, RelayError> {
        // At most twice: the first round may end the phase of holding.
        loop {
            if self.phase == Phase::Passing {
                if let Some(head) = self.head.take() {
                    return Ok(Some(Item::Head(head)));
                }
                if let Some(frame) = self.held.pop() {
                    return Ok(Some(Item::Frame(frame)));
                }
            }
            if let Some(frame) = self.next_frame()? {
                return Ok(Some(Item::Frame(frame)));
            }
            if self.phase == Phase::Holding || self.head.is_none() {
                return Ok(None);
            }
        }
    }

    fn received(&mut self, mut data: Bytes) {
        if let Content::Unknown { usage, start } = &mut self.content {
            if !start.is_empty() {
                data = [&start[..], &data[..]].concat().into();
            }
            match Start::of(&data) {
                None if data.len() < MAX_START => {
                    *start = data;
                    return;
                }
                found => {
                    let usage = *usage;
                    self.recognize(usage, found.unwrap_or(Start::Other));
                }
            }
        }
        match &mut self.content {
            Content::Events(events) => {
                self.received = data.clone();
                events.push(data);
            }
            Content::Plain(plain) => {
                plain.read(&data);
                self.phase = Phase::Passing;
                self.held.push(data);
            }
            Content::Unknown { .. } => {}
        }
    }

    /// Names what a body consists of, of which the engine does not say it.
    fn recognize(&mut self, usage: UsageInStream, start: Start) {
        let (content, media_type) = match start {
            Start::Json => (Content::Plain(Plain::new()), Some("application/json")),
            Start::Events => (Content::events(usage), Some("text/event-stream")),
            Start::Other => (Content::Plain(Plain::new()), None),
        };
        self.content = content;
        if let Some((head, media_type)) = self.head.as_mut().zip(media_type) {
            let mut headers = headers::response(std::mem::take(&mut head.headers), self.content.body());
            headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(media_type));
            head.headers = headers;
        }
    }

    /// The body has ended. Its last frames and the head may still be held.
    fn ended(&mut self) -> Result<(), RelayError> {
        self.body = None;
        let holding = self.phase == Phase::Holding;
        self.phase = Phase::Passing;
        if let Content::Unknown { start, .. } = &mut self.content {
            let start = std::mem::take(start);
            if !start.is_empty() {
                self.held.push(start);
            }
        }
        let Content::Events(events) = &mut self.content else { return Ok(()) };
        events.finish(holding, self.ends_anywhere)?.into_iter().for_each(|frame| self.held.push(frame));
        events.take_last().into_iter().for_each(|frame| self.held.push(frame));
        // A client that has got output gets the last frames too, before the error.
        if holding && !self.ends_anywhere && !events.is_finished() { Err(RelayError::Unfinished) } else { Ok(()) }
    }

    fn report(&mut self) -> Result<Item, RelayError> {
        match &mut self.content {
            Content::Events(events) => match events.take_failure() {
                Some(failure) => Err(failure),
                None if self.ends_anywhere || events.is_finished() => Ok(Item::End(events.report())),
                None => Err(RelayError::Unfinished),
            },
            Content::Plain(plain) => Ok(Item::End(plain.report())),
            Content::Unknown { .. } => Ok(Item::End(Report::default())),
        }
    }

    /// The last item. There is none if the end was reported before.
    fn end(&mut self, last: Result<Item, RelayError>) -> Poll<Option<Result<Item, RelayError>>> {
        self.phase = Phase::Ended;
        self.body = None;
        self.held.clear();
        Poll::Ready(Some(last).filter(|_| self.rest.is_none()))
    }

    /// Waits for the end of a body after `[DONE]`. The end of the stream is reported first.
    fn poll_rest(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<Item, RelayError>>> {
        let Some(timer) = &mut self.rest else {
            let report = self.report();
            if report.is_err() {
                return self.end(report);
            }
            self.rest = Some(Box::pin(sleep(REST_TIMEOUT)));
            return Poll::Ready(Some(report));
        };
        ready!(timer.as_mut().poll(context));
        self.end(Err(RelayError::Unfinished))
    }
}

impl<B> Stream for Relay<B>
where
    B: Body<Data = Bytes> + Unpin,
    B::Error: Into<Box<dyn Error + Send + Sync>>,
{
    type Item = Result<Item, RelayError>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = &mut *self;
        loop {
            if this.phase == Phase::Ended {
                return Poll::Ready(None);
            }
            match this.buffered() {
                Ok(Some(item)) => return Poll::Ready(Some(Ok(item))),
                Ok(None) => {}
                Err(error) => return this.end(Err(error)),
            }
            if std::mem::take(&mut this.is_ending) {
                if let Err(error) = this.ended() {
                    return this.end(Err(error));
                }
                continue;
            }
            let Some(body) = &mut this.body else {
                let report = this.report();
                return this.end(report);
            };
            let polled = Pin::new(&mut *body).poll_frame(context);
            // More may come of a stream of which it is not known how it ends.
            if polled.is_pending() && this.content.is_done() && !this.ends_anywhere {
                return this.poll_rest(context);
            }
            match ready!(polled) {
                Some(Ok(frame)) => {
                    // A body of known length, or of which the end arrived too, need not be asked for more.
                    if body.is_end_stream() {
                        this.body = None;
                        this.is_ending = true;
                    }
                    // Trailers end here; no engine sends any.
                    if let Ok(data) = frame.into_data() {
                        this.received(data);
                    }
                }
                // The answer is whole after `[DONE]`, however its connection ends.
                Some(Err(error)) if !this.content.is_done() && !this.content.is_done_at_end() => {
                    return this.end(Err(RelayError::BrokenOff(chain(&*error.into()))));
                }
                None | Some(Err(_)) => {
                    if let Err(error) = this.ended() {
                        return this.end(Err(error));
                    }
                }
            }
        }
    }
}

impl Content {
    fn events(usage: UsageInStream) -> Self {
        Self::Events(Box::new(Events::new(usage)))
    }

    /// Whether the client gets the body as it comes. A stream that keeps its usage may change too: if it breaks off, an
    /// event with the error is added.
    fn body(&self) -> headers::Body {
        if matches!(self, Self::Events(_)) { headers::Body::Changed } else { headers::Body::Unchanged }
    }

    /// `[DONE]` was read.
    fn is_done(&self) -> bool {
        matches!(self, Self::Events(events) if events.is_done())
    }

    /// `[DONE]` was read without the empty line after it, so that only the end of the body ends its event.
    fn is_done_at_end(&self) -> bool {
        matches!(self, Self::Events(events) if events.is_done_at_end())
    }
}

/// An error with its causes.
pub(super) fn chain(error: &(dyn Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text.push_str(": ");
        text.push_str(&cause.to_string());
        source = cause.source();
    }
    text
}

#[cfg(test)]
mod tests;
