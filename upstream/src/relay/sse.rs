//! Splits a body into server-sent events (the `text/event-stream` format of the HTML standard).
//!
//! Line ends are LF, CRLF or CR, and an empty line ends an event. Chunks of the body may be split anywhere. An event
//! within one chunk is a slice of that chunk; only events across chunks are copied.
//!
//! **Every byte that goes in comes out once, in order.** The events of a body do not depend on how it is split.
//!
//! Not here: the fields `event`, `id` and `retry`, apart from access to their bytes, and the byte order mark. A relay
//! forwards them as they are.

use bytes::{Bytes, BytesMut};
use std::borrow::Cow;
use std::ops::Range;

/// The event stream of one response.
#[derive(Debug)]
pub struct Splitter {
    /// The latest chunk, from where the next event starts.
    chunk: Bytes,
    /// The start of an event whose end is not there yet.
    partial: BytesMut,
    state: State,
    /// The latest line end was CRLF. Then a CR at the start of a line is taken for the first half of another.
    crlf: bool,
    /// Parts of the present event were already passed on, because it is too long.
    passing: bool,
    max_event: usize,
}

/// An event, or a part of one that is too long to be examined.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Event {
    /// The bytes to forward, the empty line included.
    pub raw: Bytes,
    /// Whether `raw` is a whole event.
    pub whole: bool,
}

/// What precedes the next byte.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    /// A line end or the start of the body.
    LineStart,
    /// Part of a line.
    Line,
    /// A CR after a line, which an LF may follow.
    Cr,
    /// A CR that is an empty line, if no LF follows that belongs to it.
    EmptyCr,
}

impl Splitter {
    /// A splitter that does not keep or examine events above `max_event` bytes.
    pub fn new(max_event: usize) -> Self {
        Self {
            chunk: Bytes::new(),
            partial: BytesMut::new(),
            state: State::LineStart,
            crlf: false,
            passing: false,
            max_event,
        }
    }

    /// Adds the next chunk of the body. The events of the chunk before must have been taken with [`next`](Self::next).
    pub fn push(&mut self, chunk: Bytes) {
        debug_assert!(self.chunk.is_empty(), "events of the chunk before are left");
        self.chunk = chunk;
    }

    /// The next event of the chunk. `None` if another chunk is needed.
    #[expect(clippy::should_implement_trait, reason = "an iterator that ends would not continue after the next chunk")]
    pub fn next(&mut self) -> Option<Event> {
        while !self.chunk.is_empty() {
            let Some(end) = self.find_end() else {
                let rest = std::mem::take(&mut self.chunk);
                if !self.passing && self.partial.len() + rest.len() <= self.max_event {
                    self.partial.extend_from_slice(&rest);
                    return None;
                }
                self.passing = true;
                return Some(Event { raw: self.joined(rest), whole: false });
            };
            let rest = self.chunk.split_to(end);
            let raw = self.joined(rest);
            let whole = !std::mem::take(&mut self.passing) && raw.len() <= self.max_event;
            // The end of a long event may be known only at the first byte of the next one. Then nothing is left of it.
            if !raw.is_empty() {
                return Some(Event { raw, whole });
            }
        }
        None
    }

    /// The bytes after the last empty line. A client discards them, so no engine ends a stream with them on purpose,
    /// but some forget the last line end.
    pub fn finish(&mut self) -> Option<Event> {
        let raw = self.partial.split().freeze();
        self.state = State::LineStart;
        (!raw.is_empty()).then_some(Event { raw, whole: true })
    }

    /// The same, which stay where they are.
    pub fn unfinished(&self) -> Option<Event> {
        (!self.partial.is_empty()).then(|| Event { raw: Bytes::copy_from_slice(&self.partial), whole: true })
    }

    fn joined(&mut self, rest: Bytes) -> Bytes {
        if self.partial.is_empty() {
            return rest;
        }
        self.partial.extend_from_slice(&rest);
        self.partial.split().freeze()
    }

    /// Position in the chunk of the end of the event. Without one, the state is that at the end of the chunk.
    fn find_end(&mut self) -> Option<usize> {
        let mut at = 0;
        while at < self.chunk.len() {
            let byte = self.chunk[at];
            match (self.state, byte) {
                (State::Line, _) => {
                    at += memchr::memchr2(b'\n', b'\r', &self.chunk[at..])?;
                    let cr = self.chunk[at] == b'\r';
                    self.crlf = false;
                    self.state = if cr { State::Cr } else { State::LineStart };
                }
                (State::LineStart, b'\r') if self.crlf => self.state = State::EmptyCr,
                (State::LineStart, b'\n' | b'\r') => return Some(at + 1),
                (State::LineStart, _) => self.state = State::Line,
                (State::Cr, b'\n') => {
                    self.crlf = true;
                    self.state = State::LineStart;
                }
                // The CR was a whole line end. The byte is looked at again.
                (State::Cr, _) => {
                    self.state = State::LineStart;
                    continue;
                }
                (State::EmptyCr, _) => {
                    self.state = State::LineStart;
                    return Some(at + usize::from(byte == b'\n'));
                }
            }
            at += 1;
        }
        None
    }
}

impl Event {
    /// The payload: the value of the `data` field, lines joined with LF. `None` for comments and parts of events.
    pub fn data(&self) -> Option<Cow<'_, [u8]>> {
        self.field("data")
    }

    /// The value of a field as [`data`](Self::data). Only a field of more than one line is copied.
    pub fn field(&self, name: &str) -> Option<Cow<'_, [u8]>> {
        let mut values = self.values(name);
        let first = values.next()?;
        let Some(second) = values.next() else {
            return Some(Cow::Borrowed(&self.raw[first]));
        };
        let mut joined = self.raw[first].to_vec();
        for value in [second].into_iter().chain(values) {
            joined.push(b'\n');
            joined.extend_from_slice(&self.raw[value]);
        }
        Some(Cow::Owned(joined))
    }

    /// Position of the payload in `raw` if it is one line.
    pub fn data_range(&self) -> Option<Range<usize>> {
        let mut values = self.values("data");
        values.next().filter(|_| values.next().is_none())
    }

    /// Positions of the values of the lines that have this field.
    fn values<'a>(&'a self, name: &'a str) -> impl Iterator<Item = Range<usize>> + 'a {
        let mut at = 0;
        let lines = std::iter::from_fn(move || {
            // An empty CRLF line after CRLF is seen as two, which makes no difference.
            let rest = self.raw.get(at..).filter(|rest| self.whole && !rest.is_empty())?;
            let length = memchr::memchr2(b'\n', b'\r', rest).unwrap_or(rest.len());
            let line = at..at + length;
            at = line.end + 1;
            Some(line)
        });
        lines.filter_map(move |line| {
            let rest = self.raw[line.clone()].strip_prefix(name.as_bytes())?;
            let value = match rest {
                [] => rest,
                [b':', value @ ..] => value.strip_prefix(b" ").unwrap_or(value),
                _ => return None,
            };
            Some(line.end - value.len()..line.end)
        })
    }
}

#[cfg(test)]
mod tests;
