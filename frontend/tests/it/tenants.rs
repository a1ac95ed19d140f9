//! Metrics of tenants: requests, rejections, tokens and limits of keys, and the number of tenants that are exported.

use crate::fake::{FakeEngine, Step, chat, completion, first, last, send};
use crate::key_file::{Keys, with_key};
use axum::Router;
use axum::body::Body;
use axum::http::Request;
use frontend::{KeyEntry, Settings};
use serde_json::json;
use std::num::NonZero;
use std::sync::Arc;
use worker::engine::{Error, FinishReason};

/// An engine that finds 48 tokens of the prompt in host memory, and generates three tokens.
fn engine() -> Arc<FakeEngine> {
    FakeEngine::with_steps(vec![first("ab"), last("c", FinishReason::Length)])
}

/// Gives a key to a tenant, with limits of requests and tokens per minute; 0: without the limit.
fn of(tenant: &'static str, requests: u32, tokens: u32) -> impl FnOnce(&mut KeyEntry) {
    move |key| {
        key.tenant = Some(tenant.to_owned());
        key.requests_per_minute = NonZero::new(requests);
        key.tokens_per_minute = NonZero::new(tokens);
    }
}

fn with(mut request: Request<Body>, header: &'static str, value: &str) -> Request<Body> {
    request.headers_mut().insert(header, value.parse().unwrap());
    request
}

/// The lines of the metrics of tenants.
async fn metrics(router: &Router) -> Vec<String> {
    let answer = send(router, Request::get("/metrics").body(Body::empty()).unwrap()).await;
    let text = String::from_utf8(answer.body).unwrap();
    let lines = text.lines().filter_map(|line| line.strip_prefix("blockyard_frontend_tenant_"));
    lines.map(str::to_owned).collect()
}

fn assert_has(lines: &[String], expected: &[&str]) {
    for line in expected {
        assert!(lines.iter().any(|exported| exported == line), "{line} is not in\n{}", lines.join("\n"));
    }
}

/// The value of a line, whose last digits depend on the time.
fn value(lines: &[String], name: &str) -> f64 {
    let line = lines.iter().find_map(|line| line.strip_prefix(name));
    line.unwrap_or_else(|| panic!("no {name} in\n{}", lines.join("\n"))).trim().parse().unwrap()
}

#[tokio::test]
async fn each_tenant_has_its_requests_tokens_and_rejections() {
    let keys = Keys::new();
    let ann = keys.add("ann", of("ann", 0, 0));
    let bob = keys.add("bob", of("bob", 2, 0));
    let router = engine().router_with(keys.settings());
    assert_has(&metrics(&router).await, &[r#"requests_total{outcome="ok",tenant="ann"} 0"#]);
    for _ in 0..2 {
        let prompt = json!({ "prompt": [1, 2, 3, 4, 5] });
        assert_eq!(send(&router, with_key(completion(prompt), &ann)).await.status, 200);
    }
    assert_eq!(send(&router, with_key(completion(json!({ "prompt": 7.5 })), &ann)).await.status, 400);
    assert_eq!(send(&router, with_key(chat(json!({ "stream": true })), &bob)).await.status, 200);
    for expected in [404, 429] {
        assert_eq!(send(&router, with_key(chat(json!({ "model": "none" })), &bob)).await.status, expected);
    }
    let lines = metrics(&router).await;
    assert_has(
        &lines,
        &[
            r#"requests_total{outcome="ok",tenant="ann"} 2"#,
            r#"requests_total{outcome="rejected",tenant="ann"} 1"#,
            r#"rejections_total{reason="invalid_request",tenant="ann"} 1"#,
            r#"prompt_tokens_total{tenant="ann"} 10"#,
            r#"cached_tokens_total{tenant="ann"} 96"#,
            r#"generated_tokens_total{tenant="ann"} 6"#,
            r#"requests_total{outcome="ok",tenant="bob"} 1"#,
            r#"requests_total{outcome="rejected",tenant="bob"} 2"#,
            r#"rejections_total{reason="invalid_request",tenant="bob"} 1"#,
            r#"rejections_total{reason="request_limit",tenant="bob"} 1"#,
            r#"generated_tokens_total{tenant="bob"} 3"#,
            r#"limit_per_minute{limit="requests",tenant="bob"} 2"#,
        ],
    );
    assert!(!lines.iter().any(|line| line.starts_with("limit_") && line.contains("ann")), "ann has no limit");
}

#[tokio::test]
async fn failed_and_cancelled_requests_are_counted_apart() {
    let keys = Keys::new();
    let ann = keys.add("ann", of("ann", 0, 0));
    let failing = FakeEngine::with_steps(vec![Step::Fail(Error::Failed("scripted".into()))]);
    let router = failing.router_with(keys.settings());
    assert_eq!(send(&router, with_key(completion(json!({})), &ann)).await.status, 500);
    let lines = metrics(&router).await;
    assert_has(
        &lines,
        &[r#"requests_total{outcome="failed",tenant="ann"} 1"#, r#"prompt_tokens_total{tenant="ann"} 0"#],
    );

    let router = FakeEngine::with_steps(vec![first("ab"), Step::Hang]).router_with(keys.settings());
    let request = with_key(completion(json!({ "stream": true })), &ann);
    let response = tower::ServiceExt::oneshot(router.clone(), request).await.unwrap();
    drop(response);
    assert_has(&metrics(&router).await, &[r#"requests_total{outcome="cancelled",tenant="ann"} 1"#]);
}

#[tokio::test]
async fn the_use_of_limits_is_added_up_over_the_keys_of_a_tenant() {
    let keys = Keys::new();
    let first_key = keys.add("first", of("ann", 100, 1000));
    let second_key = keys.add("second", of("ann", 0, 500));
    let router = engine().router_with(keys.settings());
    for key in [&first_key, &second_key] {
        let prompt = json!({ "prompt": [1, 2, 3, 4, 5] });
        assert_eq!(send(&router, with_key(completion(prompt), key)).await.status, 200);
    }
    let lines = metrics(&router).await;
    let limits = [
        r#"limit_per_minute{limit="requests",tenant="ann"} 100"#,
        r#"limit_per_minute{limit="tokens",tenant="ann"} 1500"#,
    ];
    assert_has(&lines, &limits);
    // Of each key five tokens of the prompt and three of the output were taken. They are refilled with time.
    let tokens = value(&lines, r#"limit_used{limit="tokens",tenant="ann"}"#);
    assert!((0.0..=16.0).contains(&tokens), "{tokens}");
    let requests = value(&lines, r#"limit_used{limit="requests",tenant="ann"}"#);
    assert!((0.0..=1.0).contains(&requests), "{requests}");
}

#[tokio::test]
async fn names_from_a_header_are_exported_up_to_the_limit() {
    let tenant_header = Some("x-tenant".to_owned().try_into().unwrap());
    let settings = Settings { tenant_header, tenant_metrics: 2, ..Settings::default() };
    let router = engine().router_with(settings.clone());
    for tenant in ["a", "b", "c", "d", "e", "a"] {
        assert_eq!(send(&router, with(chat(json!({})), "x-tenant", tenant)).await.status, 200);
    }
    // Without a tenant it is counted for none.
    assert_eq!(send(&router, chat(json!({}))).await.status, 200);
    let lines = metrics(&router).await;
    let served: Vec<&str> =
        lines.iter().filter_map(|line| line.strip_prefix(r#"requests_total{outcome="ok","#)).collect();
    assert_eq!(served, [r#"tenant="a"} 2"#, r#"tenant="b"} 1"#, r#"tenant="other"} 3"#]);

    let router = engine().router_with(Settings { tenant_metrics: 0, ..settings });
    assert_eq!(send(&router, with(chat(json!({})), "x-tenant", "a")).await.status, 200);
    assert_eq!(metrics(&router).await, Vec::<String>::new(), "they are off");
}
