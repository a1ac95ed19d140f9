//! Cursor of one source of KV events: which event is next, what is missing, and what to request. Pure.
//!
//! ```text
//!              next event: apply ↺
//!   following ──── gap, behind a report ───▶ Range ─────── the log is truncated ────────────────▶ Snapshot
//!       ▲                                     │ (of events)     a new epoch, or an unknown source ──▶ │
//!       ├── all known events have arrived ────┴──────────────────────────────────────────────────────┘
//!       └── a snapshot ──── Revalidate ◀── the index may be wrong
//! ```
//! Events that arrive early are buffered and applied in order once the missing ones arrive. So repeated, late and old
//! events do not change the outcome. Neither do forged events with arbitrary numbers or epochs: the source's answer to
//! a request overrides whatever arrived before the request.

mod reorder_buffer;

use kvbm::{BlockEvent, Epoch, Numbered};
use reorder_buffer::ReorderBuffer;
use std::time::Duration;
use tokio::time::Instant;
use worker::plane::RANGE_MAX;

/// Cursor of one source.
pub(crate) struct SourceCursor {
    /// The epoch that is followed; `None` before the first is known.
    epoch: Option<Epoch>,
    /// The source is in this epoch or a later one, according to discovery.
    min_epoch: Option<Epoch>,
    /// Number of the last event applied to the index.
    number: u64,
    /// Number of the last event that is known to exist.
    last_known: u64,
    /// Events that arrived before one that they follow.
    buffer: ReorderBuffer,
    /// What is missing; `None` while following.
    resync: Option<Resync>,
    /// The request whose answer is pending.
    pending: Option<PendingRequest>,
    /// Epoch and number of a report whose events have not arrived, and since when.
    missing: Option<(Epoch, u64, Instant)>,
    /// Whether events of this epoch have arrived since the last [`Self::take_has_new_events`].
    has_new_events: bool,
}

#[derive(Clone, Copy)]
struct PendingRequest {
    request_seq: u64,
    /// Epoch and number when the request was sent.
    position: (Option<Epoch>, u64),
}

/// What a cursor needs to follow its source.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Resync {
    /// Events that the source's log may still have.
    Range,
    /// A snapshot: what precedes the present events is unknown.
    Snapshot,
    /// A snapshot, before any further event is applied: the index may be wrong.
    Revalidate,
}

/// What to do with an event.
#[derive(PartialEq, Debug)]
pub(crate) enum Outcome {
    /// It is the next one: apply it. Buffered events may follow.
    Apply(BlockEvent),
    /// It is buffered until the ones before it arrive.
    Buffered,
    /// It was applied before.
    Duplicate,
    /// It is from a former epoch.
    Stale,
    /// It is buffered, and reveals that the ones before it are missing.
    Gap,
    /// The source started a new epoch: clear its index entries.
    NewEpoch,
}

/// A request to the source.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum ResyncRequest {
    /// The events of this epoch after this number.
    Range(Epoch, u64),
    /// All blocks that it holds.
    Snapshot,
}

/// Time by which a report may overtake the last events.
const GRACE: Duration = Duration::from_millis(500);
/// Several processes publish events of a store, and the one that started last is followed. It has ended when the
/// digests of others arrive for this long without one of its own: each sends one every ten seconds, and two may be
/// lost.
const STORE_GRACE: Duration = Duration::from_secs(25);

impl Outcome {
    /// The label in metrics.
    pub(crate) const fn name(&self) -> &'static str {
        match self {
            Self::Apply(_) => "applied",
            Self::Buffered => "buffered",
            Self::Duplicate => "duplicate",
            Self::Stale => "stale",
            Self::Gap => "gap",
            Self::NewEpoch => "new_epoch",
        }
    }
}

impl SourceCursor {
    /// A cursor without any events: it needs a snapshot, or the first event.
    pub(crate) fn new(epoch: Option<Epoch>) -> Self {
        Self {
            epoch,
            min_epoch: epoch,
            number: 0,
            last_known: 0,
            buffer: ReorderBuffer::default(),
            resync: Some(Resync::Snapshot),
            pending: None,
            missing: None,
            has_new_events: false,
        }
    }

    /// The epoch that is followed.
    pub(crate) fn epoch(&self) -> Option<Epoch> {
        self.epoch
    }

    /// Number of the last event applied to the index.
    pub(crate) fn number(&self) -> u64 {
        self.number
    }

    /// Takes an event. Afterwards, as after every other change, call [`next`](Self::next) and
    /// [`next_request`](Self::next_request).
    pub(crate) fn event(&mut self, epoch: Epoch, number: u64, event: BlockEvent) -> Outcome {
        match self.epoch {
            Some(current) if epoch < current => return Outcome::Stale,
            Some(current) if epoch > current => {
                // If the pending answer is of the former epoch, it is requested again.
                self.start_epoch(epoch);
                self.has_new_events = true;
                self.buffer_event(number, event);
                return Outcome::NewEpoch;
            }
            _ => self.epoch = Some(epoch),
        }
        self.has_new_events = true;
        if number <= self.number {
            Outcome::Duplicate
        } else if number == self.number + 1 && self.resync != Some(Resync::Revalidate) {
            self.advance();
            Outcome::Apply(event)
        } else {
            self.buffer_event(number, event);
            let expected = self.resync.is_some();
            self.resync.get_or_insert(Resync::Range);
            if expected { Outcome::Buffered } else { Outcome::Gap }
        }
    }

    /// The next buffered event to apply, once all before it were applied.
    pub(crate) fn next(&mut self) -> Option<BlockEvent> {
        if self.resync == Some(Resync::Revalidate) {
            return None;
        }
        let event = self.buffer.take(self.number.checked_add(1)?)?;
        self.advance();
        Some(event)
    }

    /// The next request, numbered `request_seq`; `None` if nothing is missing or an answer is pending.
    pub(crate) fn next_request(&mut self, request_seq: u64) -> Option<ResyncRequest> {
        let (resync, epoch) = (self.resync.filter(|_| self.pending.is_none())?, self.epoch);
        self.pending = Some(PendingRequest { request_seq, position: (epoch, self.number) });
        Some(match (resync, epoch) {
            (Resync::Range, Some(epoch)) => ResyncRequest::Range(epoch, self.number),
            _ => ResyncRequest::Snapshot,
        })
    }

    /// Whether the answer to this request is pending.
    pub(crate) fn awaits(&self, request_seq: u64) -> bool {
        self.pending.is_some_and(|pending| pending.request_seq == request_seq)
    }

    /// Whether events have arrived, also in a snapshot, since the last call.
    pub(crate) fn take_has_new_events(&mut self) -> bool {
        std::mem::take(&mut self.has_new_events)
    }

    /// Whether exactly the events up to this number of this epoch were applied.
    pub(crate) fn is_at(&self, epoch: Epoch, number: u64) -> bool {
        self.resync.is_none() && self.epoch == Some(epoch) && self.number == number
    }

    /// Marks the index entries of the source as possibly wrong.
    pub(crate) fn invalidate(&mut self) {
        self.resync = Some(Resync::Revalidate);
    }

    /// Takes epoch and number of a report. Returns whether events that it implies have been missing for too long, or
    /// the source is in another epoch while the followed one is no longer reported.
    pub(crate) fn behind(&mut self, epoch: Epoch, number: u64, now: Instant) -> bool {
        let comes = |epoch, number| self.epoch != Some(epoch) || number > self.number;
        if self.resync.is_some() || !comes(epoch, number) {
            self.missing = None;
            return false;
        }
        let since = self.missing.filter(|(epoch, number, _)| comes(*epoch, *number)).map(|(_, _, since)| since);
        let grace = if self.min_epoch.is_none() && Some(epoch) < self.epoch { STORE_GRACE } else { GRACE };
        let due = since.is_some_and(|since| now - since >= grace);
        self.missing = Some((epoch, number, since.unwrap_or(now))).filter(|_| !due);
        if due && self.epoch == Some(epoch) {
            self.last_known = number;
            self.resync = Some(Resync::Range);
        } else if due {
            self.invalidate();
        }
        due
    }

    /// Accepts or refuses a snapshot of an epoch and number. After `true` apply it to the index, then call
    /// [`snapshot_applied`](Self::snapshot_applied); until then no event is applied. `false`: it is older than the
    /// cursor.
    pub(crate) fn accept_snapshot(&mut self, epoch: Epoch, number: u64) -> bool {
        let position = (Some(epoch), number);
        // It is older than the cursor was when it was requested: then the cursor's position is not from the source.
        let corrects = self.pending.is_some_and(|pending| position < pending.position);
        if position.0 < self.min_epoch || (position < (self.epoch, self.number) && !corrects) {
            self.pending = None;
            return false;
        }
        if self.epoch != Some(epoch) {
            self.start_epoch(epoch);
        }
        self.invalidate();
        true
    }

    /// Records that an [accepted](Self::accept_snapshot) snapshot was applied. Returns whether its epoch is still
    /// followed.
    pub(crate) fn snapshot_applied(&mut self, epoch: Epoch, number: u64) -> bool {
        self.pending = None;
        if self.epoch != Some(epoch) {
            self.invalidate();
            return false;
        }
        self.has_new_events |= number > self.number;
        self.number = number;
        self.buffer.discard_up_to(number);
        // Events that neither the snapshot nor the buffer contains do not exist.
        self.last_known = self.buffer.last().unwrap_or(number);
        self.resync = (self.last_known > number).then_some(Resync::Range);
        true
    }

    /// Takes the events of an epoch after a number: empty when there are none yet, `None` when the log is truncated.
    pub(crate) fn range(&mut self, epoch: Epoch, after: u64, kept: Option<Vec<Numbered>>) {
        self.pending = None;
        if self.epoch != Some(epoch) || self.resync != Some(Resync::Range) {
            return;
        }
        let ends = kept.as_ref().is_some_and(Vec::is_empty);
        // Stops at the first event that was not requested.
        let expected = |(number, event): &(u64, Numbered)| event.number == *number;
        let events = (after..=u64::MAX).skip(1).zip(kept.into_iter().flatten()).take(RANGE_MAX).take_while(expected);
        for (number, Numbered { event, .. }) in events.filter(|(number, _)| *number > self.number) {
            self.last_known = self.last_known.max(number);
            self.buffer.insert(number, event);
        }
        if self.number != after {
            // Other events have arrived in the meantime.
        } else if ends {
            // So buffered or reported events beyond it do not exist.
            (self.buffer, self.last_known, self.resync) = (ReorderBuffer::default(), after, None);
        } else if after.checked_add(1).is_none_or(|next| !self.buffer.contains(next)) {
            self.resync = Some(Resync::Snapshot);
        }
    }

    /// The request failed. Events that arrive may still close the gap.
    pub(crate) fn request_failed(&mut self) {
        self.pending = None;
        if self.resync == Some(Resync::Range) {
            self.resync = Some(Resync::Snapshot);
        }
    }

    /// Follows another epoch from its start.
    fn start_epoch(&mut self, epoch: Epoch) {
        let Self { min_epoch, pending, has_new_events, .. } = *self;
        *self = Self { min_epoch, pending, has_new_events, ..Self::new(Some(epoch)) };
    }

    fn advance(&mut self) {
        self.number += 1;
        self.last_known = self.last_known.max(self.number);
        if self.number == self.last_known {
            self.resync = None;
        }
    }

    fn buffer_event(&mut self, number: u64, event: BlockEvent) {
        self.last_known = self.last_known.max(number);
        self.buffer.push(number, event);
    }
}

#[cfg(test)]
mod tests;
