//! What operators and their tools see.

use crate::fake::{Answer, Fake, card, chat, completion, first, last, say, send};
use async_openai::types::models::{ListModelResponse, Model};
use axum::Router;
use axum::body::Body;
use axum::http::Request;
use serde_json::json;
use std::sync::Arc;
use worker::engine::{Finish, Readiness};

async fn get(router: &Router, path: &str) -> Answer {
    send(router, Request::get(path).body(Body::empty()).unwrap()).await
}

#[tokio::test]
async fn models_are_listed_and_found_by_an_id_with_a_slash() {
    let router = Fake::saying(vec![]).router();
    let list: ListModelResponse = get(&router, "/v1/models").await.parsed();
    assert_eq!((list.object.as_str(), list.data.len()), ("list", 1));
    let model: Model = get(&router, "/v1/models/org/tiny").await.parsed();
    assert_eq!((model.id.as_str(), model.created), ("org/tiny", 1_700_000_000));
    assert_eq!(get(&router, "/v1/models/org%2Ftiny").await.status, 200);
    let shown = get(&router, "/v1/models").await.json()["data"][0].clone();
    assert_eq!(
        (&shown["root"], &shown["parent"], &shown["max_model_len"]),
        (&json!("org/tiny"), &json!(null), &json!(64))
    );
    let missing = get(&router, "/v1/models/other").await;
    assert_eq!((missing.status.as_u16(), &missing.json()["error"]["code"]), (404, &json!("model_not_found")));
}

#[tokio::test]
async fn readiness_is_told_with_its_reason_and_liveness_is_not_touched() {
    let engine = Fake::saying(vec![]);
    let router = engine.router();
    for path in ["/live", "/ready", "/health", "/ping"] {
        assert_eq!(get(&router, path).await.status, 200);
    }
    assert_eq!(get(&router, "/version").await.json()["version"], env!("CARGO_PKG_VERSION"));
    let ping = Request::post("/ping").body(Body::empty()).unwrap();
    assert_eq!(send(&router, ping).await.status, 200);
    *engine.readiness.lock().unwrap() = Readiness::NotReady("no decode worker".into());
    let answer = get(&router, "/ready").await;
    assert_eq!(answer.status, 503);
    assert!(answer.json()["error"]["message"].as_str().unwrap().contains("no decode worker"));
    assert_eq!(get(&router, "/health").await.status, 503);
    assert_eq!(get(&router, "/ping").await.status, 503);
    assert_eq!(get(&router, "/live").await.status, 200);
}

#[tokio::test]
async fn what_is_not_there_is_said_in_json() {
    let router = Fake::saying(vec![]).router();
    let missing = get(&router, "/v1/nothing").await;
    assert_eq!((missing.status.as_u16(), &missing.json()["error"]["code"]), (404, &json!("unknown_url")));
    let method = get(&router, "/v1/chat/completions").await;
    assert_eq!((method.status.as_u16(), &method.json()["error"]["code"]), (405, &json!("method_not_supported")));
    assert_eq!(method.header("allow"), "POST");
}

#[tokio::test]
async fn trap_17_metrics_count_requests_and_tokens_of_plain_http() {
    let router = Fake::saying(vec![first("a"), say("bc"), last("", Finish::Stop)]).router();
    send(&router, chat(json!({ "messages": [{ "role": "user", "content": "x" }] }))).await;
    send(&router, completion(json!({ "stream": true, "prompt": [1, 2, 3] }))).await;
    send(&router, completion(json!({ "model": "made-up" }))).await;
    get(&router, "/made-up").await;
    let text = String::from_utf8(get(&router, "/metrics").await.body).unwrap();
    for line in [
        r#"requests_total{endpoint="/v1/chat/completions",status="200"} 1"#,
        r#"requests_total{endpoint="/v1/completions",status="200"} 1"#,
        r#"requests_total{endpoint="/v1/completions",status="404"} 1"#,
        r#"requests_total{endpoint="unmatched",status="404"} 1"#,
        "in_flight 1",
        r#"prompt_tokens_total{model="org/tiny"} 12"#,
        r#"cached_tokens_total{model="org/tiny"} 96"#,
        r#"generated_tokens_total{model="org/tiny"} 8"#,
        r#"time_to_first_token_seconds_count{model="org/tiny"} 2"#,
        r#"inter_token_seconds_count{model="org/tiny"} 6"#,
        r#"request_seconds_count{model="org/tiny"} 2"#,
    ] {
        assert!(text.contains(&format!("blockyard_frontend_{line}\n")), "{line} is not in\n{text}");
    }
    assert!(!text.contains("made-up"), "labels are bounded");
}

#[tokio::test]
async fn a_sane_request_id_is_kept() {
    let router = Fake::saying(vec![]).router();
    let ask = |id: &'static str| Request::get("/live").header("x-request-id", id).body(Body::empty()).unwrap();
    assert_eq!(send(&router, ask("trace-1.a:b")).await.header("x-request-id"), "trace-1.a:b");
    assert_ne!(send(&router, ask("no spaces")).await.header("x-request-id"), "no spaces");
    assert_ne!(get(&router, "/live").await.header("x-request-id"), get(&router, "/live").await.header("x-request-id"));
}

#[tokio::test]
async fn a_model_that_changes_is_made_anew() {
    let engine = Fake::saying(vec![last("", Finish::Stop)]);
    let router = engine.router();
    send(&router, chat(json!({}))).await;
    *engine.card.lock().unwrap() =
        Arc::new(worker::engine::ModelCard { chat_template: Some("other".into()), ..card() });
    send(&router, chat(json!({}))).await;
    *engine.card.lock().unwrap() = Arc::new(worker::engine::ModelCard { chat_template: None, ..card() });
    let without = send(&router, chat(json!({}))).await;
    assert_eq!((without.status.as_u16(), &without.json()["error"]["param"]), (400, &json!("model")));
    *engine.card.lock().unwrap() =
        Arc::new(worker::engine::ModelCard { chat_template: Some("{% if %}".into()), ..card() });
    let broken = send(&router, chat(json!({}))).await;
    let said = broken.json()["error"]["message"].as_str().unwrap().to_owned();
    assert_eq!(broken.status, 400);
    assert!(said.starts_with("The model `org/tiny` has a chat template that does not compile: "), "{said}");
    let lengths: Vec<_> = engine.seen.lock().unwrap().iter().map(|request| request.tokens.len()).collect();
    assert_eq!(lengths[1], "other".len() - 1, "`he` is one token");
}
