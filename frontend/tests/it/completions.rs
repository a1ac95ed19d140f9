//! Text completions without streaming.

use crate::fake::{FakeEngine, bytes, completion, first, last, last_with_logprobs, send};
use crate::tiny_tokenizer;
use async_openai::types::chat::CompletionFinishReason;
use async_openai::types::completions::CreateCompletionResponse;
use serde_json::{Value, json};
use worker::engine::FinishReason;

async fn tokens_of(prompt: Value) -> Vec<Vec<u32>> {
    let engine = FakeEngine::with_steps(vec![last("", FinishReason::Stop)]);
    assert_eq!(send(&engine.router(), completion(json!({ "prompt": prompt }))).await.status, 200);
    engine.seen.lock().iter().map(|request| request.tokens.to_vec()).collect()
}

#[tokio::test]
async fn a_prompt_comes_in_four_shapes() {
    let hello = vec![tiny_tokenizer::BOS, 259];
    assert_eq!(tokens_of(json!("hello")).await, std::slice::from_ref(&hello));
    assert_eq!(tokens_of(json!(["hello", "x"])).await, [hello, vec![tiny_tokenizer::BOS, u32::from(b'x')]]);
    assert_eq!(tokens_of(json!([1, 2])).await, [[1, 2]]);
    assert_eq!(tokens_of(json!([[1, 2], [3]])).await, [vec![1, 2], vec![3]]);
}

#[tokio::test]
async fn a_response_has_openais_format_and_usage() {
    let engine =
        FakeEngine::new(|request| Ok(vec![first(""), last(&format!("{}", request.tokens[0]), FinishReason::Length)]));
    let answer = send(&engine.router(), completion(json!({ "prompt": [[1, 2], [3]], "n": 2 }))).await;
    let parsed: CreateCompletionResponse = answer.parsed();
    assert!(parsed.id.starts_with("cmpl-"));
    assert_eq!(parsed.object, "text_completion");
    let texts: Vec<_> = parsed.choices.iter().map(|choice| (choice.index, choice.text.as_str())).collect();
    assert_eq!(texts, [(0, "1"), (1, "1"), (2, "3"), (3, "3")]);
    assert_eq!(parsed.choices[3].finish_reason, Some(CompletionFinishReason::Length));
    let usage = parsed.usage.unwrap();
    assert_eq!((usage.prompt_tokens, usage.completion_tokens, usage.total_tokens), (3, 4, 7));
}

#[tokio::test]
async fn max_tokens_of_completions_defaults_to_16() {
    let engine = FakeEngine::with_steps(vec![last("", FinishReason::Length)]);
    send(&engine.router(), completion(json!({}))).await;
    assert_eq!(engine.only().stop.max_tokens, Some(16));
}

#[tokio::test]
async fn echo_repeats_the_prompt_without_special_tokens() {
    for stream in [false, true] {
        let engine = FakeEngine::with_steps(vec![first(" wo"), last("rld", FinishReason::Length)]);
        let answer = send(&engine.router(), completion(json!({ "echo": true, "stream": stream }))).await;
        let text = if stream {
            let chunks = answer.events();
            let chunks = chunks.iter().filter(|chunk| *chunk != "[DONE]");
            chunks
                .map(|chunk| {
                    serde_json::from_str::<Value>(chunk).unwrap()["choices"][0]["text"].as_str().unwrap().to_owned()
                })
                .collect()
        } else {
            answer.parsed::<CreateCompletionResponse>().choices[0].text.clone()
        };
        assert_eq!(text, "hello world");
    }
}

#[tokio::test]
async fn logprobs_have_openais_shape() {
    let engine = FakeEngine::with_steps(vec![last_with_logprobs(&[bytes("a")[0], 0xC3, 0xA9, bytes("b")[0]], 256)]);
    let parsed: CreateCompletionResponse = send(&engine.router(), completion(json!({ "logprobs": 2 }))).await.parsed();
    let logprobs = parsed.choices[0].logprobs.as_ref().unwrap();
    assert_eq!(logprobs.tokens, ["a", "bytes:\\xc3", "bytes:\\xa9", "b"]);
    assert_eq!(logprobs.token_logprobs, [Some(-0.5); 4]);
    assert_eq!(logprobs.text_offset, [0, 1, 1, 2]);
    assert_eq!(logprobs.top_logprobs[0], json!({ "a": -0.5, "he": -9999.0 }));
}

#[test]
fn a_model_whose_tokens_have_no_known_text_is_refused() {
    let mut card = crate::fake::card();
    assert_eq!(frontend::check_model(&card.clone().into()), Ok(()));
    let mut tokenizer: serde_json::Value = serde_json::from_str(&tiny_tokenizer::tokenizer()).unwrap();
    tokenizer["decoder"] = serde_json::Value::Null;
    card.tokenizer = Some(tokenizer.to_string().into());
    let problem = frontend::check_model(&card.into()).unwrap_err();
    assert!(problem.starts_with("tokenizer.json: decoder none is not supported"), "{problem}");
}
