//! API keys: which requests need one, what it allows, its limits, and changes of the key file.

use crate::fake::{FakeEngine, Step, TestResponse, card, chat, completion, first, last, post, send};
use crate::key_file::{Keys, with_key};
use axum::Router;
use axum::body::Body;
use axum::http::{HeaderMap, Method, Request, StatusCode};
use bytes::Bytes;
use frontend::{KeyFile, Server, Settings, Shutdown, Tokenizers};
use futures::StreamExt;
use futures::future::BoxFuture;
use serde_json::json;
use spans::Tracer;
use std::collections::BTreeMap;
use std::fs;
use std::net::SocketAddr;
use std::num::NonZero;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::{Instant, sleep};
use tower::ServiceExt;
use worker::engine::{
    FinishReason, ModelCard, Output, RelayProgress, RelayReport, ResponseHead, Tokenize, TokenizeError, Work,
};

/// Time for what takes less than a second on an idle machine.
const TIMEOUT: Duration = Duration::from_mins(1);

fn engine() -> Arc<FakeEngine> {
    FakeEngine::with_steps(vec![first("ab"), last("c", FinishReason::Length)])
}

fn get(path: &str) -> Request<Body> {
    Request::get(path).body(Body::empty()).unwrap()
}

fn code(response: &TestResponse) -> (u16, String) {
    let code = response.json()["error"]["code"].as_str().unwrap_or_default().to_owned();
    (response.status.as_u16(), code)
}

#[tokio::test]
async fn every_endpoint_but_health_and_metrics_needs_a_key() {
    let keys = Keys::new();
    let key = keys.add("ci", |_| ());
    let router = engine().router_with(keys.settings());
    for path in ["/live", "/ready", "/health", "/ping", "/metrics"] {
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
        crate::fake::post("/tokenize", &json!({ "model": "org/tiny", "prompt": "x" })),
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
async fn requests_beyond_a_limit_get_429_with_retry_after() {
    let keys = Keys::new();
    let few = keys.add("few", |key| key.requests_per_minute = NonZero::new(2));
    let tokens = keys.add("tokens", |key| key.tokens_per_minute = NonZero::new(10));
    let unlimited = keys.add("unlimited", |_| ());
    let router = engine().router_with(keys.settings());
    let ask = async |key: &str, prompt: &[u32]| {
        let response = send(&router, with_key(completion(json!({ "prompt": prompt })), key)).await;
        if response.status == StatusCode::TOO_MANY_REQUESTS {
            assert_eq!(code(&response).1, "rate_limit_exceeded");
            Err(response.header("retry-after").parse::<u64>().unwrap())
        } else {
            assert_eq!(response.status, 200);
            Ok(())
        }
    };
    assert_eq!([ask(&few, &[1]).await, ask(&few, &[1]).await], [Ok(()); 2]);
    let wait = ask(&few, &[1]).await.unwrap_err();
    assert!((1..=30).contains(&wait), "{wait} s for one request");
    // Each has two tokens of the prompt and three of the output.
    assert_eq!([ask(&tokens, &[1, 2]).await, ask(&tokens, &[1, 2]).await], [Ok(()); 2]);
    let wait = ask(&tokens, &[1, 2]).await.unwrap_err();
    assert!((1..=12).contains(&wait), "{wait} s for two tokens");
    for _ in 0..20 {
        assert_eq!(ask(&unlimited, &[1, 2]).await, Ok(()));
    }
}

#[tokio::test]
async fn a_request_that_fails_costs_no_tokens() {
    let keys = Keys::new();
    let key = keys.add("tokens", |key| key.tokens_per_minute = NonZero::new(10));
    let engine = FakeEngine::with_steps(vec![Step::Fail(worker::engine::Error::Failed("scripted".into()))]);
    let router = engine.router_with(keys.settings());
    for _ in 0..4 {
        let request = with_key(completion(json!({ "prompt": [1, 2, 3, 4, 5, 6, 7, 8] })), &key);
        assert_eq!(send(&router, request).await.status, 500);
    }
}

#[tokio::test]
async fn a_request_that_a_worker_may_have_computed_costs_its_prompt() {
    let failed = || Step::Fail(worker::engine::Error::Failed("scripted".into()));
    let unavailable = Step::Fail(worker::engine::Error::Unavailable("connection refused".into()));
    let no_answer = Step::Fail(worker::engine::Error::NoAnswer("connection closed".into()));
    // Attempts, how many of them are refused, and the statuses of two requests.
    for (attempts, refused, step, expected) in [
        (0, 0, Step::Hang, [504, 504]),
        (1, 0, Step::Hang, [504, 429]),
        (2, 1, Step::Hang, [504, 429]),
        (0, 0, failed(), [500, 500]),
        (1, 0, failed(), [500, 429]),
        (1, 1, unavailable, [503, 503]),
        (1, 0, no_answer, [503, 429]),
    ] {
        for is_relayed in [false, true] {
            let keys = Keys::new();
            let key = keys.add("tokens", |key| key.tokens_per_minute = NonZero::new(10));
            let steps = vec![step.clone()];
            let engine = FakeEngine::new(move |request| {
                (0..attempts).for_each(|_| request.attributes.attempts.begin());
                (0..refused).for_each(|_| request.attributes.attempts.refused());
                Ok(steps.clone())
            });
            if is_relayed {
                let card = ModelCard { tokenizer: None, is_relayed, has_exact_blocks: false, ..card() };
                *engine.card.lock() = Arc::new(card);
            }
            let hangs = matches!(step, Step::Hang);
            let max_request_time = hangs.then(|| units::HumanDuration::millis(300));
            let router = engine.router_with(Settings { max_request_time, ..keys.settings() });
            for status in expected {
                let request = with_key(completion(json!({ "prompt": [1, 2, 3, 4, 5, 6, 7, 8] })), &key);
                let answer = send(&router, request).await.status;
                assert_eq!(answer, status, "{attempts} attempts, {refused} refused, relayed: {is_relayed}");
            }
        }
    }
}

#[tokio::test]
async fn a_client_that_leaves_before_the_response_pays_for_its_prompt() {
    for is_relayed in [false, true] {
        let keys = Keys::new();
        let key = keys.add("tokens", |key| key.tokens_per_minute = NonZero::new(10));
        let engine = FakeEngine::with_steps(vec![Step::Hang]);
        if is_relayed {
            let card = ModelCard { tokenizer: None, is_relayed, has_exact_blocks: false, ..card() };
            *engine.card.lock() = Arc::new(card);
        }
        let router = engine.router_with(keys.settings());
        let ask = || with_key(completion(json!({ "prompt": [1, 2, 3, 4, 5, 6, 7, 8] })), &key);
        let left = tokio::spawn(router.clone().oneshot(ask()));
        while engine.seen.lock().is_empty() {
            sleep(Duration::from_millis(1)).await;
        }
        left.abort();
        assert!(left.await.unwrap_err().is_cancelled());
        assert_eq!(send(&router, ask()).await.status, 429, "relayed: {is_relayed}");
    }
}

#[tokio::test]
async fn an_engine_gets_no_key_and_no_unnamed_model() {
    let keys = Keys::new();
    let all = keys.add("all", |_| ());
    let some = keys.add("some", |key| key.models = Some(vec!["org/tiny".into()]));
    let head = ResponseHead {
        status: StatusCode::OK,
        headers: HeaderMap::new(),
        worker: None,
        explain: None,
        progress: None,
        tunnel: None,
    };
    let report = RelayReport { completion_tokens: Some(3), ..RelayReport::default() };
    let steps = [Output::Head(Box::new(head)), Output::Body(Bytes::from_static(b"{}")), Output::End(report)];
    let engine = FakeEngine::with_steps(steps.into_iter().map(Step::Relay).collect());
    *engine.card.lock() = Arc::new(ModelCard { tokenizer: None, is_relayed: true, has_exact_blocks: false, ..card() });
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
        let Work::Relay(http) = &request.work else { panic!("it is relayed") };
        assert!(["authorization", "api-key", "x-api-key"].iter().all(|name| !http.headers.contains_key(*name)));
    }
}

/// An engine that says the tokens of every prompt: five.
struct FiveTokens;

impl Tokenize for FiveTokens {
    fn name(&self) -> &'static str {
        "five tokens"
    }

    fn tokenize(&self, _: Bytes) -> BoxFuture<'_, Result<Vec<u32>, TokenizeError>> {
        Box::pin(std::future::ready(Ok(vec![0; 5])))
    }
}

#[tokio::test]
async fn an_estimated_prompt_is_corrected_to_what_the_engine_says() {
    // 240 bytes are estimated as 61 tokens, so a bucket of 100 admits one such prompt, if it were not corrected.
    let prompt = json!({ "prompt": "x".repeat(240) });
    let report = |prompt_tokens| RelayReport { prompt_tokens, completion_tokens: Some(3), ..RelayReport::default() };
    for (is_asked, report, expected) in [
        (false, report(Some(10)), [200, 200, 200]),
        (false, report(Some(500)), [200, 429, 429]),
        (false, report(None), [200, 429, 429]),
        (true, report(None), [200, 200, 200]),
    ] {
        let keys = Keys::new();
        let key = keys.add("tokens", |key| key.tokens_per_minute = NonZero::new(100));
        let head = ResponseHead {
            status: StatusCode::OK,
            headers: HeaderMap::new(),
            worker: None,
            explain: None,
            progress: None,
            tunnel: None,
        };
        let steps = [Output::Head(Box::new(head)), Output::Body(Bytes::from_static(b"{}")), Output::End(report)];
        let engine = FakeEngine::with_steps(steps.into_iter().map(Step::Relay).collect());
        let card = ModelCard { tokenizer: None, is_relayed: true, has_exact_blocks: is_asked, ..card() };
        *engine.card.lock() = Arc::new(card.clone());
        let registry = prometheus::Registry::new();
        let tokenizers = Arc::new(Tokenizers::new(BTreeMap::new(), &registry).unwrap());
        let _server = tokenizers.add_server(&card, None, Arc::new(FiveTokens)).await;
        let parts = frontend::Parts { tokenizers, tracer: Tracer::off() };
        let router = frontend::router_with(parts, engine, registry, keys.settings()).unwrap();
        let mut statuses = Vec::new();
        for _ in 0..3 {
            statuses.push(send(&router, with_key(completion(prompt.clone()), &key)).await.status.as_u16());
        }
        assert_eq!(statuses, expected, "asked: {is_asked}, {report:?}");
    }
}

#[tokio::test]
async fn output_that_the_engine_does_not_report_is_counted() {
    let events = "data: {\"text\":\"x\"}\n\n".repeat(200);
    let json = json!({ "text": "x".repeat(800) }).to_string();
    let verbose = json!({ "text": "x", "segments": [{ "text": "x".repeat(800) }] }).to_string();
    let message = json!({ "role": "assistant", "content": "tok" });
    let line = json!({ "model": "tiny", "created_at": "2026-11-26T15:00:00Z", "message": message, "done": false });
    let lines = format!("{line}\n").repeat(40);
    let image = json!({ "data": [{ "b64_json": "iVBORw0KGgo/".repeat(400) }] }).to_string();
    let base64 = "iVBORw0KGgo/".repeat(400);
    let none = RelayReport::default();
    let embeddings = RelayReport { prompt_tokens: Some(1), ..none };
    let few = RelayReport { completion_tokens: Some(1), ..none };
    for (content_type, body, path, report, expected) in [
        ("text/event-stream; charset=utf-8", &events, "/generate", none, 429),
        ("text/event-stream", &events, "/v1/completions", embeddings, 429),
        ("text/event-stream", &events, "/v1/completions", few, 200),
        ("application/json", &json, "/generate", none, 429),
        ("application/json", &json, "/v1/chat/completions", embeddings, 429),
        ("text/plain", &json, "/v1/audio/transcriptions", none, 429),
        ("", &json, "/v1/audio/transcriptions", none, 429),
        ("application/json", &json, "/v1/audio/transcriptions", none, 429),
        ("application/json", &verbose, "/v1/audio/transcriptions", none, 200),
        ("application/json", &json, "/v1/completions", few, 200),
        ("application/json", &json, "/v1/embeddings", embeddings, 200),
        ("application/json", &json, "/rerank", none, 200),
        ("application/json", &json, "/detokenize", none, 200),
        ("application/json", &json, "/v1/messages/count_tokens", none, 200),
        ("application/json", &json, "/v1/chat/completions/render", none, 200),
        ("application/json", &json, "/v1/completions/render", none, 200),
        ("application/json", &json, "/v1/messages/render", none, 200),
        ("application/json", &json, "/v1/responses/render", none, 200),
        ("audio/wav", &json, "/v1/audio/speech", none, 200),
        ("text/plain", &base64, "/v1/audio/speech", none, 200),
        ("application/json", &image, "/v1/images/generations", none, 200),
        ("application/x-ndjson", &lines, "/v1/chat/completions", none, 200),
        ("application/x-ndjson", &lines.repeat(3), "/v1/chat/completions", none, 429),
    ] {
        let keys = Keys::new();
        let key = keys.add("tokens", |key| key.tokens_per_minute = NonZero::new(100));
        let headers: HeaderMap =
            [("content-type".parse().unwrap(), content_type.parse().unwrap())].into_iter().collect();
        let head =
            ResponseHead { status: StatusCode::OK, headers, worker: None, explain: None, progress: None, tunnel: None };
        let steps = [Output::Head(Box::new(head)), Output::Body(body.clone().into()), Output::End(report)];
        let engine = FakeEngine::with_steps(steps.into_iter().map(Step::Relay).collect());
        *engine.card.lock() =
            Arc::new(ModelCard { tokenizer: None, is_relayed: true, has_exact_blocks: false, ..card() });
        let router = engine.router_with(keys.settings());
        let mut statuses = Vec::new();
        for _ in 0..2 {
            // What the request says of a stream makes no difference, and so does its method. Routes take POST only.
            let body = json!({ "model": "org/tiny", "prompt": [1], "n": 2, "stream": "maybe" });
            let mut request = with_key(post(path, &body), &key);
            if path == "/generate" {
                *request.method_mut() = Method::PUT;
            }
            statuses.push(send(&router, request).await.status.as_u16());
        }
        assert_eq!(statuses, [200, expected], "{content_type} {path} {report:?}");
    }
}

#[tokio::test]
async fn the_output_of_a_response_that_is_retrieved_counts_once() {
    let head = ResponseHead {
        status: StatusCode::OK,
        headers: HeaderMap::new(),
        worker: None,
        explain: None,
        progress: None,
        tunnel: None,
    };
    let report = RelayReport {
        prompt_tokens: Some(1),
        completion_tokens: Some(60),
        response_id: Some(7),
        ..RelayReport::default()
    };
    let steps = [Output::Head(Box::new(head)), Output::Body(Bytes::from_static(b"{}")), Output::End(report)];
    let engine = FakeEngine::with_steps(steps.into_iter().map(Step::Relay).collect());
    *engine.card.lock() = Arc::new(ModelCard { tokenizer: None, is_relayed: true, has_exact_blocks: false, ..card() });
    let keys = Keys::new();
    let added = ["background", "at-once", "cancelled", "twice"].map(|name| {
        keys.add(name, |key| {
            key.tokens_per_minute = NonZero::new(100);
            key.tenant = Some(name.into());
        })
    });
    let router = engine.router_with(keys.settings());
    let [background, at_once, cancelled, twice] = &added;
    let create = || post("/v1/responses", &json!({ "model": "org/tiny", "input": [] }));
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
        let next = completion(json!({ "prompt": vec![1; 30] }));
        assert_eq!(send(&router, with_key(next, key)).await.status, expected);
    }
}

#[tokio::test]
async fn the_rest_of_a_response_that_was_left_counts_when_it_is_retrieved() {
    let report = RelayReport { completion_tokens: Some(60), response_id: Some(7), ..RelayReport::default() };
    let creations = AtomicUsize::new(0);
    let engine = FakeEngine::new(move |request| {
        let Work::Relay(http) = &request.work else { panic!("it is relayed") };
        // The second response with this id is computed in the background.
        let is_left = http.method == "POST" && creations.fetch_add(1, Ordering::Relaxed) == 1;
        let progress = Arc::<RelayProgress>::default();
        progress.set(RelayReport { response_id: Some(7), ..RelayReport::default() });
        let headers = [("content-type".parse().unwrap(), "text/event-stream".parse().unwrap())].into_iter().collect();
        let head = ResponseHead {
            status: StatusCode::OK,
            headers,
            worker: None,
            explain: None,
            progress: Some(progress),
            tunnel: None,
        };
        let event = Output::Body(Bytes::from_static(b"data: {}\n\n"));
        let end = if is_left { Step::Hang } else { Step::Relay(Output::End(report)) };
        Ok(vec![Step::Relay(Output::Head(Box::new(head))), Step::Relay(event), end])
    });
    *engine.card.lock() = Arc::new(ModelCard { tokenizer: None, is_relayed: true, has_exact_blocks: false, ..card() });
    let keys = Keys::new();
    let key = keys.add("left", |key| key.tokens_per_minute = NonZero::new(100));
    let router = engine.router_with(keys.settings());
    let create = || with_key(post("/v1/responses", &json!({ "model": "org/tiny", "input": [] })), &key);
    assert_eq!(send(&router, create()).await.status, 200);
    let mut left = router.clone().oneshot(create()).await.unwrap().into_body().into_data_stream();
    assert!(left.next().await.unwrap().is_ok());
    drop(left);
    assert_eq!(send(&router, with_key(get("/v1/responses/resp_1"), &key)).await.status, 200);
    let next = with_key(completion(json!({ "prompt": [1] })), &key);
    assert_eq!(send(&router, next).await.status, 429, "it has used 60, 1 and 59 tokens");
}

#[tokio::test]
async fn a_stored_stream_that_is_left_again_counts_once() {
    let engine = FakeEngine::new(|request| {
        let Work::Relay(http) = &request.work else { panic!("it is relayed") };
        let progress = Arc::<RelayProgress>::default();
        progress.set(RelayReport { response_id: Some(7), ..RelayReport::default() });
        let headers = [("content-type".parse().unwrap(), "text/event-stream".parse().unwrap())].into_iter().collect();
        let head = ResponseHead {
            status: StatusCode::OK,
            headers,
            worker: None,
            explain: None,
            progress: Some(progress),
            tunnel: None,
        };
        let events = Output::Body("event: a\ndata: {}\n\n".repeat(40).into());
        let end = if http.method == "GET" { Step::Hang } else { Step::Relay(Output::End(RelayReport::default())) };
        Ok(vec![Step::Relay(Output::Head(Box::new(head))), Step::Relay(events), end])
    });
    *engine.card.lock() = Arc::new(ModelCard { tokenizer: None, is_relayed: true, has_exact_blocks: false, ..card() });
    let keys = Keys::new();
    let key = keys.add("left", |key| key.tokens_per_minute = NonZero::new(100));
    let router = engine.router_with(keys.settings());
    for _ in 0..3 {
        let request = with_key(get("/v1/responses/resp_1?stream=true"), &key);
        let mut left = router.clone().oneshot(request).await.unwrap().into_body().into_data_stream();
        assert!(left.next().await.unwrap().is_ok());
    }
    let next = with_key(completion(json!({ "prompt": vec![1; 50] })), &key);
    assert_eq!(send(&router, next).await.status, 200, "40 of 100 tokens are used");
}

#[tokio::test]
async fn a_part_of_a_stored_stream_is_that_of_the_response_in_its_path() {
    let id = worker::engine::response_id(b"resp_1");
    let engine = FakeEngine::new(move |request| {
        let Work::Relay(http) = &request.work else { panic!("it is relayed") };
        let headers = [("content-type".parse().unwrap(), "text/event-stream".parse().unwrap())].into_iter().collect();
        let head = ResponseHead {
            status: StatusCode::OK,
            headers,
            worker: None,
            explain: None,
            // The events that a retrieval begins with do not have the id.
            progress: Some(Arc::default()),
            tunnel: None,
        };
        let report = RelayReport {
            prompt_tokens: Some(1),
            completion_tokens: Some(60),
            response_id: Some(id),
            ..RelayReport::default()
        };
        let events = Output::Body("event: a\ndata: {}\n\n".repeat(50).into());
        let end = if http.method == "GET" { Step::Hang } else { Step::Relay(Output::End(report)) };
        Ok(vec![Step::Relay(Output::Head(Box::new(head))), Step::Relay(events), end])
    });
    *engine.card.lock() = Arc::new(ModelCard { tokenizer: None, is_relayed: true, has_exact_blocks: false, ..card() });
    for (path, expected) in [("/v1/responses/resp_1", 200), ("/v1/responses/resp_2", 429)] {
        let keys = Keys::new();
        let key = keys.add("left", |key| key.tokens_per_minute = NonZero::new(100));
        let router = engine.router_with(keys.settings());
        let create = post("/v1/responses", &json!({ "model": "org/tiny", "input": [] }));
        assert_eq!(send(&router, with_key(create, &key)).await.status, 200);
        let request = with_key(get(&format!("{path}?stream=true&starting_after=1")), &key);
        let mut left = router.clone().oneshot(request).await.unwrap().into_body().into_data_stream();
        assert!(left.next().await.unwrap().is_ok());
        drop(left);
        let next = with_key(completion(json!({ "prompt": vec![1; 30] })), &key);
        assert_eq!(send(&router, next).await.status, expected, "{path}: 61 of 100 tokens were used before");
    }
}

#[tokio::test]
async fn a_response_that_is_left_costs_what_was_reported() {
    let report = RelayReport { prompt_tokens: Some(30), completion_tokens: Some(50), ..RelayReport::default() };
    let engine = FakeEngine::new(move |request| {
        let progress = Arc::<RelayProgress>::default();
        progress.set(report);
        let headers = [("content-type".parse().unwrap(), "text/event-stream".parse().unwrap())].into_iter().collect();
        let head = ResponseHead {
            status: StatusCode::OK,
            headers,
            worker: None,
            explain: None,
            progress: Some(progress),
            tunnel: None,
        };
        let event = Output::Body(Bytes::from_static(b"data: {}\n\n"));
        let is_left = request.tokens.len() == 1;
        let end = if is_left { Step::Hang } else { Step::Relay(Output::End(RelayReport::default())) };
        Ok(vec![Step::Relay(Output::Head(Box::new(head))), Step::Relay(event), end])
    });
    *engine.card.lock() = Arc::new(ModelCard { tokenizer: None, is_relayed: true, has_exact_blocks: false, ..card() });
    let keys = Keys::new();
    let key = keys.add("left", |key| key.tokens_per_minute = NonZero::new(100));
    let router = engine.router_with(keys.settings());
    let ask = |prompt: usize| with_key(completion(json!({ "prompt": vec![1; prompt] })), &key);
    let mut left = router.clone().oneshot(ask(1)).await.unwrap().into_body().into_data_stream();
    assert!(left.next().await.unwrap().is_ok());
    drop(left);
    assert_eq!(send(&router, ask(30)).await.status, 429, "it has used 80 tokens");
}

#[tokio::test]
async fn a_stream_that_is_left_costs_the_text_of_its_events() {
    // As of vLLM with `--stream-interval 80`: nothing is reported before the end.
    let engine = FakeEngine::new(|_| {
        let headers = [("content-type".parse().unwrap(), "text/event-stream".parse().unwrap())].into_iter().collect();
        let head = ResponseHead {
            status: StatusCode::OK,
            headers,
            worker: None,
            explain: None,
            progress: Some(Arc::default()),
            tunnel: None,
        };
        let event = format!("data: {{\"choices\":[{{\"index\":0,\"text\":\"{}\"}}]}}\n\n", "abc ".repeat(80));
        Ok(vec![Step::Relay(Output::Head(Box::new(head))), Step::Relay(Output::Body(event.into())), Step::Hang])
    });
    *engine.card.lock() = Arc::new(ModelCard {
        tokenizer: None,
        is_relayed: true,
        has_exact_blocks: false,
        ..ModelCard::new("org/tiny", 1024, 16)
    });
    let keys = Keys::new();
    let key = keys.add("left", |key| key.tokens_per_minute = NonZero::new(100));
    let router = engine.router_with(keys.settings());
    let ask = |prompt: usize| with_key(completion(json!({ "prompt": vec![1; prompt] })), &key);
    let mut left = router.clone().oneshot(ask(1)).await.unwrap().into_body().into_data_stream();
    assert!(left.next().await.unwrap().is_ok());
    drop(left);
    assert_eq!(send(&router, ask(30)).await.status, 429, "it has used 81 tokens");
}

#[tokio::test]
async fn a_wrong_report_does_not_use_up_a_limit_for_days() {
    let keys = Keys::new();
    let key = keys.add("tokens", |key| key.tokens_per_minute = NonZero::new(100));
    let head = ResponseHead {
        status: StatusCode::OK,
        headers: HeaderMap::new(),
        worker: None,
        explain: None,
        progress: None,
        tunnel: None,
    };
    let report =
        RelayReport { prompt_tokens: Some(u32::MAX), completion_tokens: Some(u32::MAX), ..RelayReport::default() };
    let steps = [Output::Head(Box::new(head)), Output::Body(Bytes::from_static(b"{}")), Output::End(report)];
    let engine = FakeEngine::with_steps(steps.into_iter().map(Step::Relay).collect());
    *engine.card.lock() = Arc::new(ModelCard { tokenizer: None, is_relayed: true, has_exact_blocks: false, ..card() });
    let router = engine.router_with(keys.settings());
    let ask = async || send(&router, with_key(completion(json!({ "prompt": [1] })), &key)).await;
    assert_eq!(ask().await.status, 200);
    let refused = ask().await;
    assert_eq!(refused.status, 429);
    let wait: u64 = refused.header("retry-after").parse().unwrap();
    assert!(wait <= 60, "{wait} s for twice the context of 64 tokens");
}

/// The response to a request over a connection of its own.
async fn ask(address: SocketAddr, path: &str, key: &str) -> String {
    let mut connection = TcpStream::connect(address).await.unwrap();
    let request =
        format!("GET {path} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {key}\r\nconnection: close\r\n\r\n");
    connection.write_all(request.as_bytes()).await.unwrap();
    let mut response = String::new();
    connection.read_to_string(&mut response).await.unwrap();
    response
}

async fn status(address: SocketAddr, path: &str, key: &str) -> u16 {
    ask(address, path, key).await[9..12].parse().unwrap()
}

#[tokio::test]
async fn changes_of_the_file_take_effect_while_it_serves() {
    let keys = Keys::new();
    let (one, two) = (keys.add("one", |_| ()), keys.add("two", |_| ()));
    let registry = prometheus::Registry::new();
    let server = Server::new(&keys.settings(), &registry).unwrap();
    let router: Router = frontend::router(engine(), registry, keys.settings()).unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move { server.serve(listener, router, Shutdown::default()).await });
    let until = async |path: &'static str, key: &str, expected: u16| {
        let deadline = Instant::now() + TIMEOUT;
        while status(address, path, key).await != expected {
            assert!(Instant::now() < deadline, "{path} gets {expected}");
            sleep(Duration::from_millis(20)).await;
        }
    };
    assert_eq!([status(address, "/v1/models", &one).await, status(address, "/v1/models", &two).await], [200; 2]);
    KeyFile::change(&keys.path(), |file| {
        file.keys.retain(|key| key.name != "one");
        Ok(())
    })
    .unwrap();
    until("/v1/models", &one, 401).await;
    assert_eq!(status(address, "/v1/models", &two).await, 200);
    let good = fs::read(keys.path()).unwrap();
    fs::write(keys.path(), "[[keys]]\nname = 'broken'").unwrap();
    let deadline = Instant::now() + TIMEOUT;
    while !ask(address, "/ready", "").await.contains("frontend.api_keys_file") {
        assert!(Instant::now() < deadline, "/ready names the file");
        sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(status(address, "/v1/models", &two).await, 200, "the previous keys stay in effect");
    fs::write(keys.path(), good).unwrap();
    let three = keys.add("three", |_| ());
    until("/v1/models", &three, 200).await;
    assert!(!ask(address, "/ready", "").await.contains("frontend.api_keys_file"));
}

#[tokio::test]
async fn a_key_file_without_keys_is_listed_as_degraded() {
    let keys = Keys::new();
    fs::write(keys.path(), "").unwrap();
    let router = engine().router_with(keys.settings());
    let ready = send(&router, get("/ready")).await;
    let degraded = ready.json()["degraded"].to_string();
    assert_eq!(ready.status, 200);
    assert!(degraded.contains("frontend.api_keys_file has no keys"), "{degraded}");
}

#[tokio::test]
async fn a_key_file_that_is_missing_or_wrong_is_refused() {
    let keys = Keys::new();
    let refused = || {
        let error = frontend::router(engine(), prometheus::Registry::new(), keys.settings()).unwrap_err();
        error.to_string()
    };
    let missing = refused();
    assert!(missing.contains("frontend.api_keys_file") && missing.contains("blockyard key add --file"), "{missing}");
    fs::write(keys.path(), "keys = 1").unwrap();
    assert!(refused().contains("keys.toml"));
}
