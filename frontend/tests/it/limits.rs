//! Limits on bodies, prompts and choices of one client.

use crate::fake::{FakeEngine, Step, TestResponse, chat, completion, first, last, post, send};
use axum::Router;
use axum::body::Body;
use axum::http::Request;
use bytes::Bytes;
use frontend::Settings;
use futures::channel::mpsc;
use futures::{FutureExt, StreamExt};
use serde_json::json;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Semaphore;
use worker::engine::FinishReason;

fn engine() -> Arc<FakeEngine> {
    FakeEngine::with_steps(vec![last("a", FinishReason::Stop)])
}

fn router(engine: &Arc<FakeEngine>, settings: Settings) -> Router {
    frontend::router(engine.clone(), prometheus::Registry::new(), settings).unwrap()
}

fn code(answer: &TestResponse) -> (u16, String) {
    (answer.status.as_u16(), answer.json()["error"]["code"].as_str().unwrap_or_default().to_owned())
}

#[tokio::test]
async fn an_unknown_field_with_millions_of_values_is_not_parsed() {
    let bomb = "{\"\":0},".repeat((15 << 20) / 7);
    let body = format!(r#"{{"model":"org/tiny","prompt":"hello","x":[{bomb}0]}}"#);
    let request = |body: String| Request::post("/v1/completions").body(Body::from(body)).unwrap();
    let router = engine().router();
    assert_eq!(send(&router, request(body.clone())).await.status, 200);
    // In a field that is read, it is rejected after 131,072 values.
    let read = send(&router, request(body.replace("\"x\"", "\"stop\""))).await;
    assert_eq!(code(&read), (400, "too_many_values".into()));
}

#[tokio::test]
async fn a_prompt_of_14_mib_is_refused_from_its_first_bytes() {
    let engine = engine();
    let router = engine.router();
    let text = "hello world, ".repeat((14 << 20) / 13);
    for request in [
        post("/v1/completions", &json!({ "model": "org/tiny", "prompt": text })),
        post(
            "/v1/chat/completions",
            &json!({ "model": "org/tiny", "messages": [{ "role": "user", "content": text }] }),
        ),
    ] {
        let answer = send(&router, request).await;
        assert_eq!(code(&answer), (400, "context_length_exceeded".into()));
        let message = answer.json()["error"]["message"].as_str().unwrap().to_owned();
        // The message has the lower bound: not all tokens were counted.
        assert!(message.contains("resulted in at least 65 tokens"), "{message}");
    }
    assert!(engine.seen.lock().is_empty());
}

#[tokio::test]
async fn bodies_beyond_the_memory_for_bodies_get_429() {
    let size = 1 << 20;
    let settings =
        Settings { max_body: units::ByteSize(size), max_inflight_bodies: units::ByteSize(size), ..Settings::default() };
    let router = router(&engine(), settings);
    let (mut sender, receiver) = mpsc::channel::<Bytes>(1);
    let slow = Body::from_stream(receiver.map(Ok::<_, Infallible>));
    let mut slow = Box::pin(send(&router, Request::post("/v1/completions").body(slow).unwrap()));
    let text = completion(json!({ "x": "y".repeat(900 << 10) })).into_body();
    let text = axum::body::to_bytes(text, usize::MAX).await.unwrap();
    let half = text.len() / 2;
    sender.try_send(text.slice(..half)).unwrap();
    // The first body has its first half read, and waits for the rest.
    while sender.try_send(Bytes::new()).is_err() {
        assert!(slow.as_mut().now_or_never().is_none());
    }
    assert!(slow.as_mut().now_or_never().is_none());
    let second = || Request::post("/v1/completions").body(Body::from(text.clone())).unwrap();
    assert_eq!(code(&send(&router, second()).await), (429, "rate_limit_exceeded".into()));
    assert_eq!(send(&router, completion(json!({}))).await.status, 200, "a small body is never refused");
    while sender.try_send(text.slice(half..)).is_err() {
        assert!(slow.as_mut().now_or_never().is_none());
    }
    drop(sender);
    assert_eq!(slow.await.status, 200);
    assert_eq!(send(&router, second()).await.status, 200, "the memory is free again");
}

#[tokio::test(start_paused = true)]
async fn an_upload_that_idles_gets_408_when_memory_for_bodies_is_short() {
    let size = units::ByteSize(1 << 20);
    let router = router(&engine(), Settings { max_body: size, max_inflight_bodies: size, ..Settings::default() });
    let (mut sender, receiver) = mpsc::channel::<Bytes>(1);
    let idle = Body::from_stream(receiver.map(Ok::<_, Infallible>));
    let mut idle = Box::pin(send(&router, Request::post("/v1/completions").body(idle).unwrap()));
    sender.try_send(Bytes::from(vec![b' '; 900 << 10])).unwrap();
    assert!(idle.as_mut().now_or_never().is_none());
    tokio::time::advance(Duration::from_secs(10)).await;
    let (idle, other) = tokio::join!(idle, send(&router, completion(json!({ "x": "y".repeat(500 << 10) }))));
    assert_eq!(code(&idle), (408, "request_timeout".into()));
    assert_eq!(other.status, 200);
    drop(sender);
}

#[tokio::test]
async fn choices_beyond_a_tenants_limit_get_429() {
    let permits = Arc::new(Semaphore::new(0));
    let engine = FakeEngine::with_steps(vec![Step::Wait(permits.clone()), first("a"), last("b", FinishReason::Length)]);
    let tenant_header = Some("x-tenant".to_owned().try_into().unwrap());
    let router = router(&engine, Settings { tenant_header, max_choices_per_tenant: 4, ..Settings::default() });
    let ask = |tenant: &'static str, n: u32| {
        let mut request = chat(json!({ "n": n }));
        request.headers_mut().insert("x-tenant", tenant.parse().unwrap());
        request
    };
    let mut running = Box::pin(send(&router, ask("ann", 3)));
    while engine.open() == 0 {
        assert!(running.as_mut().now_or_never().is_none());
        tokio::task::yield_now().await;
    }
    let refused = send(&router, ask("ann", 2)).await;
    assert_eq!(code(&refused), (429, "rate_limit_exceeded".into()));
    assert_eq!(refused.header("retry-after"), "1");
    assert_eq!(code(&send(&router, ask("ann", 5)).await), (400, "integer_above_max_value".into()));
    permits.add_permits(100);
    assert_eq!(send(&router, ask("bob", 4)).await.status, 200);
    assert_eq!(running.await.status, 200);
    assert_eq!(send(&router, ask("ann", 4)).await.status, 200, "what has ended does not count");
}
