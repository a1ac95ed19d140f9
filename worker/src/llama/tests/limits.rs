//! The limits of a running engine change while it serves requests.

use super::*;
use crate::engine::{Error, OutputStream};
use crate::plane::Load;
use std::time::Duration;

async fn start(harness: &Harness, seed: u64) -> Result<OutputStream, Error> {
    let mut request = request(&*harness.engine, &Rng(seed).tokens(20), 400);
    request.stop.ignore_eos = true;
    harness.engine.generate(request).await
}

/// Waits for a load, with a timeout, so that a test fails instead of hanging.
async fn until(harness: &Harness, what: impl FnMut(&Load) -> bool) {
    let mut load = harness.engine.load();
    let reached = tokio::time::timeout(Duration::from_mins(2), load.wait_for(what)).await;
    drop(reached.expect("it happens in time").unwrap());
}

#[tokio::test(flavor = "multi_thread")]
async fn limits_change_while_requests_run() {
    let engine = Settings { max_num_seqs: 1, ..keeps_unread() };
    let harness = Harness::new(Shape { engine, ..Shape::default() });
    let set = |max_num_seqs, max_queued_requests| {
        harness.engine.limits().set(&Settings { max_num_seqs, max_queued_requests, ..engine });
    };
    let first = start(&harness, 1).await.unwrap();
    let second = start(&harness, 2).await.unwrap();
    until(&harness, |load| (load.running, load.waiting) == (1, 1)).await;
    set(1, 1);
    assert!(matches!(start(&harness, 3).await, Err(Error::Overloaded { .. })), "the queue is full now");
    set(2, 1);
    until(&harness, |load| (load.running, load.waiting, load.sequences_max) == (2, 0, 2)).await;
    let third = start(&harness, 3).await.unwrap();
    // Lower limits end nothing.
    set(1, 0);
    for stream in [first, second, third] {
        assert_eq!(collect(stream).await.unwrap().ids.len(), 400);
    }
    // An idle engine reports its new limit too.
    set(7, 1);
    until(&harness, |load| load.is_idle() && load.sequences_max == 7).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn another_chunk_size_takes_effect_and_changes_no_answer() {
    let harness = Harness::new(Shape { chunk: 64, ..Shape::default() });
    let (prompt, other) = (Rng(5).tokens(600), Rng(6).tokens(600));
    let (before, steps) = (harness.run(&prompt, 4).await, harness.steps("prefill"));
    harness.engine.limits().set(&Settings { max_prefill_chunk_tokens: 1024, ..Settings::default() });
    let alone = harness.run(&other, 4).await;
    assert_eq!((steps, harness.steps("prefill") - steps), (10, 1), "of 64 tokens each, then one of 600");
    let fresh = Harness::new(Shape::default());
    assert_eq!((before.ids, alone.ids), (fresh.run(&prompt, 4).await.ids, fresh.run(&other, 4).await.ids));
}
