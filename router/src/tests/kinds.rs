//! Models that workers and servers of other programs serve under one name.

use super::defaults;
use super::harness::{MODEL, card, prompt, relayed, settle};
use worker::engine::{Engine, Error, ModelCard};
use worker::plane::{Role, WorkerId};

const COMPLETIONS: &str = "/v1/completions";

#[tokio::test(start_paused = true)]
async fn workers_serve_a_model_that_upstreams_have_too_whoever_came_first() {
    for server_first in [true, false] {
        let harness = defaults();
        // The lower id is that of the server, so that the order of ids is not what decides.
        let (server, worker) = if server_first {
            let server = harness.relayed_worker(1).await;
            (server, harness.worker(2, Role::Both).await)
        } else {
            let worker = harness.worker(2, Role::Both).await;
            (harness.relayed_worker(1).await, worker)
        };
        for family in 0..6 {
            harness.answer(prompt(family, 100)).await.unwrap();
        }
        assert_eq!((server.requests(), worker.requests()), (0, 6));
        let cards = harness.router.models();
        assert_eq!(cards.iter().map(|card| (&*card.id, card.is_relayed)).collect::<Vec<_>>(), [(MODEL, false)]);
        let unused: Vec<bool> = harness.router.workers().iter().map(|status| status.unused.is_some()).collect();
        assert_eq!(unused, [true, false]);
    }
}

/// The memory of a worker limits its context.
#[tokio::test(start_paused = true)]
async fn workers_with_different_contexts_serve_one_model() {
    for ids in [[1, 2], [2, 1]] {
        let harness = defaults();
        let with = |context| ModelCard { context, ..card(MODEL) };
        let short = harness.join_with(ids[0], Role::Both, with(200), 1, &[]).await;
        let long = harness.join_with(ids[1], Role::Both, with(400), 1, &[]).await;
        let contexts: Vec<usize> = harness.router.models().iter().map(|card| card.context).collect();
        assert_eq!(contexts, [400]);
        for family in 0..4 {
            harness.answer(prompt(family, 300)).await.unwrap();
        }
        assert_eq!((short.requests(), long.requests()), (0, 4));
        let refused = harness.answer(prompt(4, 400)).await;
        assert_eq!(refused, Err(Error::PromptTooLong { prompt: 400, context: 400 }));
        harness.router.cordon(WorkerId(ids[1])).unwrap();
        harness.answer(prompt(5, 100)).await.unwrap();
        assert_eq!((short.requests(), long.requests()), (1, 4));
    }
}

#[tokio::test(start_paused = true)]
async fn prefill_workers_never_prefill_for_an_upstream() {
    let harness = defaults();
    let (server, prefill) = (harness.relayed_worker(1).await, harness.worker(2, Role::Prefill).await);
    let long = harness.answer(prompt(1, 20_000)).await;
    assert_eq!((long, server.requests(), prefill.requests()), (Ok(vec![1, 2]), 0, 1), "it decodes as the only worker");
}

#[tokio::test(start_paused = true)]
async fn a_request_of_the_other_kind_is_to_be_sent_again() {
    let harness = defaults();
    let server = harness.relayed_worker(1).await;
    assert_eq!(harness.answer(relayed(COMPLETIONS, prompt(1, 100))).await, Ok(vec![1, 2]));
    // Parsed for workers, the last of which has left meanwhile.
    let refused = harness.answer(prompt(2, 100)).await;
    assert!(matches!(&refused, Err(Error::Unavailable(why)) if why.contains("send it again")), "{refused:?}");
    let worker = harness.worker(2, Role::Both).await;
    let refused = harness.answer(relayed(COMPLETIONS, prompt(3, 100))).await;
    assert!(matches!(&refused, Err(Error::Unavailable(why)) if why.contains("send it again")), "{refused:?}");
    assert_eq!((server.requests(), worker.requests()), (1, 0));
    harness.discovery.expire(WorkerId(2));
    settle().await;
    assert_eq!(harness.answer(relayed(COMPLETIONS, prompt(4, 100))).await, Ok(vec![1, 2]), "the upstream serves now");
    assert!(harness.router.models()[0].is_relayed);
}
