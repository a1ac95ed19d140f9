//! Responses that a server stores, and a client retrieves again.

use super::setup::{end, event_stream, get, key_with_tokens, leave, prompt, server};
use crate::fake::{FakeEngine, Step, post, send};
use crate::key_file::{Keys, with_key};
use crate::relay::{part, relayed};
use axum::body::Body;
use axum::http::Request;
use futures::StreamExt;
use serde_json::json;
use std::num::NonZero;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use tower::ServiceExt;
use worker::engine::{Output, RelayProgress, RelayReport, ResponseHead, response_id};

/// The usage of a response: 61 tokens.
fn report(id: u64) -> RelayReport {
    RelayReport { prompt_tokens: Some(1), completion_tokens: Some(60), response_id: Some(id), ..RelayReport::default() }
}

/// The head of a stream that has said its id, and no usage so far.
fn head_with_id() -> Step {
    event_stream(RelayReport { response_id: Some(7), ..RelayReport::default() })
}

/// A request for a response that is stored.
fn create() -> Request<Body> {
    post("/v1/responses", &json!({ "model": "org/tiny", "input": [] }))
}

#[tokio::test]
async fn the_output_of_a_response_that_is_retrieved_counts_once() {
    let engine = server(report(7));
    let keys = Keys::new();
    let added = ["background", "at-once", "cancelled", "twice"].map(|name| {
        keys.add(name, |key| {
            key.tokens_per_minute = NonZero::new(100);
            key.tenant = Some(name.into());
        })
    });
    let router = engine.router_with(keys.settings());
    let [background, at_once, cancelled, twice] = &added;
    let retrieve = || get("/v1/responses/resp_1");
    let cancel = || post("/v1/responses/resp_1/cancel", &json!({}));
    for (key, requests, expected) in [
        (background, vec![retrieve(), retrieve(), retrieve()], 200),
        (at_once, vec![create(), retrieve(), retrieve()], 200),
        (cancelled, vec![create(), cancel(), retrieve()], 200),
        (twice, vec![create(), create()], 429),
    ] {
        for request in requests {
            assert_eq!(send(&router, with_key(request, key)).await.status, 200);
        }
        assert_eq!(send(&router, with_key(prompt(30), key)).await.status, expected);
    }
}

#[tokio::test]
async fn the_rest_of_a_response_that_was_left_counts_when_it_is_retrieved() {
    let report = RelayReport { completion_tokens: Some(60), response_id: Some(7), ..RelayReport::default() };
    let creations = AtomicUsize::new(0);
    let engine = FakeEngine::relaying(move |request| {
        // The second response with this id is computed in the background.
        let is_left = relayed(request).method == "POST" && creations.fetch_add(1, Ordering::Relaxed) == 1;
        let end = if is_left { Step::Hang } else { end(report) };
        Ok(vec![head_with_id(), part("data: {}\n\n"), end])
    });
    let (keys, key) = key_with_tokens(100);
    let router = engine.router_with(keys.settings());
    assert_eq!(send(&router, with_key(create(), &key)).await.status, 200);
    leave(&router, with_key(create(), &key)).await;
    assert_eq!(send(&router, with_key(get("/v1/responses/resp_1"), &key)).await.status, 200);
    assert_eq!(send(&router, with_key(prompt(1), &key)).await.status, 429, "it has used 60, 1 and 59 tokens");
}

#[tokio::test]
async fn a_stored_stream_that_is_left_again_counts_once() {
    let engine = FakeEngine::relaying(|request| {
        let end = if relayed(request).method == "GET" { Step::Hang } else { end(RelayReport::default()) };
        Ok(vec![head_with_id(), part("event: a\ndata: {}\n\n".repeat(40)), end])
    });
    let (keys, key) = key_with_tokens(100);
    let router = engine.router_with(keys.settings());
    for _ in 0..3 {
        leave(&router, with_key(get("/v1/responses/resp_1?stream=true"), &key)).await;
    }
    assert_eq!(send(&router, with_key(prompt(50), &key)).await.status, 200, "40 of 100 tokens are used");
}

#[tokio::test]
async fn a_part_of_a_stored_stream_is_that_of_the_response_in_its_path() {
    let id = response_id(b"resp_1");
    let engine = FakeEngine::relaying(move |request| {
        // The events that a retrieval begins with do not have the id.
        let head = event_stream(RelayReport::default());
        let end = if relayed(request).method == "GET" { Step::Hang } else { end(report(id)) };
        Ok(vec![head, part("event: a\ndata: {}\n\n".repeat(50)), end])
    });
    for (path, expected) in [("/v1/responses/resp_1", 200), ("/v1/responses/resp_2", 429)] {
        let (keys, key) = key_with_tokens(100);
        let router = engine.router_with(keys.settings());
        assert_eq!(send(&router, with_key(create(), &key)).await.status, 200);
        leave(&router, with_key(get(&format!("{path}?stream=true&starting_after=1")), &key)).await;
        assert_eq!(
            send(&router, with_key(prompt(30), &key)).await.status,
            expected,
            "{path}: 61 of 100 tokens were used before"
        );
    }
}

#[tokio::test]
async fn the_server_of_a_response_is_known_to_its_tenant_before_its_end() {
    let engine = FakeEngine::relaying(|request| {
        if relayed(request).method == "GET" {
            return Ok(vec![Step::Relay(Output::Head(Box::default())), part("{}"), end(RelayReport::default())]);
        }
        let progress = Arc::<RelayProgress>::default();
        progress.set(RelayReport { response_id: Some(response_id(b"resp_1")), ..RelayReport::default() });
        let head = ResponseHead { progress: Some(progress), server: Some(7), ..ResponseHead::default() };
        Ok(vec![Step::Relay(Output::Head(Box::new(head))), part("data: {}\n\n"), Step::Hang])
    });
    let keys = Keys::new();
    let [ann, bob] = ["ann", "bob"].map(|name| keys.add(name, |key| key.tenant = Some(name.into())));
    let router = engine.router_with(keys.settings());
    let created = router.clone().oneshot(with_key(create(), &ann)).await.unwrap();
    let mut body = created.into_body().into_data_stream();
    body.next().await.unwrap().unwrap();
    for (key, path, expected) in [
        (&ann, "/v1/responses/resp_1", Some(7)),
        (&ann, "/v1/responses/resp_1/input_items", Some(7)),
        (&ann, "/v1/responses/resp_2", None),
        (&bob, "/v1/responses/resp_1", None),
    ] {
        assert_eq!(send(&router, with_key(get(path), key)).await.status, 200);
        assert_eq!(engine.last().attributes.server, expected, "{path}");
    }
    let next = json!({ "model": "org/tiny", "input": [], "previous_response_id": "resp_1" });
    for (key, expected) in [(&ann, Some(7)), (&bob, None)] {
        leave(&router, with_key(post("/v1/responses", &next), key)).await;
        assert_eq!(engine.last().attributes.server, expected);
    }
}
