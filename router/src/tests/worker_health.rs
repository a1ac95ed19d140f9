//! Stalled, slow and ejected workers, and health checks.

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
async fn one_stalled_worker_delays_no_client() {
    let (harness, a, b) = two().await;
    a.set_behaviour(Behaviour::Hang);
    let before = Instant::now();
    let asking = harness.clone();
    let answers = tokio::spawn(async move {
        let answers = join_all((0..6).map(|family| asking.answer(prompt(family, 100)))).await;
        (answers, Instant::now())
    });
    pass(&harness, &[&a, &b], 40).await;
    let (answers, ended) = answers.await.unwrap();
    assert!(answers.iter().all(|answer| answer == &Ok(vec![1, 2])));
    assert!(ended - before < Duration::from_secs(30), "{:?}", ended - before);
    assert_eq!((a.requests(), b.requests(), a.open()), (3, 6, 0));
    let before = Instant::now();
    join_all((6..12).map(|family| harness.answer(prompt(family, 100)))).await;
    assert_eq!((a.requests(), before.elapsed().as_secs()), (3, 0), "the stalled worker is ejected");
}

#[tokio::test(start_paused = true)]
async fn a_worker_that_stalls_after_output_of_others_delays_no_client() {
    let (harness, a, b) = two().await;
    a.set_behaviour(Behaviour::Hang);
    let asking = harness.clone();
    let answers = tokio::spawn(async move { join_all((0..2).map(|family| asking.answer(prompt(family, 100)))).await });
    pass(&harness, &[&a, &b], 3).await;
    assert_eq!((a.requests(), b.requests()), (1, 1));
    // As the last output of a stream that was running when the request came.
    harness.router.core.fleet.snapshot().get(WorkerId(1)).unwrap().record_output(Instant::now());
    pass(&harness, &[&a, &b], 20).await;
    assert!(answers.is_finished(), "overdue after 11 s without output");
    assert!(answers.await.unwrap().iter().all(|answer| answer == &Ok(vec![1, 2])));
    assert_eq!((b.requests(), is_ejected(&harness, 1)), (2, true));
}

#[tokio::test(start_paused = true)]
async fn no_worker_counts_as_stalled_when_all_are_slow() {
    let (harness, a, b) = two().await;
    for worker in [&a, &b] {
        worker.set_behaviour(Behaviour::Hang);
    }
    let asking = harness.clone();
    let answers = tokio::spawn(async move { join_all((0..2).map(|family| asking.answer(prompt(family, 100)))).await });
    pass(&harness, &[&a, &b], 120).await;
    assert_eq!((a.requests(), b.requests(), is_ejected(&harness, 1), is_ejected(&harness, 2)), (1, 1, false, false));
    answers.abort();
}

/// Two servers that send no output for `silent`, and the answer to a request whose response comes whole. It has at
/// most ten tokens, so that it is overdue after 12 s.
async fn silent_servers(silent: Duration) -> (Arc<Harness>, [Arc<FakeEngine>; 2], JoinHandle<Result<Vec<u32>, Error>>) {
    let harness = Arc::new(defaults());
    let servers = [harness.relayed_worker(1).await, harness.relayed_worker(2).await];
    for (id, server) in (1..).zip(&servers) {
        *server.server.lock() = Some(id);
        server.set_behaviour(Behaviour::ServeAfter(silent));
    }
    let stop = StopConditions { max_tokens: Some(10), ..StopConditions::default() };
    let request = relayed_as(false, "/v1/completions", Request { stop, ..prompt(1, 100) });
    let asking = Arc::clone(&harness);
    let answer = tokio::spawn(async move { asking.answer(request).await });
    pass(&harness, &[&servers[0], &servers[1]], 2).await;
    (harness, servers, answer)
}

#[tokio::test(start_paused = true)]
async fn a_long_response_that_comes_whole_stays_on_a_server_that_answers_health_checks() {
    let (harness, [a, b], answer) = silent_servers(Duration::from_secs(200)).await;
    pass(&harness, &[&a, &b], 210).await;
    assert_eq!(answer.await.unwrap(), Ok(vec![1, 2]));
    assert_eq!((a.requests() + b.requests(), is_ejected(&harness, 1), is_ejected(&harness, 2)), (1, false, false));
    let computing = if a.requests() == 1 { &a } else { &b };
    assert!(probes(computing) > 20, "{} health checks while the response was overdue", probes(computing));
}

#[tokio::test(start_paused = true)]
async fn a_response_that_comes_whole_is_asked_elsewhere_if_the_health_check_fails() {
    let (harness, [a, b], answer) = silent_servers(Duration::from_secs(1000)).await;
    let (computing, other, id) = if a.requests() == 1 { (&a, &b, 1) } else { (&b, &a, 2) };
    computing.set_behaviour(Behaviour::Hang);
    other.set_behaviour(Behaviour::Serve);
    pass(&harness, &[&a, &b], 60).await;
    assert!(answer.is_finished());
    assert_eq!(answer.await.unwrap(), Ok(vec![1, 2]));
    assert_eq!((computing.requests(), other.requests(), is_ejected(&harness, id)), (1, 1, true));
}

/// Two servers of which the first hangs, after its health check has begun. Each has a request of a prompt that takes
/// ten seconds, so that it is overdue after 110 s.
async fn server_that_hangs_with_a_request() -> (Arc<Harness>, [Arc<FakeEngine>; 2], JoinHandle<bool>) {
    let harness = Arc::new(defaults());
    let (a, b) = (harness.relayed_worker(1).await, harness.relayed_worker(2).await);
    (*a.server.lock(), *b.server.lock()) = (Some(1), Some(2));
    a.set_behaviour(Behaviour::Hang);
    while probes(&a) == 0 {
        pass(&harness, &[&a, &b], 1).await;
    }
    let asking = Arc::clone(&harness);
    let answers = tokio::spawn(async move {
        let ask = |family| asking.answer(relayed_as(true, "/v1/completions", prompt(family, 10_000)));
        join_all((0..2).map(ask)).await.iter().all(Result::is_ok)
    });
    pass(&harness, &[&a, &b], 2).await;
    assert_eq!((a.requests(), b.requests(), is_ejected(&harness, 1)), (1, 1, false));
    (harness, [a, b], answers)
}

#[tokio::test(start_paused = true)]
async fn a_request_without_output_leaves_a_server_whose_health_check_fails() {
    let (harness, [a, b], answers) = server_that_hangs_with_a_request().await;
    // The check fails 10 s after it began; the other server needs 10 s for each of the two.
    pass(&harness, &[&a, &b], 30).await;
    assert!(answers.is_finished() && answers.await.unwrap());
    assert_eq!((a.requests(), b.requests(), is_ejected(&harness, 1)), (1, 2, true));
}

#[tokio::test(start_paused = true)]
async fn a_request_stays_on_a_server_with_output_whose_health_check_fails() {
    let (harness, [a, b], answers) = server_that_hangs_with_a_request().await;
    let server = harness.router.core.fleet.snapshot().get(WorkerId(1)).unwrap().clone();
    for _ in 0..60 {
        server.record_output(Instant::now());
        pass(&harness, &[&a, &b], 1).await;
    }
    assert_eq!((a.requests(), b.requests(), is_ejected(&harness, 1)), (1, 1, true));
    // Without output, until the next check has failed.
    pass(&harness, &[&a, &b], 40).await;
    assert!(answers.is_finished() && answers.await.unwrap());
    assert_eq!((a.requests(), b.requests()), (1, 2));
}

#[tokio::test(start_paused = true)]
async fn a_server_that_hangs_is_found_although_its_clients_leave_early() {
    let harness = Arc::new(defaults());
    let server = harness.relayed_worker(1).await;
    *server.server.lock() = Some(1);
    server.set_behaviour(Behaviour::Hang);
    let asking = Arc::clone(&harness);
    let clients = tokio::spawn(async move {
        // The server always has a request. No client leaves at the moment at which due checks are started.
        for family in 0..20 {
            let request = relayed_as(true, "/v1/completions", prompt(family, 100));
            let _ = tokio::time::timeout(Duration::from_millis(1999), asking.answer(request)).await;
        }
    });
    pass(&harness, &[&server], 30).await;
    clients.abort();
    assert!(probes(&server) > 0 && is_ejected(&harness, 1), "{} health checks", probes(&server));
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

/// A stream on the first of two workers. That is a real `Worker` around its engine, which changes its role when it is
/// asked to; the second one is busy, so that requests go to the first.
async fn on_a_worker_with_roles(
    harness: &Harness,
    first: &Arc<FakeEngine>,
    second: &Arc<FakeEngine>,
) -> (Worker, watch::Sender<Load>, OutputStream) {
    harness.report(second, Load { waiting_tokens: 5000, running: 1, ..Load::default() });
    let planes = Planes { discovery: harness.discovery.clone(), events: harness.events.clone() };
    let (id, epoch, model) = (WorkerId(1), Epoch(1), first.models()[0].clone());
    let instance = Instance { id, epoch, role: Role::Both, model, stores: vec![], kv_cache: None };
    let (reports, load) = watch::channel(Load::default());
    let worker = Worker::start(&planes, instance, first.clone(), Arc::new(EventLog::new(epoch)), load).await.unwrap();
    settle().await;
    let stream = harness.ask(prompt(1, 100)).await.unwrap();
    (worker, reports, stream)
}

/// Requests another role of the first worker.
async fn change_role(harness: &Harness, role: Role) {
    let body = EventBody::RoleRequest { worker: WorkerId(1), role };
    harness.events.publish(Event { source: Source::Router(RouterId(0)), epoch: Epoch(0), body });
    settle().await;
}

#[tokio::test(start_paused = true)]
async fn a_worker_that_changes_its_role_keeps_streams_and_load() {
    let (harness, a, b) = two().await;
    let (_worker, _reports, mut stream) = on_a_worker_with_roles(&harness, &a, &b).await;
    let id = WorkerId(1);
    let (runs, role) = (harness.load(1), || harness.router.core.fleet.snapshot().get(id).unwrap().instance.role);
    assert_eq!((a.open(), b.open(), runs.1, role()), (1, 0, 1, Role::Both));
    for to in [Role::Prefill, Role::Decode] {
        change_role(&harness, to).await;
        assert_eq!((role(), harness.load(1), a.open()), (to, runs, 1), "running requests continue and stay booked");
    }
    let mut ids = Vec::new();
    while let Some(item) = stream.next().await {
        let Output::Tokens(tokens) = item.unwrap() else { panic!("tokens are expected") };
        ids.extend(tokens.ids);
    }
    drop(stream);
    assert_eq!((ids, a.open(), harness.load(1)), (vec![1, 2], 0, (0, 0, 0)), "the booking ends with the stream");
    assert_eq!((is_ejected(&harness, 1), harness.metric("blockyard_router_retries_total")), (false, 0));
}

#[tokio::test(start_paused = true)]
async fn a_fault_of_a_request_that_was_sent_before_a_change_of_the_role_counts() {
    let (harness, a, b) = two().await;
    a.set_behaviour(Behaviour::BreakLater(Error::Unresponsive("no answer".to_owned())));
    let (_worker, _reports, stream) = on_a_worker_with_roles(&harness, &a, &b).await;
    change_role(&harness, Role::Decode).await;
    assert!(stream.all(async |item| item.is_ok()).await, "it is continued on the other one");
    assert_eq!((a.requests(), b.requests()), (1, 1));
    let worker = harness.router.core.fleet.snapshot().get(WorkerId(1)).unwrap().clone();
    assert_eq!((worker.instance.role, worker.is_failing()), (Role::Decode, true));
    // A check of the worker, as it is now, begins.
    worker.probe_started(Instant::now());
    assert!(is_ejected(&harness, 1));
}

/// Two servers, whose health checks compute nothing.
async fn two_servers() -> (Arc<Harness>, Arc<FakeEngine>, Arc<FakeEngine>) {
    let (harness, a, b) = two().await;
    *a.server.lock() = Some(1);
    *b.server.lock() = Some(2);
    (harness, a, b)
}

#[tokio::test(start_paused = true)]
async fn rare_requests_seldom_meet_a_server_that_answers_only_health_checks() {
    let (harness, a, b) = two_servers().await;
    a.set_behaviour(Behaviour::RefuseRequests(failed()));
    for family in 0..15 {
        harness.answer(prompt(family, 10)).await.unwrap();
        assert_eq!(harness.router.degraded().len(), usize::from(a.requests() >= 3), "after request {family}");
        pass(&harness, &[&a, &b], 6).await;
    }
    assert!((4..=8).contains(&a.requests()), "{} requests", a.requests());
    a.set_behaviour(Behaviour::Serve);
    pass(&harness, &[&a, &b], 61).await;
    assert_eq!(harness.router.degraded().len(), 1, "only its health checks are good");
    for family in 20..22 {
        harness.answer(prompt(family, 10)).await.unwrap();
    }
    assert_eq!(harness.router.degraded(), [""; 0], "a request has succeeded");
}

#[tokio::test(start_paused = true)]
async fn good_health_checks_for_minutes_take_a_server_from_the_list() {
    let (harness, a, b) = two_servers().await;
    a.set_behaviour(Behaviour::RefuseRequests(failed()));
    for family in 0..6 {
        harness.answer(prompt(family, 10)).await.unwrap();
    }
    pass(&harness, &[&a, &b], 280).await;
    assert_eq!(harness.router.degraded().len(), 1);
    pass(&harness, &[&a, &b], 40).await;
    assert_eq!(harness.router.degraded(), [""; 0]);
}

#[tokio::test(start_paused = true)]
async fn a_server_that_awaits_a_trial_serves_when_no_other_answers() {
    let (harness, a, b) = two_servers().await;
    a.set_behaviour(Behaviour::RefuseRequests(failed()));
    for family in 0..40 {
        harness.answer(prompt(family, 10)).await.unwrap();
        pass(&harness, &[&a, &b], 1).await;
    }
    b.set_behaviour(Behaviour::Hang);
    pass(&harness, &[&a, &b], 20).await;
    assert!(is_ejected(&harness, 1) && is_ejected(&harness, 2));
    a.set_behaviour(Behaviour::Serve);
    let before = (a.requests(), b.requests());
    harness.answer(prompt(50, 10)).await.unwrap();
    assert_eq!((a.requests(), b.requests()), (before.0 + 1, before.1));
}

#[tokio::test(start_paused = true)]
async fn a_request_that_workers_fail_counts_against_none_of_them() {
    let no_answer = || Error::NoAnswer("connection closed".to_owned());
    let refused = || Error::Unavailable("connection refused".to_owned());
    // Whether each of three workers fails requests, and how many are ejected at once.
    for (error, fail, expected) in [
        (no_answer(), [true, true, true], 0),
        (no_answer(), [true, false, false], 1),
        (no_answer(), [true, true, false], 2),
        (refused(), [true, true, true], 3),
        (failed(), [true, true, true], 0),
        (failed(), [true, false, false], 1),
        (failed(), [true, true, false], 2),
    ] {
        let harness = defaults();
        for (id, fails) in (1..).zip(fail) {
            let worker = harness.worker(id, Role::Both).await;
            if fails {
                worker.set_behaviour(Behaviour::RefuseRequests(error.clone()));
            }
        }
        let mut ejected = 0;
        for family in 0..40 {
            let is_served = harness.answer(prompt(family, 10)).await.is_ok();
            assert_eq!(is_served, fail.contains(&false), "{error}");
            ejected = [1, 2, 3].into_iter().filter(|id| is_ejected(&harness, *id)).count().max(ejected);
        }
        assert_eq!(ejected, expected, "{error} {fail:?}");
        let counts_against_none = |problem: &String| problem.contains("counts against no worker");
        let is_listed = harness.router.degraded().iter().any(counts_against_none);
        assert_eq!(is_listed, expected == 0, "{error} {fail:?}");
    }
    let harness = defaults();
    harness.worker(1, Role::Both).await.set_behaviour(Behaviour::RefuseRequests(no_answer()));
    for family in 0..3 {
        assert!(harness.answer(prompt(family, 10)).await.is_err());
    }
    assert_eq!(harness.router.degraded().len(), 1, "no other worker shows whose fault it is");
}
