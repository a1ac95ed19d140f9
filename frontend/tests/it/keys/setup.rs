//! What these tests share: engines, requests, and keys with a limit.

use crate::fake::{FakeEngine, Step, TestResponse, completion, first, last};
use crate::key_file::Keys;
use crate::relay::part;
use axum::Router;
use axum::body::Body;
use axum::http::Request;
use futures::StreamExt;
use serde_json::json;
use std::num::NonZero;
use std::sync::Arc;
use tower::ServiceExt;
use worker::engine::{FinishReason, Output, RelayProgress, RelayReport, ResponseHead};

/// An engine whose responses have three tokens.
pub(super) fn engine() -> Arc<FakeEngine> {
    FakeEngine::with_steps(vec![first("ab"), last("c", FinishReason::Length)])
}

/// A server whose responses are one object, and report this usage at their end.
pub(super) fn server(report: RelayReport) -> Arc<FakeEngine> {
    FakeEngine::relaying(move |_| Ok(vec![Step::Relay(Output::Head(Box::default())), part("{}"), end(report)]))
}

/// The head of a relayed response with this content type.
pub(super) fn head(content_type: &str, progress: Option<Arc<RelayProgress>>) -> Step {
    let headers = [("content-type".parse().unwrap(), content_type.parse().unwrap())].into_iter().collect();
    Step::Relay(Output::Head(Box::new(ResponseHead { headers, progress, ..ResponseHead::default() })))
}

/// The head of a relayed stream that reports this usage before its end.
pub(super) fn event_stream(so_far: RelayReport) -> Step {
    let progress = Arc::<RelayProgress>::default();
    progress.set(so_far);
    head("text/event-stream", Some(progress))
}

/// The end of a relayed response.
pub(super) fn end(report: RelayReport) -> Step {
    Step::Relay(Output::End(report))
}

/// A key that may use this number of tokens per minute, with its file.
pub(super) fn key_with_tokens(per_minute: u32) -> (Keys, String) {
    let keys = Keys::new();
    let key = keys.add("tokens", |key| key.tokens_per_minute = NonZero::new(per_minute));
    (keys, key)
}

pub(super) fn get(path: &str) -> Request<Body> {
    Request::get(path).body(Body::empty()).unwrap()
}

/// A completion request whose prompt has this number of tokens.
pub(super) fn prompt(tokens: usize) -> Request<Body> {
    completion(json!({ "prompt": vec![1; tokens] }))
}

/// Sends a request, and leaves after the first part of its response.
pub(super) async fn leave(router: &Router, request: Request<Body>) {
    let mut body = router.clone().oneshot(request).await.unwrap().into_body().into_data_stream();
    assert!(body.next().await.unwrap().is_ok());
}

/// Status and code of an error.
pub(super) fn code(response: &TestResponse) -> (u16, String) {
    let code = response.json()["error"]["code"].as_str().unwrap_or_default().to_owned();
    (response.status.as_u16(), code)
}
