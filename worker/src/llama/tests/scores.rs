//! Log-probabilities of the prompt, and requests for no tokens.

use super::{Harness, Rng, Shape};
use crate::engine::contract::{collect, request};
use crate::engine::{FinishReason, Logprobs, Request, Tokens};

async fn run(harness: &Harness, request: Request) -> Tokens {
    collect(crate::engine::Engine::generate(&*harness.engine, request).await.unwrap()).await.unwrap()
}

fn scored(harness: &Harness, prompt: &[u32], tokens: u32) -> Request {
    let mut request = request(&*harness.engine, prompt, tokens);
    request.sampling.prompt_logprobs = Some(3);
    request
}

/// The log-probabilities of sampling for the token after `prompt`; a bias chooses `token`.
async fn sampled(harness: &Harness, prompt: &[u32], token: u32) -> Logprobs {
    let mut request = request(&*harness.engine, prompt, 1);
    request.sampling.logprobs = Some(3);
    request.sampling.logit_bias = vec![(token, 1e6)];
    let mut all = run(harness, request).await;
    assert_eq!(all.ids, [token]);
    all.logprobs.remove(0)
}

#[tokio::test]
async fn prompt_logprobs_equal_those_of_sampling_to_the_bit() {
    let harness = Harness::new(Shape { chunk: 48, ..Shape::default() });
    let prompt = Rng(5).random_tokens(120..121);
    let all = run(&harness, scored(&harness, &prompt, 1)).await;
    assert_eq!((all.prompt_logprobs.len(), all.ids.len()), (119, 1));
    for at in [1, 2, 15, 16, 17, 47, 48, 49, 96, 118, 119] {
        let want = sampled(&harness, &prompt[..at], prompt[at]).await;
        assert_eq!(all.prompt_logprobs[at - 1], want, "token {at}");
    }
    let plain = run(&harness, request(&*harness.engine, &prompt, 1)).await;
    assert_eq!(plain.ids, all.ids, "prompt log-probabilities do not change the answer");
    assert!(plain.prompt_logprobs.is_empty());
}

#[tokio::test]
async fn prompt_logprobs_are_computed_despite_cached_blocks() {
    let harness = Harness::new(Shape::default());
    let prompt = Rng(6).random_tokens(100..101);
    let first = run(&harness, scored(&harness, &prompt, 2)).await;
    let again = run(&harness, scored(&harness, &prompt, 2)).await;
    assert_eq!(again.prompt_logprobs, first.prompt_logprobs);
    let report = again.prompt.unwrap();
    assert_eq!((report.cached_tokens(), report.computed), (0, 100), "the report shows that");
    let plain = run(&harness, request(&*harness.engine, &prompt, 2)).await;
    assert_eq!(plain.prompt.unwrap().cached_tokens(), 96, "other requests reuse its blocks");
}

#[tokio::test]
async fn a_request_for_no_tokens_computes_its_prompt() {
    let harness = Harness::new(Shape { chunk: 32, ..Shape::default() });
    for (len, cached) in [(1, 0), (70, 0), (70, 64)] {
        let all = run(&harness, request(&*harness.engine, &Rng(7).random_tokens(len..len + 1), 0)).await;
        assert_eq!((all.ids.as_slice(), all.finish), (&[][..], Some(FinishReason::Length)));
        let report = all.prompt.unwrap();
        assert_eq!((report.cached_tokens(), report.computed), (cached, len as u32 - cached));
    }
    let all = run(&harness, scored(&harness, &Rng(8).random_tokens(70..71), 0)).await;
    assert_eq!((all.prompt_logprobs.len(), all.ids.len()), (69, 0));
}

#[tokio::test]
async fn a_preempted_request_scores_each_token_once() {
    // Each request fits alone; the three do not fit together.
    let harness = Harness::new(Shape { chunk: 16, g1: 12, ..Shape::default() });
    let prompts: Vec<_> = (0..3).map(|i| Rng(20 + i).random_tokens(80..81)).collect();
    let mut want = Vec::new();
    for prompt in &prompts {
        want.push(run(&harness, scored(&harness, prompt, 60)).await);
    }
    let together = prompts.iter().map(|prompt| run(&harness, scored(&harness, prompt, 60)));
    let got = futures::future::join_all(together).await;
    for (got, want) in got.iter().zip(&want) {
        assert_eq!((&got.ids, &got.prompt_logprobs), (&want.ids, &want.prompt_logprobs));
    }
}

#[tokio::test]
async fn the_token_that_ends_a_request_is_reported() {
    let harness = Harness::new(Shape::default());
    let prompt = Rng(9).random_tokens(20..21);
    let mut request = request(&*harness.engine, &prompt, 5);
    let next = run(&harness, request.clone()).await.ids[0];
    request.stop.stop_tokens = vec![next];
    request.sampling.logprobs = Some(0);
    let all = run(&harness, request).await;
    assert_eq!((all.ids.as_slice(), all.finish), (&[][..], Some(FinishReason::StopToken(next))));
    let end = all.end.unwrap();
    assert_eq!((end.id, end.logprobs.unwrap().rank), (next, 1));
}
