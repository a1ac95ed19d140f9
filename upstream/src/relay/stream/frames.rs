//! Frames of a stream for the client: those that are held, and events in a row as one.

use super::events::Events;
use crate::relay::error::RelayError;
use bytes::Bytes;
use std::collections::VecDeque;
use std::ops::Range;

/// Frames from before the first output, and the last one of a body.
#[derive(Default, Debug)]
pub(super) struct HeldFrames {
    /// Most answers never have more than one.
    first: Option<Bytes>,
    others: VecDeque<Bytes>,
    /// Of all frames that were ever held.
    pub(super) bytes: usize,
}

/// The next frame of a stream that passes: all events in a row that were received together and pass unchanged. A frame
/// that does not follow the ones before it is put into `held`.
pub(super) fn next_run(
    events: &mut Events,
    received: &Bytes,
    held: &mut HeldFrames,
) -> Result<Option<Bytes>, RelayError> {
    let mut run = 0..0;
    while let Some(event) = events.next() {
        let Some(frame) = events.step(event, false)?.frame else { continue };
        match position(received, &frame) {
            Some(at) if at.start == run.end || run.is_empty() => {
                run = if run.is_empty() { at } else { run.start..at.end };
            }
            _ if run.is_empty() => return Ok(Some(frame)),
            _ => {
                held.push(frame);
                break;
            }
        }
    }
    Ok(Some(received.slice(run)).filter(|run| !run.is_empty()))
}

/// Where `part` is in `whole`, if it is a slice of it.
fn position(whole: &Bytes, part: &Bytes) -> Option<Range<usize>> {
    let start = part.as_ptr().addr().checked_sub(whole.as_ptr().addr())?;
    let end = start + part.len();
    (end <= whole.len()).then_some(start..end)
}

impl HeldFrames {
    pub(super) fn push(&mut self, frame: Bytes) {
        self.bytes += frame.len();
        if self.first.is_none() && self.others.is_empty() {
            self.first = Some(frame);
        } else {
            self.others.push_back(frame);
        }
    }

    /// Adds a frame to the one before it, if it follows that one in `received`: a server may send many small events.
    pub(super) fn push_received(&mut self, frame: Bytes, received: &Bytes) {
        let last = self.others.back_mut().or(self.first.as_mut());
        if let Some(last) = last
            && let Some(before) = position(received, last)
            && let Some(at) = position(received, &frame)
            && before.end == at.start
        {
            *last = received.slice(before.start..at.end);
            self.bytes += frame.len();
        } else {
            self.push(frame);
        }
    }

    pub(super) fn pop(&mut self) -> Option<Bytes> {
        self.first.take().or_else(|| self.others.pop_front())
    }

    pub(super) fn clear(&mut self) {
        self.first = None;
        self.others.clear();
    }
}
