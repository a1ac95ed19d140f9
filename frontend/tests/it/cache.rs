//! Cache parameters of requests, as the engine receives them.

use crate::fake::{FakeEngine, chat, completion, last, send};
use axum::http::HeaderValue;
use serde_json::json;
use std::collections::HashSet;
use std::time::Duration;
use worker::engine::{Domain, FinishReason, Priority, Retention};

#[tokio::test]
async fn retention_is_asked_for_in_one_field_of_both_endpoints() {
    let minute = Some(Duration::from_mins(1));
    let table = [
        (json!({}), Retention::default()),
        (json!({ "cache": null }), Retention::default()),
        (json!({ "cache": {} }), Retention::default()),
        (json!({ "cache": { "ttl": 60 } }), Retention { ttl: minute, ..Retention::default() }),
        (json!({ "cache": { "store": false } }), Retention { store: false, ..Retention::default() }),
        (
            json!({ "cache": { "ttl": 60, "pin": 60, "store": true, "priority": "high" } }),
            Retention { ttl: minute, pin: minute, store: true, priority: Priority::High },
        ),
    ];
    for (fields, retention) in table {
        for request in [chat(fields.clone()), completion(fields.clone())] {
            let engine = FakeEngine::with_steps(vec![last("", FinishReason::Stop)]);
            assert_eq!(send(&engine.router(), request).await.status, 200);
            let attributes = engine.only().attributes;
            assert_eq!((attributes.retention, attributes.priority), (retention, Priority::Normal), "{fields}");
        }
    }
}

/// The domains that the engine sees for requests of these tenants.
async fn domains(settings: serde_json::Value, tenants: &[&'static str]) -> Vec<Domain> {
    let engine = FakeEngine::with_steps(vec![last("", FinishReason::Stop)]);
    let settings: frontend::Settings = serde_json::from_value(settings).unwrap();
    let router = frontend::router(engine.clone(), prometheus::Registry::new(), settings).unwrap();
    for tenant in tenants {
        let mut request = chat(json!({}));
        request.headers_mut().insert("x-tenant", HeaderValue::from_static(tenant));
        assert_eq!(send(&router, request).await.status, 200);
    }
    let seen = engine.seen.lock();
    seen.iter().map(|request| request.domain.clone()).collect()
}

#[tokio::test]
async fn a_tenants_domain_is_derived_from_name_and_secret() {
    let folder = tempfile::tempdir().unwrap();
    let secret = |name: &str, text: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        json!({ "tenant_header": "x-tenant", "tenant_secret_file": path })
    };
    let one = secret("one", "0123456789abcdef\n");
    let same = secret("same", "0123456789abcdef");
    let other = secret("other", "fedcba9876543210");
    let tenants = ["ann", "bob", ""];
    let seen = domains(one, &tenants).await;
    assert_eq!(seen.iter().collect::<HashSet<_>>().len(), 3);
    assert_eq!(seen[2], Domain::shared(), "no tenant");
    assert_eq!(domains(same, &tenants).await, seen, "whichever process asks");
    let without = domains(json!({ "tenant_header": "x-tenant" }), &tenants).await;
    for another in [domains(other, &tenants).await, without] {
        assert_eq!(another.iter().chain(&seen).collect::<HashSet<_>>().len(), 5);
    }
    assert_eq!(domains(json!({}), &tenants).await, vec![Domain::shared(); 3], "no header, no tenants");
}

#[tokio::test]
async fn a_missing_or_short_secret_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let short = folder.path().join("short");
    std::fs::write(&short, "sesame\n").unwrap();
    for (path, says) in [(short, "holds 6 bytes"), (folder.path().join("none"), "none")] {
        let settings = frontend::Settings { tenant_secret_file: Some(path), ..frontend::Settings::default() };
        let engine = FakeEngine::with_steps(Vec::new());
        let refused = frontend::router(engine, prometheus::Registry::new(), settings).unwrap_err().to_string();
        assert!(refused.contains(says) && !refused.contains("sesame"), "{refused}");
    }
}
