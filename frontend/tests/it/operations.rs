//! Endpoints for operators.

use crate::fake::{
    FakeEngine, Step, TestResponse, card, chat, completion, first, last, ready, relayed_card, say, send,
};
use async_openai::types::models::{ListModelResponse, Model};
use axum::Router;
use axum::body::Body;
use axum::http::Request;
use futures::StreamExt;
use serde_json::json;
use std::sync::Arc;
use tokio::sync::Semaphore;
use tower::ServiceExt;
use worker::engine::{Error, FinishReason, ModelCard, Output, Readiness, RelayReport};

async fn get(router: &Router, path: &str) -> TestResponse {
    send(router, Request::get(path).body(Body::empty()).unwrap()).await
}

#[tokio::test]
async fn models_are_listed_and_found_by_an_id_with_a_slash() {
    let router = FakeEngine::with_steps(vec![]).router();
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
async fn readiness_has_a_reason_and_liveness_is_independent() {
    let engine = FakeEngine::with_steps(vec![]);
    let router = engine.router();
    assert_eq!(ready(&router).await.status, 200);
    for path in ["/live", "/health", "/ping"] {
        assert_eq!(get(&router, path).await.status, 200);
    }
    assert_eq!(get(&router, "/version").await.json()["version"], env!("CARGO_PKG_VERSION"));
    let ping = Request::post("/ping").body(Body::empty()).unwrap();
    assert_eq!(send(&router, ping).await.status, 200);
    *engine.readiness.lock() = Readiness::NotReady("no decode worker".into());
    let answer = get(&router, "/ready").await;
    assert_eq!(answer.status, 503);
    assert!(answer.json()["error"]["message"].as_str().unwrap().contains("no decode worker"));
    assert_eq!(get(&router, "/health").await.status, 503);
    assert_eq!(get(&router, "/ping").await.status, 503);
    assert_eq!(get(&router, "/live").await.status, 200);
}

#[tokio::test]
async fn unknown_routes_and_methods_are_json_errors() {
    let router = FakeEngine::with_steps(vec![]).router();
    let missing = get(&router, "/v1/nothing").await;
    assert_eq!((missing.status.as_u16(), &missing.json()["error"]["code"]), (404, &json!("unknown_url")));
    let method = get(&router, "/v1/chat/completions").await;
    assert_eq!((method.status.as_u16(), &method.json()["error"]["code"]), (405, &json!("method_not_supported")));
    assert_eq!(method.header("allow"), "POST");
    // As before upstreams, which would have these routes.
    for (method, path) in [("CONNECT", "/"), ("TRACE", "/v1/nothing")] {
        let request = Request::builder().method(method).uri(path).body(Body::empty()).unwrap();
        assert_eq!(send(&router, request).await.status, 405, "{method}");
    }
}

#[tokio::test]
async fn metrics_count_requests_and_tokens() {
    let router = FakeEngine::with_steps(vec![first("a"), say("bc"), last("", FinishReason::Stop)]).router();
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
        "requests_in_flight 0",
        r#"prompt_tokens_total{model="org/tiny"} 12"#,
        r#"cached_tokens_total{model="org/tiny"} 96"#,
        r#"generated_tokens_total{model="org/tiny"} 8"#,
        r#"time_to_first_token_seconds_count{model="org/tiny"} 2"#,
        r#"inter_token_latency_seconds_count{model="org/tiny"} 6"#,
        r#"request_duration_seconds_count{model="org/tiny"} 2"#,
        r#"choices_finished_total{model="org/tiny",reason="stop"} 2"#,
        r#"request_prompt_tokens_sum{model="org/tiny"} 12"#,
        r#"choice_generated_tokens_bucket{model="org/tiny",le="4"} 2"#,
        r#"choice_generated_tokens_bucket{model="org/tiny",le="2"} 0"#,
    ] {
        assert!(text.contains(&format!("blockyard_frontend_{line}\n")), "{line} is not in\n{text}");
    }
    assert!(!text.contains("made-up"), "labels are bounded");
}

#[tokio::test]
async fn rejected_requests_are_not_counted_as_served() {
    let engine = FakeEngine::new(|request| {
        if request.id.starts_with("rejected") {
            return Err(Error::Overloaded { retry_after: std::time::Duration::from_secs(1) });
        }
        Ok(vec![first("a"), last("", FinishReason::Stop)])
    });
    let router = engine.router();
    for (id, status) in [("rejected", 429), ("served", 200)] {
        let mut request = completion(json!({ "prompt": [1, 2, 3] }));
        request.headers_mut().insert("x-request-id", id.parse().unwrap());
        assert_eq!(send(&router, request).await.status, status);
    }
    let text = String::from_utf8(get(&router, "/metrics").await.body).unwrap();
    for line in [
        r#"requests_total{endpoint="/v1/completions",status="429"} 1"#,
        r#"prompt_tokens_total{model="org/tiny"} 3"#,
        r#"request_prompt_tokens_count{model="org/tiny"} 1"#,
        r#"request_duration_seconds_count{model="org/tiny"} 1"#,
    ] {
        assert!(text.contains(&format!("blockyard_frontend_{line}\n")), "{line} is not in\n{text}");
    }
}

#[tokio::test]
async fn metrics_come_as_open_metrics_when_asked_for() {
    let router = FakeEngine::with_steps(vec![last("", FinishReason::Stop)]).router();
    send(&router, chat(json!({}))).await;
    let accept = "application/openmetrics-text;version=1.0.0;q=0.6,text/plain;version=0.0.4;q=0.3";
    let scrape = Request::get("/metrics").header("accept", accept).body(Body::empty()).unwrap();
    let answer = send(&router, scrape).await;
    assert_eq!(answer.header("content-type"), "application/openmetrics-text; version=1.0.0; charset=utf-8");
    let text = String::from_utf8(answer.body).unwrap();
    assert!(text.contains("# TYPE blockyard_frontend_requests counter\n"), "{text}");
    assert!(text.contains("blockyard_frontend_requests_total{"), "{text}");
    assert!(text.ends_with("\n# EOF\n"), "{text}");
    assert_eq!(get(&router, "/metrics").await.header("content-type"), "text/plain; version=0.0.4");
}

#[tokio::test]
async fn choices_that_fail_or_are_cancelled_are_counted_apart() {
    let engine = FakeEngine::new(|request| {
        let end = if request.id.starts_with("fails") { Step::Fail(Error::Failed("lost".into())) } else { Step::Hang };
        Ok(vec![first("ab"), end])
    });
    let router = engine.router();
    let named = |id: &'static str| {
        let mut request = chat(json!({ "stream": true, "n": 2 }));
        request.headers_mut().insert("x-request-id", id.parse().unwrap());
        request
    };
    send(&router, named("fails")).await;
    let mut body = router.clone().oneshot(named("hangs")).await.unwrap().into_body().into_data_stream();
    body.next().await.unwrap().unwrap();
    drop(body);
    let text = String::from_utf8(get(&router, "/metrics").await.body).unwrap();
    for line in [
        r#"choices_finished_total{model="org/tiny",reason="error"} 2"#,
        r#"choices_finished_total{model="org/tiny",reason="cancelled"} 2"#,
    ] {
        assert!(text.contains(line), "{line} is not in\n{text}");
    }
}

#[tokio::test]
async fn a_valid_request_id_is_kept() {
    let router = FakeEngine::with_steps(vec![]).router();
    let ask = |id: &'static str| Request::get("/live").header("x-request-id", id).body(Body::empty()).unwrap();
    assert_eq!(send(&router, ask("trace-1.a:b")).await.header("x-request-id"), "trace-1.a:b");
    assert_ne!(send(&router, ask("no spaces")).await.header("x-request-id"), "no spaces");
    assert_ne!(get(&router, "/live").await.header("x-request-id"), get(&router, "/live").await.header("x-request-id"));
}

#[tokio::test]
async fn a_changed_model_card_is_reloaded() {
    let engine = FakeEngine::with_steps(vec![last("", FinishReason::Stop)]);
    let router = engine.router();
    send(&router, chat(json!({}))).await;
    *engine.card.lock() = Arc::new(worker::engine::ModelCard { chat_template: Some("other".into()), ..card() });
    send(&router, chat(json!({}))).await;
    *engine.card.lock() = Arc::new(worker::engine::ModelCard { chat_template: None, ..card() });
    let without = send(&router, chat(json!({}))).await;
    assert_eq!((without.status.as_u16(), &without.json()["error"]["param"]), (400, &json!("model")));
    *engine.card.lock() = Arc::new(worker::engine::ModelCard { chat_template: Some("{% if %}".into()), ..card() });
    let broken = send(&router, chat(json!({}))).await;
    let said = broken.json()["error"]["message"].as_str().unwrap().to_owned();
    assert_eq!(broken.status, 400);
    assert!(said.starts_with("The model `org/tiny` has a chat template that does not compile: "), "{said}");
    let lengths: Vec<_> = engine.seen.lock().iter().map(|request| request.tokens.len()).collect();
    assert_eq!(lengths[1], "other".len() - 1, "`he` is one token");
}

#[tokio::test]
async fn the_metrics_of_a_model_end_with_it() {
    let output = [Output::Head(Box::default()), Output::Body("{}".into()), Output::End(RelayReport::default())];
    let hangs = Step::Wait(Arc::new(Semaphore::new(0)));
    let engine = FakeEngine::relaying(move |request| {
        let mut steps: Vec<Step> = output.clone().into_iter().map(Step::Relay).collect();
        if &*request.model == "running" {
            steps.insert(1, hangs.clone());
        }
        Ok(steps)
    });
    let adapter = |id: &str| Arc::new(ModelCard { id: id.into(), parent: Some("org/tiny".into()), ..relayed_card() });
    *engine.others.lock() = ["gone", "back-soon", "running"].map(adapter).into();
    let router = engine.router();
    let chat = |model| chat(json!({ "model": model, "stream": true }));
    let running = tokio::spawn({
        let router = router.clone();
        async move { send(&router, chat("running")).await }
    });
    for model in ["gone", "back-soon", "org/tiny"] {
        assert_eq!(send(&router, chat(model)).await.status, 200);
    }
    while engine.open() == 0 {
        tokio::task::yield_now().await;
    }
    let series = async |model: &str| {
        let metrics = String::from_utf8(get(&router, "/metrics").await.body).unwrap();
        metrics.lines().filter(|line| line.contains(&format!("model=\"{model}\""))).count()
    };
    assert!(series("gone").await > 5);
    engine.others.lock().clear();
    *engine.absent.lock() = Some("back-soon".into());
    assert_eq!(series("gone").await, 0);
    for model in ["back-soon", "running", "org/tiny"] {
        assert!(series(model).await > 0, "{model}");
    }
    running.abort();
}
