//! Scheduling parameters of requests, as the engine receives them.

use crate::fake::{FakeEngine, chat, last, send};
use axum::Router;
use axum::body::Body;
use axum::http::{HeaderValue, Request};
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;
use worker::engine::{FinishReason, Priority};

fn behind_a_proxy() -> (Arc<FakeEngine>, Router) {
    let engine = FakeEngine::with_steps(vec![last("", FinishReason::Stop)]);
    let settings: frontend::Settings = serde_json::from_value(json!({ "tenant_header": "X-Tenant" })).unwrap();
    let router = frontend::router(engine.clone(), prometheus::Registry::new(), settings).unwrap();
    (engine, router)
}

fn with(headers: &[(&'static str, &str)], fields: Value) -> Request<Body> {
    let mut request = chat(fields);
    for (name, value) in headers {
        request.headers_mut().append(*name, HeaderValue::from_str(value).unwrap());
    }
    request
}

#[tokio::test]
async fn a_priority_has_a_name_or_a_number_as_vllm_counts() {
    let table = [
        (json!({}), Priority::Normal),
        (json!({ "priority": null }), Priority::Normal),
        (json!({ "priority": "low" }), Priority::Low),
        (json!({ "priority": "normal" }), Priority::Normal),
        (json!({ "priority": "high" }), Priority::High),
        (json!({ "priority": -3 }), Priority::High),
        (json!({ "priority": 0 }), Priority::Normal),
        (json!({ "priority": 7 }), Priority::Low),
    ];
    for (fields, priority) in table {
        let engine = FakeEngine::with_steps(vec![last("", FinishReason::Stop)]);
        assert_eq!(send(&engine.router(), chat(fields.clone())).await.status, 200);
        assert_eq!(engine.only().attributes.priority, priority, "{fields}");
    }
}

#[tokio::test(start_paused = true)]
async fn the_earlier_deadline_applies_from_arrival() {
    type Headers = &'static [(&'static str, &'static str)];
    let table: [(Headers, Value, Option<u64>); 4] = [
        (&[], json!({}), None),
        (&[], json!({ "deadline_ms": 1500 }), Some(1500)),
        (&[("x-blockyard-deadline-ms", " 700 ")], json!({}), Some(700)),
        (&[("x-blockyard-deadline-ms", "700")], json!({ "deadline_ms": 1500 }), Some(700)),
    ];
    for (headers, fields, within) in table {
        let engine = FakeEngine::with_steps(vec![last("", FinishReason::Stop)]);
        let now = Instant::now();
        assert_eq!(send(&engine.router(), with(headers, fields)).await.status, 200);
        assert_eq!(engine.only().attributes.deadline, within.map(|ms| now + Duration::from_millis(ms)));
    }
    let engine = FakeEngine::with_steps(vec![crate::fake::first("a"), last("", FinishReason::Stop)]);
    send(&engine.router(), chat(json!({ "n": 2, "deadline_ms": 1500 }))).await;
    let deadlines: Vec<bool> = engine.seen.lock().iter().map(|request| request.attributes.deadline.is_some()).collect();
    assert_eq!(deadlines, [true, false], "the client has its first token when the second choice starts");
}

#[tokio::test]
async fn the_tenant_comes_from_the_configured_header() {
    let (engine, router) = behind_a_proxy();
    assert_eq!(send(&router, with(&[("x-tenant", "blue/7")], json!({}))).await.status, 200);
    assert_eq!(send(&router, chat(json!({}))).await.status, 200);
    let tenants: Vec<Arc<str>> = engine.seen.lock().iter().map(|request| request.attributes.tenant.clone()).collect();
    assert_eq!(tenants, ["blue/7".into(), Arc::<str>::from("")]);

    let engine = FakeEngine::with_steps(vec![last("", FinishReason::Stop)]);
    send(&engine.router(), with(&[("x-tenant", "blue")], json!({}))).await;
    assert_eq!(&*engine.only().attributes.tenant, "", "without the setting the header is ignored");
}

#[tokio::test]
async fn invalid_headers_are_rejected_by_name() {
    let (engine, router) = behind_a_proxy();
    let long = "x".repeat(65);
    let table: [(&[(&str, &str)], &str); 6] = [
        (&[("x-tenant", "a b")], "x-tenant"),
        (&[("x-tenant", &long)], "x-tenant"),
        (&[("x-tenant", "a"), ("x-tenant", "b")], "x-tenant"),
        (&[("x-blockyard-deadline-ms", "soon")], "x-blockyard-deadline-ms"),
        (&[("x-blockyard-deadline-ms", "0")], "x-blockyard-deadline-ms"),
        (&[("x-blockyard-deadline-ms", "")], "x-blockyard-deadline-ms"),
    ];
    for (headers, param) in table {
        let answer = send(&router, with(headers, json!({}))).await;
        assert_eq!((answer.status.as_u16(), &answer.json()["error"]["param"]), (400, &json!(param)), "{headers:?}");
    }
    assert!(engine.seen.lock().is_empty());
    let error = serde_json::from_value::<frontend::Settings>(json!({ "tenant_header": "x tenant" })).unwrap_err();
    assert!(error.to_string().contains("x-tenant"), "{error}");
}
