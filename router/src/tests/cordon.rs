//! Cordoning, draining and uncordoning of workers.

use super::defaults;
use super::harness::{MODEL, prompt, settle};
use crate::router::NoSuchWorker;
use crate::state::Settings;
use futures::StreamExt;
use std::time::Duration;
use worker::engine::{Engine, Error, Readiness};
use worker::plane::{Load, Role, WorkerId};

#[tokio::test(start_paused = true)]
async fn a_cordoned_worker_gets_no_new_requests_until_uncordoned() {
    let harness = defaults();
    let (a, b) = (harness.worker(1, Role::Both).await, harness.worker(2, Role::Both).await);
    harness.router.cordon(WorkerId(1)).unwrap();
    for family in 0..6 {
        harness.answer(prompt(family, 100)).await.unwrap();
    }
    assert_eq!((a.requests(), b.requests()), (0, 6));
    harness.router.uncordon(WorkerId(1)).unwrap();
    for family in 6..12 {
        harness.answer(prompt(family, 100)).await.unwrap();
    }
    assert!(a.requests() > 0, "it gets requests again");
    assert_eq!(harness.router.cordon(WorkerId(9)), Err(NoSuchWorker(WorkerId(9))));
}

#[tokio::test(start_paused = true)]
async fn draining_waits_until_running_requests_have_finished() {
    let harness = defaults();
    let (a, _b) = (harness.worker(1, Role::Both).await, harness.worker(2, Role::Both).await);
    harness.router.cordon(WorkerId(2)).unwrap();
    let mut running = harness.ask(prompt(1, 100)).await.unwrap();
    assert_eq!(a.requests(), 1);
    harness.router.uncordon(WorkerId(2)).unwrap();
    harness.router.cordon(WorkerId(1)).unwrap();
    let busy: Vec<_> = harness.router.workers().iter().map(|worker| (worker.cordoned, worker.requests)).collect();
    assert_eq!(busy, [(true, 1), (false, 0)]);
    let drained = harness.router.drained(WorkerId(1));
    let mut drained = std::pin::pin!(drained);
    assert!(tokio::time::timeout(Duration::from_mins(1), &mut drained).await.is_err(), "a request still runs");
    while let Some(item) = running.next().await {
        item.unwrap();
    }
    assert_eq!(drained.await, Ok(()));
}

#[tokio::test(start_paused = true)]
async fn cordoning_every_worker_refuses_requests_and_readiness() {
    let harness = defaults();
    let _a = harness.worker(1, Role::Both).await;
    harness.router.cordon(WorkerId(1)).unwrap();
    let refused = harness.answer(prompt(1, 100)).await;
    assert!(matches!(&refused, Err(Error::Unavailable(why)) if why.contains("cordoned")), "{refused:?}");
    assert!(matches!(harness.router.readiness(), Readiness::NotReady(why) if why.contains("cordoned")));
    assert_eq!(harness.router.models()[0].id, MODEL, "the model is served again once a worker is uncordoned");
    assert_eq!(harness.router.degraded(), [format!("all workers of the model `{MODEL}` are cordoned")]);
    assert!(!harness.router.is_available(MODEL));
    harness.router.uncordon(WorkerId(1)).unwrap();
    assert!(harness.router.is_available(MODEL) && harness.router.degraded().is_empty());
    assert_eq!((harness.answer(prompt(1, 100)).await, harness.router.readiness()), (Ok(vec![1, 2]), Readiness::Ready));
}

#[tokio::test(start_paused = true)]
async fn a_worker_that_restarts_stays_cordoned() {
    let harness = defaults();
    let (_a, _b) = (harness.worker(1, Role::Both).await, harness.worker(2, Role::Both).await);
    harness.router.cordon(WorkerId(1)).unwrap();
    let again = harness.join(1, Role::Both, MODEL, 2, &[]).await;
    harness.answer(prompt(1, 100)).await.unwrap();
    assert_eq!(again.requests(), 0);
}

#[tokio::test(start_paused = true)]
async fn requests_queued_for_a_cordoned_worker_are_rerouted() {
    let harness = super::harness::Harness::new(Settings::default());
    let (a, b) = (harness.worker(1, Role::Both).await, harness.worker(2, Role::Both).await);
    harness.router.cordon(WorkerId(2)).unwrap();
    // The first worker has so much queued that further requests wait in the router.
    harness.report(&a, Load { waiting_tokens: 100_000, ..Load::default() });
    settle().await;
    let router = harness.router.clone();
    let waiting = tokio::spawn(async move { router.generate(prompt(1, 100)).await.map(drop) });
    settle().await;
    assert!(!waiting.is_finished() && a.requests() == 0);
    harness.router.uncordon(WorkerId(2)).unwrap();
    harness.router.cordon(WorkerId(1)).unwrap();
    assert!(waiting.await.unwrap().is_ok());
    assert_eq!((a.requests(), b.requests()), (0, 1));
}
