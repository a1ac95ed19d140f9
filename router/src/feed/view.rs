//! How far one source was followed: which event is next, what is missing, and whom to ask for it. Pure.
//!
//! ```text
//!              next event: apply ↺
//!   following ──── gap, behind a report ───▶ lacks events ──── the source keeps them no more ───▶ lacks the past
//!       ▲                                     │  (a range)     a new life, or a source not seen before ──▶ │ (a snapshot)
//!       ├── all that was heard of has come ───┴───────────────────────────────────────────────────────────┘
//!       └── a snapshot ──── lacks the truth ◀── what is known is doubtful
//! ```
//! Events that come too early are held in their order, and go on as soon as those before them come, from wherever. So an event
//! that comes twice, late, or from a former life changes nothing in the end.

use kvbm::{BlockEvent, Epoch, Numbered};
use std::collections::BTreeMap;
use std::time::Duration;
use tokio::time::Instant;

/// The view of one source.
pub(crate) struct View {
    /// Whose numbers these are; `None` before the first is known.
    life: Option<Epoch>,
    /// The last event that the index has seen.
    number: u64,
    /// The last event that is known to exist.
    heard: u64,
    /// Events that came before one that they follow.
    held: BTreeMap<u64, BlockEvent>,
    /// Why the view does not follow.
    lacks: Option<Lack>,
    /// An answer is on its way.
    asked: bool,
    /// A number that a report named and that has not come yet, and since when.
    missing: Option<(u64, Instant)>,
    /// Events of this life have come since somebody asked.
    news: bool,
}

/// What a view lacks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Lack {
    /// Events that the source may still keep.
    Events,
    /// What was before the events that are there.
    Past,
    /// Belief in what is known: no event is applied to it.
    Truth,
}

/// What became of an event.
#[derive(PartialEq, Debug)]
pub(crate) enum Outcome {
    /// It is the next one. Some that were held may follow it.
    Apply(BlockEvent),
    /// It waits for those before it.
    Held,
    /// The index has seen it.
    Duplicate,
    /// It is from a former life.
    Stale,
    /// It waits for those before it, of which nobody knew.
    Gap,
    /// The source began anew: drop what it held.
    NewLife,
}

/// What to ask the source for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Ask {
    /// The events of this life after this one.
    Range(Epoch, u64),
    /// All that it holds.
    Snapshot,
}

/// Events that are held. Older ones go first, which leaves a gap, and so another question.
const HELD_MAX: usize = 4096;
/// A report may overtake the last events by this much.
const GRACE: Duration = Duration::from_millis(500);

impl Outcome {
    /// The label in metrics.
    pub(crate) const fn name(&self) -> &'static str {
        match self {
            Self::Apply(_) => "applied",
            Self::Held => "held",
            Self::Duplicate => "duplicate",
            Self::Stale => "stale",
            Self::Gap => "gap",
            Self::NewLife => "new_life",
        }
    }
}

impl View {
    /// A view of a source of which nothing is known: its snapshot is due, or its first event.
    pub(crate) fn of_life(life: Option<Epoch>) -> Self {
        Self {
            life,
            number: 0,
            heard: 0,
            held: BTreeMap::new(),
            lacks: Some(Lack::Past),
            asked: false,
            missing: None,
            news: false,
        }
    }

    /// The life that is followed.
    pub(crate) fn life(&self) -> Option<Epoch> {
        self.life
    }

    /// Takes an event. Afterwards, [`next`](Self::next) and [`ask`](Self::ask) say how to go on; so after everything else.
    pub(crate) fn event(&mut self, epoch: Epoch, number: u64, event: BlockEvent) -> Outcome {
        match self.life {
            Some(life) if epoch < life => return Outcome::Stale,
            Some(life) if epoch > life => {
                // Should the answer that is on its way tell of the former life, it is asked again.
                *self = Self { asked: self.asked, news: true, ..Self::of_life(Some(epoch)) };
                self.hold(number, event);
                return Outcome::NewLife;
            }
            _ => self.life = Some(epoch),
        }
        self.news = true;
        if number <= self.number {
            Outcome::Duplicate
        } else if number == self.number + 1 && self.lacks != Some(Lack::Truth) {
            self.advance();
            Outcome::Apply(event)
        } else {
            self.hold(number, event);
            let expected = self.lacks.is_some();
            self.lacks.get_or_insert(Lack::Events);
            if expected { Outcome::Held } else { Outcome::Gap }
        }
    }

    /// The next of the held events, once all before it were seen: apply it.
    pub(crate) fn next(&mut self) -> Option<BlockEvent> {
        let first = self.held.first_entry().filter(|first| *first.key() == self.number + 1)?;
        if self.lacks == Some(Lack::Truth) {
            return None;
        }
        let event = first.remove();
        self.advance();
        Some(event)
    }

    /// What to ask for, unless nothing is missing or an answer is on its way.
    pub(crate) fn ask(&mut self) -> Option<Ask> {
        let (lack, epoch) = (self.lacks.filter(|_| !self.asked)?, self.life);
        self.asked = true;
        Some(match (lack, epoch) {
            (Lack::Events, Some(epoch)) => Ask::Range(epoch, self.number),
            _ => Ask::Snapshot,
        })
    }

    /// Whether events have come, also by way of a snapshot, since this was last asked.
    pub(crate) fn news(&mut self) -> bool {
        std::mem::take(&mut self.news)
    }

    /// The last event that the index has seen.
    pub(crate) fn number(&self) -> u64 {
        self.number
    }

    /// Whether it has seen all events up to this one of this life, and no more.
    pub(crate) fn stands_at(&self, epoch: Epoch, number: u64) -> bool {
        self.lacks.is_none() && self.life == Some(epoch) && self.number == number
    }

    /// What is known of the source is doubtful.
    pub(crate) fn doubt(&mut self) {
        self.lacks = Some(Lack::Truth);
    }

    /// Takes a report's number. Whether events that it names have been missing for too long.
    pub(crate) fn behind(&mut self, epoch: Epoch, number: u64, now: Instant) -> bool {
        if self.lacks.is_some() || self.life != Some(epoch) || number <= self.number {
            self.missing = None;
            return false;
        }
        match self.missing {
            Some((missing, since)) if missing > self.number => {
                let due = now - since >= GRACE;
                if due {
                    self.missing = None;
                    self.heard = number;
                    self.lacks = Some(Lack::Events);
                }
                due
            }
            _ => {
                self.missing = Some((number, now));
                false
            }
        }
    }

    /// Takes a snapshot, as of a number. Whether the index is to be set to it; else it is older than what is known.
    pub(crate) fn snapshot(&mut self, epoch: Epoch, number: u64) -> bool {
        self.asked = false;
        if self.life.is_some_and(|life| epoch < life || (epoch == life && number < self.number)) {
            return false;
        }
        if self.life != Some(epoch) {
            *self = Self { news: self.news, ..Self::of_life(Some(epoch)) };
        }
        self.news |= number > self.number;
        self.number = number;
        self.held = self.held.split_off(&(number + 1));
        // What a report named, and neither the snapshot nor an event has, was never there.
        self.heard = self.held.last_key_value().map_or(number, |(last, _)| *last);
        self.lacks = (!self.held.is_empty()).then_some(Lack::Events);
        true
    }

    /// Takes the events of a life after a number, as far as the source keeps them.
    pub(crate) fn range(&mut self, epoch: Epoch, after: u64, events: Vec<Numbered>) {
        self.asked = false;
        if self.life != Some(epoch) || self.lacks != Some(Lack::Events) {
            return;
        }
        for Numbered { number, event } in events.into_iter().filter(|event| event.number > self.number) {
            self.heard = self.heard.max(number);
            self.held.insert(number, event);
        }
        // Unless others have come meanwhile, what is missing is not to be had.
        if self.number == after && !self.held.contains_key(&(after + 1)) {
            self.lacks = Some(Lack::Past);
        }
    }

    /// Nobody answered. What came in may do without, and what comes yet.
    pub(crate) fn unanswered(&mut self) {
        self.asked = false;
        if self.lacks == Some(Lack::Events) {
            self.lacks = Some(Lack::Past);
        }
    }

    fn advance(&mut self) {
        self.number += 1;
        self.heard = self.heard.max(self.number);
        if self.number == self.heard {
            self.lacks = None;
        }
    }

    fn hold(&mut self, number: u64, event: BlockEvent) {
        self.heard = self.heard.max(number);
        self.held.insert(number, event);
        if self.held.len() > HELD_MAX {
            self.held.pop_first();
        }
    }
}

#[cfg(test)]
mod tests;
