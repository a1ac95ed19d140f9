//! The conformance suite of [`Engine`]; every engine runs it.

use super::{Engine, Error, Output, OutputStream, PrefixCopy, Request, Sampling, Tokens, Work};
use futures::{FutureExt, StreamExt};
use kvbm::SequenceHash;
use std::sync::Arc;

/// Checks an engine against the contract.
pub(crate) async fn check(engine: Arc<dyn Engine>) {
    impossible_requests_are_rejected(&*engine).await;
    streams_end_with_one_finish(&*engine).await;
    equal_seeds_give_equal_tokens_in_a_batch(&*engine).await;
    another_engine_continues_with_the_same_tokens(&*engine).await;
    stop_tokens_end_the_stream_unsent(&*engine).await;
    a_prefill_stream_stays_open_after_its_end(&*engine).await;
    a_prefix_that_is_nowhere_is_not_copied(&*engine).await;
}

/// A request for the engine's first model that generates `tokens` tokens, greedily.
pub(crate) fn request(engine: &dyn Engine, prompt: &[u32], tokens: u32) -> Request {
    Request::greedy("contract", &engine.models()[0].id, prompt, tokens)
}

/// All tokens of a stream, merged.
pub(crate) async fn collect(mut stream: OutputStream) -> Result<Tokens, Error> {
    let mut all = Tokens::default();
    while let Some(item) = stream.next().await {
        let Output::Tokens(tokens) = item? else { panic!("unexpected item") };
        assert!(all.finish.is_none(), "no item follows the finish");
        all.ids.extend(tokens.ids);
        all.logprobs.extend(tokens.logprobs);
        all.finish = tokens.finish;
        all.end = tokens.end;
        all.prompt_logprobs.extend(tokens.prompt_logprobs);
        all.prompt = all.prompt.or(tokens.prompt);
    }
    assert!(all.finish.is_some(), "a stream ends with a finish");
    Ok(all)
}

async fn run(engine: &dyn Engine, request: Request) -> Tokens {
    collect(engine.generate(request).await.unwrap()).await.unwrap()
}

fn prompt(len: u32) -> Vec<u32> {
    (0..len).map(|i| i * 7 % 100).collect()
}

async fn impossible_requests_are_rejected(engine: &dyn Engine) {
    let model = engine.models().swap_remove(0);
    let unknown = Request { model: "unknown".into(), ..request(engine, &prompt(3), 1) };
    assert_eq!(engine.generate(unknown).await.err(), Some(Error::UnknownModel("unknown".into())));
    let long = engine.generate(request(engine, &vec![1; model.context], 1)).await;
    assert!(matches!(long.err(), Some(Error::PromptTooLong { prompt, .. }) if prompt == model.context));
    let empty = engine.generate(request(engine, &[], 1)).await;
    assert!(matches!(empty.err(), Some(Error::Invalid { .. })));
    let foreign = engine.generate(request(engine, &[model.vocabulary as u32], 1)).await;
    assert!(matches!(foreign.err(), Some(Error::Invalid { .. })));
}

async fn streams_end_with_one_finish(engine: &dyn Engine) {
    for (len, tokens) in [(1, 1), (16, 5), (33, 20)] {
        let all = run(engine, request(engine, &prompt(len), tokens)).await;
        assert_eq!(all.ids.len(), tokens as usize);
        let report = all.prompt.expect("the first item has the report of the prompt");
        assert_eq!(report.computed + report.cached_tokens(), len);
    }
}

async fn equal_seeds_give_equal_tokens_in_a_batch(engine: &dyn Engine) {
    let sampled = |seed| {
        let mut request = request(engine, &prompt(40), 12);
        request.sampling = Sampling { temperature: 1.0, seed: Some(seed), logprobs: Some(2), ..Sampling::default() };
        request
    };
    let alone = run(engine, sampled(1)).await;
    let beside = futures::future::join_all((1..6).map(|seed| run(engine, sampled(seed)))).await;
    assert_eq!((&alone.ids, &alone.logprobs), (&beside[0].ids, &beside[0].logprobs));
    assert!(beside.iter().any(|other| other.ids != alone.ids), "other seeds give other tokens");
    assert!(alone.logprobs.iter().all(|each| each.top.len() == 2 && each.chosen <= 0.0));
}

async fn another_engine_continues_with_the_same_tokens(engine: &dyn Engine) {
    let sampling = [
        Sampling { temperature: 0.0, ..Sampling::default() },
        Sampling { seed: Some(3), frequency_penalty: 0.7, repetition_penalty: 1.3, ..Sampling::default() },
    ];
    for sampling in sampling {
        let mut whole = request(engine, &prompt(40), 20);
        whole.sampling = sampling;
        let undisturbed = run(engine, whole.clone()).await;
        for generated_tokens in [1, 9, 19] {
            let tokens = [&prompt(40)[..], &undisturbed.ids[..generated_tokens]].concat().into();
            let rest = run(engine, Request { tokens, generated_tokens, ..whole.clone() }).await;
            assert_eq!(rest.ids, undisturbed.ids[generated_tokens..], "after {generated_tokens} tokens");
            let report = rest.prompt.expect("the first item has the report of the prompt");
            assert_eq!(report.computed + report.cached_tokens(), 40);
        }
    }
}

async fn stop_tokens_end_the_stream_unsent(engine: &dyn Engine) {
    let free = run(engine, request(engine, &prompt(40), 8)).await;
    let mut stopped = request(engine, &prompt(40), 8);
    stopped.stop.stop_tokens = vec![free.ids[3]];
    let first = free.ids.iter().position(|id| *id == free.ids[3]).unwrap();
    let all = run(engine, stopped).await;
    assert_eq!(all.ids, free.ids[..first]);
    assert_eq!(all.finish, Some(super::FinishReason::StopToken(free.ids[3])));
}

async fn a_prefill_stream_stays_open_after_its_end(engine: &dyn Engine) {
    let prefill = Request { work: Work::Prefill, ..request(engine, &prompt(50), 1) };
    let mut stream = engine.generate(prefill).await.unwrap();
    assert!(matches!(stream.next().await, Some(Ok(Output::Handoff(_)))));
    assert!(matches!(stream.next().await, Some(Ok(Output::Prefilled))));
    assert!(stream.next().now_or_never().is_none(), "the blocks are kept until the stream is dropped");
}

async fn a_prefix_that_is_nowhere_is_not_copied(engine: &dyn Engine) {
    let blocks = [SequenceHash::from_bytes([0xAB; 16])];
    assert!(engine.prefetch(PrefixCopy { blocks: blocks.into(), peer: None }).await.is_err());
}
