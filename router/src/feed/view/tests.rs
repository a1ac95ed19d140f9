use super::*;
use kvbm::{EventLog, Level, SequenceHash};
use proptest::prelude::*;
use std::collections::BTreeSet;

const LIFE: Epoch = Epoch(7);

fn stored(block: u8) -> BlockEvent {
    BlockEvent::Stored { level: Level::G1, parent: None, blocks: vec![SequenceHash::from_bytes([block; 16])] }
}

/// Event `number` of a source that stores one block after the other.
fn event(number: u64) -> BlockEvent {
    stored(number as u8)
}

fn range(numbers: std::ops::RangeInclusive<u64>) -> Vec<Numbered> {
    numbers.map(|number| Numbered { number, event: event(number) }).collect()
}

/// A view of the first life that has seen events up to `number`.
fn following(number: u64) -> View {
    let mut view = View::of_life(Some(LIFE));
    assert_eq!(view.ask(), Some(Ask::Snapshot));
    assert!(view.snapshot(LIFE, number));
    assert_eq!(view.ask(), None);
    view
}

/// A view that lacks event 4, holds 5, and has asked for what is missing.
fn lacking() -> View {
    let mut view = following(3);
    assert_eq!(view.event(LIFE, 5, event(5)), Outcome::Gap);
    assert_eq!(view.ask(), Some(Ask::Range(LIFE, 3)));
    assert_eq!((view.ask(), view.next()), (None, None), "an answer is on its way");
    view
}

fn ready(view: &mut View) -> Vec<BlockEvent> {
    std::iter::from_fn(|| view.next()).collect()
}

#[test]
fn the_next_is_applied_a_repeated_one_is_not_and_a_former_life_is_over() {
    let mut view = following(3);
    assert_eq!(view.event(LIFE, 4, event(4)), Outcome::Apply(event(4)));
    assert_eq!(view.event(LIFE, 4, event(4)), Outcome::Duplicate);
    assert_eq!(view.event(Epoch(6), 5, event(5)), Outcome::Stale);
    assert_eq!(view.event(LIFE, 5, event(5)), Outcome::Apply(event(5)));
}

#[test]
fn a_gap_is_closed_by_the_range_that_was_asked_for() {
    let mut view = lacking();
    assert_eq!(view.event(LIFE, 7, event(7)), Outcome::Held);
    view.range(LIFE, 3, range(4..=5));
    assert_eq!(ready(&mut view), [event(4), event(5)], "and no further");
    assert_eq!(view.ask(), Some(Ask::Range(LIFE, 5)), "a bounded answer: the rest is asked for");
    view.range(LIFE, 5, range(6..=7));
    assert_eq!(ready(&mut view), [event(6), event(7)]);
    assert_eq!((view.ask(), view.stands_at(LIFE, 7)), (None, true));
}

#[test]
fn an_event_that_was_overtaken_closes_the_gap_when_it_comes_and_its_answer_comes_too_late() {
    let mut view = lacking();
    assert_eq!(view.event(LIFE, 4, event(4)), Outcome::Apply(event(4)));
    assert_eq!(ready(&mut view), [event(5)]);
    assert!(view.stands_at(LIFE, 5));
    assert_eq!(view.event(LIFE, 7, event(7)), Outcome::Gap);
    assert_eq!(view.ask(), None, "one question at a time");
    view.range(LIFE, 3, range(4..=5));
    assert_eq!(view.ask(), Some(Ask::Range(LIFE, 5)), "that answer says nothing of the new gap");
}

#[test]
fn what_is_not_kept_or_not_answered_takes_a_snapshot() {
    let unkept = |view: &mut View| view.range(LIFE, 3, vec![]);
    for answer in [unkept, View::unanswered] {
        let mut view = lacking();
        answer(&mut view);
        assert_eq!(view.ask(), Some(Ask::Snapshot));
        assert!(!view.snapshot(LIFE, 2), "older than what is known");
        assert_eq!(view.ask(), Some(Ask::Snapshot), "so it is asked for again");
        assert!(view.snapshot(LIFE, 4));
        assert_eq!(ready(&mut view), [event(5)]);
        assert!(view.stands_at(LIFE, 5));
    }
}

#[test]
fn where_nobody_answers_the_overtaken_event_is_as_good() {
    let mut view = lacking();
    for _ in 0..3 {
        view.unanswered();
        assert_eq!(view.ask(), Some(Ask::Snapshot));
    }
    assert_eq!(view.event(LIFE, 4, event(4)), Outcome::Apply(event(4)));
    assert_eq!(ready(&mut view), [event(5)]);
    view.unanswered();
    assert_eq!(view.ask(), None);

    let mut unknown = View::of_life(None);
    assert_eq!(unknown.event(LIFE, 2, event(2)), Outcome::Held);
    assert_eq!(unknown.event(LIFE, 1, event(1)), Outcome::Apply(event(1)), "from its first event all is known");
    assert_eq!((ready(&mut unknown), unknown.ask()), (vec![event(2)], None));
}

#[test]
fn a_new_life_starts_over_and_answers_of_the_old_one_are_refused() {
    let mut view = lacking();
    assert_eq!(view.event(Epoch(8), 2, event(2)), Outcome::NewLife);
    assert_eq!(view.event(LIFE, 4, event(4)), Outcome::Stale);
    view.range(LIFE, 3, range(4..=5));
    assert_eq!(ready(&mut view), []);
    assert_eq!(view.ask(), Some(Ask::Snapshot));
    assert!(!view.snapshot(LIFE, 10));
    assert!(view.snapshot(Epoch(8), 1));
    assert_eq!(ready(&mut view), [event(2)]);
    assert!(view.snapshot(Epoch(9), 0), "a snapshot may be the first to tell of a life");
    assert!(view.stands_at(Epoch(9), 0));
}

#[test]
fn what_is_doubtful_is_not_built_upon() {
    let mut view = following(3);
    view.doubt();
    assert_eq!(view.ask(), Some(Ask::Snapshot));
    assert_eq!(view.event(LIFE, 4, event(4)), Outcome::Held);
    assert_eq!(view.next(), None);
    view.unanswered();
    assert_eq!(view.ask(), Some(Ask::Snapshot));
    assert!(view.snapshot(LIFE, 3));
    assert_eq!((ready(&mut view), view.ask()), (vec![event(4)], None));
}

#[test]
fn what_is_held_is_bounded() {
    let mut view = lacking();
    (6..20_000).for_each(|number| drop(view.event(LIFE, number, event(number))));
    assert_eq!(view.held.len(), HELD_MAX);
    view.range(LIFE, 3, range(4..=600));
    assert_eq!(ready(&mut view).len(), 597);
    assert_eq!(view.ask(), Some(Ask::Range(LIFE, 600)));
    assert!(view.snapshot(LIFE, 19_000));
    assert_eq!(ready(&mut view).len(), 999);
}

#[test]
fn what_a_report_named_and_nobody_has_is_not_asked_for_for_ever() {
    let (mut view, now) = (following(3), Instant::now());
    assert!(!view.behind(LIFE, 9, now));
    assert!(view.behind(LIFE, 9, now + GRACE));
    assert_eq!(view.ask(), Some(Ask::Range(LIFE, 3)));
    view.range(LIFE, 3, vec![]);
    assert_eq!(view.ask(), Some(Ask::Snapshot));
    assert!(view.snapshot(LIFE, 3));
    assert_eq!(view.ask(), None);
}

#[test]
fn a_report_ahead_is_believed_after_a_grace() {
    let (mut view, now) = (following(3), Instant::now());
    assert!(!view.behind(LIFE, 5, now));
    view.event(LIFE, 4, event(4));
    view.event(LIFE, 5, event(5));
    assert!(!view.behind(LIFE, 6, now + GRACE), "what was missing came; now another is");
    assert!(view.behind(LIFE, 6, now + GRACE * 2));
    assert_eq!(view.ask(), Some(Ask::Range(LIFE, 5)));
    assert_eq!(view.event(LIFE, 7, event(7)), Outcome::Held);
}

type Blocks = BTreeSet<(Level, SequenceHash)>;

fn apply(blocks: &mut Blocks, event: &BlockEvent) {
    match event {
        BlockEvent::Stored { level, blocks: more, .. } => blocks.extend(more.iter().map(|block| (*level, *block))),
        BlockEvent::Removed { level, blocks: gone } => {
            blocks.retain(|(at, block)| at != level || !gone.contains(block));
        }
        BlockEvent::Cleared { level } => blocks.retain(|(at, _)| at != level),
    }
}

/// A source, all that it ever sent, and one who follows it over a link that does what it likes.
struct Stage {
    log: EventLog,
    sent: Vec<(Epoch, Numbered)>,
    view: View,
    believed: Blocks,
    asked: Vec<Ask>,
}

#[derive(Clone, Debug)]
enum Step {
    /// The source stores a block, or removes it.
    Change(bool, u8),
    Restart,
    /// One of the events ever sent arrives, counted from the newest.
    Arrives(usize),
    /// A question is answered, or the log does not keep it, or nobody is there.
    Answer(Option<bool>),
    /// Two reports, long enough one after the other.
    Report,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        8 => (any::<bool>(), 0..8u8).prop_map(|(stores, block)| Step::Change(stores, block)),
        10 => (0..12usize).prop_map(Step::Arrives),
        4 => prop_oneof![Just(Some(true)), Just(Some(true)), Just(Some(false)), Just(None)].prop_map(Step::Answer),
        1 => Just(Step::Restart),
        1 => Just(Step::Report),
    ]
}

impl Stage {
    fn change(&mut self, stores: bool, block: u8) {
        let blocks = vec![SequenceHash::from_bytes([block; 16])];
        let event = if stores { stored(block) } else { BlockEvent::Removed { level: Level::G1, blocks } };
        self.log.announce(event.clone());
        self.sent.push((self.log.epoch(), Numbered { number: *self.log.latest().borrow(), event }));
    }

    /// What a life had told by a number.
    fn told(&self, life: Epoch, number: u64) -> Blocks {
        let mut blocks = Blocks::new();
        for (epoch, event) in &self.sent {
            if *epoch == life && event.number <= number {
                apply(&mut blocks, &event.event);
            }
        }
        blocks
    }

    fn arrives(&mut self, back: usize) {
        let Some((epoch, Numbered { number, event })) = self.sent.iter().rev().nth(back).cloned() else { return };
        match self.view.event(epoch, number, event) {
            Outcome::Apply(event) => apply(&mut self.believed, &event),
            Outcome::NewLife => self.believed.clear(),
            _ => {}
        }
        self.go_on();
    }

    fn report(&mut self) {
        let now = Instant::now();
        for at in [now, now + GRACE] {
            self.view.behind(self.log.epoch(), *self.log.latest().borrow(), at);
        }
        self.go_on();
    }

    fn answer(&mut self, kept: Option<bool>) {
        match (self.asked.pop(), kept) {
            (None, _) => return,
            (Some(_), None) => self.view.unanswered(),
            (Some(Ask::Range(epoch, after)), Some(kept)) => {
                let kept = kept && self.log.epoch() == epoch;
                // Two at a time, so that answers are bounded.
                self.view.range(epoch, after, if kept { self.log.after(after, 2).unwrap() } else { vec![] });
            }
            (Some(Ask::Snapshot), Some(_)) => {
                let snapshot = self.log.snapshot();
                if self.view.snapshot(snapshot.epoch, snapshot.number) {
                    self.believed = snapshot.blocks().collect();
                }
            }
        }
        self.go_on();
    }

    fn go_on(&mut self) {
        while let Some(event) = self.view.next() {
            apply(&mut self.believed, &event);
        }
        self.asked.extend(self.view.ask());
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn loss_order_repetition_and_restarts_change_nothing_in_the_end(
        known in any::<bool>(),
        steps in proptest::collection::vec(step(), 1..120),
    ) {
        let log = EventLog::new(Epoch(1));
        let view = View::of_life(known.then_some(Epoch(1)));
        let mut stage = Stage { log, sent: vec![], view, believed: Blocks::new(), asked: vec![] };
        stage.go_on();
        for step in steps {
            match step {
                Step::Change(stores, block) => stage.change(stores, block),
                Step::Restart => stage.log = EventLog::new(Epoch(stage.log.epoch().0 + 1)),
                Step::Arrives(back) => stage.arrives(back),
                Step::Answer(kept) => stage.answer(kept),
                Step::Report => stage.report(),
            }
            prop_assert!(stage.asked.len() <= 1, "one question at a time");
            let told = stage.view.life().map_or_else(Blocks::new, |life| stage.told(life, stage.view.number()));
            prop_assert_eq!(&stage.believed, &told, "what is believed was true at some time");
        }
        // The link recovers: one more event comes, reports do, and questions are answered.
        stage.change(true, 0);
        stage.arrives(0);
        stage.report();
        for _ in 0..200 {
            stage.answer(Some(true));
        }
        prop_assert!(stage.view.stands_at(stage.log.epoch(), stage.log.snapshot().number));
        let rests: Blocks = stage.log.snapshot().blocks().collect();
        prop_assert_eq!(stage.believed, rests);
    }
}
