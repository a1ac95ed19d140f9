//! Admission with a whole router over fake workers that compute a thousand prompt tokens per second, on a paused clock.

use super::settings::{LateRequests, Settings as Limits, Tenant};
use crate::config::Slo;
use crate::state::Settings;
use crate::tests::harness::{Behaviour, FakeEngine, Harness, prompt, settle};
use futures::StreamExt;
use futures::future::join_all;
use std::sync::Arc;
use std::time::Duration;
use tokio::task::JoinHandle;
use tokio::time::Instant;
use units::HumanDuration;
use worker::engine::{Error, Priority, Request, RequestAttributes, RequestGroup, StopConditions};
use worker::plane::{Load, Role, WorkerId};

fn harness(limits: Limits) -> Arc<Harness> {
    Arc::new(Harness::new(Settings { admission: limits, ..Settings::default() }))
}

fn request(family: u32, tokens: usize, attributes: RequestAttributes) -> Request {
    Request {
        attributes,
        stop: StopConditions { max_tokens: Some(1), ..StopConditions::default() },
        ..prompt(family, tokens)
    }
}

fn of(tenant: &str) -> RequestAttributes {
    RequestAttributes { tenant: tenant.into(), ..RequestAttributes::default() }
}

type Answer = JoinHandle<Result<Vec<u32>, Error>>;

/// Sends a request in a task of its own, and lets it run until it waits.
async fn ask(harness: &Arc<Harness>, request: Request) -> Answer {
    let harness = harness.clone();
    let answer = tokio::spawn(async move { harness.answer(request).await });
    settle().await;
    answer
}

/// A worker that is saturated until it reports another load.
async fn full(harness: &Harness, id: u64) -> Arc<FakeEngine> {
    let worker = harness.worker(id, Role::Both).await;
    harness.report(&worker, Load { waiting_tokens: 2000, running: 1, ..Load::default() });
    settle().await;
    worker
}

fn waiting(harness: &Harness) -> u64 {
    harness.router.core.admission.inner().controller.queue.queued_tokens().iter().sum()
}

fn outcome(harness: &Harness, class: &str, outcome: &str) -> u64 {
    harness.router.core.metrics.admission_requests.with_label_values(&[class, outcome]).get()
}

#[tokio::test(start_paused = true)]
async fn idle_fleet_admits_at_once() {
    let harness = harness(Limits::default());
    let worker = harness.worker(1, Role::Both).await;
    let before = Instant::now();
    for family in 0..5 {
        harness.answer(request(family, 100, RequestAttributes::default())).await.unwrap();
    }
    // 100 ms of prefill and three outputs after 10 ms each.
    assert_eq!(before.elapsed().as_millis() / 5, 130);
    assert_eq!((worker.requests(), outcome(&harness, "normal", "immediate"), waiting(&harness)), (5, 5, 0));
}

#[tokio::test(start_paused = true)]
async fn queued_requests_go_when_the_worker_reports_capacity() {
    let harness = harness(Limits::default());
    let worker = full(&harness, 1).await;
    let answers = [ask(&harness, request(1, 100, of("a"))).await, ask(&harness, request(2, 100, of("a"))).await];
    assert_eq!((worker.requests(), waiting(&harness)), (0, 200));
    harness.report(&worker, Load { waiting_tokens: 1500, running: 1, ..Load::default() });
    settle().await;
    assert_eq!((worker.requests(), waiting(&harness)), (2, 0));
    assert!(join_all(answers).await.into_iter().all(|answer| answer.unwrap() == Ok(vec![1, 2])));
    assert_eq!(outcome(&harness, "normal", "queued"), 2);
}

#[tokio::test(start_paused = true)]
async fn explanation_has_queue_time_and_reason() {
    let harness = harness(Limits::default());
    let worker = full(&harness, 1).await;
    let asking = harness.clone();
    let explained = tokio::spawn(async move { asking.explain(request(1, 100, RequestAttributes::default())).await });
    tokio::time::sleep(Duration::from_secs(2)).await;
    harness.report(&worker, Load::default());
    let explained = explained.await.unwrap();
    assert!((1.9..2.1).contains(&explained["queued_s"].as_f64().unwrap()), "{explained}");
    assert_eq!(explained["queue_reason"], "queue");
    assert_eq!(explained["chosen"], "w1");
}

#[tokio::test(start_paused = true)]
async fn cancelled_request_frees_its_queue_space_at_once() {
    let harness = harness(Limits { max_queued_tokens: 150, ..Limits::default() });
    let worker = full(&harness, 1).await;
    let cancelled = ask(&harness, request(1, 100, RequestAttributes::default())).await;
    let rejected = harness.answer(request(2, 100, RequestAttributes::default())).await;
    assert_eq!(rejected, Err(Error::Overloaded { retry_after: Duration::from_secs(1) }));
    cancelled.abort();
    settle().await;
    assert_eq!((waiting(&harness), harness.load(1).0), (0, 2000), "its reservation is released too");
    let next = ask(&harness, request(3, 100, RequestAttributes::default())).await;
    harness.report(&worker, Load::default());
    next.await.unwrap().unwrap();
    assert_eq!(
        (worker.requests(), outcome(&harness, "normal", "cancelled"), outcome(&harness, "normal", "queue_full")),
        (1, 1, 1)
    );
}

#[tokio::test(start_paused = true)]
async fn tenants_share_a_saturated_worker_by_weight() {
    let weights = [("heavy".to_owned(), Tenant { weight: 3.0, ..Tenant::default() })];
    let harness = harness(Limits { tenants: weights.into(), ..Limits::default() });
    let worker = full(&harness, 1).await;
    for family in 0..40 {
        ask(&harness, request(family, 1000, of("light"))).await;
    }
    for family in 40..80 {
        ask(&harness, request(family, 1000, of("heavy"))).await;
    }
    // Capacity for one request at a time.
    for _ in 0..20 {
        harness.report(&worker, Load { waiting_tokens: 1500, running: 1, ..Load::default() });
        settle().await;
        harness.report(&worker, Load { waiting_tokens: 4000, running: 1, ..Load::default() });
        tokio::time::sleep(Duration::from_millis(60)).await;
        harness.report(&worker, Load { waiting_tokens: 4000, running: 1, ..Load::default() });
        settle().await;
    }
    let served = worker.families();
    let heavy = served.iter().filter(|family| **family >= 40).count();
    assert_eq!(served.len(), 20);
    assert!((14..=16).contains(&heavy), "{heavy} of 20 at three to one");
}

#[tokio::test(start_paused = true)]
async fn urgent_request_overtakes_and_sheds() {
    let harness = harness(Limits { max_queued_tokens: 250, ..Limits::default() });
    let worker = full(&harness, 1).await;
    let of = |priority| RequestAttributes { priority, ..RequestAttributes::default() };
    let low = ask(&harness, request(1, 100, of(Priority::Low))).await;
    let normal = ask(&harness, request(2, 100, of(Priority::Normal))).await;
    let high = ask(&harness, request(3, 100, of(Priority::High))).await;
    assert!(matches!(low.await.unwrap(), Err(Error::Overloaded { .. })), "the queue is full");
    harness.report(&worker, Load::default());
    settle().await;
    assert_eq!(worker.families(), [3, 2]);
    assert!(normal.await.unwrap().is_ok() && high.await.unwrap().is_ok());
    assert_eq!(outcome(&harness, "low", "shed"), 1);
}

#[tokio::test(start_paused = true)]
async fn deadline_that_cannot_be_met_is_rejected_once_known() {
    let harness = harness(Limits::default());
    let worker = harness.worker(1, Role::Both).await;
    let within = |ms| RequestAttributes {
        deadline: Some(Instant::now() + Duration::from_millis(ms)),
        ..RequestAttributes::default()
    };
    let before = Instant::now();
    assert_eq!(harness.answer(request(1, 3000, within(2000))).await, Err(Error::DeadlineExceeded));
    assert_eq!((before.elapsed(), worker.requests()), (Duration::ZERO, 0), "its prefill takes three seconds");
    assert_eq!(harness.answer(request(2, 1000, within(2000))).await, Ok(vec![1, 2]));
    harness.report(&worker, Load { waiting_tokens: 5000, running: 1, ..Load::default() });
    settle().await;
    let before = Instant::now();
    assert_eq!(harness.answer(request(3, 1000, within(5000))).await, Err(Error::DeadlineExceeded));
    assert_eq!(before.elapsed().as_millis(), 4000, "its prefill takes the last second");
    harness.report(&worker, Load::default());
    worker.set_behaviour(Behaviour::Hang);
    let before = Instant::now();
    assert_eq!(harness.answer(request(4, 100, within(5000))).await, Err(Error::DeadlineExceeded));
    assert_eq!((before.elapsed().as_millis(), worker.open()), (5000, 0), "the worker stops computing");
}

/// A saturated worker, a request that is late after half a second, and one that stays in time.
async fn late_and_in_time(late_requests: LateRequests) -> (Arc<Harness>, Arc<FakeEngine>, [Answer; 2]) {
    let slo = Slo { ttft: Some(HumanDuration::secs(3)), itl: None };
    let admission = Limits { late_requests, ..Limits::default() };
    let harness = Arc::new(Harness::new(Settings { slo, admission, ..Settings::default() }));
    let worker = full(&harness, 1).await;
    let answers = [ask(&harness, request(1, 2500, of("a"))).await, ask(&harness, request(2, 100, of("a"))).await];
    assert_eq!((harness.load(1).0, waiting(&harness)), (4600, 2600));
    for _ in 0..2 {
        tokio::time::sleep(Duration::from_millis(500)).await;
        harness.report(&worker, Load { waiting_tokens: 2000, running: 1, ..Load::default() });
    }
    settle().await;
    (harness, worker, answers)
}

#[tokio::test(start_paused = true)]
async fn late_request_goes_after_one_in_time_and_reserves_nothing() {
    let (harness, worker, answers) = late_and_in_time(LateRequests::Last).await;
    assert_eq!((harness.load(1).0, waiting(&harness)), (2100, 2600));
    harness.report(&worker, Load { waiting_tokens: 1500, running: 1, ..Load::default() });
    settle().await;
    assert_eq!((worker.families(), waiting(&harness)), (vec![2], 2500), "the queue is too long for a late request");
    harness.report(&worker, Load::default());
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(worker.families(), [2, 1]);
    assert!(harness.load(1).0 >= 2500, "it is reserved once it is sent");
    assert!(join_all(answers).await.into_iter().all(|answer| answer.unwrap() == Ok(vec![1, 2])));
}

#[tokio::test(start_paused = true)]
async fn late_request_is_rejected_if_configured() {
    let (harness, worker, [late, in_time]) = late_and_in_time(LateRequests::Reject).await;
    assert!(matches!(late.await.unwrap(), Err(Error::Overloaded { .. })));
    assert_eq!((outcome(&harness, "normal", "late"), waiting(&harness)), (1, 100));
    harness.report(&worker, Load::default());
    assert_eq!(in_time.await.unwrap(), Ok(vec![1, 2]));
}

#[tokio::test(start_paused = true)]
async fn late_request_is_rerouted_to_a_worker_in_time() {
    let harness = harness(Limits::default());
    let workers = [full(&harness, 1).await, full(&harness, 2).await];
    let has = |at: usize, waiting_tokens| {
        harness.report(&workers[at], Load { waiting_tokens, running: 1, ..Load::default() });
    };
    has(1, 9000);
    settle().await;
    let attributes =
        RequestAttributes { deadline: Some(Instant::now() + Duration::from_secs(5)), ..RequestAttributes::default() };
    let answer = ask(&harness, request(1, 1000, attributes)).await;
    assert_eq!((harness.load(1).0, harness.load(2).0), (3000, 9000), "it was placed on the first worker");
    has(0, 9000);
    has(1, 1500);
    assert_eq!(answer.await.unwrap(), Ok(vec![1, 2]));
    assert_eq!((workers[0].requests(), workers[1].requests()), (0, 1));
}

#[tokio::test(start_paused = true)]
async fn worker_in_time_is_preferred_to_a_cheaper_one() {
    let harness = harness(Limits::default());
    let workers = [harness.worker(1, Role::Both).await, harness.worker(2, Role::Both).await];
    // Worker 1 decodes many sequences and has no queue, worker 2 decodes none and has a queue.
    harness.report(&workers[0], Load { running: 200, decode_step_seconds: Some(0.2), ..Load::default() });
    harness.report(&workers[1], Load { waiting_tokens: 800, ..Load::default() });
    settle().await;
    for (family, deadline, chosen) in [(1, None, "w2"), (2, Some(Duration::from_secs(1)), "w1")] {
        let attributes = RequestAttributes {
            deadline: deadline.map(|within| Instant::now() + within),
            ..RequestAttributes::default()
        };
        assert_eq!(harness.explain(request(family, 500, attributes)).await["chosen"], chosen);
    }
}

#[tokio::test(start_paused = true)]
async fn requests_wait_where_they_would_miss_the_target_between_tokens() {
    for (itl, queue_reason) in [(Some(HumanDuration::millis(50)), Some("itl")), (None, None)] {
        let slo = Slo { ttft: None, itl };
        let harness = Arc::new(Harness::new(Settings { slo, ..Settings::default() }));
        let worker = harness.worker(1, Role::Both).await;
        worker.set_behaviour(Behaviour::Hang);
        let running = ask(&harness, request(1, 100, of("a"))).await;
        tokio::time::sleep(Duration::from_secs(1)).await;
        harness.report(&worker, Load { running: 20, decode_step_seconds: Some(0.06), ..Load::default() });
        settle().await;
        worker.set_behaviour(Behaviour::Serve);
        let asking = harness.clone();
        let explained = tokio::spawn(async move { asking.explain(request(2, 100, of("a"))).await });
        settle().await;
        assert_eq!(waiting(&harness), if itl.is_some() { 100 } else { 0 });
        harness.report(&worker, Load::default());
        assert_eq!(explained.await.unwrap()["queue_reason"].as_str(), queue_reason);
        running.abort();
    }
}

#[tokio::test(start_paused = true)]
async fn request_is_rejected_after_max_queue_time() {
    let harness = harness(Limits { max_queue_time: HumanDuration::secs(7), ..Limits::default() });
    let worker = full(&harness, 1).await;
    let answer = ask(&harness, request(1, 100, RequestAttributes::default())).await;
    for _ in 0..8 {
        harness.report(&worker, Load { waiting_tokens: 2000, running: 1, ..Load::default() });
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    assert!(matches!(answer.await.unwrap(), Err(Error::Overloaded { .. })));
    assert_eq!((outcome(&harness, "normal", "queue_timeout"), waiting(&harness)), (1, 0));
}

#[tokio::test(start_paused = true)]
async fn overload_is_rejected_once_the_rate_is_known() {
    let harness = harness(Limits { max_queue_time: HumanDuration::secs(10), ..Limits::default() });
    let worker = full(&harness, 1).await;
    let answers =
        join_all((0..40).map(|family| ask(&harness, request(family, 500, RequestAttributes::default())))).await;
    // One leaves per second: ten of the forty can be served in time.
    for _ in 0..4 {
        harness.report(&worker, Load { waiting_tokens: 1500, running: 1, ..Load::default() });
        settle().await;
        harness.report(&worker, Load { waiting_tokens: 2000, running: 1, ..Load::default() });
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    let rejected = answers.iter().filter(|answer| answer.is_finished()).count() - worker.requests();
    assert!(rejected >= 20, "{rejected} of 36 are rejected after four seconds");
    assert_eq!(outcome(&harness, "normal", "predicted_timeout_queued"), rejected as u64);
    let before = Instant::now();
    let Err(Error::Overloaded { retry_after }) = harness.answer(request(40, 500, RequestAttributes::default())).await
    else {
        panic!("it is admitted");
    };
    assert_eq!((before.elapsed(), outcome(&harness, "normal", "predicted_timeout")), (Duration::ZERO, 1));
    assert!(retry_after > Duration::from_secs(1), "{retry_after:?}");
    let rate = harness.router.core.metrics.drain_rate.with_label_values(&[crate::tests::harness::MODEL]).get();
    assert!((400.0..600.0).contains(&rate), "{rate} tokens per second");
    for _ in 0..9 {
        harness.report(&worker, Load { waiting_tokens: 1500, running: 1, ..Load::default() });
        settle().await;
        harness.report(&worker, Load { waiting_tokens: 2000, running: 1, ..Load::default() });
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    assert!(worker.requests() >= 9 && waiting(&harness) == 0, "{} are served", worker.requests());
}

#[tokio::test(start_paused = true)]
async fn queued_requests_move_to_idle_and_from_leaving_workers() {
    let harness = harness(Limits::default());
    let a = full(&harness, 1).await;
    let answers: Vec<Answer> =
        join_all((0..3).map(|family| ask(&harness, request(family, 100, RequestAttributes::default())))).await;
    assert_eq!(waiting(&harness), 300);
    let b = harness.worker(2, Role::Both).await;
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!((a.requests(), b.requests(), waiting(&harness)), (0, 3, 0));
    assert!(join_all(answers).await.into_iter().all(|answer| answer.unwrap().is_ok()));

    harness.report(&a, Load { waiting_tokens: 3000, running: 1, ..Load::default() });
    harness.report(&b, Load { waiting_tokens: 2000, running: 1, ..Load::default() });
    settle().await;
    let moved = ask(&harness, request(9, 100, RequestAttributes::default())).await;
    harness.discovery.expire(WorkerId(2));
    settle().await;
    harness.report(&a, Load::default());
    assert_eq!(moved.await.unwrap(), Ok(vec![1, 2]));
    assert_eq!((a.requests(), b.requests()), (1, 3));
}

#[tokio::test(start_paused = true)]
async fn permit_is_held_until_the_last_byte() {
    let tenant = Tenant { max_inflight_tokens: Some(100), ..Tenant::default() };
    let harness = harness(Limits { tenants: [("a".to_owned(), tenant)].into(), ..Limits::default() });
    let worker = harness.worker(1, Role::Both).await;
    let mut first = harness.ask(request(1, 100, of("a"))).await.unwrap();
    let second = ask(&harness, request(2, 100, of("a"))).await;
    assert!(first.next().await.unwrap().is_ok(), "the first output has arrived");
    tokio::time::sleep(Duration::from_mins(1) - Duration::from_secs(1)).await;
    assert_eq!((worker.requests(), waiting(&harness)), (1, 100), "the client has not read the rest");
    while first.next().await.is_some() {}
    settle().await;
    assert_eq!(worker.requests(), 2, "released at the last item, though the stream is still held");
    second.await.unwrap().unwrap();
    drop(first);

    let cut = harness.ask(request(3, 100, of("a"))).await.unwrap();
    let next = ask(&harness, request(4, 100, of("a"))).await;
    assert_eq!(waiting(&harness), 100);
    drop(cut);
    next.await.unwrap().unwrap();
}

#[tokio::test(start_paused = true)]
async fn stop_rejects_queued_and_later_requests() {
    let harness = harness(Limits::default());
    let _worker = full(&harness, 1).await;
    let queued = ask(&harness, request(1, 100, RequestAttributes::default())).await;
    harness.router.stop().await;
    for answer in [queued, ask(&harness, request(2, 100, RequestAttributes::default())).await] {
        let answer = tokio::time::timeout(Duration::from_hours(1), answer).await.expect("it still waits");
        assert_eq!(answer.unwrap(), Err(Error::Unavailable("the router has stopped".to_owned())));
    }
}

#[tokio::test(start_paused = true)]
async fn group_reserves_for_all_choices_until_the_first_output() {
    let harness = harness(Limits::default());
    let bad = harness.worker(1, Role::Both).await;
    let good = harness.worker(2, Role::Both).await;
    bad.set_behaviour(Behaviour::Refuse(Error::Failed("broken".to_owned())));
    for family in [1, 2] {
        let stop = StopConditions { max_tokens: Some(160), ..StopConditions::default() };
        let request = Request { group: Some(RequestGroup::new(3)), stop, ..prompt(family, 100) };
        let asking = harness.clone();
        let first = tokio::spawn(async move { asking.ask(request).await.unwrap() });
        settle().await;
        // Of at most 160 output tokens 119 are expected: seven blocks of 16.
        assert_eq!((harness.load(1), harness.load(2)), ((0, 0, 0), (100, 3, 29)));
        let first = first.await.unwrap();
        assert_eq!(harness.load(2), (0, 1, 15), "the others need seven blocks each");
        drop(first);
    }
    assert!(bad.requests() > 0 && good.requests() == 2, "no request was tried on the other worker first");
}

#[tokio::test(start_paused = true)]
async fn choices_of_a_group_are_admitted_together() {
    let tenant = Tenant { max_inflight_tokens: Some(150), ..Tenant::default() };
    let harness = harness(Limits { tenants: [("a".to_owned(), tenant)].into(), ..Limits::default() });
    let worker = harness.worker(1, Role::Both).await;
    let group = RequestGroup::new(3);
    let choice = |index| Request { group: Some(group.choice(index)), ..request(1, 100, of("a")) };
    let asking = harness.clone();
    let lead = choice(0);
    let first = tokio::spawn(async move { asking.ask(lead).await.unwrap() });
    settle().await;
    assert_eq!(harness.load(1).1, 3, "reserved for all choices");
    let first = first.await.unwrap();
    assert_eq!(harness.load(1).1, 1, "the others come now and reserve for themselves");
    harness.report(&worker, Load { waiting_tokens: 5000, running: 1, ..Load::default() });
    settle().await;
    let other = ask(&harness, request(2, 100, of("b"))).await;
    let second = harness.ask(choice(1)).await.unwrap();
    assert_eq!((worker.families(), waiting(&harness)), (vec![1, 1], 100), "a later choice does not queue");
    let next = ask(&harness, request(3, 100, of("a"))).await;
    harness.report(&worker, Load::default());
    drop(first);
    other.await.unwrap().unwrap();
    assert_eq!((worker.families(), waiting(&harness)), (vec![1, 1, 2], 100), "the second still runs");
    drop(second);
    next.await.unwrap().unwrap();
    assert_eq!(outcome(&harness, "normal", "immediate"), 1);
    assert!(harness.router.core.admission.inner().groups.is_empty(), "a permit removes its entry");
}

#[tokio::test(start_paused = true)]
async fn later_choices_do_not_queue_after_the_first_has_ended() {
    let tenant = Tenant { max_inflight_tokens: Some(100), ..Tenant::default() };
    let harness = harness(Limits { tenants: [("a".to_owned(), tenant)].into(), ..Limits::default() });
    let worker = harness.worker(1, Role::Both).await;
    let group = RequestGroup::new(3);
    let choice = |index| Request { group: Some(group.choice(index)), ..request(1, 100, of("a")) };
    harness.answer(choice(0)).await.unwrap();
    harness.report(&worker, Load { waiting_tokens: 5000, running: 1, ..Load::default() });
    settle().await;
    let choices = [harness.ask(choice(1)).await.unwrap(), harness.ask(choice(2)).await.unwrap()];
    assert_eq!((worker.requests(), waiting(&harness)), (3, 0));
    harness.report(&worker, Load::default());
    let next = ask(&harness, request(2, 100, of("a"))).await;
    assert_eq!(waiting(&harness), 100, "they count as running");
    drop(choices);
    next.await.unwrap().unwrap();
    assert!(harness.router.core.admission.inner().groups.is_empty());
}

#[tokio::test(start_paused = true)]
async fn no_wake_up_is_lost_under_many_requests() {
    let harness = harness(Limits::default());
    let workers = [harness.worker(1, Role::Both).await, harness.worker(2, Role::Both).await];
    let answers = (0..200).map(|family| harness.answer(request(family, 300, of(&(family % 7).to_string()))));
    assert!(join_all(answers).await.iter().all(|answer| answer == &Ok(vec![1, 2])));
    assert_eq!(workers.iter().map(|worker| worker.requests()).sum::<usize>(), 200);
    assert_eq!((waiting(&harness), harness.load(1), harness.load(2)), (0, (0, 0, 0), (0, 0, 0)));
    assert!(outcome(&harness, "normal", "queued") > 100, "the queue was never used: the test shows nothing");
}
