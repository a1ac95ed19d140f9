//! The events of a stream: which are read, and what is removed from them.

use super::total::TotalUsage;
use super::{Report, UsageInStream};
use crate::relay::chunk::{Chunk, Kind, NULL_USAGE, Relevance, UsageScanner};
use crate::relay::error::{Answer, RelayError};
use crate::relay::splice::Splice;
use crate::relay::sse::{Event, Splitter};
use crate::relay::transcript::{Reading, Transcript};
use bytes::Bytes;
use memchr::memmem::{self, Finder};
use std::ops::Range;
use std::sync::LazyLock;
use worker::engine::ErrorKind;

/// Longer events are not kept: only their usage is read. Chunks have 300 bytes, or some 100 KB with the log
/// probabilities of a prompt; the last event of the Responses API repeats the request and the whole answer.
const MAX_EVENT: usize = 1 << 20;

/// The same for a stream that is followed: its first chunk has the token ids of the prompt, 7 bytes each.
const MAX_FOLLOWED_EVENT: usize = 8 << 20;

#[derive(Debug)]
pub(super) struct Events {
    splitter: Splitter,
    /// Set if another server may continue the stream.
    transcript: Option<Box<Transcript>>,
    /// The stream breaks off here, although its body does not.
    failure: Option<RelayError>,
    strip: bool,
    /// The payload of the latest event that was not read. Only at the end of the body it matters what it says.
    unread: Vec<u8>,
    /// Whether the answer may end after the latest event.
    finished: Finished,
    done: bool,
    usage: TotalUsage,
    response_id: Option<u64>,
    /// Reads the events that are too long.
    long: UsageScanner,
    failed: bool,
    /// The event with the finish reason, until the next one comes. Where the usage is removed, what else its chunk says
    /// belongs to this one: vLLM writes `system_fingerprint` into the last chunk.
    last: Option<Bytes>,
}

/// Part of a chunk that ends a choice.
static FINISH: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(br#""finish_reason":""#));
/// What vLLM says in the last chunk only.
const FINGERPRINT: &str = "system_fingerprint";

/// What an event means for the client.
#[derive(Debug)]
pub(super) struct Step {
    /// The bytes to forward.
    pub(super) frame: Option<Bytes>,
    /// It has output, or the stream is over: no further event must be waited for.
    pub(super) release: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Finished {
    Yes,
    No,
    /// [`Events::unread`] says it.
    Unread,
}

impl Events {
    pub(super) fn new(usage: UsageInStream) -> Self {
        Self {
            splitter: Splitter::new(MAX_EVENT),
            transcript: None,
            failure: None,
            strip: usage == UsageInStream::Strip,
            unread: Vec::new(),
            finished: Finished::No,
            done: false,
            usage: TotalUsage::default(),
            response_id: None,
            long: UsageScanner::of_events(),
            failed: false,
            last: None,
        }
    }

    pub(super) fn push(&mut self, chunk: Bytes) {
        self.splitter.push(chunk);
    }

    /// Follows a stream of which nothing was received yet.
    pub(super) fn follow(&mut self, transcript: Box<Transcript>) {
        self.splitter = Splitter::new(MAX_FOLLOWED_EVENT);
        self.transcript = Some(transcript);
    }

    pub(super) fn transcript(&self) -> Option<&Transcript> {
        self.transcript.as_deref()
    }

    pub(super) fn next(&mut self) -> Option<Event> {
        if self.failure.is_some() { None } else { self.splitter.next() }
    }

    /// What the client gets of the bytes after the last empty line, at the end of the body: all if they are the end of
    /// the stream, of which a server has forgotten the last line end, else nothing. An error follows a stream that has
    /// no end, and part of an event before it would hide it. `ends_anywhere`: any event may be the last one.
    pub(super) fn finish(&mut self, holding: bool, ends_anywhere: bool) -> Result<Option<Bytes>, RelayError> {
        let is_sent_again = !self.is_done_at_end() && self.transcript().is_some_and(Transcript::is_followed);
        let Some(event) = self.splitter.finish().filter(|_| !is_sent_again) else { return Ok(None) };
        let last = self.last.clone();
        let step = self.step(event, holding)?;
        if ends_anywhere || self.is_finished() {
            return Ok(step.frame);
        }
        self.last = last;
        Ok(None)
    }

    /// Whether the bytes after the last empty line are a `[DONE]`, whose event ends with the body.
    pub(super) fn is_done_at_end(&self) -> bool {
        let event = self.splitter.unfinished();
        event.and_then(|event| event.data().map(|data| data.trim_ascii() == b"[DONE]")).unwrap_or(false)
    }

    /// The error with which the stream breaks off after the frames so far.
    pub(super) fn take_failure(&mut self) -> Option<RelayError> {
        self.failure.take()
    }

    /// Decides on an event. `holding`: there was no output yet. Then an error in the stream is an error of the request.
    pub(super) fn step(&mut self, event: Event, holding: bool) -> Result<Step, RelayError> {
        let event = match &mut self.transcript {
            None => event,
            Some(transcript) => match transcript.read(event) {
                Reading::Pass(event) => event,
                Reading::Drop => return Ok(Step { frame: None, release: false }),
                Reading::Fail(error) => {
                    self.failure = Some(error);
                    return Ok(Step { frame: None, release: false });
                }
            },
        };
        let data = event.data_range();
        if !self.strip {
            return self.step_alone(event, data, holding);
        }
        let ends_a_choice = data.clone().is_some_and(|data| FINISH.find(&event.raw[data]).is_some());
        let mut step = self.step_alone(event, data, holding)?;
        let frame = step.frame.take();
        let (last, frame) =
            if ends_a_choice { (std::mem::replace(&mut self.last, frame), None) } else { (self.last.take(), frame) };
        step.frame = match (last, frame) {
            (Some(last), Some(frame)) => Some(joined(&last, b"", &frame)),
            (last, frame) => last.or(frame),
        };
        Ok(step)
    }

    /// The event with the finish reason, if it has not been taken yet.
    pub(super) fn take_last(&mut self) -> Option<Bytes> {
        self.last.take()
    }

    /// Adds to the event before it what a chunk that is removed says besides the usage.
    fn add_to_last(&mut self, removed: &[u8]) -> Option<()> {
        let value = Splice::scan(Bytes::copy_from_slice(removed)).ok()?.get(FINGERPRINT)?;
        let last = Event { raw: self.last.take()?, whole: true };
        let range = last.data_range();
        self.last = Some(last.raw.clone());
        let range = range?;
        let mut splice = Splice::scan(last.raw.slice(range.clone())).ok()?;
        if splice.range(FINGERPRINT).is_none() {
            splice.set(FINGERPRINT, value);
            self.last = Some(joined(&last.raw[..range.start], &splice.finish(), &last.raw[range.end..]));
        }
        Some(())
    }

    /// `range`: position of the payload in the event, if it is one line.
    fn step_alone(&mut self, event: Event, range: Option<Range<usize>>, holding: bool) -> Result<Step, RelayError> {
        if let Some(range) = range.clone().filter(|_| !holding) {
            let data = &event.raw[range.clone()];
            let relevance = Relevance::of(data);
            if relevance != Relevance::Read {
                self.unread.clear();
                self.unread.extend_from_slice(data);
                self.finished = Finished::Unread;
                let strip = self.strip && relevance == Relevance::NullUsage;
                let frame = if strip { without_null_usage(&event.raw, range) } else { event.raw };
                return Ok(Step { frame: Some(frame), release: true });
            }
        }
        // llama.cpp sends an error as a field of its own.
        let error = || event.field("error").map(|data| (data, true));
        let Some((data, is_error)) = event.data().map(|data| (data, false)).or_else(error) else {
            // A comment, or a part of an event that is too long. The latter is certainly not only a role.
            if !event.whole {
                self.read_part(&event.raw);
            }
            return Ok(Step { release: !event.whole, frame: Some(event.raw) });
        };
        let mut chunk = Chunk::read(&data);
        if is_error {
            chunk.kind = Kind::Error;
        }
        if holding && chunk.kind == Kind::Error {
            let answer = Answer::of_event(Bytes::copy_from_slice(&data));
            if answer.kind != ErrorKind::Request {
                return Err(RelayError::Answered(Box::new(answer)));
            }
            // Another engine would refuse the request too, so it passes as the engine wrote it.
            self.finished = Finished::Yes;
            return Ok(Step { frame: Some(event.raw), release: true });
        }
        self.learn(chunk);
        if self.strip && chunk.kind == Kind::Usage {
            // Without it nothing has to be added.
            let _ = self.add_to_last(&data);
            return Ok(Step { frame: None, release: false });
        }
        // No engine writes a chunk on several lines; such a chunk would keep its usage.
        let stripped = range.filter(|_| self.strip).and_then(|range| without_usage(&event.raw, range));
        let release = !matches!(chunk.kind, Kind::Preamble | Kind::Usage);
        Ok(Step { frame: Some(stripped.unwrap_or_else(|| event.raw.clone())), release })
    }

    /// Reads a part of an event that is too long.
    fn read_part(&mut self, part: &[u8]) {
        self.long.push(part);
        let found = self.long.take();
        self.response_id = found.response_id.or(self.response_id);
        if let Some(usage) = found.usage {
            // An event of this length that has the usage is the last one of an answer.
            self.finished = Finished::Yes;
            self.usage.update(found.item, usage);
        }
    }

    fn learn(&mut self, chunk: Chunk) {
        self.finished = if chunk.finished { Finished::Yes } else { Finished::No };
        self.done |= chunk.kind == Kind::Done;
        self.failed |= chunk.kind == Kind::Error;
        self.response_id = chunk.response_id.or(self.response_id);
        if let Some(usage) = chunk.usage {
            self.usage.update(chunk.item, usage);
        }
    }

    pub(super) fn is_done(&self) -> bool {
        self.done
    }

    /// Whether the answer is whole if the body ends now.
    pub(super) fn is_finished(&self) -> bool {
        let finished = match self.finished {
            Finished::Yes => true,
            Finished::No => false,
            Finished::Unread => Chunk::read(&self.unread).finished,
        };
        self.done || self.failed || finished
    }

    pub(super) fn report(&self) -> Report {
        Report { usage: self.usage.get(), response_id: self.response_id, failed: self.failed }
    }
}

/// The event without the [`NULL_USAGE`] at the end of its payload.
fn without_null_usage(raw: &[u8], data: Range<usize>) -> Bytes {
    // The brace stays.
    let brace = data.end - 1;
    joined(&raw[..data.end - NULL_USAGE.len()], b"", &raw[brace..])
}

/// The event without the member `usage` of its payload. `None` if it has none.
fn without_usage(raw: &Bytes, data: Range<usize>) -> Option<Bytes> {
    memmem::find(&raw[data.clone()], br#""usage""#)?;
    let mut splice = Splice::scan(raw.slice(data.clone())).ok()?;
    splice.range("usage")?;
    splice.remove("usage");
    Some(joined(&raw[..data.start], &splice.finish(), &raw[data.end..]))
}

fn joined(before: &[u8], between: &[u8], after: &[u8]) -> Bytes {
    let mut out = Vec::with_capacity(before.len() + between.len() + after.len());
    out.extend_from_slice(before);
    out.extend_from_slice(between);
    out.extend_from_slice(after);
    out.into()
}
