//! Ejected workers, and health checks.

mod faults;
mod stalls;

use super::harness::{Behaviour, FakeEngine, Harness, MODEL, prompt, relayed_as, settle};
use super::{defaults, failed};
use futures::StreamExt;
use futures::future::join_all;
use kvbm::{Epoch, EventLog};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::Instant;
use worker::engine::{Engine, Error, Output, OutputStream, Readiness, Request, StopConditions};
use worker::plane::{Event, EventBody, Events, Instance, Load, Role, RouterId, Source, WorkerId};
use worker::serve::{Planes, Worker};

fn is_ejected(harness: &Harness, id: u64) -> bool {
    harness.router.core.fleet.snapshot().get(WorkerId(id)).unwrap().is_ejected(Instant::now())
}

fn probes(worker: &FakeEngine) -> usize {
    worker.probes.load(Ordering::SeqCst)
}

async fn two() -> (Arc<Harness>, Arc<FakeEngine>, Arc<FakeEngine>) {
    let harness = Arc::new(defaults());
    let (a, b) = (harness.worker(1, Role::Both).await, harness.worker(2, Role::Both).await);
    (harness, a, b)
}

/// Lets time pass while these workers report once a second.
async fn pass(harness: &Harness, workers: &[&Arc<FakeEngine>], seconds: u64) {
    for _ in 0..seconds {
        for worker in workers {
            harness.report(worker, Load::default());
        }
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
}

#[tokio::test(start_paused = true)]
async fn the_router_is_not_ready_while_all_workers_are_down() {
    let (harness, a, b) = two().await;
    let states = |harness: &Harness| (harness.router.readiness() == Readiness::Ready, harness.router.degraded().len());
    assert_eq!(states(&harness), (true, 0));
    for (worker, expected) in [(&a, (true, 1)), (&b, (false, 2))] {
        worker.set_behaviour(Behaviour::Refuse(failed()));
        for family in 0..12 {
            // Both may fail it.
            let _ = harness.answer(prompt(family, 10)).await;
        }
        pass(&harness, &[&a, &b], 20).await;
        assert_eq!(states(&harness), expected, "{:?}", harness.router.degraded());
        assert!(harness.router.is_available(MODEL) || !expected.0, "one of two fails");
    }
    let failing = |id| format!("worker w{id} (http://w{id}:8000) fails its requests or health checks");
    assert_eq!(harness.router.degraded(), [failing(1), failing(2)]);
    assert!(!harness.router.is_available(MODEL));
    let reason = "every worker that decodes fails its requests and health checks";
    let named = format!("{reason}: worker w1 (http://w1:8000), worker w2 (http://w2:8000)");
    assert_eq!(harness.router.readiness(), Readiness::NotReady(named));
    assert_eq!(harness.router.workers()[0].address.as_deref(), Some("http://w1:8000"));
    b.set_behaviour(Behaviour::Serve);
    pass(&harness, &[&a, &b], 20).await;
    assert_eq!(states(&harness), (true, 1), "its health checks get answers again");
}

#[tokio::test(start_paused = true)]
async fn an_ejected_worker_is_probed_before_it_gets_requests() {
    let (harness, a, b) = two().await;
    a.set_behaviour(Behaviour::Refuse(failed()));
    for family in 0..10 {
        harness.answer(prompt(family, 10)).await.unwrap();
    }
    assert_eq!(a.requests(), 3, "three failures open the circuit breaker");
    pass(&harness, &[&a, &b], 20).await;
    let failing = probes(&a);
    assert!((5..12).contains(&failing), "probes back off: {failing}");
    assert!(is_ejected(&harness, 1));
    a.set_behaviour(Behaviour::Serve);
    pass(&harness, &[&a, &b], 9).await;
    assert_eq!((probes(&a), is_ejected(&harness, 1)), (failing + 1, false));
    harness.answer(prompt(20, 10)).await.unwrap();
    harness.answer(prompt(21, 10)).await.unwrap();
    assert_eq!(a.requests(), 4);
}

#[tokio::test(start_paused = true)]
async fn a_worker_that_answers_nothing_gets_no_request_until_it_answers() {
    let (harness, a, b) = two().await;
    // Streams on it end without an answer to a check.
    a.set_behaviour(Behaviour::BreakLater(Error::Unresponsive("no answer".to_owned())));
    let mut families = 0..;
    let mut answer = async || harness.answer(prompt(families.next().unwrap(), 10)).await.unwrap();
    while a.requests() == 0 {
        answer().await;
    }
    a.set_behaviour(Behaviour::Hang);
    for _ in 0..20 {
        answer().await;
        pass(&harness, &[&a, &b], 1).await;
    }
    assert_eq!(a.requests(), 1, "the others do not wait for it");
    a.set_behaviour(Behaviour::Serve);
    // Its next health check is answered.
    pass(&harness, &[&a, &b], 19).await;
    for _ in 0..2 {
        answer().await;
    }
    assert_eq!(a.requests(), 2);
}

#[tokio::test(start_paused = true)]
async fn health_checks_find_an_idle_worker_that_stalls() {
    let (harness, a, b) = two().await;
    pass(&harness, &[&a, &b], 300).await;
    assert!((8..=10).contains(&probes(&a)), "{} in five minutes", probes(&a));
    a.set_behaviour(Behaviour::Hang);
    pass(&harness, &[&a, &b], 60).await;
    assert!(is_ejected(&harness, 1) && !is_ejected(&harness, 2));
    for family in 0..4 {
        harness.answer(prompt(family, 10)).await.unwrap();
    }
    assert_eq!((a.requests(), b.requests()), (0, 4), "no request was sent to it");
}

#[tokio::test(start_paused = true)]
async fn idle_workers_are_checked_more_often_while_no_reports_arrive() {
    let (harness, a, b) = two().await;
    pass(&harness, &[&a, &b], 10).await;
    let before = probes(&b);
    // Nothing arrives any more, and discovery has its last view.
    a.set_behaviour(Behaviour::Hang);
    pass(&harness, &[], 22).await;
    assert!(harness.router.core.fleet.snapshot().get(WorkerId(1)).unwrap().fails_health_checks());
    assert!(probes(&b) >= before + 3, "{} health checks", probes(&b) - before);
    let started = Instant::now();
    for family in 0..4 {
        harness.answer(prompt(family, 10)).await.unwrap();
    }
    assert_eq!((a.requests(), b.requests(), started.elapsed().as_secs()), (0, 4, 0), "no request waits for it");
    pass(&harness, &[&a, &b], 40).await;
    let before = probes(&b);
    pass(&harness, &[&a, &b], 300).await;
    assert!(probes(&b) <= before + 10, "{} in five minutes with reports", probes(&b) - before);
}

#[tokio::test(start_paused = true)]
async fn one_health_check_is_for_all_idle_models_of_a_server() {
    let harness = defaults();
    let (model, adapter) = (harness.relayed_worker(1).await, harness.relayed_worker(2).await);
    for engine in [&model, &adapter] {
        *engine.server.lock() = Some(7);
    }
    pass(&harness, &[&model, &adapter], 60).await;
    let checks = probes(&model) + probes(&adapter);
    // Every 3 to 5 s, not twice as often.
    assert!((10..=21).contains(&checks), "{checks} in a minute");
    for engine in [&model, &adapter] {
        engine.set_behaviour(Behaviour::Refuse(failed()));
    }
    pass(&harness, &[&model, &adapter], 6).await;
    assert!(is_ejected(&harness, 1) && is_ejected(&harness, 2));
    for engine in [&model, &adapter] {
        engine.set_behaviour(Behaviour::Serve);
    }
    pass(&harness, &[&model, &adapter], 10).await;
    assert!(!is_ejected(&harness, 1) && !is_ejected(&harness, 2));
}

#[tokio::test(start_paused = true)]
async fn an_idle_server_that_hangs_is_checked_once_at_a_time() {
    let harness = defaults();
    let server = harness.relayed_worker(1).await;
    *server.server.lock() = Some(7);
    server.set_behaviour(Behaviour::Hang);
    while probes(&server) == 0 {
        pass(&harness, &[&server], 1).await;
    }
    pass(&harness, &[&server], 8).await;
    assert_eq!((probes(&server), is_ejected(&harness, 1)), (1, false));
    pass(&harness, &[&server], 3).await;
    assert!(is_ejected(&harness, 1));
}

#[tokio::test(start_paused = true)]
async fn servers_that_hang_keep_no_other_from_its_checks() {
    let harness = defaults();
    let mut servers = Vec::new();
    for id in 1..=48 {
        let server = harness.relayed_worker(id).await;
        *server.server.lock() = Some(id);
        servers.push(server);
    }
    let all: Vec<&Arc<FakeEngine>> = servers.iter().collect();
    let (hung, healthy) = all.split_at(44);
    for server in hung {
        server.set_behaviour(Behaviour::Hang);
    }
    pass(&harness, &all, 20).await;
    assert_eq!(harness.router.degraded().len(), hung.len());
    let before: Vec<_> = all.iter().map(|server| probes(server)).collect();
    pass(&harness, &all, 60).await;
    for (server, before) in healthy.iter().zip(&before[hung.len()..]) {
        let checks = probes(server) - before;
        assert!((10..=21).contains(&checks), "{checks} in a minute");
    }
    for (server, before) in hung.iter().zip(&before) {
        let checks = probes(server) - before;
        assert!((3..=6).contains(&checks), "{checks} in a minute of one that hangs");
    }
    assert_eq!(harness.router.degraded().len(), hung.len());
}

#[tokio::test(start_paused = true)]
async fn workers_that_hang_keep_no_other_from_its_checks() {
    let harness = defaults();
    let mut workers = Vec::new();
    for id in 1..=44 {
        workers.push(harness.worker(id, Role::Both).await);
    }
    let all: Vec<&Arc<FakeEngine>> = workers.iter().collect();
    let (hung, healthy) = all.split_at(40);
    for worker in hung {
        worker.set_behaviour(Behaviour::Hang);
    }
    // Sixteen are checked at a time until it is known which of them hang.
    pass(&harness, &all, 70).await;
    assert_eq!(harness.router.degraded().len(), hung.len());
    let before: Vec<_> = healthy.iter().map(|worker| probes(worker)).collect();
    pass(&harness, &all, 70).await;
    for (worker, before) in healthy.iter().zip(before) {
        assert!(probes(worker) >= before + 2, "twice a minute");
    }
}

#[tokio::test(start_paused = true)]
async fn a_health_check_without_an_answer_fails_after_ten_seconds() {
    let (harness, a, b) = two().await;
    a.set_behaviour(Behaviour::Hang);
    let mut seconds = 0;
    while probes(&a) == 0 {
        pass(&harness, &[&a, &b], 1).await;
        seconds += 1;
    }
    assert!((30..=31).contains(&seconds), "idle for {seconds} s");
    pass(&harness, &[&a, &b], 8).await;
    assert!(!is_ejected(&harness, 1));
    pass(&harness, &[&a, &b], 3).await;
    assert!(is_ejected(&harness, 1) && !is_ejected(&harness, 2));
}

#[tokio::test(start_paused = true)]
async fn an_overloaded_worker_is_avoided_until_its_retry_after() {
    let (harness, a, b) = two().await;
    a.set_behaviour(Behaviour::Refuse(Error::Overloaded { retry_after: Duration::from_secs(20) }));
    harness.answer(prompt(1, 10)).await.unwrap();
    harness.answer(prompt(2, 10)).await.unwrap();
    a.set_behaviour(Behaviour::Serve);
    pass(&harness, &[&a, &b], 19).await;
    harness.answer(prompt(3, 10)).await.unwrap();
    assert_eq!((a.requests(), b.requests()), (1, 3));
    pass(&harness, &[&a, &b], 1).await;
    harness.answer(prompt(4, 10)).await.unwrap();
    assert_eq!((a.requests(), b.requests()), (2, 3));
}

#[tokio::test(start_paused = true)]
async fn models_are_listed_and_served_while_a_worker_is_down() {
    let (harness, a, b) = two().await;
    let other = harness.join(3, Role::Both, "other", 1, &[]).await;
    let ids = || -> Vec<String> { harness.router.models().iter().map(|card| card.id.clone()).collect() };
    for worker in [&a, &other] {
        worker.set_behaviour(Behaviour::Hang);
    }
    assert_eq!(ids(), ["other", MODEL], "listing asks no worker");
    harness.discovery.expire(WorkerId(1));
    harness.discovery.expire(WorkerId(3));
    settle().await;
    assert_eq!(ids(), [MODEL]);
    harness.answer(prompt(1, 100)).await.unwrap();
    assert_eq!(b.requests(), 1);
}
