//! A stream that is not read takes neither places in the batch nor blocks from those that are read.

use super::*;
use crate::engine::{Error, OutputStream};
use std::time::Duration;

/// An unread sequence loses its place at once, and fails after `limit`.
fn settings(limit: Duration) -> Settings {
    Settings { unread: Unread { place: Duration::ZERO, limit }, ..Settings::default() }
}

const LONG: Duration = Duration::from_hours(1);

async fn ask(rig: &Rig, prompt: &[u32], tokens: u32) -> OutputStream {
    let mut wanted = request(&*rig.engine, prompt, tokens);
    wanted.stop.ignore_eos = true;
    rig.engine.generate(wanted).await.unwrap()
}

/// Waits for what must come, and fails a test instead of hanging it.
async fn comes<T>(what: impl Future<Output = T>) -> T {
    tokio::time::timeout(Duration::from_mins(2), what).await.expect("it comes")
}

async fn paused(rig: &Rig, most: u64) {
    let mut load = rig.engine.load();
    let counted = load.wait_for(|_| rig.count("blockyard_worker_output_pauses_total", "w") >= most);
    drop(comes(counted).await.unwrap());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_batch_full_of_unread_streams_serves_another_request() {
    let rig = Rig::new(Shape { engine: settings(LONG), ..Shape::default() });
    let mut rng = Rng(41);
    let mut unread = Vec::new();
    for _ in 0..Settings::default().max_num_seqs {
        unread.push(ask(&rig, &rng.tokens(20), 600).await);
    }
    paused(&rig, unread.len() as u64).await;
    assert_eq!(rig.manager.available(), rig.manager.capacity(), "paused sequences hold no blocks");
    let prompt = rng.tokens(300);
    let answer = comes(rig.run(&prompt, 20)).await;
    assert_eq!(answer.ids, Rig::new(Shape::default()).run(&prompt, 20).await.ids);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_paused_stream_goes_on_when_it_is_read_again() {
    let engine = Settings { max_num_seqs: 1, ..settings(LONG) };
    let rig = Rig::new(Shape { engine, ..Shape::default() });
    let prompt = Rng(42).tokens(100);
    let slow = ask(&rig, &prompt, 300).await;
    paused(&rig, 1).await;
    let other = Rng(43).tokens(100);
    let beside = comes(collect(ask(&rig, &other, 30).await)).await.unwrap();
    assert_eq!(beside.ids.len(), 30);
    let read = comes(collect(slow)).await.unwrap();
    let alone = collect(ask(&Rig::new(Shape::default()), &prompt, 300).await).await.unwrap();
    assert_eq!((read.ids, read.prompt.map(|report| report.computed)), (alone.ids, Some(100)));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unread_stream_fails_at_the_limit() {
    let rig = Rig::new(Shape { engine: settings(Duration::ZERO), ..Shape::default() });
    let mut stream = ask(&rig, &Rng(44).tokens(20), 600).await;
    let mut load = rig.engine.load();
    let gone = load.wait_for(|load| {
        rig.count("blockyard_worker_output_timeouts_total", "w") == 1 && load.running + load.waiting == 0
    });
    drop(comes(gone).await.unwrap());
    assert_eq!(rig.manager.available(), rig.manager.capacity());
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
async fn no_more_streams_are_paused_than_may_wait() {
    let engine = Settings { max_queued_requests: 2, ..settings(LONG) };
    let rig = Rig::new(Shape { engine, ..Shape::default() });
    let mut streams = Vec::new();
    for nth in 1..=3 {
        streams.push(ask(&rig, &Rng(nth).tokens(20), 600).await);
        paused(&rig, nth).await;
    }
    assert_eq!(rig.count("blockyard_worker_output_timeouts_total", "w"), 1);
    let first = comes(collect(streams.remove(0))).await;
    assert!(matches!(first, Err(Error::Unread(_))), "{first:?}");
}
