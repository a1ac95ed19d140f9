//! The central property of the engine: an answer and its KV have the same bits, independent of the tier that the prefix
//! came from, of the chunks of the prompt, and of the other sequences in the batch.

use super::{Builtin, ModelSource, Runtime, Settings};
use crate::engine::contract::{self, collect, request};
use crate::engine::{Engine, Error, FinishReason, Output, Work};
use crate::handoff::Peers;
use crate::plane::WorkerId;
use futures::StreamExt;
use futures::future::join_all;
use harness::{
    ANSWER, Conversation, Harness, Rng, Shape, cases, disk, keeps_unread, log, runtime, shared, unless_stalled,
};
use kvbm::{ChainKey, Domain, EventLog, Level, Tier};
use std::path::Path;
use std::sync::Arc;

mod handoff;
pub(crate) mod harness;
mod limits;
mod memory;
mod prefetch;
mod reuse;
mod scores;
mod soak;
mod terms;
mod unread;

#[tokio::test(flavor = "multi_thread")]
async fn chunks_and_other_rows_change_nothing() {
    for (seed, mut rng) in cases() {
        let talk = Conversation::draw(&mut rng).await;
        for chunk in [64, 128, 256, 1024] {
            let harness = Harness::new(Shape { chunk, ..Shape::default() });
            let others: Vec<_> = (0..rng.within(0..8)).map(|_| rng.random_tokens(1..400)).collect();
            let case = format!("seed {seed}, chunk {chunk}, {} others", others.len());
            let beside = join_all(others.iter().map(|other| harness.run(other, 9)));
            let (answer, beside) = futures::join!(harness.run(&talk.second, ANSWER), beside);
            answer.must_equal(&talk.answers[1], &case, None);
            for (other, answer) in others.iter().zip(beside) {
                let alone = Harness::new(Shape::default()).run(other, 9).await;
                answer.must_equal(&alone, &case, None);
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_chunk_smaller_than_a_block_computes_blocks() {
    let (prompt, harness) = (Rng(29).tokens(100), Harness::new(Shape { chunk: 5, ..Shape::default() }));
    let answer = tokio::time::timeout(std::time::Duration::from_mins(1), harness.run(&prompt, 3)).await;
    let alone = Harness::new(Shape::default()).run(&prompt, 3).await;
    assert_eq!(answer.expect("it computes").ids, alone.ids);
}

#[tokio::test(flavor = "multi_thread")]
async fn dropping_the_stream_frees_the_engine() {
    let harness = Harness::new(Shape::default());
    let mut stream = harness.engine.generate(request(&*harness.engine, &Rng(1).tokens(700), 4000)).await.unwrap();
    assert!(stream.next().await.unwrap().is_ok());
    drop(stream);
    let mut load = harness.engine.load();
    load.wait_for(|load| load.running == 0 && load.waiting_tokens == 0).await.unwrap();
    assert_eq!(harness.manager.available(), harness.manager.capacity());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_pauses_gets_the_rest_later() {
    let harness = Harness::new(Shape::default());
    let prompt = Rng(3).tokens(40);
    let mut slow = harness.engine.generate(request(&*harness.engine, &prompt, 300)).await.unwrap();
    let Some(Ok(Output::Tokens(first))) = slow.next().await else { panic!("a first token") };
    // Another request runs and finishes meanwhile; by then the paused one has stopped computing.
    let beside = harness.run(&prompt, 300).await.ids;
    let rest = collect(slow).await.unwrap();
    assert_eq!([first.ids, rest.ids].concat(), beside);
}

#[tokio::test(flavor = "multi_thread")]
async fn logits_that_are_not_finite_fail_the_request() {
    let data = tempfile::tempdir().unwrap();
    let folder = Builtin::Tiny.ensure(data.path(), &|_, _| ()).unwrap();
    let path = folder.join("model.safetensors");
    let mut bytes = std::fs::read(&path).unwrap();
    let start = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    // The first matrix of the file begins with weights whose products overflow.
    bytes[start..start + 64].copy_from_slice(&[0x7f; 64]);
    std::fs::write(&path, bytes).unwrap();
    let runtime = Runtime::open(&ModelSource::Folder(folder), data.path(), 2, &|_, _| ()).unwrap();
    let harness = Harness::of_model(runtime, Shape::default());
    for logprobs in [None, Some(3)] {
        let mut request = request(&*harness.engine, &Rng(9).tokens(40), 8);
        request.sampling.prompt_logprobs = logprobs;
        let error = collect(harness.engine.generate(request).await.unwrap()).await.unwrap_err();
        assert!(matches!(&error, Error::Failed(why) if why.contains("logits that are not finite")), "{error}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn keeps_the_contract() {
    contract::check(Harness::new(Shape::default()).engine).await;
}
