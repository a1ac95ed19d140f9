use super::*;

/// An input of the state machine.
#[derive(Clone, Copy, Debug)]
enum Event {
    Request(HealthSignal),
    ProbeGoes,
    Probe(HealthSignal),
}

const BUSY: HealthSignal = HealthSignal::Busy(Duration::from_secs(1));

fn closed() -> Health {
    Health::default()
}

fn after_two_faults(now: Instant) -> Health {
    let mut health = closed();
    (0..2).for_each(|_| health.record_outcome(HealthSignal::Fault, now));
    health
}

fn open(now: Instant) -> Health {
    let mut health = after_two_faults(now);
    health.record_outcome(HealthSignal::Fault, now);
    health
}

fn half_open(now: Instant) -> Health {
    let mut health = open(now);
    health.probe_started(now + FIRST_OPEN);
    health
}

#[tokio::test(start_paused = true)]
async fn every_transition() {
    use Breaker::{Closed, HalfOpen};
    use Event::{Probe, ProbeGoes, Request};
    use HealthSignal::{Fault, Healthy, Neutral, TimedOut};
    let start = Instant::now();
    let now = start + FIRST_OPEN;
    let open_for = |times: u32| Breaker::Open(now + FIRST_OPEN * times);
    let was = Breaker::Open(start + FIRST_OPEN);
    let table = [
        // From closed.
        (closed(), Request(Healthy), Closed),
        (closed(), Request(Neutral), Closed),
        (closed(), Request(BUSY), Closed),
        (closed(), Request(Fault), Closed),
        (closed(), Request(TimedOut), open_for(1)),
        (closed(), ProbeGoes, Closed),
        (closed(), Probe(Healthy), Closed),
        (closed(), Probe(Neutral), Closed),
        (closed(), Probe(BUSY), Closed),
        (closed(), Probe(Fault), open_for(1)),
        (closed(), Probe(TimedOut), open_for(1)),
        (after_two_faults(start), Request(Neutral), Closed),
        (after_two_faults(start), Request(BUSY), Closed),
        (after_two_faults(start), Request(Fault), open_for(1)),
        // From open.
        (open(start), Request(Healthy), Closed),
        (open(start), Request(Neutral), was),
        (open(start), Request(BUSY), was),
        (open(start), Request(Fault), was),
        (open(start), Request(TimedOut), was),
        (open(start), ProbeGoes, HalfOpen),
        // From half open.
        (half_open(start), Request(Healthy), Closed),
        (half_open(start), Request(Neutral), HalfOpen),
        (half_open(start), Request(BUSY), HalfOpen),
        (half_open(start), Request(Fault), HalfOpen),
        (half_open(start), Request(TimedOut), HalfOpen),
        (half_open(start), ProbeGoes, HalfOpen),
        (half_open(start), Probe(Healthy), Closed),
        (half_open(start), Probe(BUSY), Closed),
        (half_open(start), Probe(Neutral), open_for(1)),
        (half_open(start), Probe(Fault), open_for(2)),
        (half_open(start), Probe(TimedOut), open_for(2)),
    ];
    for (row, (mut health, event, after)) in table.into_iter().enumerate() {
        let before = health.breaker;
        match event {
            Request(signal) => health.record_outcome(signal, now),
            ProbeGoes => health.probe_started(now),
            Probe(signal) => health.probe_ended(Check::Computes, signal, now),
        }
        assert_eq!(health.breaker, after, "row {row}: {before:?}, {event:?}");
        assert_eq!(health.is_closed(), after == Closed);
        let ejected = health.ejected_until().is_some_and(|until| until > now);
        let busy = matches!(event, Request(BUSY) | Probe(BUSY));
        assert_eq!(ejected, busy || after != Closed, "row {row}: {before:?}, {event:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn errors_of_clients_and_of_this_process_neither_open_nor_close_the_breaker() {
    let now = Instant::now();
    let errors = [
        Error::PromptTooLong { prompt: 2, context: 1 },
        Error::UnknownModel("m".into()),
        Error::Invalid { field: "f", problem: "p".into() },
        Error::DeadlineExceeded,
        Error::Unread(Duration::from_secs(30)),
        Error::OutOfFiles,
    ];
    let (mut healthy, mut faulty) = (closed(), open(now));
    for _ in 0..100 {
        for error in &errors {
            healthy.record_outcome(HealthSignal::of(error), now);
            faulty.record_outcome(HealthSignal::of(error), now);
        }
    }
    assert!(healthy.is_closed() && !faulty.is_closed());
    let mut nearly = after_two_faults(now);
    nearly.record_outcome(HealthSignal::Neutral, now);
    nearly.record_outcome(HealthSignal::Fault, now);
    assert!(!nearly.is_closed(), "a client's mistake is no success in between");
}

#[tokio::test(start_paused = true)]
async fn back_pressure_is_obeyed_and_is_not_a_fault() {
    let (mut health, now) = (closed(), Instant::now());
    for _ in 0..100 {
        health.record_outcome(HealthSignal::of(&Error::Overloaded { retry_after: Duration::from_secs(1) }), now);
    }
    assert!(health.is_closed());
    assert_eq!(health.ejected_until(), Some(now + Duration::from_secs(1)), "and it does not add up");
    health.record_outcome(HealthSignal::Healthy, now);
    assert_eq!(health.ejected_until(), Some(now + Duration::from_secs(1)), "one that was accepted before says nothing");
    health.record_outcome(HealthSignal::Busy(Duration::from_hours(1)), now);
    assert_eq!(health.ejected_until(), Some(now + BUSY_MAX));
}

#[tokio::test(start_paused = true)]
async fn unavailable_and_failed_engines_are_faults() {
    for error in [
        Error::Unavailable("connection refused".into()),
        Error::NoAnswer("connection closed".into()),
        Error::Failed("out of memory".into()),
    ] {
        let (mut health, now) = (closed(), Instant::now());
        (0..CONSECUTIVE_FAULTS).for_each(|_| health.record_outcome(HealthSignal::of(&error), now));
        assert!(!health.is_closed(), "{error}");
    }
}

#[tokio::test(start_paused = true)]
async fn an_engine_that_answers_nothing_opens_the_breaker_at_once() {
    let (mut health, now) = (closed(), Instant::now());
    health.record_outcome(HealthSignal::of(&Error::Unresponsive("no answer".into())), now);
    assert!(!health.is_closed());
}

#[tokio::test(start_paused = true)]
async fn half_of_sixteen_opens_though_every_other_request_is_served() {
    let (mut health, now) = (closed(), Instant::now());
    for n in 1..=8 {
        assert!(health.is_closed(), "after {n} of each");
        health.record_outcome(HealthSignal::Healthy, now);
        health.record_outcome(HealthSignal::Fault, now);
    }
    assert!(!health.is_closed());
    let (mut rare, now) = (closed(), Instant::now());
    for _ in 0..100 {
        rare.record_outcome(HealthSignal::Fault, now);
        (0..2).for_each(|_| rare.record_outcome(HealthSignal::Healthy, now));
    }
    assert!(rare.is_closed(), "a third does not");
}

#[tokio::test(start_paused = true)]
async fn open_times_double_up_to_a_limit_and_an_output_resets_them() {
    let start = Instant::now();
    let mut health = open(start);
    let mut now = start + FIRST_OPEN;
    for rest in [2, 4, 8, 16, 32, 32] {
        assert!(health.wants_probe(start, now));
        health.probe_started(now);
        assert!(!health.wants_probe(start, now + MAX_OPEN), "one at a time");
        health.probe_ended(Check::Computes, HealthSignal::TimedOut, now);
        assert!(!health.wants_probe(start, now + FIRST_OPEN * rest - Duration::from_millis(1)));
        now += FIRST_OPEN * rest;
    }
    health.probe_started(now);
    health.probe_ended(Check::Computes, HealthSignal::Healthy, now);
    health.record_outcome(HealthSignal::TimedOut, now);
    assert!(!health.wants_probe(start, now + MAX_OPEN / 2), "an answered probe closes but resets nothing");
    health.record_outcome(HealthSignal::Healthy, now);
    health.record_outcome(HealthSignal::TimedOut, now);
    assert!(health.wants_probe(start, now + FIRST_OPEN));
}

#[tokio::test(start_paused = true)]
async fn a_good_health_check_of_a_closed_breaker_forgets_no_fault() {
    let now = Instant::now();
    let mut health = after_two_faults(now);
    health.probe_started(now);
    health.probe_ended(Check::Computes, HealthSignal::Healthy, now);
    health.record_outcome(HealthSignal::Fault, now);
    assert!(!health.is_closed());
}

#[tokio::test(start_paused = true)]
async fn good_health_checks_of_a_closed_breaker_reset_its_open_time() {
    let start = Instant::now();
    let mut health = open(start);
    for _ in 0..4 {
        for _ in 0..2 {
            health.probe_started(start);
            health.probe_ended(Check::Computes, HealthSignal::Healthy, start);
        }
        health.probe_ended(Check::Computes, HealthSignal::Fault, start);
        assert!(!health.is_down());
        assert!(health.wants_probe(start, start + FIRST_OPEN));
    }
}

/// A breaker that requests have opened, after a good health check of a server.
fn awaits_trial(start: Instant) -> Health {
    let mut health = half_open(start);
    health.probe_ended(Check::Answers, HealthSignal::Healthy, start + FIRST_OPEN);
    health
}

fn is_ejected(health: &Health, now: Instant) -> bool {
    health.ejected_until().is_some_and(|until| until > now)
}

#[tokio::test(start_paused = true)]
async fn a_request_decides_where_a_health_check_computes_nothing() {
    let start = Instant::now();
    let mut now = start + FIRST_OPEN;
    let mut health = awaits_trial(start);
    for wait in [1, 4, 16, 60, 60] {
        assert!(health.breaker == Breaker::AwaitsTrial && !is_ejected(&health, now), "{health:?}");
        health.request_sent(now);
        assert!(health.breaker == Breaker::InTrial && is_ejected(&health, now), "one request at a time: {health:?}");
        health.probe_ended(Check::Answers, HealthSignal::Healthy, now);
        assert_eq!(health.breaker, Breaker::InTrial);
        health.record_outcome(HealthSignal::Fault, now);
        health.record_outcome(HealthSignal::Fault, now);
        health.request_sent(now);
        assert_eq!(health.ejected_until(), Some(now + Duration::from_secs(wait)));
        assert!(!health.is_down() && !health.is_open());
        now += Duration::from_secs(wait);
    }
    health.request_sent(now);
    health.record_outcome(HealthSignal::Healthy, now);
    assert!(health.is_closed());
    for _ in 0..CONSECUTIVE_FAULTS {
        health.record_outcome(HealthSignal::Fault, now);
    }
    health.probe_ended(Check::Answers, HealthSignal::Healthy, now);
    assert_eq!(health.ejected_until(), Some(now + FIRST_OPEN), "the output has reset the wait");
}

#[tokio::test(start_paused = true)]
async fn a_trial_without_an_outcome_is_followed_by_another() {
    let start = Instant::now();
    let now = start + FIRST_OPEN;
    for signal in [HealthSignal::Neutral, BUSY] {
        let mut health = awaits_trial(start);
        health.request_sent(now);
        health.record_outcome(signal, now);
        assert_eq!((health.breaker, is_ejected(&health, now)), (Breaker::AwaitsTrial, signal == BUSY));
    }
    let mut health = awaits_trial(start);
    health.request_sent(now);
    assert!(!is_ejected(&health, now + TRIAL_TIME), "its client has gone");
}

#[tokio::test(start_paused = true)]
async fn a_long_time_without_faults_closes_the_breaker_of_a_server() {
    let start = Instant::now();
    let mut health = awaits_trial(start);
    health.request_sent(start + FIRST_OPEN);
    health.record_outcome(HealthSignal::Fault, start + FIRST_OPEN);
    let first = start + Duration::from_secs(4);
    for now in [first, first + REPAIRED_AFTER - Duration::from_secs(1)] {
        health.probe_ended(Check::Answers, HealthSignal::Healthy, now);
        assert!(!health.is_closed());
    }
    health.probe_ended(Check::Answers, HealthSignal::Healthy, first + REPAIRED_AFTER);
    assert!(health.is_closed());
}

#[tokio::test(start_paused = true)]
async fn a_server_that_was_away_needs_no_trial_and_keeps_its_wait() {
    let start = Instant::now();
    let mut health = awaits_trial(start);
    let now = start + FIRST_OPEN;
    health.request_sent(now);
    health.record_outcome(HealthSignal::Fault, now);
    health.probe_ended(Check::Answers, HealthSignal::TimedOut, now);
    assert!(health.is_open());
    health.probe_ended(Check::Answers, HealthSignal::Healthy, now);
    assert!(health.is_closed());
    health.record_outcome(HealthSignal::Fault, now);
    assert!(health.is_open(), "one fault is enough");
    health.probe_ended(Check::Answers, HealthSignal::Healthy, now);
    assert_eq!(health.ejected_until(), Some(now + FIRST_OPEN * 8));
}
