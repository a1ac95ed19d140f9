//! How far one source was followed: which event is next, which was seen, when a snapshot is due. Pure.
//!
//! ```text
//!              next event: apply ↺
//!   following ──── gap, new life, behind a report ───▶ waiting (events are held)
//!       ▲                                                 │
//!       └── snapshot, then the held events that follow it ┘── gap among them: another snapshot
//! ```

use kvbm::{BlockEvent, Epoch};
use std::collections::VecDeque;
use std::time::Duration;
use tokio::time::Instant;

/// The view of one source.
pub(crate) struct View {
    /// Whose numbers these are; `None` before the first is known.
    life: Option<Epoch>,
    /// The last event that the index has seen.
    number: u64,
    /// Events that wait for a snapshot; `None` while following.
    held: Option<VecDeque<(Epoch, u64, BlockEvent)>>,
    /// A number that a report named and that has not come yet, and since when.
    missing: Option<(u64, Instant)>,
    /// Events of this life have come since somebody asked.
    news: bool,
}

/// What became of an event.
#[derive(PartialEq, Debug)]
pub(crate) enum Outcome {
    /// It is the next one.
    Apply(BlockEvent),
    /// A snapshot is on its way; the event waits for it.
    Held,
    /// The index has seen it.
    Duplicate,
    /// It is from a former life.
    Stale,
    /// Some before it were lost: ask for a snapshot.
    Gap,
    /// The source began anew: drop what it held, and ask for a snapshot.
    NewLife,
}

/// Where a view stands after a snapshot.
#[derive(PartialEq, Debug)]
pub(crate) enum Caught {
    /// Up to date, after these events.
    Up(Vec<BlockEvent>),
    /// After these events there is a gap again: ask for another.
    Gap(Vec<BlockEvent>),
    /// The snapshot was older than what is known: ask again, later.
    Outdated,
}

/// Events kept while a snapshot is on its way. Older ones go first, which leaves a gap, and so another snapshot.
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
    /// A view that waits for its first snapshot.
    pub(crate) fn of_life(life: Option<Epoch>) -> Self {
        Self { life, number: 0, held: Some(VecDeque::new()), missing: None, news: false }
    }

    /// The life that is followed.
    pub(crate) fn life(&self) -> Option<Epoch> {
        self.life
    }

    /// Takes an event.
    pub(crate) fn event(&mut self, epoch: Epoch, number: u64, event: BlockEvent) -> Outcome {
        match self.life {
            Some(life) if epoch < life => return Outcome::Stale,
            Some(life) if epoch > life => {
                let waiting = self.held.is_some();
                *self = Self::of_life(Some(epoch));
                self.news = true;
                self.hold(epoch, number, event);
                // One snapshot is on its way already; should it tell of the former life, it is asked for again.
                return if waiting { Outcome::Held } else { Outcome::NewLife };
            }
            _ => {}
        }
        self.news = true;
        if self.held.is_some() {
            self.hold(epoch, number, event);
            Outcome::Held
        } else if number <= self.number {
            Outcome::Duplicate
        } else if number == self.number + 1 {
            self.number = number;
            Outcome::Apply(event)
        } else {
            self.held = Some(VecDeque::new());
            self.hold(epoch, number, event);
            Outcome::Gap
        }
    }

    /// Whether events have come, also by way of a snapshot, since this was last asked.
    pub(crate) fn news(&mut self) -> bool {
        std::mem::take(&mut self.news)
    }

    /// Whether it has seen all events up to this one of this life, and no more.
    pub(crate) fn stands_at(&self, epoch: Epoch, number: u64) -> bool {
        self.held.is_none() && self.life == Some(epoch) && self.number == number
    }

    /// What is known of the source is doubtful. Whether a snapshot is due, as none is on its way.
    pub(crate) fn doubt(&mut self) -> bool {
        let due = self.held.is_none();
        self.held.get_or_insert_default();
        due
    }

    /// Takes a report's number. Whether events that it names have been missing for too long, so that a snapshot is due.
    pub(crate) fn behind(&mut self, epoch: Epoch, number: u64, now: Instant) -> bool {
        if self.held.is_some() || self.life != Some(epoch) || number <= self.number {
            self.missing = None;
            return false;
        }
        match self.missing {
            Some((missing, since)) if missing > self.number => {
                let due = now - since >= GRACE;
                if due {
                    self.missing = None;
                    self.held = Some(VecDeque::new());
                }
                due
            }
            _ => {
                self.missing = Some((number, now));
                false
            }
        }
    }

    /// Takes a snapshot, as of a number. Unless it is outdated, the index is to be set to it, and then to see the events.
    pub(crate) fn snapshot(&mut self, epoch: Epoch, number: u64) -> Caught {
        match self.life {
            Some(life) if epoch < life => return Caught::Outdated,
            Some(life) if epoch == life && number < self.number => return Caught::Outdated,
            _ => {}
        }
        self.news |= number > self.number;
        self.life = Some(epoch);
        self.number = number;
        self.catch_up()
    }

    /// There is no snapshot to be had. Whether the held events can do without.
    pub(crate) fn without_snapshot(&mut self) -> Caught {
        let first = self.held.as_ref().and_then(VecDeque::front).map(|(epoch, number, _)| (*epoch, *number));
        match first {
            Some((epoch, number)) if self.life.is_none_or(|life| life == epoch) && number == self.number + 1 => {
                self.life = Some(epoch);
                self.catch_up()
            }
            _ => Caught::Outdated,
        }
    }

    /// Takes the held events that follow, up to the next gap.
    fn catch_up(&mut self) -> Caught {
        let mut held = self.held.take().unwrap_or_default();
        let mut events = Vec::new();
        while let Some((epoch, number, event)) = held.pop_front() {
            if self.life.is_some_and(|life| epoch < life) || (self.life == Some(epoch) && number <= self.number) {
                continue;
            }
            if self.life == Some(epoch) && number == self.number + 1 {
                self.number = number;
                events.push(event);
                continue;
            }
            held.push_front((epoch, number, event));
            self.held = Some(held);
            return Caught::Gap(events);
        }
        Caught::Up(events)
    }

    fn hold(&mut self, epoch: Epoch, number: u64, event: BlockEvent) {
        let held = self.held.get_or_insert_default();
        if held.len() == HELD_MAX {
            held.pop_front();
        }
        held.push_back((epoch, number, event));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvbm::Level;

    const LIFE: Epoch = Epoch(7);

    fn event() -> BlockEvent {
        BlockEvent::Cleared { level: Level::G1 }
    }

    /// A view of the first life that has seen events up to `number`.
    fn following(number: u64) -> View {
        let mut view = View::of_life(Some(LIFE));
        assert_eq!(view.snapshot(LIFE, number), Caught::Up(vec![]));
        view
    }

    #[test]
    fn the_next_is_applied_a_repeated_one_is_not_and_a_former_life_is_over() {
        let mut view = following(3);
        assert_eq!(view.event(LIFE, 4, event()), Outcome::Apply(event()));
        assert_eq!(view.event(LIFE, 4, event()), Outcome::Duplicate);
        assert_eq!(view.event(Epoch(6), 5, event()), Outcome::Stale);
        assert_eq!(view.event(LIFE, 5, event()), Outcome::Apply(event()));
    }

    #[test]
    fn a_gap_holds_what_follows_until_a_snapshot() {
        let mut view = following(3);
        assert_eq!(view.event(LIFE, 6, event()), Outcome::Gap);
        assert_eq!(view.event(LIFE, 7, event()), Outcome::Held);
        assert_eq!(view.snapshot(LIFE, 2), Caught::Outdated, "older than what is known");
        assert_eq!(view.snapshot(LIFE, 6), Caught::Up(vec![event()]));
        assert_eq!(view.event(LIFE, 8, event()), Outcome::Apply(event()));
    }

    #[test]
    fn a_gap_among_the_held_asks_again() {
        let mut view = following(0);
        assert_eq!(view.event(LIFE, 2, event()), Outcome::Gap);
        view.event(LIFE, 3, event());
        view.event(LIFE, 6, event());
        assert_eq!(view.snapshot(LIFE, 1), Caught::Gap(vec![event(), event()]));
        assert_eq!(view.snapshot(LIFE, 6), Caught::Up(vec![]));
    }

    #[test]
    fn a_new_life_starts_over_and_a_snapshot_of_the_old_one_is_refused() {
        let mut view = following(9);
        assert_eq!(view.event(Epoch(8), 1, event()), Outcome::NewLife);
        assert_eq!(view.event(LIFE, 10, event()), Outcome::Stale);
        assert_eq!(view.snapshot(LIFE, 10), Caught::Outdated);
        assert_eq!(view.snapshot(Epoch(8), 1), Caught::Up(vec![]));
    }

    #[test]
    fn a_source_nobody_answers_for_is_followed_from_its_first_event() {
        let mut view = View::of_life(None);
        assert_eq!(view.without_snapshot(), Caught::Outdated);
        view.event(LIFE, 1, event());
        view.event(LIFE, 2, event());
        assert_eq!(view.without_snapshot(), Caught::Up(vec![event(), event()]));
        assert_eq!(view.event(LIFE, 3, event()), Outcome::Apply(event()));
    }

    #[tokio::test(start_paused = true)]
    async fn a_report_ahead_is_believed_after_a_grace() {
        let (mut view, now) = (following(3), Instant::now());
        assert!(!view.behind(LIFE, 5, now));
        view.event(LIFE, 4, event());
        view.event(LIFE, 5, event());
        assert!(!view.behind(LIFE, 6, now + GRACE), "what was missing came; now another is");
        assert!(view.behind(LIFE, 6, now + GRACE * 2));
        assert_eq!(view.event(LIFE, 7, event()), Outcome::Held);
    }
}
