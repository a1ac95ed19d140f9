//! Failures of workers and clients: which are retried, and which count against a worker.

use super::harness::{Behaviour, FakeEngine, MODEL, card, prompt, relayed, settle};
use super::{defaults, failed};
use crate::Router;
use crate::state::Settings;
use futures::future::{BoxFuture, join_all};
use futures::stream::{self, BoxStream};
use futures::{FutureExt, StreamExt};
use std::sync::Arc;
use std::time::Duration;
use worker::engine::{
    Attempts, Engine, Error, ErrorKind, ErrorResponse, FinishReason, HttpRequest, ModelCard, Output, OutputStream,
    Readiness,
};
use worker::plane::local::LocalEvents;
use worker::plane::{Discovery, Instance, Lease, Load, Membership, PlaneError, Role, RouterId, WorkerId};

#[tokio::test(start_paused = true)]
async fn client_errors_are_neither_retried_nor_worker_faults() {
    let harness = defaults();
    let (a, b) = (harness.worker(1, Role::Both).await, harness.worker(2, Role::Both).await);
    let invalid = Error::Invalid { field: "top_k", problem: "too large".to_owned() };
    for worker in [&a, &b] {
        worker.set_behaviour(Behaviour::Refuse(invalid.clone()));
    }
    for n in 1..=20 {
        assert_eq!(harness.answer(prompt(n, 100)).await, Err(invalid.clone()));
        assert_eq!(a.requests() + b.requests(), n as usize, "one attempt");
    }
    for worker in [&a, &b] {
        worker.set_behaviour(Behaviour::Serve);
    }
    harness.answer(prompt(1, 100)).await.unwrap();
    harness.answer(prompt(2, 100)).await.unwrap();
    assert_eq!((a.requests(), b.requests()), (11, 11), "both still get requests");
}

#[tokio::test(start_paused = true)]
async fn a_worker_that_fails_before_its_first_output_is_replaced() {
    for behaviour in [Behaviour::Refuse(failed()), Behaviour::Break(failed()), Behaviour::End] {
        let harness = defaults();
        let (a, b) = (harness.worker(1, Role::Both).await, harness.worker(2, Role::Both).await);
        a.set_behaviour(behaviour);
        for family in 0..4 {
            assert_eq!(harness.answer(prompt(family, 100)).await, Ok(vec![1, 2]));
        }
        assert_eq!(b.requests(), 4);
        assert!((1..4).contains(&a.requests()), "ejected after a fault: {} requests", a.requests());
        assert_eq!(harness.load(1), (0, 0, 0));
    }
}

#[tokio::test(start_paused = true)]
async fn workers_that_may_have_computed_a_request_count_as_its_attempts() {
    let unavailable = Error::Unavailable("connection refused".to_owned());
    let busy = Error::Overloaded { retry_after: Duration::from_secs(1) };
    for (name, behaviour, expected) in [
        ("served", Behaviour::Serve, true),
        ("sends nothing until the deadline", Behaviour::Hang, true),
        ("fails", Behaviour::Refuse(failed()), true),
        ("does not answer", Behaviour::Refuse(Error::NoAnswer("connection closed".to_owned())), true),
        ("breaks off", Behaviour::Break(failed()), true),
        ("cannot be reached", Behaviour::Refuse(unavailable), false),
        ("is busy", Behaviour::Break(busy), false),
    ] {
        let harness = defaults();
        let worker = harness.worker(1, Role::Both).await;
        worker.set_behaviour(behaviour);
        let attempts = Attempts::counted();
        let mut request = prompt(1, 100);
        request.attributes.attempts = attempts.clone();
        request.attributes.deadline = Some(tokio::time::Instant::now() + Duration::from_secs(10));
        let is_served = harness.answer(request).await.is_ok();
        assert_eq!((worker.requests(), is_served), (1, name == "served"), "{name}");
        assert_eq!(attempts.may_have_computed(), expected, "{name}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_worker_that_leaves_with_a_request_may_have_computed_it() {
    let harness = defaults();
    let worker = harness.worker(1, Role::Both).await;
    worker.set_behaviour(Behaviour::Hang);
    let attempts = Attempts::counted();
    let mut request = prompt(1, 100);
    request.attributes.attempts = attempts.clone();
    let leave = async {
        settle().await;
        harness.discovery.expire(WorkerId(1));
    };
    let (answer, ()) = tokio::join!(harness.answer(request), leave);
    assert!(matches!(answer, Err(Error::Unavailable(_))), "{answer:?}");
    assert_eq!((worker.requests(), attempts.may_have_computed()), (1, true));
}

#[tokio::test(start_paused = true)]
async fn the_address_of_a_worker_does_not_reach_the_client() {
    let unreachable = "worker w1: 10.0.0.7:22101: Connection refused (os error 111)";
    for error in [Error::Unavailable, Error::NoAnswer, Error::Unresponsive].map(|kind| kind(unreachable.to_owned())) {
        let harness = defaults();
        for id in [1, 2] {
            let worker = harness.worker(id, Role::Both).await;
            worker.set_behaviour(Behaviour::Refuse(error.clone()));
        }
        let expected = format!("no worker of the model `{MODEL}` answers now");
        assert_eq!(harness.answer(prompt(1, 100)).await, Err(Error::Unavailable(expected)));
        let count = |name| harness.metric(name);
        let (sent, retried) = (count("blockyard_router_requests_total"), count("blockyard_router_retries_total"));
        assert_eq!((sent, retried), (2, 1), "after the second failure there is no other worker");
    }
}

#[tokio::test(start_paused = true)]
async fn a_request_that_meets_a_process_that_is_gone_is_sent_to_another_process() {
    let gone = [Error::Unavailable, Error::NoAnswer, Error::Unresponsive];
    for (error, is_stream) in gone.into_iter().flat_map(|kind| [(kind, false), (kind, true)]) {
        let error = error("connection refused".to_owned());
        let harness = defaults();
        let mut dead = Vec::new();
        for id in 1..=8 {
            dead.push(harness.worker(id, Role::Both).await);
        }
        // The request goes there last: it has less room than the others.
        let alive = harness.worker(9, Role::Both).await;
        harness.report(&alive, Load { waiting_tokens: 100_000, ..Load::default() });
        settle().await;
        let of = if is_stream { Behaviour::BreakLater } else { Behaviour::Refuse };
        for worker in &dead {
            *worker.shared_address.lock() = Some("http://10.0.0.7:8100".to_owned());
            worker.set_behaviour(of(error.clone()));
        }
        assert_eq!(harness.answer(prompt(1, 100)).await, Ok(vec![1, 2]), "{error}");
        assert_eq!((dead.iter().map(|worker| worker.requests()).sum::<usize>(), alive.requests()), (1, 1), "{error}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_worker_of_a_process_that_refuses_another_request_gets_one_if_there_is_no_other_process() {
    let harness = defaults();
    let (leaving, other) = (harness.worker(1, Role::Both).await, harness.worker(2, Role::Both).await);
    for worker in [&leaving, &other] {
        *worker.shared_address.lock() = Some("http://10.0.0.7:8100".to_owned());
    }
    leaving.set_behaviour(Behaviour::Refuse(Error::Unavailable("status 404".to_owned())));
    for family in 0..4 {
        assert_eq!(harness.answer(prompt(family, 100)).await, Ok(vec![1, 2]));
    }
    assert_eq!(other.requests(), 4);
    assert!(leaving.requests() > 0);
}

#[tokio::test(start_paused = true)]
async fn a_request_that_may_have_been_carried_out_is_repeated_only_if_it_changes_nothing() {
    let status = |status: &str, kind| {
        let HttpRequest { headers, body, .. } = HttpRequest::post("/");
        let status = status.parse().unwrap();
        Error::Relayed(Arc::new(ErrorResponse { status, headers, body, kind, replaces: None }))
    };
    let (no_answer, unavailable) = (Error::NoAnswer("closed".into()), Error::Unavailable("refused".into()));
    let busy = ErrorKind::Busy(Duration::from_secs(1));
    for (error, times) in [
        (failed(), 1),
        (no_answer, 1),
        (status("500", ErrorKind::Fault), 1),
        (status("502", ErrorKind::Fault), 1),
        (status("504", ErrorKind::Fault), 1),
        (status("508", ErrorKind::Fault), 2),
        (status("503", busy), 2),
        (unavailable, 2),
    ] {
        for (path, expected) in [("/v1/batches", times), ("/v1/embeddings", 2)] {
            let harness = defaults();
            let workers = [harness.relayed_worker(1).await, harness.relayed_worker(2).await];
            for worker in &workers {
                worker.set_behaviour(Behaviour::Refuse(error.clone()));
            }
            let answer = harness.answer(relayed(path, prompt(1, 100))).await.unwrap_err();
            assert_eq!(workers.iter().map(|worker| worker.requests()).sum::<usize>(), expected, "{path} {error}");
            let is_unknown = expected == 1 && matches!(error, Error::NoAnswer(_));
            assert!(!is_unknown || matches!(answer, Error::Failed(_)), "it does not ask for a retry: {answer}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_request_that_may_not_be_repeated_stays_with_its_worker() {
    let harness = defaults();
    let workers = [harness.relayed_worker(1).await, harness.relayed_worker(2).await];
    for worker in &workers {
        worker.set_behaviour(Behaviour::Hang);
    }
    let requests = || workers.iter().map(|worker| worker.requests()).sum::<usize>();
    let answer = harness.answer(relayed("/v1/batches", prompt(1, 100)));
    tokio::pin!(answer);
    assert!(tokio::time::timeout(Duration::from_mins(20), &mut answer).await.is_err(), "it waits");
    harness.discovery.expire(WorkerId(1));
    harness.discovery.expire(WorkerId(2));
    assert!(matches!(answer.await, Err(Error::Failed(_))));
    assert_eq!(requests(), 1);
}

/// Both workers restart, one after the other, before they have computed a request: the first is another one by then.
#[tokio::test(start_paused = true)]
async fn a_worker_that_has_started_again_may_serve_a_request_that_it_lost() {
    let harness = defaults();
    let before = [harness.worker(1, Role::Both).await, harness.worker(2, Role::Both).await];
    for worker in &before {
        worker.set_behaviour(Behaviour::Hang);
    }
    let answer = harness.answer(prompt(1, 100));
    let restarts = async {
        tokio::time::sleep(Duration::from_millis(100)).await;
        let first = before.iter().position(|worker| worker.requests() > 0).unwrap();
        let (first, other) = ([1, 2][first], [2, 1][first]);
        harness.discovery.expire(WorkerId(first));
        // The request is sent to the other one once the first had time to finish it.
        tokio::time::sleep(Duration::from_secs(3)).await;
        assert!(before.iter().all(|worker| worker.requests() == 1));
        let again = harness.join(first, Role::Both, MODEL, 2, &[]).await;
        harness.discovery.expire(WorkerId(other));
        again
    };
    let (answer, again) = futures::join!(answer, restarts);
    assert_eq!((answer, again.requests()), (Ok(vec![1, 2]), 1));
}

#[tokio::test(start_paused = true)]
async fn a_stream_whose_worker_fails_is_continued_on_another() {
    let harness = defaults();
    let (a, b) = (harness.worker(1, Role::Both).await, harness.worker(2, Role::Both).await);
    for failing in [&a, &b] {
        failing.set_behaviour(Behaviour::BreakLater(failed()));
        for family in 0..4 {
            assert_eq!(harness.answer(prompt(family, 100)).await, Ok(vec![1, 2]));
        }
        failing.set_behaviour(Behaviour::Serve);
    }
    let moves = harness.metric("blockyard_router_stream_moves_total");
    assert!(moves >= 2, "{moves} streams moved");
    assert_eq!((harness.load(1), harness.load(2), a.open(), b.open()), ((0, 0, 0), (0, 0, 0), 0, 0));
}

#[tokio::test(start_paused = true)]
async fn a_stream_that_fails_on_every_worker_ends_with_the_error() {
    let harness = defaults();
    let mut workers = Vec::new();
    for id in 1..=5 {
        workers.push(harness.worker(id, Role::Both).await);
    }
    for worker in &workers {
        worker.set_behaviour(Behaviour::BreakLater(failed()));
    }
    assert_eq!(harness.answer(prompt(1, 100)).await, Err(failed()));
    assert_eq!(workers.iter().map(|worker| worker.requests()).sum::<usize>(), 3, "moved twice");
}

/// Reads the next output of a stream: its tokens.
async fn next_ids(stream: &mut OutputStream) -> Result<Vec<u32>, Error> {
    match stream.next().await.expect("the stream has not ended")? {
        Output::Tokens(tokens) => Ok(tokens.ids),
        other => panic!("no tokens: {other:?}"),
    }
}

/// The position of the worker that serves a request.
fn serving(workers: &[Arc<FakeEngine>]) -> usize {
    workers.iter().position(|worker| worker.open() > 0).expect("a worker serves the request")
}

/// Each worker leaves, generates for a time, and ends the stream: more of them than may fail.
#[tokio::test(start_paused = true)]
async fn a_stream_survives_a_rolling_restart_of_many_workers() {
    let harness = defaults();
    let mut workers = Vec::new();
    for id in 1..=6 {
        let worker = harness.worker(id, Role::Both).await;
        worker.set_behaviour(Behaviour::Drain(failed()));
        workers.push(worker);
    }
    let mut stream = harness.ask(prompt(1, 100)).await.unwrap();
    let mut ids = Vec::new();
    for last in [false, false, false, false, true] {
        ids.extend(next_ids(&mut stream).await.unwrap());
        harness.discovery.expire(WorkerId(serving(&workers) as u64 + 1));
        settle().await;
        ids.extend(next_ids(&mut stream).await.unwrap());
        if last {
            for worker in &workers {
                worker.set_behaviour(Behaviour::Serve);
            }
        }
    }
    while let Some(item) = stream.next().await {
        assert!(matches!(item, Ok(Output::Tokens(tokens)) if tokens.ids.is_empty()));
    }
    assert_eq!(ids, (1..=10).collect::<Vec<_>>(), "no token is missing or sent twice");
    assert_eq!(harness.metric("blockyard_router_stream_moves_total"), 5);
    assert_eq!(workers.iter().map(|worker| worker.requests()).sum::<usize>(), 6, "each served once");
}

/// A request that stops the engine of every worker must not go through the whole deployment.
#[tokio::test(start_paused = true)]
async fn a_worker_that_leaves_because_it_fails_counts_as_failed() {
    let harness = defaults();
    let mut workers = Vec::new();
    for id in 1..=5 {
        let worker = harness.worker(id, Role::Both).await;
        worker.set_behaviour(Behaviour::BreakLater(failed()));
        workers.push(worker);
    }
    let mut stream = harness.ask(prompt(1, 100)).await.unwrap();
    for _ in 0..3 {
        next_ids(&mut stream).await.unwrap();
        harness.discovery.expire(WorkerId(serving(&workers) as u64 + 1));
        settle().await;
    }
    assert_eq!(next_ids(&mut stream).await, Err(failed()));
    assert_eq!(workers.iter().map(|worker| worker.requests()).sum::<usize>(), 3, "moved twice");
}

/// Two workers leave and come back again and again, as the same runs.
#[tokio::test(start_paused = true)]
async fn a_stream_does_not_move_between_the_same_workers_without_end() {
    let harness = defaults();
    let mut workers = Vec::new();
    for id in 1..=2 {
        workers.push(harness.worker(id, Role::Both).await);
    }
    for worker in &workers {
        worker.set_behaviour(Behaviour::Drain(failed()));
    }
    let mut stream = harness.ask(prompt(1, 100)).await.unwrap();
    let mut served = 0;
    let ended = loop {
        if let Err(error) = next_ids(&mut stream).await {
            break error;
        }
        served += 1;
        let (at, other) = if serving(&workers) == 0 { (0, 1) } else { (1, 0) };
        workers[other] = harness.join(other as u64 + 1, Role::Both, MODEL, 1, &[]).await;
        workers[other].set_behaviour(Behaviour::Drain(failed()));
        harness.discovery.expire(WorkerId(at as u64 + 1));
        settle().await;
        next_ids(&mut stream).await.unwrap();
    };
    assert_eq!((ended, served), (failed(), 5), "each run counts as stopped once, and two may fail");
}

#[tokio::test(start_paused = true)]
async fn a_stream_that_nothing_can_continue_ends_with_the_error_of_its_worker() {
    let harness = defaults();
    let worker = harness.worker(1, Role::Both).await;
    worker.set_behaviour(Behaviour::BreakLater(failed()));
    assert_eq!(harness.answer(prompt(1, 100)).await, Err(failed()));
    let unread = Error::Unread(Duration::from_secs(30));
    let other = harness.worker(2, Role::Both).await;
    for worker in [&worker, &other] {
        worker.set_behaviour(Behaviour::BreakLater(unread.clone()));
    }
    let before = worker.requests() + other.requests();
    assert_eq!(harness.answer(prompt(1, 100)).await, Err(unread), "the client does not read");
    assert_eq!(worker.requests() + other.requests() - before, 1);
}

#[tokio::test(start_paused = true)]
async fn a_stream_is_not_continued_with_other_weights_of_the_same_name() {
    let harness = defaults();
    let worker = harness.worker(1, Role::Both).await;
    let other = ModelCard { identity: "toy@2".to_owned(), ..card(MODEL) };
    let other = harness.join_with(2, Role::Both, other, 1, &[]).await;
    for failing in [&worker, &other] {
        failing.set_behaviour(Behaviour::BreakLater(failed()));
    }
    assert_eq!(harness.answer(prompt(1, 100)).await, Err(failed()));
    assert_eq!(worker.requests() + other.requests(), 1);
    harness.worker(3, Role::Both).await;
    let same_as_other = ModelCard { identity: "toy@2".to_owned(), ..card(MODEL) };
    harness.join_with(4, Role::Both, same_as_other, 1, &[]).await;
    assert_eq!(harness.answer(prompt(2, 100)).await, Ok(vec![1, 2]));
    assert_eq!(harness.answer(prompt(3, 100)).await, Ok(vec![1, 2]));
}

#[tokio::test(start_paused = true)]
async fn a_stream_is_continued_with_the_same_fingerprint_if_a_worker_has_it() {
    for has_same in [true, false] {
        let harness = defaults();
        let worker = harness.worker_with_fingerprint(1, Role::Both, 1).await;
        worker.set_behaviour(Behaviour::BreakLater(failed()));
        let mut stream = harness.ask(prompt(1, 100)).await.unwrap();
        let other = harness.worker_with_fingerprint(2, Role::Both, 2).await;
        let second = harness.worker_with_fingerprint(3, Role::Both, if has_same { 1 } else { 2 }).await;
        // So it would not be chosen for anything else.
        harness.report(&second, Load { waiting_tokens: 5000, running: 1, ..Load::default() });
        settle().await;
        let mut ids = Vec::new();
        while let Some(item) = stream.next().await {
            if let Output::Tokens(tokens) = item.unwrap() {
                ids.extend(tokens.ids);
            }
        }
        let expected = if has_same { (0, 1) } else { (1, 0) };
        assert_eq!((ids, (other.requests(), second.requests())), (vec![1, 2], expected));
    }
}

#[tokio::test(start_paused = true)]
async fn attempts_are_limited_and_ejected_workers_still_serve() {
    let harness = defaults();
    let mut workers = Vec::new();
    for id in 1..=5 {
        workers.push(harness.worker(id, Role::Both).await);
    }
    for worker in &workers {
        worker.set_behaviour(Behaviour::Refuse(failed()));
    }
    assert_eq!(harness.answer(prompt(1, 100)).await, Err(failed()));
    assert_eq!(workers.iter().map(|worker| worker.requests()).sum::<usize>(), 3);
    harness.answer(prompt(1, 100)).await.unwrap_err();
    for worker in &workers {
        worker.set_behaviour(Behaviour::Serve);
    }
    assert_eq!(harness.answer(prompt(1, 100)).await, Ok(vec![1, 2]), "all are ejected, one serves");
}

/// More workers leave than may fail, each with the request: its own fault is none of that.
#[tokio::test(start_paused = true)]
async fn a_request_survives_a_rolling_restart_of_many_workers() {
    let harness = defaults();
    let mut workers = Vec::new();
    for id in 1..=6 {
        let worker = harness.worker(id, Role::Both).await;
        worker.set_behaviour(Behaviour::Hang);
        workers.push(worker);
    }
    let answer = harness.answer(prompt(1, 100));
    let restarts = async {
        for last in [false, false, false, false, true] {
            tokio::time::sleep(Duration::from_secs(3)).await;
            let holder = workers.iter().position(|worker| worker.open() > 0).unwrap();
            if last {
                for worker in &workers {
                    worker.set_behaviour(Behaviour::Serve);
                }
            }
            harness.discovery.expire(WorkerId(holder as u64 + 1));
        }
    };
    let (answer, ()) = futures::join!(answer, restarts);
    assert_eq!(answer, Ok(vec![1, 2]));
    assert_eq!(workers.iter().map(|worker| worker.requests()).sum::<usize>(), 6, "each was tried once");
}

#[tokio::test(start_paused = true)]
async fn back_pressure_is_no_fault_and_is_retried_elsewhere() {
    let harness = defaults();
    let (a, b) = (harness.worker(1, Role::Both).await, harness.worker(2, Role::Both).await);
    let busy = |seconds| Error::Overloaded { retry_after: Duration::from_secs(seconds) };
    a.set_behaviour(Behaviour::Refuse(busy(7)));
    for family in 0..3 {
        harness.answer(prompt(family, 100)).await.unwrap();
    }
    assert_eq!(b.requests(), 3);
    b.set_behaviour(Behaviour::Refuse(busy(3)));
    assert_eq!(harness.answer(prompt(9, 100)).await, Err(busy(3)), "the earlier retry_after");
}

#[tokio::test(start_paused = true)]
async fn requests_not_started_survive_the_death_of_a_worker() {
    let harness = defaults();
    let (a, b) = (harness.worker(1, Role::Both).await, harness.worker(2, Role::Both).await);
    a.set_behaviour(Behaviour::Hang);
    let mut requests = Box::pin(join_all((0..4).map(|family| harness.answer(prompt(family, 500)))));
    assert!(tokio::time::timeout(Duration::from_secs(5), &mut requests).await.is_err(), "two of the requests stall");
    assert_eq!((a.requests(), b.requests()), (2, 2), "the others are not delayed");
    harness.discovery.expire(WorkerId(1));
    assert!(requests.await.iter().all(|answer| answer == &Ok(vec![1, 2])));
    assert_eq!((a.open(), b.requests()), (0, 4));
}

#[tokio::test(start_paused = true)]
async fn a_worker_that_leaves_finishes_started_requests() {
    let harness = defaults();
    let worker = harness.worker(1, Role::Both).await;
    let mut stream = harness.ask(prompt(1, 100)).await.unwrap();
    harness.discovery.expire(WorkerId(1));
    tokio::time::sleep(Duration::from_mins(1)).await;
    let mut last = None;
    while let Some(item) = stream.next().await {
        last = Some(item.unwrap());
    }
    assert!(matches!(last, Some(Output::Tokens(tokens)) if tokens.finish == Some(FinishReason::Length)));
    assert_eq!(worker.requests(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_model_is_expected_back_for_a_time_after_its_last_worker_left() {
    let harness = defaults();
    let answer = async || harness.answer(prompt(1, 100)).await;
    assert!(matches!(answer().await, Err(Error::UnknownModel(_))), "it was never there");
    let _worker = harness.worker(1, Role::Both).await;
    assert!(answer().await.is_ok() && harness.router.absence(MODEL).is_none());
    harness.discovery.expire(WorkerId(1));
    tokio::time::sleep(Duration::from_mins(9)).await;
    assert!(matches!(answer().await, Err(Error::Unavailable(why)) if why.contains("no worker now")));
    assert!(harness.router.absence(MODEL).is_some() && harness.router.absence("other").is_none());
    assert_eq!(harness.router.degraded(), [harness.router.absence(MODEL).unwrap()]);
    tokio::time::sleep(Duration::from_mins(1)).await;
    assert!(matches!(answer().await, Err(Error::UnknownModel(_))));
    assert!(harness.router.absence(MODEL).is_none());
}

#[tokio::test(start_paused = true)]
async fn the_end_of_a_plane_makes_the_router_not_ready() {
    struct Ends;
    impl Discovery for Ends {
        fn register(&self, _: Instance, _: Arc<dyn Engine>) -> BoxFuture<'_, Result<Lease, PlaneError>> {
            std::future::ready(Err(PlaneError::Unavailable("no".to_owned()))).boxed()
        }
        fn watch(&self) -> BoxStream<'static, Membership> {
            stream::empty().boxed()
        }
    }
    let registry = prometheus::Registry::new();
    let router =
        Router::new(RouterId(0), Arc::new(Ends), Arc::new(LocalEvents::default()), Settings::default(), &registry)
            .unwrap();
    settle().await;
    assert!(matches!(router.readiness(), Readiness::NotReady(why) if why.contains("plane stream ended")));
    assert!(matches!(router.generate(prompt(1, 10)).await.err(), Some(Error::Unavailable(_))));
}
