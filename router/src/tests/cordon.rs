//! Workers that are cordoned, drained and taken back.

use super::defaults;
use super::harness::{MODEL, prompt, settle};
use crate::router::NoSuchWorker;
use crate::settings::Settings;
use futures::StreamExt;
use std::time::Duration;
use worker::engine::{Engine, Error, Readiness};
use worker::plane::{Load, Phase, WorkerId};

#[tokio::test(start_paused = true)]
async fn a_cordoned_worker_gets_no_new_requests_until_uncordoned() {
    let yard = defaults();
    let (a, b) = (yard.worker(1, Phase::Both).await, yard.worker(2, Phase::Both).await);
    yard.router.cordon(WorkerId(1)).unwrap();
    for family in 0..6 {
        yard.answer(prompt(family, 100)).await.unwrap();
    }
    assert_eq!((a.requests(), b.requests()), (0, 6));
    yard.router.uncordon(WorkerId(1)).unwrap();
    for family in 6..12 {
        yard.answer(prompt(family, 100)).await.unwrap();
    }
    assert!(a.requests() > 0, "it comes back");
    assert_eq!(yard.router.cordon(WorkerId(9)), Err(NoSuchWorker(WorkerId(9))));
}

#[tokio::test(start_paused = true)]
async fn draining_waits_for_running_requests_and_lets_them_finish() {
    let yard = defaults();
    let (a, _b) = (yard.worker(1, Phase::Both).await, yard.worker(2, Phase::Both).await);
    yard.router.cordon(WorkerId(2)).unwrap();
    let mut running = yard.ask(prompt(1, 100)).await.unwrap();
    assert_eq!(a.requests(), 1);
    yard.router.uncordon(WorkerId(2)).unwrap();
    yard.router.cordon(WorkerId(1)).unwrap();
    let busy: Vec<_> = yard.router.workers().iter().map(|worker| (worker.cordoned, worker.requests)).collect();
    assert_eq!(busy, [(true, 1), (false, 0)]);
    let drained = yard.router.drained(WorkerId(1));
    let mut drained = std::pin::pin!(drained);
    assert!(tokio::time::timeout(Duration::from_mins(1), &mut drained).await.is_err(), "a request still runs");
    while let Some(item) = running.next().await {
        item.unwrap();
    }
    assert_eq!(drained.await, Ok(()));
}

#[tokio::test(start_paused = true)]
async fn with_every_worker_cordoned_requests_are_refused_and_readiness_says_why() {
    let yard = defaults();
    let _a = yard.worker(1, Phase::Both).await;
    yard.router.cordon(WorkerId(1)).unwrap();
    let refused = yard.answer(prompt(1, 100)).await;
    assert!(matches!(&refused, Err(Error::Unavailable(why)) if why.contains("cordoned")), "{refused:?}");
    assert!(matches!(yard.router.readiness(), Readiness::NotReady(why) if why.contains("cordoned")));
    assert_eq!(yard.router.models()[0].id, MODEL, "the model is served again once a worker is uncordoned");
    yard.router.uncordon(WorkerId(1)).unwrap();
    assert_eq!((yard.answer(prompt(1, 100)).await, yard.router.readiness()), (Ok(vec![1, 2]), Readiness::Ready));
}

#[tokio::test(start_paused = true)]
async fn a_worker_that_restarts_stays_cordoned() {
    let yard = defaults();
    let (_a, _b) = (yard.worker(1, Phase::Both).await, yard.worker(2, Phase::Both).await);
    yard.router.cordon(WorkerId(1)).unwrap();
    let again = yard.join(1, Phase::Both, MODEL, 2, &[]).await;
    yard.answer(prompt(1, 100)).await.unwrap();
    assert_eq!(again.requests(), 0);
}

#[tokio::test(start_paused = true)]
async fn requests_that_wait_for_a_cordoned_worker_are_placed_again() {
    let yard = super::harness::Yard::new(Settings::default());
    let (a, b) = (yard.worker(1, Phase::Both).await, yard.worker(2, Phase::Both).await);
    yard.router.cordon(WorkerId(2)).unwrap();
    // So much waits at the first worker that requests wait for it in the router.
    yard.report(&a, Load { waiting_tokens: 100_000, ..Load::default() });
    settle().await;
    let router = yard.router.clone();
    let waiting = tokio::spawn(async move { router.generate(prompt(1, 100)).await.map(drop) });
    settle().await;
    assert!(!waiting.is_finished() && a.requests() == 0);
    yard.router.uncordon(WorkerId(2)).unwrap();
    yard.router.cordon(WorkerId(1)).unwrap();
    assert!(waiting.await.unwrap().is_ok());
    assert_eq!((a.requests(), b.requests()), (0, 1));
}
