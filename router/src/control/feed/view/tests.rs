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
    assert_eq!(view.ask(0), Some(Ask::Snapshot));
    assert!(snapshot(&mut view, LIFE, number));
    assert_eq!(view.ask(0), None);
    view
}

/// A view that lacks event 4, holds 5, and has asked for what is missing.
fn lacking() -> View {
    let mut view = following(3);
    assert_eq!(view.event(LIFE, 5, event(5)), Outcome::Gap);
    assert_eq!(view.ask(0), Some(Ask::Range(LIFE, 3)));
    assert_eq!((view.ask(0), view.next()), (None, None), "an answer is on its way");
    view
}

/// A snapshot comes, and is laid in the index at once.
fn snapshot(view: &mut View, epoch: Epoch, number: u64) -> bool {
    view.takes(epoch, number) && view.laid(epoch, number)
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
    view.range(LIFE, 3, Some(range(4..=5)));
    assert_eq!(ready(&mut view), [event(4), event(5)], "and no further");
    assert_eq!(view.ask(0), Some(Ask::Range(LIFE, 5)), "a bounded answer: the rest is asked for");
    view.range(LIFE, 5, Some(range(6..=7)));
    assert_eq!(ready(&mut view), [event(6), event(7)]);
    assert_eq!((view.ask(0), view.stands_at(LIFE, 7)), (None, true));
}

#[test]
fn an_event_that_was_overtaken_closes_the_gap_when_it_comes_and_its_answer_comes_too_late() {
    let mut view = lacking();
    assert_eq!(view.event(LIFE, 4, event(4)), Outcome::Apply(event(4)));
    assert_eq!(ready(&mut view), [event(5)]);
    assert!(view.stands_at(LIFE, 5));
    assert_eq!(view.event(LIFE, 7, event(7)), Outcome::Gap);
    assert_eq!(view.ask(0), None, "one question at a time");
    view.range(LIFE, 3, Some(range(4..=5)));
    assert_eq!(view.ask(0), Some(Ask::Range(LIFE, 5)), "that answer says nothing of the new gap");
}

#[test]
fn what_is_not_kept_or_not_answered_takes_a_snapshot() {
    let unkept = |view: &mut View| view.range(LIFE, 3, None);
    for answer in [unkept, View::unanswered] {
        let mut view = lacking();
        view.event(LIFE, 7, event(7));
        answer(&mut view);
        assert_eq!(view.ask(0), Some(Ask::Snapshot));
        assert_eq!(view.event(LIFE, 4, event(4)), Outcome::Apply(event(4)));
        assert_eq!(ready(&mut view), [event(5)]);
        assert!(!snapshot(&mut view, LIFE, 4), "older than what is known meanwhile");
        assert_eq!(view.ask(0), Some(Ask::Snapshot), "so it is asked for again");
        assert!(snapshot(&mut view, LIFE, 6));
        assert_eq!(ready(&mut view), [event(7)]);
        assert!(view.stands_at(LIFE, 7));
    }
}

#[test]
fn where_nobody_answers_the_overtaken_event_is_as_good() {
    let mut view = lacking();
    for _ in 0..3 {
        view.unanswered();
        assert_eq!(view.ask(0), Some(Ask::Snapshot));
    }
    assert_eq!(view.event(LIFE, 4, event(4)), Outcome::Apply(event(4)));
    assert_eq!(ready(&mut view), [event(5)]);
    view.unanswered();
    assert_eq!(view.ask(0), None);

    let mut unknown = View::of_life(None);
    assert_eq!(unknown.event(LIFE, 2, event(2)), Outcome::Held);
    assert_eq!(unknown.event(LIFE, 1, event(1)), Outcome::Apply(event(1)), "from its first event all is known");
    assert_eq!((ready(&mut unknown), unknown.ask(0)), (vec![event(2)], None));
}

#[test]
fn a_new_life_starts_over_and_answers_that_the_old_one_was_asked_for_are_refused() {
    let range = |view: &mut View| view.range(LIFE, 3, Some(range(4..=5)));
    let past = |view: &mut View| assert!(!snapshot(view, LIFE, 10));
    for answer in [range, past] {
        let mut view = lacking();
        assert_eq!(view.event(Epoch(8), 2, event(2)), Outcome::NewLife);
        assert_eq!(view.event(LIFE, 4, event(4)), Outcome::Stale);
        assert_eq!(view.ask(0), None, "one question at a time");
        answer(&mut view);
        assert_eq!(ready(&mut view), []);
        assert_eq!(view.ask(0), Some(Ask::Snapshot));
        assert!(snapshot(&mut view, Epoch(8), 1));
        assert_eq!(ready(&mut view), [event(2)]);
        assert!(snapshot(&mut view, Epoch(9), 0), "a snapshot may be the first to tell of a life");
        assert!(view.stands_at(Epoch(9), 0));
    }
}

#[test]
fn while_a_snapshot_is_laid_in_events_wait_and_another_life_is_not_taken_for_it() {
    let mut view = following(3);
    view.doubt();
    assert_eq!(view.ask(0), Some(Ask::Snapshot));
    assert!(view.takes(LIFE, 5));
    assert_eq!(view.event(LIFE, 4, event(4)), Outcome::Held);
    assert_eq!(view.event(LIFE, 6, event(6)), Outcome::Held);
    assert_eq!((view.next(), view.ask(0)), (None, None));
    assert!(view.laid(LIFE, 5));
    assert_eq!((ready(&mut view), view.stands_at(LIFE, 6)), (vec![event(6)], true));

    view.doubt();
    assert_eq!(view.ask(0), Some(Ask::Snapshot));
    assert!(view.takes(LIFE, 6));
    assert_eq!(view.event(Epoch(8), 1, event(1)), Outcome::NewLife);
    assert_eq!(view.ask(0), None, "it would be overtaken by what is being laid in");
    assert!(!view.laid(LIFE, 6));
    assert_eq!((view.next(), view.ask(0)), (None, Some(Ask::Snapshot)), "the index has a former life's blocks");
}

#[test]
fn numbers_that_nobody_counted_to_are_dropped_once_the_source_knows_of_none() {
    for number in [9, u64::MAX - 1, u64::MAX] {
        let mut view = following(3);
        assert_eq!(view.event(LIFE, number, event(9)), Outcome::Gap);
        assert_eq!(view.ask(0), Some(Ask::Range(LIFE, 3)));
        view.range(LIFE, 3, None);
        assert_eq!(view.ask(0), Some(Ask::Snapshot));
        assert!(snapshot(&mut view, LIFE, 4));
        assert_eq!((view.next(), view.ask(0)), (None, Some(Ask::Range(LIFE, 4))));
        view.range(LIFE, 4, Some(vec![]));
        assert_eq!((view.ask(0), view.stands_at(LIFE, 4), view.held.len()), (None, true, 0));
    }
    let mut view = following(u64::MAX);
    assert_eq!(view.event(LIFE, u64::MAX, event(1)), Outcome::Duplicate);
    assert!(!view.behind(LIFE, u64::MAX, Instant::now()));
    view.doubt();
    assert_eq!((view.ask(0), view.next()), (Some(Ask::Snapshot), None));
    assert!(snapshot(&mut view, LIFE, 5), "it contradicts itself: the later answer counts");
}

#[test]
fn a_life_that_nobody_lives_is_over_once_the_source_tells_of_another() {
    let now = Instant::now();
    for number in [1, 2] {
        let mut view = following(3);
        assert_eq!(view.event(Epoch(u64::MAX), number, event(1)), Outcome::NewLife);
        // From its first event all of a life is known, unless somebody tells of another.
        ready(&mut view);
        let asks = view.ask(0) == Some(Ask::Snapshot);
        assert_eq!(asks, number > 1);
        if !asks {
            assert_eq!(view.event(LIFE, 4, event(4)), Outcome::Stale);
            assert!(!view.behind(LIFE, 4, now));
            assert!(view.behind(LIFE, 4, now + GRACE));
            assert_eq!(view.ask(0), Some(Ask::Snapshot));
        }
        assert!(!snapshot(&mut view, Epoch(6), 9), "a life before the one that is known to have begun");
        assert_eq!(view.ask(0), Some(Ask::Snapshot));
        assert!(snapshot(&mut view, LIFE, 4));
        assert!(view.stands_at(LIFE, 4));
    }
    let mut view = following(3);
    assert!(!view.behind(Epoch(6), 9, now), "a late report");
    assert!(!view.behind(LIFE, 3, now + GRACE));
    assert!(!view.behind(Epoch(6), 9, now + GRACE), "who is followed is there");
}

#[test]
fn what_is_doubtful_is_not_built_upon() {
    let mut view = following(3);
    view.doubt();
    assert_eq!(view.ask(0), Some(Ask::Snapshot));
    assert_eq!(view.event(LIFE, 4, event(4)), Outcome::Held);
    assert_eq!(view.next(), None);
    view.unanswered();
    assert_eq!(view.ask(0), Some(Ask::Snapshot));
    assert!(snapshot(&mut view, LIFE, 3));
    assert_eq!((ready(&mut view), view.ask(0)), (vec![event(4)], None));
}

#[test]
fn what_is_held_is_bounded() {
    let mut view = lacking();
    (6..20_000).for_each(|number| drop(view.event(LIFE, number, event(number))));
    assert_eq!(view.held.len(), reorder_buffer::EVENTS_MAX);
    view.range(LIFE, 3, Some(range(4..=600)));
    assert_eq!(ready(&mut view).len(), RANGE_MAX, "whoever answers with more than was agreed is not heard out");
    assert_eq!(view.ask(0), Some(Ask::Range(LIFE, 3 + RANGE_MAX as u64)));
    assert!(snapshot(&mut view, LIFE, 19_000));
    assert_eq!(ready(&mut view).len(), 999);

    // Few events that name many blocks are no better.
    let mut view = lacking();
    for number in 6..20 {
        let blocks = vec![SequenceHash::from_bytes([1; 16]); reorder_buffer::BLOCKS_MAX / 4];
        view.event(LIFE, number, BlockEvent::Removed { level: Level::G1, blocks });
    }
    assert_eq!(view.held.len(), 4);
    // An answer out of order, or of other events, is none.
    let mut view = lacking();
    view.range(LIFE, 3, Some(range(9..=600)));
    assert_eq!((view.ask(0), view.held.len()), (Some(Ask::Snapshot), 1));
}

#[test]
fn what_a_report_named_and_nobody_has_is_not_asked_for_for_ever() {
    let (mut view, now) = (following(3), Instant::now());
    assert!(!view.behind(LIFE, 9, now));
    assert!(view.behind(LIFE, 9, now + GRACE));
    assert_eq!(view.ask(0), Some(Ask::Range(LIFE, 3)));
    view.range(LIFE, 3, Some(vec![]));
    assert_eq!((view.ask(0), view.stands_at(LIFE, 3)), (None, true), "the source itself says that there is none");
}

#[test]
fn a_report_ahead_is_believed_after_a_grace() {
    let (mut view, now) = (following(3), Instant::now());
    assert!(!view.behind(LIFE, 5, now));
    view.event(LIFE, 4, event(4));
    view.event(LIFE, 5, event(5));
    assert!(!view.behind(LIFE, 6, now + GRACE), "what was missing came; now another is");
    assert!(view.behind(LIFE, 6, now + GRACE * 2));
    assert_eq!(view.ask(0), Some(Ask::Range(LIFE, 5)));
    assert_eq!(view.event(LIFE, 7, event(7)), Outcome::Held);
}

#[test]
fn of_several_that_announce_a_store_the_last_is_gone_when_only_the_others_tell_for_long() {
    let mut view = View::of_life(None);
    assert_eq!(view.ask(0), Some(Ask::Snapshot));
    assert!(snapshot(&mut view, LIFE, 9));
    let (mut now, formers) = (Instant::now(), [Epoch(5), Epoch(6)]);
    let mut round = |view: &mut View, lives: &[Epoch]| {
        now += Duration::from_secs(10);
        // Of a store, each says what it holds every ten seconds, whenever that is.
        let told = |(at, life): (u32, &Epoch)| view.behind(*life, 9, now + Duration::from_millis(3_300) * at);
        (0..).zip(lives).map(told).filter(|behind| *behind).count()
    };
    let all = [formers[0], formers[1], LIFE];
    for lives in [&all[..], &all, &formers, &formers, &all, &formers] {
        assert_eq!(round(&mut view, lives), 0, "it is there, or its digests were lost");
    }
    assert_eq!([0; 3].map(|_| round(&mut view, &formers)), [0, 0, 1]);
    assert_eq!(view.ask(0), Some(Ask::Snapshot));
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
    /// The index is being set to the snapshot of this life and number.
    laying: Option<(Epoch, u64)>,
    answers: usize,
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
    /// What a snapshot told is in the index.
    Laid,
    /// Reports, long enough one after the other, for whichever life is followed.
    Report,
    /// An event that nobody announced, with a number of this life or of one that nobody lives.
    Lie(bool, u64),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        8 => (any::<bool>(), 0..8u8).prop_map(|(stores, block)| Step::Change(stores, block)),
        10 => (0..12usize).prop_map(Step::Arrives),
        4 => prop_oneof![Just(Some(true)), Just(Some(true)), Just(Some(false)), Just(None)].prop_map(Step::Answer),
        1 => Just(Step::Restart),
        3 => Just(Step::Laid),
        1 => Just(Step::Report),
        1 => (any::<bool>(), prop_oneof![Just(1 << 40), Just(u64::MAX - 1), Just(u64::MAX)])
            .prop_map(|(alive, number)| Step::Lie(alive, number)),
        1 => (1..3u64).prop_map(|number| Step::Lie(false, number)),
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
        let Some((epoch, event)) = self.sent.iter().rev().nth(back).cloned() else { return };
        self.hears(epoch, event);
    }

    fn lie(&mut self, alive: bool, number: u64) {
        let epoch = Epoch(self.log.epoch().0 + if alive { 0 } else { 1000 });
        let lie = (epoch, Numbered { number, event: stored(99) });
        self.sent.insert(0, lie.clone());
        self.hears(lie.0, lie.1);
    }

    fn hears(&mut self, epoch: Epoch, Numbered { number, event }: Numbered) {
        match self.view.event(epoch, number, event) {
            Outcome::Apply(event) => apply(&mut self.believed, &event),
            Outcome::NewLife => self.believed.clear(),
            _ => {}
        }
        self.go_on();
    }

    fn report(&mut self) {
        let now = Instant::now();
        for at in [now, now + GRACE, now + OTHERS_GRACE] {
            self.view.behind(self.log.epoch(), *self.log.latest().borrow(), at);
        }
        self.go_on();
    }

    fn answer(&mut self, kept: Option<bool>) {
        self.answers += usize::from(!self.asked.is_empty());
        match (self.asked.pop(), kept) {
            (None, _) => return,
            (Some(_), None) => self.view.unanswered(),
            (Some(Ask::Range(epoch, after)), Some(kept)) => {
                let kept = kept && self.log.epoch() == epoch;
                // Two at a time, so that answers are bounded.
                self.view.range(epoch, after, kept.then(|| self.log.after(after, 2).unwrap()));
            }
            (Some(Ask::Snapshot), Some(_)) => {
                let snapshot = self.log.snapshot();
                if self.view.takes(snapshot.epoch, snapshot.number) {
                    self.believed = snapshot.blocks().collect();
                    self.laying = Some((snapshot.epoch, snapshot.number));
                }
            }
        }
        self.go_on();
    }

    fn laid(&mut self) {
        if let Some((epoch, number)) = self.laying.take() {
            self.view.laid(epoch, number);
            self.go_on();
        }
    }

    fn go_on(&mut self) {
        while let Some(event) = self.view.next() {
            apply(&mut self.believed, &event);
        }
        self.asked.extend(self.view.ask(0));
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
        let (believed, asked) = (Blocks::new(), vec![]);
        let mut stage = Stage { log, sent: vec![], view, believed, asked, laying: None, answers: 0 };
        stage.go_on();
        for step in steps {
            match step {
                Step::Change(stores, block) => stage.change(stores, block),
                Step::Restart => stage.log = EventLog::new(Epoch(stage.log.epoch().0 + 1)),
                Step::Arrives(back) => stage.arrives(back),
                Step::Answer(kept) => stage.answer(kept),
                Step::Laid => stage.laid(),
                Step::Report => stage.report(),
                Step::Lie(alive, number) => stage.lie(alive, number),
            }
            prop_assert!(stage.asked.len() + usize::from(stage.laying.is_some()) <= 1, "one question at a time");
            if stage.laying.is_none() {
                let told = stage.view.life().map_or_else(Blocks::new, |life| stage.told(life, stage.view.number));
                prop_assert_eq!(&stage.believed, &told, "what is believed was told at some time");
            }
        }
        // The link recovers: one more event comes, reports do, and questions are answered.
        stage.change(true, 0);
        stage.arrives(0);
        for _ in 0..4 {
            stage.report();
            for _ in 0..100 {
                stage.answer(Some(true));
                stage.laid();
            }
        }
        prop_assert!(stage.view.stands_at(stage.log.epoch(), stage.log.snapshot().number));
        let rests: Blocks = stage.log.snapshot().blocks().collect();
        prop_assert_eq!(&stage.believed, &rests);
        // And nobody asks any more.
        let answers = std::mem::take(&mut stage.answers);
        prop_assert!(answers < 200, "{} answers", answers);
        stage.report();
        prop_assert!(stage.asked.is_empty());
    }
}
