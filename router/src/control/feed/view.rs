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
//! that comes twice, late, or from a former life changes nothing in the end. Neither does one that nobody announced, with a
//! number or a life of its own making: what the source itself answers, once asked, goes before whatever came before the question.

mod reorder_buffer;

use kvbm::{BlockEvent, Epoch, Numbered};
use reorder_buffer::Held;
use std::time::Duration;
use tokio::time::Instant;
use worker::plane::RANGE_MAX;

/// The view of one source.
pub(crate) struct View {
    /// Whose numbers these are; `None` before the first is known.
    life: Option<Epoch>,
    /// It lives this one or a later one: who is there says so.
    least: Option<Epoch>,
    /// The last event that the index has seen.
    number: u64,
    /// The last event that is known to exist.
    heard: u64,
    /// Events that came before one that they follow.
    held: Held,
    /// Why the view does not follow.
    lacks: Option<Lack>,
    /// The question whose answer is on its way.
    asked: Option<Asked>,
    /// A life and a number that a report named and that have not come yet, and since when.
    missing: Option<(Epoch, u64, Instant)>,
    /// Events of this life have come since somebody asked.
    news: bool,
}

#[derive(Clone, Copy)]
struct Asked {
    question: u64,
    /// Life and number at that time.
    knowing: (Option<Epoch>, u64),
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

/// A report may overtake the last events by this much.
const GRACE: Duration = Duration::from_millis(500);
/// Of several that announce a store, whoever began last is followed, and gone once the others' digests come for so long and none of
/// its own: each sends one every ten seconds, and two may be lost.
const OTHERS_GRACE: Duration = Duration::from_secs(25);

impl Outcome {
    /// The label in metrics.
    pub(crate) const fn name(&self) -> &'static str {
        match self {
            Self::Apply(_) => "applied",
            Self::Held => "buffered",
            Self::Duplicate => "duplicate",
            Self::Stale => "stale",
            Self::Gap => "gap",
            Self::NewLife => "new_epoch",
        }
    }
}

impl View {
    /// A view of a source of which nothing is known: its snapshot is due, or its first event.
    pub(crate) fn of_life(life: Option<Epoch>) -> Self {
        Self {
            life,
            least: life,
            number: 0,
            heard: 0,
            held: Held::default(),
            lacks: Some(Lack::Past),
            asked: None,
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
                self.begin(epoch);
                self.news = true;
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
        if self.lacks == Some(Lack::Truth) {
            return None;
        }
        let event = self.held.take(self.number.checked_add(1)?)?;
        self.advance();
        Some(event)
    }

    /// What to ask for, and by which number the answer is known, unless nothing is missing or an answer is on its way.
    pub(crate) fn ask(&mut self, question: u64) -> Option<Ask> {
        let (lack, life) = (self.lacks.filter(|_| self.asked.is_none())?, self.life);
        self.asked = Some(Asked { question, knowing: (life, self.number) });
        Some(match (lack, life) {
            (Lack::Events, Some(life)) => Ask::Range(life, self.number),
            _ => Ask::Snapshot,
        })
    }

    /// Whether it is this question that it asked, and whose answer is on its way.
    pub(crate) fn awaits(&self, question: u64) -> bool {
        self.asked.is_some_and(|asked| asked.question == question)
    }

    /// Whether events have come, also by way of a snapshot, since this was last asked.
    pub(crate) fn news(&mut self) -> bool {
        std::mem::take(&mut self.news)
    }

    /// Whether it has seen all events up to this one of this life, and no more.
    pub(crate) fn stands_at(&self, epoch: Epoch, number: u64) -> bool {
        self.lacks.is_none() && self.life == Some(epoch) && self.number == number
    }

    /// What is known of the source is doubtful.
    pub(crate) fn doubt(&mut self) {
        self.lacks = Some(Lack::Truth);
    }

    /// Takes a report's life and number. Whether what it names has been missing for too long: events of this life, or another life
    /// that is reported of, and this one is not.
    pub(crate) fn behind(&mut self, epoch: Epoch, number: u64, now: Instant) -> bool {
        let comes = |epoch, number| self.life != Some(epoch) || number > self.number;
        if self.lacks.is_some() || !comes(epoch, number) {
            self.missing = None;
            return false;
        }
        let since = self.missing.filter(|(epoch, number, _)| comes(*epoch, *number)).map(|(_, _, since)| since);
        let grace = if self.least.is_none() && Some(epoch) < self.life { OTHERS_GRACE } else { GRACE };
        let due = since.is_some_and(|since| now - since >= grace);
        self.missing = Some((epoch, number, since.unwrap_or(now))).filter(|_| !due);
        if due && self.life == Some(epoch) {
            self.heard = number;
            self.lacks = Some(Lack::Events);
        } else if due {
            self.doubt();
        }
        due
    }

    /// Takes note of a snapshot, as of a number. Whether the index is to be set to it, and then [`laid`](Self::laid) called: until
    /// then no event is applied. Else it is older than what is known.
    pub(crate) fn takes(&mut self, epoch: Epoch, number: u64) -> bool {
        let told = (Some(epoch), number);
        // It tells less than what was known when it was asked for: then what was known is not from the source.
        let corrects = self.asked.is_some_and(|asked| told < asked.knowing);
        if told.0 < self.least || (told < (self.life, self.number) && !corrects) {
            self.asked = None;
            return false;
        }
        if self.life != Some(epoch) {
            self.begin(epoch);
        }
        self.doubt();
        true
    }

    /// The index was set to a snapshot that the view [takes](Self::takes). Whether it is still what is followed.
    pub(crate) fn laid(&mut self, epoch: Epoch, number: u64) -> bool {
        self.asked = None;
        if self.life != Some(epoch) {
            self.doubt();
            return false;
        }
        self.news |= number > self.number;
        self.number = number;
        self.held.pass(number);
        // What a report named, and neither the snapshot nor an event has, was never there.
        self.heard = self.held.last().unwrap_or(number);
        self.lacks = (self.heard > number).then_some(Lack::Events);
        true
    }

    /// Takes the events of a life after a number; none when there are none yet, `None` when they are kept no more.
    pub(crate) fn range(&mut self, epoch: Epoch, after: u64, kept: Option<Vec<Numbered>>) {
        self.asked = None;
        if self.life != Some(epoch) || self.lacks != Some(Lack::Events) {
            return;
        }
        let ends = kept.as_ref().is_some_and(Vec::is_empty);
        // Whatever else it is, it is not what was asked for.
        let expected = |(number, event): &(u64, Numbered)| event.number == *number;
        let events = (after..=u64::MAX).skip(1).zip(kept.into_iter().flatten()).take(RANGE_MAX).take_while(expected);
        for (number, Numbered { event, .. }) in events.filter(|(number, _)| *number > self.number) {
            self.heard = self.heard.max(number);
            self.held.put(number, event);
        }
        if self.number != after {
            // Others have come meanwhile.
        } else if ends {
            // So what is held, or was named, is not the source's.
            (self.held, self.heard, self.lacks) = (Held::default(), after, None);
        } else if after.checked_add(1).is_none_or(|next| !self.held.has(next)) {
            self.lacks = Some(Lack::Past);
        }
    }

    /// Nobody answered. What came in may do without, and what comes yet.
    pub(crate) fn unanswered(&mut self) {
        self.asked = None;
        if self.lacks == Some(Lack::Events) {
            self.lacks = Some(Lack::Past);
        }
    }

    /// Follows another life, of which nothing is known.
    fn begin(&mut self, life: Epoch) {
        let Self { least, asked, news, .. } = *self;
        *self = Self { least, asked, news, ..Self::of_life(Some(life)) };
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
        self.held.keep(number, event);
    }
}

#[cfg(test)]
mod tests;
