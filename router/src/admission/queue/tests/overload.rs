//! Overload: rejections by the measured drain rate, `Retry-After`, and the cost of selecting requests to shed.

use super::*;
use units::HumanDuration;

fn at(start: Instant, seconds: f64) -> Instant {
    start + Duration::from_secs_f64(seconds)
}

/// A queue with 47 requests of 100 tokens of tenant `a`, with a measured drain rate of 100 tokens per second.
fn measured(start: Instant) -> FairQueue {
    let mut queue = FairQueue::default();
    for _ in 0..50 {
        wait(&mut queue, &limits(u64::MAX), request("a", 100));
    }
    for seconds in [0.0, 0.0, 2.0] {
        queue.admit_next(&limits(u64::MAX), at(start, seconds), |_, _| OPEN).unwrap();
    }
    queue
}

#[test]
fn retry_after_is_the_time_until_the_queue_has_space() {
    let start = Instant::now();
    let mut queue = measured(start);
    let now = at(start, 2.0);
    let limits = Settings { max_queue_time: HumanDuration::secs(1000), ..limits(5000) };
    for _ in 0..3 {
        assert!(matches!(enter(&mut queue, &limits, request("a", 100), None, now), Outcome::Queued(..)));
    }
    let mut rejected = |tokens| match enter(&mut queue, &limits, request("a", tokens), None, now) {
        Outcome::Rejected(Rejection::QueueFull(after)) => after.as_secs(),
        other => panic!("{other:?}"),
    };
    assert_eq!([rejected(300), rejected(100)], [3, 6], "the second gets the space after the first");
    assert_eq!((0..100).map(|_| rejected(100)).max(), Some(60), "an estimate beyond a minute is worth nothing");
}

#[test]
fn retry_after_of_a_lower_class_is_by_the_rate_that_it_gets() {
    let start = Instant::now();
    let mut queue = measured(start);
    let now = at(start, 2.0);
    let limits = Settings { max_queue_time: HumanDuration::secs(1000), ..limits(4700) };
    // The class may have a tenth of the queue.
    let mut low = || enter(&mut queue, &limits, with(Priority::Low, request("c", 94)), None, now);
    (0..5).for_each(|_| assert!(matches!(low(), Outcome::Queued(..))));
    let mut rejected = || match low() {
        Outcome::Rejected(Rejection::QueueFull(after)) => after.as_secs(),
        other => panic!("{other:?}"),
    };
    // Of 100 tokens per second, the inflow to the class above leaves 19.
    assert_eq!([rejected(), rejected()], [3, 8], "and not 1, which would be the time at the whole rate");
}

#[test]
fn retry_after_an_unknown_rate_is_a_second() {
    let mut queue = FairQueue::default();
    let limits = limits(100);
    let now = Instant::now();
    wait(&mut queue, &limits, request("a", 100));
    let rejected = enter(&mut queue, &limits, request("a", 100), None, now);
    assert_eq!(rejected, Outcome::Rejected(Rejection::QueueFull(Duration::from_secs(1))));
}

#[test]
fn predicted_timeout_is_rejected_on_arrival() {
    let start = Instant::now();
    let mut queue = measured(start);
    let now = at(start, 2.0);
    let limits = Settings { max_queue_time: HumanDuration::secs(50), ..limits(u64::MAX) };
    // 4,700 tokens wait; the last request that is accepted has 4,500 before it, nine tenths of what drains in time.
    let rejected = enter(&mut queue, &limits, request("a", 100), None, now);
    assert_eq!(rejected, Outcome::Rejected(Rejection::PredictedTimeout(Duration::from_secs(2))));
    let high = with(Priority::High, request("a", 100));
    assert!(matches!(enter(&mut queue, &limits, high, None, now), Outcome::Queued(..)), "no request is before it");
    let other = enter(&mut queue, &limits, request("b", 100), None, now);
    assert!(matches!(other, Outcome::Queued(..)), "a tenant without requests waits only for its turn: {other:?}");
    let elsewhere = enter(&mut queue, &limits, on(2, "a", 100), OPEN, now);
    assert!(matches!(elsewhere, Outcome::Queued(..)), "its worker takes it with the next turn: {elsewhere:?}");
}

#[test]
fn low_class_waits_by_its_guaranteed_rate() {
    let start = Instant::now();
    let mut queue = measured(start);
    let now = at(start, 2.0);
    let limits = Settings { max_queue_time: HumanDuration::secs(40), ..limits(u64::MAX) };
    let low = |tokens| with(Priority::Low, request("c", tokens));
    // Behind 47 s of other requests, but a tenth of the rate is its own: 300 tokens in 33 s.
    assert!(matches!(enter(&mut queue, &limits, low(300), None, now), Outcome::Queued(..)));
    let rejected = enter(&mut queue, &limits, low(100), None, now);
    assert!(matches!(rejected, Outcome::Rejected(Rejection::PredictedTimeout(_))), "{rejected:?}");
}

#[test]
fn estimate_counts_inflow_of_higher_classes() {
    let mut queue = FairQueue::default();
    let limits = limits(u64::MAX);
    let start = Instant::now();
    wait(&mut queue, &limits, request("a", 10_000));
    for tenth in 0..1200 {
        let now = at(start, f64::from(tenth) / 10.0);
        wait(&mut queue, &limits, with(Priority::High, QueuedRequest { placed: now, ..request("b", 9) }));
        queue.admit_next(&limits, now, |_, _| OPEN).unwrap();
    }
    // No request of the higher class waits, but the class takes nearly all of the 90 tokens per second.
    let wait = queue.backlogs.wait(&request("a", 100), 1.0, at(start, 120.0)).unwrap();
    assert!(wait > Duration::from_secs(500), "{wait:?} behind 10,000 tokens");
}

#[test]
fn drain_rate_is_measured_per_model() {
    let start = Instant::now();
    let mut queue = measured(start);
    let now = at(start, 2.0);
    let limits = Settings { max_queue_time: HumanDuration::secs(20), ..limits(u64::MAX) };
    let mut other = on(2, "a", 100);
    other.ticket.model = "other".into();
    assert!(
        matches!(enter(&mut queue, &limits, other, None, now), Outcome::Queued(..)),
        "no rate is known for the other model"
    );
    let rejected = enter(&mut queue, &limits, request("a", 100), None, now);
    assert!(matches!(rejected, Outcome::Rejected(Rejection::PredictedTimeout(_))), "{rejected:?}");
}

/// A burst before the first measurement: requests that cannot be served are rejected soon, not at the time limit.
#[test]
fn burst_is_rejected_once_the_rate_is_measured() {
    let mut queue = FairQueue::default();
    let start = Instant::now();
    let limits = limits(u64::MAX);
    let late = start + Duration::from_mins(1);
    for _ in 0..1000 {
        let mut one = request("a", 100);
        one.ticket.queue_deadline = late;
        wait_at(&mut queue, &limits, one, start);
    }
    let mut served = 0;
    let mut rejected = Vec::new();
    let mut timed_out = 0;
    for tick in 0..=240 {
        let now = at(start, f64::from(tick) / 4.0);
        while queue.pop_expired(now).is_some() {
            timed_out += 1;
        }
        rejected.extend(queue.pop_predicted_timeouts(now).iter().map(|_| f64::from(tick) / 4.0));
        // Ten per second.
        for _ in 0..[3, 2, 3, 2][tick as usize % 4] {
            served += u32::from(queue.admit_next(&limits, now, |_, _| OPEN).is_some());
        }
    }
    let soon = rejected.iter().filter(|seconds| **seconds <= 5.0).count();
    assert_eq!(served + timed_out + u32::try_from(rejected.len()).unwrap(), 1000);
    assert!(served >= 590 && soon >= 300 && timed_out <= 10, "{served} {soon} {timed_out}");
}

/// Workers that need longer than the time limit for their requests: no rate can be measured before it has passed.
#[test]
fn burst_is_rejected_while_no_request_leaves_the_queue() {
    let mut queue = FairQueue::default();
    let start = Instant::now();
    let limits = limits(u64::MAX);
    for _ in 0..950 {
        let mut one = QueuedRequest { placed: start, ..request("a", 100) };
        one.ticket.queue_deadline = start + Duration::from_mins(1);
        wait_at(&mut queue, &limits, one, start);
    }
    let mut rejected = 0;
    for (second, least) in [(1, 0), (5, 300), (10, 650), (20, 800), (30, 880)] {
        let now = at(start, f64::from(second));
        queue.set_running("m", 50);
        rejected += queue.pop_predicted_timeouts(now).len();
        assert!(rejected >= least && rejected <= 949, "{rejected} are rejected after {second} s");
    }
    let new = enter(&mut queue, &limits, request("a", 100), None, at(start, 30.0));
    assert!(matches!(new, Outcome::Queued(..)), "as many wait as may be served: {new:?}");
    let slow = queue.retry_after(&limits, &request("a", 100), at(start, 59.0));
    assert!(slow > Duration::from_secs(1), "{slow:?}");
}

#[test]
fn victims_are_found_without_a_search() {
    let queue_tokens = 10_000;
    let mut queue = FairQueue::default();
    let limits = limits(queue_tokens);
    let now = Instant::now();
    let examined = |queue: &FairQueue| queue.classes.iter().map(|class| class.occupancy.examined.get()).sum::<usize>();
    for nth in 0..queue_tokens {
        wait_at(&mut queue, &limits, with(Priority::Low, request(&(nth % 1000).to_string(), 1)), now);
    }
    let mut removed = 0;
    for _ in 0..500 {
        let high = with(Priority::High, request("a", 16));
        let Outcome::Queued(_, shed) = enter(&mut queue, &limits, high, None, now) else { panic!("it is queued") };
        assert_eq!(shed.len(), 16);
        removed += 16;
    }
    assert!(examined(&queue) <= removed + 500, "{} looks for {removed} of a lower class", examined(&queue));

    let mut queue = FairQueue::default();
    for nth in 0..queue_tokens {
        wait_at(&mut queue, &limits, request(&(nth % 1000).to_string(), 1), now);
    }
    let mut removed = 0;
    for nth in 0..1000 {
        let fair = request(&format!("new {nth}"), 4);
        let Outcome::Queued(_, shed) = enter(&mut queue, &limits, fair, None, now) else { panic!("others have more") };
        removed += shed.len();
    }
    assert_eq!(removed, 4000);
    assert!(examined(&queue) <= 2 * removed, "{} looks for {removed} of other tenants", examined(&queue));
}
