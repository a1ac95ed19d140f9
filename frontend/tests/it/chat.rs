//! Chat completions without streaming.

use crate::fake::{FakeEngine, Step, bytes, chat, first, last, last_with_logprobs, say, send};
use crate::tiny_tokenizer;
use async_openai::types::chat::{self, CreateChatCompletionResponse, Role};
use serde_json::json;
use std::sync::Arc;
use tokio::sync::Semaphore;
use worker::engine::{FinishReason, Sampling, StopConditions};

#[tokio::test]
async fn a_response_has_openais_format_and_usage() {
    let engine = FakeEngine::with_steps(vec![first("he"), say("l"), last("lo", FinishReason::Stop)]);
    let answer = send(&engine.router(), chat(json!({}))).await;
    assert_eq!(answer.status, 200);
    let parsed: CreateChatCompletionResponse = answer.parsed();
    assert!(parsed.id.starts_with("chatcmpl-"));
    assert_eq!((parsed.object.as_str(), parsed.model.as_str()), ("chat.completion", "org/tiny"));
    let choice = &parsed.choices[0];
    assert_eq!(choice.message.content.as_deref(), Some("hello"));
    assert_eq!((choice.message.role, choice.finish_reason), (Role::Assistant, Some(chat::FinishReason::Stop)));
    let usage = parsed.usage.unwrap();
    let prompt = engine.only().tokens.len() as u32;
    assert_eq!((usage.prompt_tokens, usage.completion_tokens, usage.total_tokens), (prompt, 6, prompt + 6));
    assert_eq!(usage.prompt_tokens_details.unwrap().cached_tokens, Some(48));
}

#[tokio::test]
async fn the_template_makes_the_prompt() {
    let engine = FakeEngine::with_steps(vec![last("", FinishReason::Stop)]);
    let messages = json!([
        { "role": "developer", "content": "x" },
        { "role": "user", "content": [{ "type": "text", "text": "a" }, { "type": "text", "text": "b" }] },
        { "role": "assistant", "content": null, "tool_calls": [] },
    ]);
    send(&engine.router(), chat(json!({ "messages": messages }))).await;
    let turn = |text: &str| [vec![tiny_tokenizer::TURN], bytes(text)].concat();
    let prompt =
        [vec![tiny_tokenizer::BOS], turn("system:x"), turn("user:a\nb"), turn("assistant:"), turn("")].concat();
    assert_eq!(*engine.only().tokens, prompt);
}

#[tokio::test]
async fn tools_reach_the_template_unless_they_must_not_be_used() {
    let tools = json!([{ "type": "function", "function": { "name": "f" } }]);
    let engine = FakeEngine::with_steps(vec![last("", FinishReason::Stop)]);
    let router = engine.router();
    send(&router, chat(json!({}))).await;
    send(&router, chat(json!({ "tools": tools, "tool_choice": "none" }))).await;
    send(&router, chat(json!({ "tools": tools, "tool_choice": "auto" }))).await;
    let seen = engine.seen.lock();
    assert_eq!(seen[0].tokens, seen[1].tokens);
    assert!(seen[2].tokens.len() > seen[1].tokens.len() + 40);
}

#[tokio::test]
async fn every_parameter_reaches_the_engine() {
    let engine = FakeEngine::with_steps(vec![last("", FinishReason::Stop)]);
    let fields = json!({
        "temperature": 0.5, "top_p": 0.25, "top_k": 7, "min_p": 0.125, "seed": -1, "frequency_penalty": 1,
        "presence_penalty": -2, "repetition_penalty": 1.5, "logit_bias": { "5": -100 }, "logprobs": true,
        "top_logprobs": 3,
        "max_tokens": 9,
        "max_completion_tokens": 8, "min_tokens": 2, "stop_token_ids": [65], "ignore_eos": true,
        "vendor_field": { "ignored": 1 },
    });
    send(&engine.router(), chat(fields)).await;
    let seen = engine.only();
    let sampling = Sampling {
        temperature: 0.5,
        top_p: 0.25,
        top_k: Some(7),
        min_p: 0.125,
        seed: Some(u64::MAX),
        frequency_penalty: 1.0,
        presence_penalty: -2.0,
        repetition_penalty: 1.5,
        logit_bias: vec![(5, -100.0)],
        logprobs: Some(3),
        prompt_logprobs: None,
    };
    assert_eq!(seen.sampling, sampling);
    let stop = StopConditions { max_tokens: Some(8), min_tokens: 2, stop_tokens: vec![65], ignore_eos: true };
    assert_eq!(seen.stop, stop);
}

#[tokio::test]
async fn absent_fields_have_openais_defaults() {
    let engine = FakeEngine::with_steps(vec![last("", FinishReason::Stop)]);
    send(&engine.router(), chat(json!({ "temperature": null, "stop": null, "top_k": -1 }))).await;
    let seen = engine.only();
    assert_eq!((seen.sampling, seen.stop), (Sampling::default(), StopConditions::default()));
    assert!(!seen.explain);
}

#[tokio::test]
async fn the_other_choices_start_when_the_first_has_output() {
    let permits = Arc::new(Semaphore::new(0));
    let steps = vec![Step::Wait(permits.clone()), first("a"), last("b", FinishReason::Length)];
    let engine = FakeEngine::with_steps(steps);
    let router = engine.router();
    let asking = send(&router, chat(json!({ "n": 3, "seed": 41 })));
    let mut asking = Box::pin(asking);
    while engine.seen.lock().is_empty() {
        assert!(futures::poll!(&mut asking).is_pending());
        tokio::task::yield_now().await;
    }
    for _ in 0..100 {
        assert!(futures::poll!(&mut asking).is_pending());
        tokio::task::yield_now().await;
    }
    assert_eq!(engine.seen.lock().len(), 1, "the prompt is computed once, by the first");
    permits.add_permits(3);
    let parsed: CreateChatCompletionResponse = asking.await.parsed();
    let seeds: Vec<_> = engine.seen.lock().iter().map(|request| request.sampling.seed).collect();
    assert_eq!(seeds, [Some(41), Some(42), Some(43)]);
    assert!(engine.seen.lock().iter().all(|request| !request.attributes.has_stop_strings));
    let groups: Vec<_> = engine.seen.lock().iter().map(|request| request.group.unwrap()).collect();
    assert_eq!(groups[0].choices(), 3);
    assert_eq!(groups, [0, 1, 2].map(|index| groups[0].choice(index)), "one group");
    let texts: Vec<_> = parsed.choices.iter().map(|c| (c.index, c.message.content.as_deref())).collect();
    assert_eq!(texts, [(0, Some("ab")), (1, Some("ab")), (2, Some("ab"))]);
    let usage = parsed.usage.unwrap();
    assert_eq!(usage.completion_tokens, 6);
    assert_eq!(usage.prompt_tokens_details.unwrap().cached_tokens, Some(48), "a prompt counts once");
}

#[tokio::test]
async fn a_stop_string_ends_the_response_and_the_engine_stream() {
    let engine = FakeEngine::with_steps(vec![first("one E"), say("ND two"), Step::Hang]);
    let parsed: CreateChatCompletionResponse =
        send(&engine.router(), chat(json!({ "stop": ["END", "x"] }))).await.parsed();
    assert_eq!(parsed.choices[0].message.content.as_deref(), Some("one "));
    assert_eq!(parsed.choices[0].finish_reason, Some(chat::FinishReason::Stop));
    assert_eq!(engine.open(), 0);
    assert!(engine.seen.lock()[0].attributes.has_stop_strings, "a router tells it from a client that has gone");
}

#[tokio::test]
async fn logprobs_have_openais_shape() {
    let engine = FakeEngine::with_steps(vec![last_with_logprobs(&[u32::from(b'a'), 0xC3, 0xA9], 256)]);
    let fields = json!({ "logprobs": true, "top_logprobs": 2 });
    let parsed: CreateChatCompletionResponse = send(&engine.router(), chat(fields)).await.parsed();
    let content = parsed.choices[0].logprobs.as_ref().unwrap().content.as_ref().unwrap();
    assert_eq!(parsed.choices[0].message.content.as_deref(), Some("aé"));
    assert_eq!(content.len(), 3);
    assert_eq!((content[0].token.as_str(), content[0].logprob), ("a", -0.5));
    assert_eq!(content[1].bytes, Some(vec![0xC3]), "half a character has its bytes");
    let rival = &content[0].top_logprobs[1];
    assert_eq!((rival.token.as_str(), rival.logprob), ("he", -9999.0));
}

#[tokio::test]
async fn the_routers_decision_comes_back_in_a_header() {
    let engine = FakeEngine::new(|request| {
        let explain = request.explain.then(|| r#"{"worker":"w1","why":"é"}"#.into());
        let mut tokens = vec![first("a"), last("", FinishReason::Stop)];
        if let Step::Say(first) = &mut tokens[0] {
            first.explain = explain;
        }
        Ok(tokens)
    });
    for stream in [false, true] {
        let mut request = chat(json!({ "stream": stream, "n": 2 }));
        request.headers_mut().insert("x-blockyard-explain", "1".parse().unwrap());
        let answer = send(&engine.router(), request).await;
        assert_eq!(answer.header("x-blockyard-explain"), r#"{"worker":"w1","why":"\u00e9"}"#);
    }
    assert!(!send(&engine.router(), chat(json!({}))).await.headers.contains_key("x-blockyard-explain"));
}
