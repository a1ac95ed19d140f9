use super::*;

/// What can happen.
#[derive(Clone, Copy, Debug)]
enum Event {
    Request(Verdict),
    ProbeGoes,
    Probe(Verdict),
}

const BUSY: Verdict = Verdict::Busy(Duration::from_secs(1));

fn closed() -> Health {
    Health::default()
}

fn after_two_faults(now: Instant) -> Health {
    let mut health = closed();
    (0..2).for_each(|_| health.note(Verdict::Fault, now));
    health
}

fn open(now: Instant) -> Health {
    let mut health = after_two_faults(now);
    health.note(Verdict::Fault, now);
    health
}

fn half_open(now: Instant) -> Health {
    let mut health = open(now);
    health.probe(now + FIRST);
    health
}

#[tokio::test(start_paused = true)]
async fn every_transition() {
    use Breaker::{Closed, HalfOpen};
    use Event::{Probe, ProbeGoes, Request};
    use Verdict::{Fault, Hung, Neutral, Well};
    let start = Instant::now();
    let now = start + FIRST;
    let rests = |times: u32| Breaker::Open(now + FIRST * times);
    let was = Breaker::Open(start + FIRST);
    let table = [
        // From closed.
        (closed(), Request(Well), Closed),
        (closed(), Request(Neutral), Closed),
        (closed(), Request(BUSY), Closed),
        (closed(), Request(Fault), Closed),
        (closed(), Request(Hung), rests(1)),
        (closed(), ProbeGoes, Closed),
        (closed(), Probe(Well), Closed),
        (closed(), Probe(Neutral), Closed),
        (closed(), Probe(BUSY), Closed),
        (closed(), Probe(Fault), rests(1)),
        (closed(), Probe(Hung), rests(1)),
        (after_two_faults(start), Request(Neutral), Closed),
        (after_two_faults(start), Request(BUSY), Closed),
        (after_two_faults(start), Request(Fault), rests(1)),
        // From open.
        (open(start), Request(Well), Closed),
        (open(start), Request(Neutral), was),
        (open(start), Request(BUSY), was),
        (open(start), Request(Fault), was),
        (open(start), Request(Hung), was),
        (open(start), ProbeGoes, HalfOpen),
        // From half open.
        (half_open(start), Request(Well), Closed),
        (half_open(start), Request(Neutral), HalfOpen),
        (half_open(start), Request(BUSY), HalfOpen),
        (half_open(start), Request(Fault), HalfOpen),
        (half_open(start), Request(Hung), HalfOpen),
        (half_open(start), ProbeGoes, HalfOpen),
        (half_open(start), Probe(Well), Closed),
        (half_open(start), Probe(BUSY), Closed),
        (half_open(start), Probe(Neutral), rests(1)),
        (half_open(start), Probe(Fault), rests(2)),
        (half_open(start), Probe(Hung), rests(2)),
    ];
    for (row, (mut health, event, after)) in table.into_iter().enumerate() {
        let before = health.breaker;
        match event {
            Request(verdict) => health.note(verdict, now),
            ProbeGoes => health.probe(now),
            Probe(verdict) => health.probed(verdict, now),
        }
        assert_eq!(health.breaker, after, "row {row}: {before:?}, {event:?}");
        assert_eq!(health.is_closed(), after == Closed);
        let rests = health.rests_until().is_some_and(|until| until > now);
        let busy = matches!(event, Request(BUSY) | Probe(BUSY));
        assert_eq!(rests, busy || after != Closed, "row {row}: {before:?}, {event:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn client_errors_neither_open_nor_close_the_breaker() {
    let now = Instant::now();
    let errors = [
        Error::PromptTooLong { prompt: 2, context: 1 },
        Error::UnknownModel("m".into()),
        Error::Invalid { field: "f", problem: "p".into() },
        Error::DeadlineExceeded,
        Error::Unread(Duration::from_secs(30)),
    ];
    let (mut well, mut ill) = (closed(), open(now));
    for _ in 0..100 {
        for error in &errors {
            well.note(Verdict::of(error), now);
            ill.note(Verdict::of(error), now);
        }
    }
    assert!(well.is_closed() && !ill.is_closed());
    let mut nearly = after_two_faults(now);
    nearly.note(Verdict::Neutral, now);
    nearly.note(Verdict::Fault, now);
    assert!(!nearly.is_closed(), "a client's mistake is no success in between");
}

#[tokio::test(start_paused = true)]
async fn back_pressure_is_obeyed_and_is_not_a_fault() {
    let (mut health, now) = (closed(), Instant::now());
    for _ in 0..100 {
        health.note(Verdict::of(&Error::Overloaded { retry_after: Duration::from_secs(1) }), now);
    }
    assert!(health.is_closed());
    assert_eq!(health.rests_until(), Some(now + Duration::from_secs(1)), "and it does not add up");
    health.note(Verdict::Well, now);
    assert_eq!(health.rests_until(), Some(now + Duration::from_secs(1)), "one that was accepted before says nothing");
    health.note(Verdict::Busy(Duration::from_hours(1)), now);
    assert_eq!(health.rests_until(), Some(now + BUSY_MAX));
}

#[tokio::test(start_paused = true)]
async fn an_engine_that_nobody_reaches_or_that_fails_is_at_fault() {
    for error in [Error::Unavailable("connection refused".into()), Error::Failed("out of memory".into())] {
        let (mut health, now) = (closed(), Instant::now());
        (0..IN_A_ROW).for_each(|_| health.note(Verdict::of(&error), now));
        assert!(!health.is_closed(), "{error}");
    }
}

#[tokio::test(start_paused = true)]
async fn half_of_sixteen_opens_though_every_other_request_is_served() {
    let (mut health, now) = (closed(), Instant::now());
    for n in 1..=8 {
        assert!(health.is_closed(), "after {n} of each");
        health.note(Verdict::Well, now);
        health.note(Verdict::Fault, now);
    }
    assert!(!health.is_closed());
    let (mut rare, now) = (closed(), Instant::now());
    for _ in 0..100 {
        rare.note(Verdict::Fault, now);
        (0..2).for_each(|_| rare.note(Verdict::Well, now));
    }
    assert!(rare.is_closed(), "a third does not");
}

#[tokio::test(start_paused = true)]
async fn rests_double_up_to_a_limit_and_an_output_forgives() {
    let start = Instant::now();
    let mut health = open(start);
    let mut now = start + FIRST;
    for rest in [2, 4, 8, 16, 32, 32] {
        assert!(health.wants_probe(start, now));
        health.probe(now);
        assert!(!health.wants_probe(start, now + LONGEST), "one at a time");
        health.probed(Verdict::Hung, now);
        assert!(!health.wants_probe(start, now + FIRST * rest - Duration::from_millis(1)));
        now += FIRST * rest;
    }
    health.probe(now);
    health.probed(Verdict::Well, now);
    health.note(Verdict::Hung, now);
    assert!(!health.wants_probe(start, now + LONGEST / 2), "an answered probe closes and forgives nothing");
    health.note(Verdict::Well, now);
    health.note(Verdict::Hung, now);
    assert!(health.wants_probe(start, now + FIRST));
}
