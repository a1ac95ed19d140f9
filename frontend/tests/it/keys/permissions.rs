//! What a key allows: endpoints, models, and its tenant.

use super::setup::{code, engine, get, server};
use crate::fake::{chat, completion, post, ready, send};
use crate::key_file::{Keys, with_key};
use crate::relay::relayed;
use axum::body::Body;
use axum::http::{Method, Request};
use frontend::Settings;
use serde_json::json;
use worker::engine::RelayReport;

#[tokio::test]
async fn every_endpoint_but_health_and_metrics_needs_a_key() {
    let keys = Keys::new();
    let key = keys.add("ci", |_| ());
    let router = engine().router_with(keys.settings());
    assert_eq!(ready(&router).await.status, 200);
    for path in ["/live", "/health", "/ping", "/metrics"] {
        assert_eq!(send(&router, get(path)).await.status, 200, "{path}");
    }
    let paths = ["/v1/models", "/v1/models/org/tiny", "/version", "/v1/nothing", "/", "/metrics/", "/%6detrics"];
    for path in paths {
        let refused = send(&router, get(path)).await;
        assert_eq!(code(&refused), (401, "invalid_api_key".into()), "{path}");
        assert_eq!(refused.header("www-authenticate"), "Bearer");
        assert_eq!(refused.json()["error"]["type"], "invalid_request_error");
    }
    // The body is not read before the key is known.
    let malformed = || Request::post("/v1/chat/completions").body(Body::from("{")).unwrap();
    assert_eq!(send(&router, malformed()).await.status, 401);
    assert_eq!(send(&router, with_key(malformed(), "by-wrong")).await.status, 401);
    assert_eq!(send(&router, with_key(malformed(), &key)).await.status, 400);
    assert_eq!(send(&router, with_key(chat(json!({})), &key)).await.status, 200);
    let refused = send(&router, get(&format!("/v1/models?api_key={key}"))).await;
    assert!(refused.status == 401 && !String::from_utf8_lossy(&refused.body).contains(&key));

    let settings = Settings { metrics_need_key: true, ..keys.settings() };
    let router = engine().router_with(settings);
    assert_eq!(send(&router, get("/metrics")).await.status, 401);
    assert_eq!(send(&router, with_key(get("/metrics"), &key)).await.status, 200);
    assert_eq!(send(&router, get("/live")).await.status, 200);
}

#[tokio::test]
async fn a_preflight_needs_no_key_and_its_request_does() {
    let keys = Keys::new();
    keys.add("ci", |_| ());
    let cors: Settings = toml::from_str("cors_origins = ['https://chat.example.com']").unwrap();
    let settings = Settings { cors_origins: cors.cors_origins, ..keys.settings() };
    let router = engine().router_with(settings);
    let ask = |method: Method, preflight: bool| {
        let builder = Request::builder().method(method).uri("/v1/chat/completions");
        let builder = builder.header("origin", "https://chat.example.com");
        let builder = if preflight { builder.header("access-control-request-method", "POST") } else { builder };
        builder.body(Body::empty()).unwrap()
    };
    assert_eq!(send(&router, ask(Method::OPTIONS, true)).await.status, 204);
    assert_eq!(send(&router, ask(Method::OPTIONS, false)).await.status, 401);
    let refused = send(&router, ask(Method::POST, false)).await;
    assert_eq!(refused.status, 401);
    assert_eq!(refused.header("access-control-allow-origin"), "https://chat.example.com", "the page can read why");
}

#[tokio::test]
async fn a_key_with_models_sees_and_uses_only_these() {
    let keys = Keys::new();
    let mine = keys.add("mine", |key| key.models = Some(vec!["org/tiny".into(), "org/absent".into()]));
    let other = keys.add("other", |key| key.models = Some(vec!["org/other".into()]));
    let router = engine().router_with(keys.settings());
    let listed = async |key: &str| {
        let list = send(&router, with_key(get("/v1/models"), key)).await.json();
        list["data"].as_array().unwrap().iter().map(|model| model["id"].as_str().unwrap().to_owned()).collect()
    };
    let listed: [Vec<String>; 2] = [listed(&mine).await, listed(&other).await];
    assert_eq!(listed, [vec!["org/tiny".to_owned()], vec![]]);
    assert_eq!(send(&router, with_key(get("/v1/models/org/tiny"), &mine)).await.status, 200);
    for request in [
        get("/v1/models/org/tiny"),
        get("/v1/models/org/unknown"),
        chat(json!({})),
        completion(json!({ "model": "org/unknown" })),
        post("/tokenize", &json!({ "model": "org/tiny", "prompt": "x" })),
    ] {
        let path = request.uri().to_string();
        let refused = send(&router, with_key(request, &other)).await;
        assert_eq!(code(&refused), (403, "model_not_allowed".into()), "{path}");
    }
    let absent = send(&router, with_key(completion(json!({ "model": "org/absent" })), &mine)).await;
    assert_eq!(code(&absent), (404, "model_not_found".into()));
    let absent = send(&router, with_key(chat(json!({ "model": "org/other" })), &other)).await;
    assert!(absent.status == 404 && !absent.json().to_string().contains("org/tiny"), "no model of others is named");
    assert_eq!(send(&router, with_key(chat(json!({})), &mine)).await.status, 200);
}

#[tokio::test]
async fn the_tenant_of_the_key_wins_over_the_header() {
    let keys = Keys::new();
    let ann = keys.add("ann", |key| key.tenant = Some("ann".into()));
    let proxy = keys.add("proxy", |_| ());
    let engine = engine();
    let tenant_header = Some("x-tenant".to_owned().try_into().unwrap());
    let router = engine.router_with(Settings { tenant_header, ..keys.settings() });
    for (key, expected) in [(&ann, "ann"), (&proxy, "bob")] {
        let mut request = with_key(chat(json!({})), key);
        request.headers_mut().insert("x-tenant", "bob".parse().unwrap());
        assert_eq!(send(&router, request).await.status, 200);
        assert_eq!(&*engine.seen.lock().last().unwrap().attributes.tenant, expected);
    }
}

#[tokio::test]
async fn an_engine_gets_no_key_and_no_unnamed_model() {
    let keys = Keys::new();
    let all = keys.add("all", |_| ());
    let some = keys.add("some", |key| key.models = Some(vec!["org/tiny".into()]));
    let engine = server(RelayReport { completion_tokens: Some(3), ..RelayReport::default() });
    let router = engine.router_with(keys.settings());
    let ask = async |key: &str, body: &'static str| {
        let request = Request::post("/v1/audio/transcriptions").header("x-api-key", key).header("api-key", key);
        send(&router, with_key(request.body(Body::from(body)).unwrap(), key)).await.status.as_u16()
    };
    let form = "--x\r\ncontent-disposition: form-data; name=\"model\"\r\n\r\norg/secret\r\n--x--";
    assert_eq!([ask(&all, form).await, ask(&some, form).await], [200, 403]);
    assert_eq!(ask(&some, r#"{"model":"org/tiny"}"#).await, 200);
    for body in [
        r#"{"model":"org/tiny","model":"org/secret"}"#,
        r#"{"model":"org/secret","model":"org/tiny"}"#,
        r#"{"mode\u006c":"org/secret","model":"org/tiny"}"#,
        r#"{"model":"org/tiny","Model":"org/secret"}"#,
        r#"{"MODEL":"org/secret"}"#,
    ] {
        assert_eq!(ask(&some, body).await, 403, "servers differ in which they read: {body}");
    }
    assert_eq!(ask(&some, r#"{"model":["org/secret"]}"#).await, 403);
    for (adapter, expected) in [
        (r#""lora_path":"org/secret""#, 403),
        (r#""lora_path":[null,"org/secret"]"#, 403),
        (r#""lora_path":null,"lora_id":7"#, 403),
        (r#""LoRA":[{"id":0,"scale":1}]"#, 403),
        (r#""lora_path":"org/tiny","lora_path":null"#, 403),
        (r#""lora_path":["org/tiny",null],"lora_id":null"#, 200),
        (r#""parameters":{"adapter_id":"org/secret"}"#, 403),
        (r#""parameters":{"adapter_id":"org/tiny","Adapter_ID":"org/secret"}"#, 403),
        (r#""parameters":{"adapter_id":"org/tiny"},"Parameters":{"adapter_id":"org/secret"}"#, 403),
        (r#""parameters":{"adapter_id":"org/tiny","max_new_tokens":9}"#, 200),
    ] {
        let body = format!(r#"{{"model":"org/tiny","text":"x",{adapter}}}"#);
        let request = |key: &str| with_key(Request::post("/generate").body(Body::from(body.clone())).unwrap(), key);
        assert_eq!(send(&router, request(&some)).await.status, expected, "{adapter}");
        assert_eq!(send(&router, request(&all)).await.status, 200, "{adapter}");
    }
    for (content_type, expected) in [
        ("application/json; charset=utf-8", 200),
        ("application/x-www-form-urlencoded", 403),
        ("multipart/form-data; boundary=x", 403),
        ("text/plain", 403),
    ] {
        let both = r#"{"model":"org/tiny","x":"&model=org/secret&y="}"#;
        let request = Request::post("/v1/audio/transcriptions").header("content-type", content_type);
        let request = with_key(request.body(Body::from(both)).unwrap(), &some);
        assert_eq!(send(&router, request).await.status, expected, "a server may read a form: {content_type}");
    }
    let invoke = Request::post("/invocations").header("x-amzn-sagemaker-adapter-identifier", "org/secret");
    let unnamed = with_key(invoke.body(Body::from(r#"{"messages":[]}"#)).unwrap(), &some);
    assert_eq!(send(&router, unnamed).await.status, 403, "a header names no model");
    let seen = engine.seen.lock();
    assert_eq!(seen.len(), 15);
    for request in &*seen {
        let http = relayed(request);
        assert!(["authorization", "api-key", "x-api-key"].iter().all(|name| !http.headers.contains_key(*name)));
    }
}
