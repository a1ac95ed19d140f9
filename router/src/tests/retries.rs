//! What goes wrong, and whose fault it is.

use super::harness::{Behaviour, prompt, settle};
use super::{defaults, failed};
use crate::Router;
use crate::settings::Settings;
use futures::future::{BoxFuture, join_all};
use futures::stream::{self, BoxStream};
use futures::{FutureExt, StreamExt};
use std::sync::Arc;
use std::time::Duration;
use worker::engine::{Engine, Error, Finish, Output, Readiness};
use worker::plane::local::LocalEvents;
use worker::plane::{Discovery, Instance, Lease, Membership, Phase, PlaneError, RouterId, WorkerId};

#[tokio::test(start_paused = true)]
async fn a_client_error_is_not_retried_and_is_not_a_worker_fault() {
    let yard = defaults();
    let (a, b) = (yard.worker(1, Phase::Both).await, yard.worker(2, Phase::Both).await);
    let invalid = Error::Invalid { field: "top_k", problem: "too large".to_owned() };
    for worker in [&a, &b] {
        worker.become_(Behaviour::Refuse(invalid.clone()));
    }
    for n in 1..=20 {
        assert_eq!(yard.answer(prompt(n, 100)).await, Err(invalid.clone()));
        assert_eq!(a.requests() + b.requests(), n as usize, "one worker is asked, once");
    }
    for worker in [&a, &b] {
        worker.become_(Behaviour::Serve);
    }
    yard.answer(prompt(1, 100)).await.unwrap();
    yard.answer(prompt(2, 100)).await.unwrap();
    assert_eq!((a.requests(), b.requests()), (11, 11), "both are still in turn");
}

#[tokio::test(start_paused = true)]
async fn a_worker_that_fails_before_its_first_output_is_replaced() {
    for behaviour in [Behaviour::Refuse(failed()), Behaviour::Break(failed()), Behaviour::End] {
        let yard = defaults();
        let (a, b) = (yard.worker(1, Phase::Both).await, yard.worker(2, Phase::Both).await);
        a.become_(behaviour);
        for family in 0..4 {
            assert_eq!(yard.answer(prompt(family, 100)).await, Ok(vec![1, 2]));
        }
        assert_eq!(b.requests(), 4);
        assert!((1..4).contains(&a.requests()), "left alone after a fault, not asked each time: {}", a.requests());
        assert_eq!(yard.standing(1), (0, 0, 0));
    }
}

#[tokio::test(start_paused = true)]
async fn tries_are_bounded_and_the_last_worker_is_never_refused() {
    let yard = defaults();
    let mut workers = Vec::new();
    for id in 1..=5 {
        workers.push(yard.worker(id, Phase::Both).await);
    }
    for worker in &workers {
        worker.become_(Behaviour::Refuse(failed()));
    }
    assert_eq!(yard.answer(prompt(1, 100)).await, Err(failed()));
    assert_eq!(workers.iter().map(|worker| worker.requests()).sum::<usize>(), 3);
    yard.answer(prompt(1, 100)).await.unwrap_err();
    for worker in &workers {
        worker.become_(Behaviour::Serve);
    }
    assert_eq!(yard.answer(prompt(1, 100)).await, Ok(vec![1, 2]), "all rest, one serves");
}

#[tokio::test(start_paused = true)]
async fn back_pressure_reaches_the_client_only_from_all_workers() {
    let yard = defaults();
    let (a, b) = (yard.worker(1, Phase::Both).await, yard.worker(2, Phase::Both).await);
    let busy = |seconds| Error::Overloaded { retry_after: Duration::from_secs(seconds) };
    a.become_(Behaviour::Refuse(busy(7)));
    for family in 0..3 {
        yard.answer(prompt(family, 100)).await.unwrap();
    }
    assert_eq!(b.requests(), 3);
    b.become_(Behaviour::Refuse(busy(3)));
    assert_eq!(yard.answer(prompt(9, 100)).await, Err(busy(3)), "the sooner of the two");
}

#[tokio::test(start_paused = true)]
async fn a_worker_that_dies_takes_no_request_that_has_not_started() {
    let yard = defaults();
    let (a, b) = (yard.worker(1, Phase::Both).await, yard.worker(2, Phase::Both).await);
    a.become_(Behaviour::Hang);
    let mut requests = Box::pin(join_all((0..4).map(|family| yard.answer(prompt(family, 500)))));
    assert!(tokio::time::timeout(Duration::from_secs(5), &mut requests).await.is_err(), "two of them hang");
    assert_eq!((a.requests(), b.requests()), (2, 2), "and they do not keep the others");
    yard.roster.expire(WorkerId(1));
    assert!(requests.await.iter().all(|answer| answer == &Ok(vec![1, 2])));
    assert_eq!((a.open(), b.requests()), (0, 4));
}

#[tokio::test(start_paused = true)]
async fn a_leaving_worker_finishes_what_it_started() {
    let yard = defaults();
    let worker = yard.worker(1, Phase::Both).await;
    let mut stream = yard.ask(prompt(1, 100)).await.unwrap();
    yard.roster.expire(WorkerId(1));
    tokio::time::sleep(Duration::from_mins(1)).await;
    let mut last = None;
    while let Some(item) = stream.next().await {
        last = Some(item.unwrap());
    }
    assert!(matches!(last, Some(Output::Tokens(tokens)) if tokens.finish == Some(Finish::Length)));
    assert_eq!(worker.requests(), 1);
    assert!(matches!(yard.answer(prompt(1, 100)).await, Err(Error::UnknownModel(_))));
}

#[tokio::test(start_paused = true)]
async fn a_plane_that_ends_kills_the_router_loudly() {
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
