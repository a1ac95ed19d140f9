//! An unread stream takes neither slots in the batch nor blocks from streams that are read.

use super::*;
use crate::engine::{Error, OutputStream};
use crate::llama::UnreadOutput;
use crate::plane::Load;
use std::time::Duration;

/// An unread sequence is paused at once, and fails after `limit`.
fn settings(limit: Duration) -> Settings {
    Settings { unread: UnreadOutput { pause_after: Duration::ZERO, fail_after: limit }, ..Settings::default() }
}

const LONG: Duration = Duration::from_hours(1);

async fn start(harness: &Harness, prompt: &[u32], tokens: u32) -> OutputStream {
    let mut request = request(&*harness.engine, prompt, tokens);
    request.stop.ignore_eos = true;
    harness.engine.generate(request).await.unwrap()
}

/// Awaits `what` with a timeout, so that a test fails instead of hanging.
async fn completes<T>(what: impl Future<Output = T>) -> T {
    tokio::time::timeout(Duration::from_mins(2), what).await.expect("it completes in time")
}

async fn paused(harness: &Harness, most: u64) {
    let mut load = harness.engine.load();
    let counted = load.wait_for(|_| harness.count("blockyard_worker_output_pauses_total", "w") >= most);
    drop(completes(counted).await.unwrap());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_batch_full_of_unread_streams_serves_another_request() {
    let harness = Harness::new(Shape { engine: settings(LONG), ..Shape::default() });
    let mut rng = Rng(41);
    let mut unread = Vec::new();
    for _ in 0..Settings::default().max_num_seqs {
        unread.push(start(&harness, &rng.tokens(20), 600).await);
    }
    paused(&harness, unread.len() as u64).await;
    assert_eq!(harness.manager.available(), harness.manager.capacity(), "paused sequences hold no blocks");
    // The router sees a free batch.
    let mut load = harness.engine.load();
    let is_free = |load: &Load| (load.running, load.waiting, load.paused) == (0, 0, unread.len() as u32);
    drop(completes(load.wait_for(is_free)).await.unwrap());
    let prompt = rng.tokens(300);
    let answer = completes(harness.run(&prompt, 20)).await;
    assert_eq!(answer.ids, Harness::new(Shape::default()).run(&prompt, 20).await.ids);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_paused_stream_resumes_when_it_is_read() {
    let engine = Settings { max_num_seqs: 1, ..settings(LONG) };
    let harness = Harness::new(Shape { engine, ..Shape::default() });
    let prompt = Rng(42).tokens(100);
    let slow = start(&harness, &prompt, 300).await;
    paused(&harness, 1).await;
    let other = Rng(43).tokens(100);
    let beside = completes(collect(start(&harness, &other, 30).await)).await.unwrap();
    assert_eq!(beside.ids.len(), 30);
    let read = completes(collect(slow)).await.unwrap();
    let alone = collect(start(&Harness::new(Shape::default()), &prompt, 300).await).await.unwrap();
    assert_eq!((read.ids, read.prompt.map(|report| report.computed)), (alone.ids, Some(100)));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unread_stream_fails_at_the_limit() {
    let harness = Harness::new(Shape { engine: settings(Duration::ZERO), ..Shape::default() });
    let mut stream = start(&harness, &Rng(44).tokens(20), 600).await;
    let mut load = harness.engine.load();
    let gone =
        load.wait_for(|load| harness.count("blockyard_worker_output_timeouts_total", "w") == 1 && load.is_idle());
    drop(completes(gone).await.unwrap());
    assert_eq!(harness.manager.available(), harness.manager.capacity());
    let last = loop {
        match stream.next().await.unwrap() {
            Ok(Output::Tokens(tokens)) => assert_eq!(tokens.finish, None),
            last => break last,
        }
    };
    assert!(matches!(last, Err(Error::Unread(_))), "{last:?}");
    assert!(stream.next().await.is_none());
}

#[tokio::test(flavor = "multi_thread")]
async fn paused_streams_are_limited_like_queued_requests() {
    let engine = Settings { max_queued_requests: 2, ..settings(LONG) };
    let harness = Harness::new(Shape { engine, ..Shape::default() });
    let mut streams = Vec::new();
    for nth in 1..=3 {
        streams.push(start(&harness, &Rng(nth).tokens(20), 600).await);
        paused(&harness, nth).await;
    }
    assert_eq!(harness.count("blockyard_worker_output_timeouts_total", "w"), 1);
    let first = completes(collect(streams.remove(0))).await;
    assert!(matches!(first, Err(Error::Unread(_))), "{first:?}");
}
