//! Streams, byte by byte.

use crate::fake::{FakeEngine, Step, chat, completion, events, first, last, say, send};
use async_openai::types::chat::CreateChatCompletionStreamResponse;
use async_openai::types::completions::CreateCompletionResponse;
use axum::body::BodyDataStream;
use axum::http::StatusCode;
use frontend::Settings;
use futures::{FutureExt, StreamExt};
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Semaphore;
use tower::ServiceExt;
use units::HumanDuration;
use worker::engine::{Error, FinishReason};

async fn next(body: &mut BodyDataStream) -> String {
    String::from_utf8(body.next().await.expect("more to come").unwrap().to_vec()).unwrap()
}

#[tokio::test]
async fn each_item_of_the_engine_is_one_write() {
    let engine = FakeEngine::with_steps(vec![first("he"), say("l"), last("lo", FinishReason::Stop)]);
    let fields = json!({ "stream": true, "stream_options": { "include_usage": true } });
    let response = engine.router().oneshot(chat(fields)).await.unwrap();
    assert_eq!(response.headers()["content-type"], "text/event-stream; charset=utf-8");
    let mut body = response.into_body().into_data_stream();
    let one = next(&mut body).await;
    let head = one.split_once(r#","choices""#).unwrap().0.to_owned();
    assert!(head.starts_with(r#"data: {"id":"chatcmpl-"#), "{head}");
    let (role, said) = one.split_once("\n\n").unwrap();
    assert_eq!(
        role.strip_prefix(&head).unwrap(),
        concat!(
            r#","choices":[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"#,
            r#""finish_reason":null}],"usage":null}"#
        ),
        "the first delta has the role and no text"
    );
    assert_eq!(
        said.strip_prefix(&head).unwrap(),
        concat!(
            r#","choices":[{"index":0,"delta":{"content":"he"},"logprobs":null,"finish_reason":null}],"usage":null}"#,
            "\n\n"
        )
    );
    assert_eq!(
        next(&mut body).await.strip_prefix(&head).unwrap(),
        concat!(
            r#","choices":[{"index":0,"delta":{"content":"l"},"logprobs":null,"finish_reason":null}],"usage":null}"#,
            "\n\n"
        )
    );
    let rest = next(&mut body).await;
    let rest = events(&rest);
    let last: CreateChatCompletionStreamResponse = serde_json::from_str(&rest[0]).unwrap();
    assert_eq!(last.choices[0].delta.content.as_deref(), Some("lo"));
    let usage: CreateChatCompletionStreamResponse = serde_json::from_str(&rest[1]).unwrap();
    assert!(usage.choices.is_empty());
    assert_eq!(usage.usage.unwrap().completion_tokens, 6, "the token that ended it counts");
    assert_eq!(rest[2], "[DONE]");
    assert!(body.next().await.is_none());
}

#[tokio::test]
async fn a_completion_streams_chunks_that_openais_types_read() {
    let engine = FakeEngine::with_steps(vec![first("he"), say("l"), last("lo", FinishReason::Length)]);
    let answer = send(&engine.router(), completion(json!({ "stream": true, "n": 2 }))).await;
    let events = answer.events();
    let (done, chunks) = events.split_last().unwrap();
    assert_eq!(done, "[DONE]");
    let mut texts = [String::new(), String::new()];
    for chunk in chunks {
        let chunk: CreateCompletionResponse = serde_json::from_str(chunk).unwrap();
        texts[chunk.choices[0].index as usize].push_str(&chunk.choices[0].text);
        assert!(chunk.usage.is_none());
    }
    assert_eq!(texts, ["hello", "hello"]);
}

#[tokio::test]
async fn a_character_is_never_split() {
    let halves = ["😀".as_bytes()[..2].to_vec(), "😀".as_bytes()[2..].to_vec()];
    let say = |bytes: &[u8]| {
        let ids = bytes.iter().copied().map(u32::from).collect();
        Step::Say(worker::engine::Tokens { ids, ..Default::default() })
    };
    let engine = FakeEngine::with_steps(vec![say(&halves[0]), say(&halves[1]), last("", FinishReason::Stop)]);
    let answer = send(&engine.router(), chat(json!({ "stream": true }))).await;
    let events = answer.events();
    let content = |event: &str| serde_json::from_str::<Value>(event).unwrap()["choices"][0]["delta"]["content"].clone();
    assert_eq!((content(&events[0]), content(&events[1])), (json!(""), json!("😀")), "not before it is complete");
}

#[tokio::test(start_paused = true)]
async fn keep_alive_comments_are_sent_during_silence() {
    let permits = Arc::new(Semaphore::new(0));
    let engine = FakeEngine::with_steps(vec![Step::Wait(permits.clone()), last("a", FinishReason::Stop)]);
    let response = engine.router().oneshot(chat(json!({ "stream": true }))).await.unwrap();
    let mut body = response.into_body().into_data_stream();
    assert_eq!(next(&mut body).await, ": keep-alive\n\n");
    assert_eq!(next(&mut body).await, ": keep-alive\n\n");
    permits.add_permits(1);
    assert!(next(&mut body).await.contains(r#""content":"a""#));
}

#[tokio::test(start_paused = true)]
async fn keep_alive_is_counted_from_the_last_write() {
    let permits = Arc::new(Semaphore::new(0));
    let wait = || Step::Wait(permits.clone());
    let engine = FakeEngine::with_steps(vec![first("a"), wait(), say("b"), wait(), last("c", FinishReason::Stop)]);
    let response = engine.router().oneshot(chat(json!({ "stream": true }))).await.unwrap();
    let mut body = response.into_body().into_data_stream();
    while !next(&mut body).await.contains(r#""content":"a""#) {}
    tokio::time::sleep(Duration::from_secs(8)).await;
    permits.add_permits(1);
    while !next(&mut body).await.contains(r#""content":"b""#) {}
    let since = tokio::time::Instant::now();
    for comments in 1..=2 {
        assert_eq!(next(&mut body).await, ": keep-alive\n\n");
        assert_eq!(since.elapsed(), Duration::from_secs(10 * comments));
    }
}

#[tokio::test]
async fn a_failure_in_a_stream_is_its_last_event() {
    let failing = [Step::Fail(Error::Unavailable("worker gone".into())), Step::Panic];
    for (step, code) in failing.into_iter().zip(["service_unavailable", "internal_error"]) {
        let engine = FakeEngine::with_steps(vec![first("a"), step, Step::Hang]);
        let router = engine.router();
        let answer = send(&router, chat(json!({ "stream": true }))).await;
        assert_eq!(answer.status, 200);
        let events = answer.events();
        assert_eq!(events.len(), 3, "no [DONE] after an error: {events:?}");
        let error: Value = serde_json::from_str(&events[2]).unwrap();
        assert_eq!((&error["error"]["code"], &error["error"]["type"]), (&json!(code), &json!("server_error")));
        assert_eq!(engine.open(), 0);
    }
}

#[tokio::test]
async fn a_response_ends_with_an_error_when_its_time_is_over() {
    let engine = FakeEngine::with_steps(vec![first("a"), Step::Hang]);
    let max_request_time = Some(HumanDuration::millis(50));
    let router = engine.router_with(Settings { max_request_time, ..Settings::default() });
    let streamed = send(&router, chat(json!({ "stream": true }))).await.events();
    let error: Value = serde_json::from_str(streamed.last().unwrap()).unwrap();
    assert_eq!(error["error"]["code"], "request_time_exceeded", "not [DONE]: {streamed:?}");
    assert!(streamed[0].contains("delta"), "after what was generated: {streamed:?}");
    let full = send(&router, chat(json!({}))).await;
    assert_eq!((full.status, &full.json()["error"]["code"]), (StatusCode::GATEWAY_TIMEOUT, &error["error"]["code"]));
    assert_eq!(engine.open(), 0, "the engine is stopped");
}

#[tokio::test]
async fn a_disconnect_drops_the_engine_streams() {
    let engine = FakeEngine::with_steps(vec![first("a"), Step::Hang]);
    let router = engine.router();
    let response = router.clone().oneshot(chat(json!({ "stream": true, "n": 2 }))).await.unwrap();
    let mut body = response.into_body().into_data_stream();
    next(&mut body).await;
    next(&mut body).await;
    assert_eq!(engine.open(), 2);
    drop(body);
    assert_eq!(engine.open(), 0);

    // The same while a client waits for a full response.
    let mut asking = Box::pin(send(&router, chat(json!({}))));
    while engine.open() == 0 {
        assert!((&mut asking).now_or_never().is_none());
    }
    drop(asking);
    assert_eq!(engine.open(), 0);

    let metrics = send(&router, axum::http::Request::get("/metrics").body(axum::body::Body::empty()).unwrap()).await;
    let text = String::from_utf8(metrics.body).unwrap();
    let line = r#"blockyard_frontend_requests_total{endpoint="/v1/chat/completions",status="499"} 2"#;
    assert!(text.contains(line), "{text}");
}

#[tokio::test]
async fn an_early_failure_with_an_explanation_has_its_status() {
    let engine =
        FakeEngine::with_steps(vec![Step::Fail(Error::Overloaded { retry_after: Duration::from_millis(1500) })]);
    let mut request = chat(json!({ "stream": true }));
    request.headers_mut().insert("x-blockyard-explain", "1".parse().unwrap());
    let answer = send(&engine.router(), request).await;
    assert_eq!((answer.status, answer.header("retry-after")), (StatusCode::TOO_MANY_REQUESTS, "2"));
}
