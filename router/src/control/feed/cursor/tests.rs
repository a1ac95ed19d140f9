use super::*;
use kvbm::{EventLog, Level, SequenceHash};
use proptest::prelude::*;
use std::collections::BTreeSet;

const EPOCH: Epoch = Epoch(7);

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

/// A cursor in the first epoch that has applied events up to `number`.
fn following(number: u64) -> SourceCursor {
    let mut cursor = SourceCursor::new(Some(EPOCH));
    assert_eq!(cursor.next_request(0), Some(ResyncRequest::Snapshot));
    assert!(snapshot(&mut cursor, EPOCH, number));
    assert_eq!(cursor.next_request(0), None);
    cursor
}

/// A cursor that lacks event 4, has buffered 5, and has requested the range.
fn lacking() -> SourceCursor {
    let mut cursor = following(3);
    assert_eq!(cursor.event(EPOCH, 5, event(5)), Outcome::Gap);
    assert_eq!(cursor.next_request(0), Some(ResyncRequest::Range(EPOCH, 3)));
    assert_eq!((cursor.next_request(0), cursor.next()), (None, None), "an answer is pending");
    cursor
}

/// Accepts a snapshot and applies it at once.
fn snapshot(cursor: &mut SourceCursor, epoch: Epoch, number: u64) -> bool {
    cursor.accept_snapshot(epoch, number) && cursor.snapshot_applied(epoch, number)
}

fn ready(cursor: &mut SourceCursor) -> Vec<BlockEvent> {
    std::iter::from_fn(|| cursor.next()).collect()
}

#[test]
fn the_next_event_is_applied_repeated_and_former_ones_are_not() {
    let mut cursor = following(3);
    assert_eq!(cursor.event(EPOCH, 4, event(4)), Outcome::Apply(event(4)));
    assert_eq!(cursor.event(EPOCH, 4, event(4)), Outcome::Duplicate);
    assert_eq!(cursor.event(Epoch(6), 5, event(5)), Outcome::Stale);
    assert_eq!(cursor.event(EPOCH, 5, event(5)), Outcome::Apply(event(5)));
}

#[test]
fn the_requested_range_closes_a_gap() {
    let mut cursor = lacking();
    assert_eq!(cursor.event(EPOCH, 7, event(7)), Outcome::Buffered);
    cursor.range(EPOCH, 3, Some(range(4..=5)));
    assert_eq!(ready(&mut cursor), [event(4), event(5)], "and no further");
    assert_eq!(cursor.next_request(0), Some(ResyncRequest::Range(EPOCH, 5)), "a bounded answer: the rest is requested");
    cursor.range(EPOCH, 5, Some(range(6..=7)));
    assert_eq!(ready(&mut cursor), [event(6), event(7)]);
    assert_eq!((cursor.next_request(0), cursor.is_at(EPOCH, 7)), (None, true));
}

#[test]
fn an_overtaken_event_closes_the_gap_before_the_answer() {
    let mut cursor = lacking();
    assert_eq!(cursor.event(EPOCH, 4, event(4)), Outcome::Apply(event(4)));
    assert_eq!(ready(&mut cursor), [event(5)]);
    assert!(cursor.is_at(EPOCH, 5));
    assert_eq!(cursor.event(EPOCH, 7, event(7)), Outcome::Gap);
    assert_eq!(cursor.next_request(0), None, "one request at a time");
    cursor.range(EPOCH, 3, Some(range(4..=5)));
    assert_eq!(
        cursor.next_request(0),
        Some(ResyncRequest::Range(EPOCH, 5)),
        "that answer does not contain the new gap"
    );
}

#[test]
fn a_truncated_log_or_a_failed_request_needs_a_snapshot() {
    let unkept = |cursor: &mut SourceCursor| cursor.range(EPOCH, 3, None);
    for answer in [unkept, SourceCursor::request_failed] {
        let mut cursor = lacking();
        cursor.event(EPOCH, 7, event(7));
        answer(&mut cursor);
        assert_eq!(cursor.next_request(0), Some(ResyncRequest::Snapshot));
        assert_eq!(cursor.event(EPOCH, 4, event(4)), Outcome::Apply(event(4)));
        assert_eq!(ready(&mut cursor), [event(5)]);
        assert!(!snapshot(&mut cursor, EPOCH, 4), "older than the cursor by now");
        assert_eq!(cursor.next_request(0), Some(ResyncRequest::Snapshot), "so it is requested again");
        assert!(snapshot(&mut cursor, EPOCH, 6));
        assert_eq!(ready(&mut cursor), [event(7)]);
        assert!(cursor.is_at(EPOCH, 7));
    }
}

#[test]
fn without_answers_the_overtaken_event_closes_the_gap() {
    let mut cursor = lacking();
    for _ in 0..3 {
        cursor.request_failed();
        assert_eq!(cursor.next_request(0), Some(ResyncRequest::Snapshot));
    }
    assert_eq!(cursor.event(EPOCH, 4, event(4)), Outcome::Apply(event(4)));
    assert_eq!(ready(&mut cursor), [event(5)]);
    cursor.request_failed();
    assert_eq!(cursor.next_request(0), None);

    let mut unknown = SourceCursor::new(None);
    assert_eq!(unknown.event(EPOCH, 2, event(2)), Outcome::Buffered);
    assert_eq!(
        unknown.event(EPOCH, 1, event(1)),
        Outcome::Apply(event(1)),
        "from its first event an epoch is complete"
    );
    assert_eq!((ready(&mut unknown), unknown.next_request(0)), (vec![event(2)], None));
}

#[test]
fn a_new_epoch_starts_over_and_refuses_answers_of_the_old() {
    let range = |cursor: &mut SourceCursor| cursor.range(EPOCH, 3, Some(range(4..=5)));
    let past = |cursor: &mut SourceCursor| assert!(!snapshot(cursor, EPOCH, 10));
    for answer in [range, past] {
        let mut cursor = lacking();
        assert_eq!(cursor.event(Epoch(8), 2, event(2)), Outcome::NewEpoch);
        assert_eq!(cursor.event(EPOCH, 4, event(4)), Outcome::Stale);
        assert_eq!(cursor.next_request(0), None, "one request at a time");
        answer(&mut cursor);
        assert_eq!(ready(&mut cursor), []);
        assert_eq!(cursor.next_request(0), Some(ResyncRequest::Snapshot));
        assert!(snapshot(&mut cursor, Epoch(8), 1));
        assert_eq!(ready(&mut cursor), [event(2)]);
        assert!(snapshot(&mut cursor, Epoch(9), 0), "a snapshot may be the first of an epoch");
        assert!(cursor.is_at(Epoch(9), 0));
    }
}

#[test]
fn events_wait_for_a_snapshot_and_a_new_epoch_refuses_it() {
    let mut cursor = following(3);
    cursor.invalidate();
    assert_eq!(cursor.next_request(0), Some(ResyncRequest::Snapshot));
    assert!(cursor.accept_snapshot(EPOCH, 5));
    assert_eq!(cursor.event(EPOCH, 4, event(4)), Outcome::Buffered);
    assert_eq!(cursor.event(EPOCH, 6, event(6)), Outcome::Buffered);
    assert_eq!((cursor.next(), cursor.next_request(0)), (None, None));
    assert!(cursor.snapshot_applied(EPOCH, 5));
    assert_eq!((ready(&mut cursor), cursor.is_at(EPOCH, 6)), (vec![event(6)], true));

    cursor.invalidate();
    assert_eq!(cursor.next_request(0), Some(ResyncRequest::Snapshot));
    assert!(cursor.accept_snapshot(EPOCH, 6));
    assert_eq!(cursor.event(Epoch(8), 1, event(1)), Outcome::NewEpoch);
    assert_eq!(cursor.next_request(0), None, "the snapshot being applied would overtake it");
    assert!(!cursor.snapshot_applied(EPOCH, 6));
    assert_eq!(
        (cursor.next(), cursor.next_request(0)),
        (None, Some(ResyncRequest::Snapshot)),
        "the index has a former epoch's blocks"
    );
}

#[test]
fn forged_numbers_are_dropped_once_the_source_has_none() {
    for number in [9, u64::MAX - 1, u64::MAX] {
        let mut cursor = following(3);
        assert_eq!(cursor.event(EPOCH, number, event(9)), Outcome::Gap);
        assert_eq!(cursor.next_request(0), Some(ResyncRequest::Range(EPOCH, 3)));
        cursor.range(EPOCH, 3, None);
        assert_eq!(cursor.next_request(0), Some(ResyncRequest::Snapshot));
        assert!(snapshot(&mut cursor, EPOCH, 4));
        assert_eq!((cursor.next(), cursor.next_request(0)), (None, Some(ResyncRequest::Range(EPOCH, 4))));
        cursor.range(EPOCH, 4, Some(vec![]));
        assert_eq!((cursor.next_request(0), cursor.is_at(EPOCH, 4), cursor.buffer.len()), (None, true, 0));
    }
    let mut cursor = following(u64::MAX);
    assert_eq!(cursor.event(EPOCH, u64::MAX, event(1)), Outcome::Duplicate);
    assert!(!cursor.behind(EPOCH, u64::MAX, Instant::now()));
    cursor.invalidate();
    assert_eq!((cursor.next_request(0), cursor.next()), (Some(ResyncRequest::Snapshot), None));
    assert!(snapshot(&mut cursor, EPOCH, 5), "the later answer counts");
}

#[test]
fn a_forged_epoch_ends_once_the_source_reports_another() {
    let now = Instant::now();
    for number in [1, 2] {
        let mut cursor = following(3);
        assert_eq!(cursor.event(Epoch(u64::MAX), number, event(1)), Outcome::NewEpoch);
        // From the first event on an epoch is complete, unless another one is reported.
        ready(&mut cursor);
        let asks = cursor.next_request(0) == Some(ResyncRequest::Snapshot);
        assert_eq!(asks, number > 1);
        if !asks {
            assert_eq!(cursor.event(EPOCH, 4, event(4)), Outcome::Stale);
            assert!(!cursor.behind(EPOCH, 4, now));
            assert!(cursor.behind(EPOCH, 4, now + GRACE));
            assert_eq!(cursor.next_request(0), Some(ResyncRequest::Snapshot));
        }
        assert!(!snapshot(&mut cursor, Epoch(6), 9), "an epoch before the one that discovery reported");
        assert_eq!(cursor.next_request(0), Some(ResyncRequest::Snapshot));
        assert!(snapshot(&mut cursor, EPOCH, 4));
        assert!(cursor.is_at(EPOCH, 4));
    }
    let mut cursor = following(3);
    assert!(!cursor.behind(Epoch(6), 9, now), "a late report");
    assert!(!cursor.behind(EPOCH, 3, now + GRACE));
    assert!(!cursor.behind(Epoch(6), 9, now + GRACE), "the followed epoch is still reported");
}

#[test]
fn no_event_is_applied_before_revalidation() {
    let mut cursor = following(3);
    cursor.invalidate();
    assert_eq!(cursor.next_request(0), Some(ResyncRequest::Snapshot));
    assert_eq!(cursor.event(EPOCH, 4, event(4)), Outcome::Buffered);
    assert_eq!(cursor.next(), None);
    cursor.request_failed();
    assert_eq!(cursor.next_request(0), Some(ResyncRequest::Snapshot));
    assert!(snapshot(&mut cursor, EPOCH, 3));
    assert_eq!((ready(&mut cursor), cursor.next_request(0)), (vec![event(4)], None));
}

#[test]
fn the_reorder_buffer_is_bounded() {
    let mut cursor = lacking();
    (6..20_000).for_each(|number| drop(cursor.event(EPOCH, number, event(number))));
    assert_eq!(cursor.buffer.len(), reorder_buffer::EVENTS_MAX);
    cursor.range(EPOCH, 3, Some(range(4..=600)));
    assert_eq!(ready(&mut cursor).len(), RANGE_MAX, "an answer beyond the agreed length is cut");
    assert_eq!(cursor.next_request(0), Some(ResyncRequest::Range(EPOCH, 3 + RANGE_MAX as u64)));
    assert!(snapshot(&mut cursor, EPOCH, 19_000));
    assert_eq!(ready(&mut cursor).len(), 999);

    // A few events with many blocks are bounded, too.
    let mut cursor = lacking();
    for number in 6..20 {
        let blocks = vec![SequenceHash::from_bytes([1; 16]); reorder_buffer::BLOCKS_MAX / 4];
        cursor.event(EPOCH, number, BlockEvent::Removed { level: Level::G1, blocks });
    }
    assert_eq!(cursor.buffer.len(), 4);
    // An answer out of order, or with other events, is ignored.
    let mut cursor = lacking();
    cursor.range(EPOCH, 3, Some(range(9..=600)));
    assert_eq!((cursor.next_request(0), cursor.buffer.len()), (Some(ResyncRequest::Snapshot), 1));
}

#[test]
fn reported_events_that_do_not_exist_are_requested_once() {
    let (mut cursor, now) = (following(3), Instant::now());
    assert!(!cursor.behind(EPOCH, 9, now));
    assert!(cursor.behind(EPOCH, 9, now + GRACE));
    assert_eq!(cursor.next_request(0), Some(ResyncRequest::Range(EPOCH, 3)));
    cursor.range(EPOCH, 3, Some(vec![]));
    assert_eq!(
        (cursor.next_request(0), cursor.is_at(EPOCH, 3)),
        (None, true),
        "the source reports that there are none"
    );
}

#[test]
fn a_report_ahead_counts_after_a_grace() {
    let (mut cursor, now) = (following(3), Instant::now());
    assert!(!cursor.behind(EPOCH, 5, now));
    cursor.event(EPOCH, 4, event(4));
    cursor.event(EPOCH, 5, event(5));
    assert!(!cursor.behind(EPOCH, 6, now + GRACE), "the missing event came; now another is missing");
    assert!(cursor.behind(EPOCH, 6, now + GRACE * 2));
    assert_eq!(cursor.next_request(0), Some(ResyncRequest::Range(EPOCH, 5)));
    assert_eq!(cursor.event(EPOCH, 7, event(7)), Outcome::Buffered);
}

#[test]
fn a_store_epoch_ends_when_only_former_ones_are_reported() {
    let mut cursor = SourceCursor::new(None);
    assert_eq!(cursor.next_request(0), Some(ResyncRequest::Snapshot));
    assert!(snapshot(&mut cursor, EPOCH, 9));
    let (mut now, former) = (Instant::now(), [Epoch(5), Epoch(6)]);
    let mut round = |cursor: &mut SourceCursor, epochs: &[Epoch]| {
        now += Duration::from_secs(10);
        // Each process sends a digest of the store every ten seconds, at any offset.
        let expected = |(at, epoch): (u32, &Epoch)| cursor.behind(*epoch, 9, now + Duration::from_millis(3_300) * at);
        (0..).zip(epochs).map(expected).filter(|behind| *behind).count()
    };
    let all = [former[0], former[1], EPOCH];
    for epochs in [&all[..], &all, &former, &former, &all, &former] {
        assert_eq!(round(&mut cursor, epochs), 0, "it is there, or its digests were lost");
    }
    assert_eq!([0; 3].map(|_| round(&mut cursor, &former)), [0, 0, 1]);
    assert_eq!(cursor.next_request(0), Some(ResyncRequest::Snapshot));
}

type Blocks = BTreeSet<(Level, SequenceHash)>;

fn apply(blocks: &mut Blocks, event: &BlockEvent) {
    match event {
        BlockEvent::Stored { level, blocks: more, .. } => blocks.extend(more.iter().map(|block| (*level, *block))),
        BlockEvent::Removed { level, blocks: removed } => {
            blocks.retain(|(at, block)| at != level || !removed.contains(block));
        }
        BlockEvent::Cleared { level } => blocks.retain(|(at, _)| at != level),
    }
}

/// A source, all events that it ever sent, and a cursor behind a link that loses, reorders and repeats.
struct Harness {
    log: EventLog,
    sent: Vec<(Epoch, Numbered)>,
    cursor: SourceCursor,
    indexed: Blocks,
    requests: Vec<ResyncRequest>,
    /// The snapshot of this epoch and number is being applied.
    applying: Option<(Epoch, u64)>,
    answers: usize,
}

#[derive(Clone, Debug)]
enum Step {
    /// The source stores a block, or removes it.
    Change(bool, u8),
    Restart,
    /// One of the events ever sent arrives, counted from the newest.
    Arrive(usize),
    /// A request is answered (`true`), the log is truncated (`false`), or the source is absent (`None`).
    Answer(Option<bool>),
    /// The pending snapshot has been applied.
    Applied,
    /// Reports, far enough apart, for any epoch.
    Report,
    /// A forged event, in the current epoch or in one that does not exist.
    Forged(bool, u64),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        8 => (any::<bool>(), 0..8u8).prop_map(|(stores, block)| Step::Change(stores, block)),
        10 => (0..12usize).prop_map(Step::Arrive),
        4 => prop_oneof![Just(Some(true)), Just(Some(true)), Just(Some(false)), Just(None)].prop_map(Step::Answer),
        1 => Just(Step::Restart),
        3 => Just(Step::Applied),
        1 => Just(Step::Report),
        1 => (any::<bool>(), prop_oneof![Just(1 << 40), Just(u64::MAX - 1), Just(u64::MAX)])
            .prop_map(|(alive, number)| Step::Forged(alive, number)),
        1 => (1..3u64).prop_map(|number| Step::Forged(false, number)),
    ]
}

impl Harness {
    fn change(&mut self, stores: bool, block: u8) {
        let blocks = vec![SequenceHash::from_bytes([block; 16])];
        let event = if stores { stored(block) } else { BlockEvent::Removed { level: Level::G1, blocks } };
        self.log.announce(event.clone());
        self.sent.push((self.log.epoch(), Numbered { number: *self.log.latest().borrow(), event }));
    }

    /// The blocks of an epoch after the event with this number.
    fn expected(&self, epoch: Epoch, number: u64) -> Blocks {
        let mut blocks = Blocks::new();
        for (of, event) in &self.sent {
            if *of == epoch && event.number <= number {
                apply(&mut blocks, &event.event);
            }
        }
        blocks
    }

    fn arrive(&mut self, back: usize) {
        let Some((epoch, event)) = self.sent.iter().rev().nth(back).cloned() else { return };
        self.receive(epoch, event);
    }

    fn forge(&mut self, alive: bool, number: u64) {
        let epoch = Epoch(self.log.epoch().0 + if alive { 0 } else { 1000 });
        let forged = (epoch, Numbered { number, event: stored(99) });
        self.sent.insert(0, forged.clone());
        self.receive(forged.0, forged.1);
    }

    fn receive(&mut self, epoch: Epoch, Numbered { number, event }: Numbered) {
        match self.cursor.event(epoch, number, event) {
            Outcome::Apply(event) => apply(&mut self.indexed, &event),
            Outcome::NewEpoch => self.indexed.clear(),
            _ => {}
        }
        self.advance_source();
    }

    fn report(&mut self) {
        let now = Instant::now();
        for at in [now, now + GRACE, now + STORE_GRACE] {
            self.cursor.behind(self.log.epoch(), *self.log.latest().borrow(), at);
        }
        self.advance_source();
    }

    fn answer(&mut self, kept: Option<bool>) {
        self.answers += usize::from(!self.requests.is_empty());
        match (self.requests.pop(), kept) {
            (None, _) => return,
            (Some(_), None) => self.cursor.request_failed(),
            (Some(ResyncRequest::Range(epoch, after)), Some(kept)) => {
                let kept = kept && self.log.epoch() == epoch;
                // Two at a time, so that answers are bounded.
                self.cursor.range(epoch, after, kept.then(|| self.log.after(after, 2).unwrap()));
            }
            (Some(ResyncRequest::Snapshot), Some(_)) => {
                let snapshot = self.log.snapshot();
                if self.cursor.accept_snapshot(snapshot.epoch, snapshot.number) {
                    self.indexed = snapshot.blocks().collect();
                    self.applying = Some((snapshot.epoch, snapshot.number));
                }
            }
        }
        self.advance_source();
    }

    fn snapshot_applied(&mut self) {
        if let Some((epoch, number)) = self.applying.take() {
            self.cursor.snapshot_applied(epoch, number);
            self.advance_source();
        }
    }

    fn advance_source(&mut self) {
        while let Some(event) = self.cursor.next() {
            apply(&mut self.indexed, &event);
        }
        self.requests.extend(self.cursor.next_request(0));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn loss_order_repetition_and_restarts_converge(
        known in any::<bool>(),
        steps in proptest::collection::vec(step(), 1..120),
    ) {
        let log = EventLog::new(Epoch(1));
        let cursor = SourceCursor::new(known.then_some(Epoch(1)));
        let (indexed, requests) = (Blocks::new(), vec![]);
        let mut harness = Harness { log, sent: vec![], cursor, indexed, requests, applying: None, answers: 0 };
        harness.advance_source();
        for step in steps {
            match step {
                Step::Change(stores, block) => harness.change(stores, block),
                Step::Restart => harness.log = EventLog::new(Epoch(harness.log.epoch().0 + 1)),
                Step::Arrive(back) => harness.arrive(back),
                Step::Answer(kept) => harness.answer(kept),
                Step::Applied => harness.snapshot_applied(),
                Step::Report => harness.report(),
                Step::Forged(alive, number) => harness.forge(alive, number),
            }
            let pending = harness.requests.len() + usize::from(harness.applying.is_some());
            prop_assert!(pending <= 1, "one request at a time");
            if harness.applying.is_none() {
                let number = harness.cursor.number;
                let epoch = harness.cursor.epoch();
                let expected = epoch.map_or_else(Blocks::new, |epoch| harness.expected(epoch, number));
                prop_assert_eq!(&harness.indexed, &expected, "the index equals an earlier state of the source");
            }
        }
        // The link recovers: one more event and reports arrive, and requests are answered.
        harness.change(true, 0);
        harness.arrive(0);
        for _ in 0..4 {
            harness.report();
            for _ in 0..100 {
                harness.answer(Some(true));
                harness.snapshot_applied();
            }
        }
        prop_assert!(harness.cursor.is_at(harness.log.epoch(), harness.log.snapshot().number));
        let actual: Blocks = harness.log.snapshot().blocks().collect();
        prop_assert_eq!(&harness.indexed, &actual);
        // No further requests follow.
        let answers = std::mem::take(&mut harness.answers);
        prop_assert!(answers < 200, "{} answers", answers);
        harness.report();
        prop_assert!(harness.requests.is_empty());
    }
}
