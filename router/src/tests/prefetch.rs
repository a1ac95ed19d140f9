//! Copies of shared prefixes ahead of demand: ordered where they pay, and nowhere else.

use super::defaults;
use super::harness::{BLOCK, FakeEngine, Harness, names, prompt, settle, stored};
use crate::state::Settings;
use futures::future::join_all;
use kvbm::Level;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::sleep;
use worker::engine::{Engine, PrefetchError, Prefetched, Request};
use worker::handoff::PeerTicket;
use worker::plane::{Role, WorkerId};

const COPIES: &str = "blockyard_router_prefix_copies_total";
/// The prefix of 1,024 tokens is the part of the prompt whose demand is counted.
const SHARED_BLOCKS: usize = 64;

/// A prompt that the first of two workers has in memory.
async fn hot(harness: &Harness) -> (Request, [Arc<FakeEngine>; 2]) {
    let workers = [harness.worker(1, Role::Both).await, harness.worker(2, Role::Both).await];
    let hot = prompt(1, 1600);
    harness.announce(&workers[0], stored(Level::G1, &names(&hot)), true);
    settle().await;
    (hot, workers)
}

fn complete() -> Prefetched {
    Prefetched { blocks: SHARED_BLOCKS as u32, bytes: 64_000 }
}

/// Eight requests for a prompt at the same time.
async fn burst(harness: &Harness, hot: &Request) {
    for answer in join_all((0..8).map(|_| harness.answer(hot.clone()))).await {
        answer.unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn a_hot_prefix_is_copied_from_the_memory_of_its_holder_to_an_idle_worker() {
    let harness = defaults();
    let (hot, [holder, idle]) = hot(&harness).await;
    *idle.copy_answer.lock() = Ok(complete());
    burst(&harness, &hot).await;
    sleep(Duration::from_secs(1)).await;
    let copies = idle.copies.lock().clone();
    assert_eq!((copies.len(), holder.copies.lock().len()), (1, 0));
    assert_eq!(copies[0].blocks[..], names(&hot)[..SHARED_BLOCKS]);
    let ticket = PeerTicket::decode(copies[0].peer.as_ref().unwrap()).unwrap();
    assert_eq!((ticket.peer, ticket.url), (WorkerId(1), holder.address()));
    let counted = |outcome| harness.router.core.metrics.prefix_copies.with_label_values(&[outcome]).get();
    assert_eq!((counted("started"), counted("complete")), (1, 1));
}

#[tokio::test(start_paused = true)]
async fn a_prefix_is_not_copied_from_a_worker_that_is_still_computing_it() {
    let harness = defaults();
    let [holder, idle] = [harness.worker(1, Role::Both).await, harness.worker(2, Role::Both).await];
    *idle.copy_answer.lock() = Ok(complete());
    let (hot, core) = (prompt(1, 1600), &harness.router.core);
    let slot = core.fleet.snapshot().get(WorkerId(1)).unwrap().slot;
    let _computing = core.inflight.add(slot, &names(&hot), BLOCK, 0);
    burst(&harness, &hot).await;
    assert!(holder.copies.lock().is_empty() && idle.copies.lock().is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_copy_that_is_on_the_way_is_explained() {
    let harness = defaults();
    let (hot, [_holder, idle]) = hot(&harness).await;
    *idle.copy_answer.lock() = Ok(complete());
    let explained = join_all((0..6).map(|_| harness.explain(hot.clone()))).await;
    let shared = |at: usize| explained[at]["shared_prefix"].clone();
    assert!(shared(0).is_null(), "the first request shares nothing yet");
    assert_eq!((&shared(5)["tokens"], &shared(5)["copies_on_the_way"]), (&1024.into(), &1.into()), "{}", shared(5));
    assert!(shared(5)["copies_in_memory"].as_u64().unwrap() >= 1);
}

#[tokio::test(start_paused = true)]
async fn a_prefix_that_is_not_hot_is_not_copied() {
    let harness = defaults();
    let (hot, [holder, idle]) = hot(&harness).await;
    *idle.copy_answer.lock() = Ok(complete());
    for _ in 0..10 {
        harness.answer(hot.clone()).await.unwrap();
        sleep(Duration::from_secs(20)).await;
    }
    assert!(holder.copies.lock().is_empty() && idle.copies.lock().is_empty());
    assert_eq!(harness.metric(COPIES), 0);
}

#[tokio::test(start_paused = true)]
async fn nothing_is_copied_when_it_is_switched_off() {
    let harness = Harness::new(Settings { prefetch: false, ..Settings::default() });
    let (hot, [holder, idle]) = hot(&harness).await;
    burst(&harness, &hot).await;
    assert!(holder.copies.lock().is_empty() && idle.copies.lock().is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_worker_that_declines_is_left_alone_for_a_while() {
    let harness = defaults();
    let (hot, [_holder, idle]) = hot(&harness).await;
    *idle.copy_answer.lock() = Err(PrefetchError::NoMemory);
    burst(&harness, &hot).await;
    assert_eq!(idle.copies.lock().len(), 1);
    let declined = harness.router.core.metrics.prefix_copies.with_label_values(&["no_memory"]).get();
    assert_eq!(declined, 1);
}

#[tokio::test(start_paused = true)]
async fn a_cordoned_worker_gets_no_copy() {
    let harness = defaults();
    let (hot, [_holder, idle]) = hot(&harness).await;
    harness.router.cordon(WorkerId(2)).unwrap();
    burst(&harness, &hot).await;
    assert!(idle.copies.lock().is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_copy_ends_when_its_worker_leaves() {
    let harness = defaults();
    let (hot, [_holder, idle]) = hot(&harness).await;
    *idle.copy_answer.lock() = Ok(complete());
    let leave = async {
        sleep(Duration::from_millis(500)).await;
        assert_eq!(idle.copies.lock().len(), 1, "a copy is being made");
        harness.discovery.expire(WorkerId(2));
    };
    futures::future::join(burst(&harness, &hot), leave).await;
    let counted = |outcome| harness.router.core.metrics.prefix_copies.with_label_values(&[outcome]).get();
    assert_eq!((counted("cancelled"), counted("complete")), (1, 0));
}
