//! Log lines of requests, and request ids.

use crate::fake::{FakeEngine, Step, card, chat, first, last, post, send};
use axum::body::Body;
use axum::http::{HeaderMap, Request, StatusCode};
use bytes::Bytes;
use futures::{FutureExt, StreamExt};
use serde_json::{Value, json};
use std::cell::RefCell;
use std::io::{self, Write};
use std::sync::{Arc, Once};
use tower::ServiceExt;
use worker::engine::{Error, ErrorKind, ErrorResponse, FinishReason, ModelCard};

thread_local! {
    /// The log of the test that runs on this thread, one JSON object a line.
    static LOG: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// Writes to the log of the current thread.
struct ThreadLog;

impl Write for ThreadLog {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        LOG.with_borrow_mut(|log| log.write(bytes))
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Begins to collect the log of the current thread, at `info` and as JSON.
///
/// The subscriber is the process's: `tracing` asks once per line of code whether it is to be logged, on the thread that
/// comes first. That thread may belong to another test, which would have no subscriber of its own.
fn collect() {
    static INSTALLED: Once = Once::new();
    INSTALLED.call_once(|| {
        let json = tracing_subscriber::fmt().json().flatten_event(true).with_current_span(false).with_span_list(false);
        let subscriber = json.with_writer(|| ThreadLog).finish();
        tracing::subscriber::set_global_default(subscriber).expect("no other test installs one");
    });
    LOG.take();
}

/// The lines since the last call on this thread.
fn lines() -> Vec<Value> {
    let log = LOG.take();
    let lines = log.split(|byte| *byte == b'\n').filter(|line| !line.is_empty());
    lines.map(|line| serde_json::from_slice(line).unwrap()).collect()
}

#[tokio::test]
async fn a_served_request_leaves_one_flat_line() {
    collect();
    let engine = FakeEngine::with_steps(vec![first("ab"), last("c", FinishReason::Length)]);
    let settings: frontend::Settings = toml::from_str("tenant_header = 'x-tenant'").unwrap();
    let router = frontend::router(engine, prometheus::Registry::new(), settings).unwrap();
    for stream in [false, true] {
        let mut request = chat(json!({ "stream": stream }));
        request.headers_mut().insert("x-request-id", "mine-1".parse().unwrap());
        request.headers_mut().insert("x-tenant", "ann".parse().unwrap());
        assert_eq!(send(&router, request).await.status, 200);
    }
    let lines = lines();
    assert_eq!(lines.len(), 2, "{lines:?}");
    for line in lines {
        let expected = [
            ("request_id", json!("mine-1")),
            ("endpoint", json!("/v1/chat/completions")),
            ("status", json!(200)),
            ("model", json!("org/tiny")),
            ("tenant", json!("ann")),
            ("worker", json!("w1")),
            ("cached_tokens", json!(48)),
            ("completion_tokens", json!(3)),
            ("finish_reason", json!("length")),
        ];
        for (field, value) in expected {
            assert_eq!(line[field], value, "{field}: {line}");
        }
        assert!(line["prompt_tokens"].is_u64() && line["ttft_s"].is_f64() && line["duration_s"].is_f64(), "{line}");
        assert!(line.as_object().unwrap().values().all(|value| !value.is_object()), "{line}");
    }
}

#[tokio::test]
async fn each_refused_request_leaves_one_line_with_its_reason() {
    collect();
    let router = FakeEngine::new(|_| Err(Error::Failed("broken".into()))).router();
    let requests = [
        (chat(json!({ "temperature": 9 })), 400, "INFO", json!("decimal_above_max_value"), "temperature"),
        (post("/v1/completions", &json!({ "model": "x" })), 404, "INFO", json!("model_not_found"), "`x`"),
        (Request::get("/v1/nothing").body(Body::empty()).unwrap(), 404, "INFO", json!("unknown_url"), "/v1/nothing"),
        (chat(json!({})), 500, "ERROR", json!("internal_error"), "broken"),
        (chat(json!({ "stream": true })), 500, "ERROR", json!("internal_error"), "broken"),
    ];
    for (request, status, level, code, word) in requests {
        let answer = send(&router, request).await;
        assert_eq!(answer.status, status);
        let lines = lines();
        let [line] = &lines[..] else { panic!("{lines:?}") };
        assert_eq!((&line["level"], &line["status"], &line["code"]), (&json!(level), &json!(status), &code), "{line}");
        assert_eq!(line["request_id"], answer.header("x-request-id"), "{line}");
        assert!(line["error"].as_str().unwrap().contains(word), "{line}");
    }
}

#[tokio::test]
async fn the_text_of_a_servers_error_is_not_logged() {
    let secret = "my secret prompt";
    let long = "x".repeat(65);
    for (body, fields) in [
        (
            json!({ "error": { "message": secret, "type": "BadRequestError", "code": 400 } }),
            ", type BadRequestError, code 400",
        ),
        (
            json!({ "message": secret, "type": "invalid_request", "code": "too_long" }),
            ", type invalid_request, code too_long",
        ),
        (json!({ "error": { "message": secret, "type": secret, "code": long } }), ""),
        (json!({ "error": { "type": "", "code": { "secret": secret } } }), ""),
        (json!({ "error": secret, "code": 7.5 }), ", code 7.5"),
        (json!([secret]), ""),
        (json!(secret), ""),
    ] {
        collect();
        let body = body.to_string();
        let sent = Bytes::from(body.clone());
        let engine = FakeEngine::new(move |_| {
            let (status, headers, body) = (StatusCode::BAD_REQUEST, HeaderMap::new(), sent.clone());
            let kind = ErrorKind::Request;
            Err(Error::Relayed(Arc::new(ErrorResponse { status, headers, body, kind, replaces: None })))
        });
        *engine.card.lock() = Arc::new(ModelCard { is_relayed: true, ..card() });
        let answer = send(&engine.router(), chat(json!({}))).await;
        assert_eq!((answer.status.as_u16(), &answer.body[..]), (400, body.as_bytes()), "the client gets it");
        let lines = lines();
        assert_eq!(
            lines[0]["error"].as_str().unwrap(),
            format!(
                "the server answered with status 400{fields}, and a body of {} bytes, which is not logged",
                body.len()
            )
        );
        assert!(lines.iter().all(|line| !line.to_string().contains("secret")), "{lines:?}");
    }
}

#[tokio::test]
async fn a_line_of_an_answer_that_the_gateway_has_replaced_says_what_is_wrong_with_it() {
    collect();
    let engine = FakeEngine::new(move |_| {
        Err(Error::Relayed(Arc::new(ErrorResponse {
            status: StatusCode::BAD_GATEWAY,
            headers: HeaderMap::new(),
            body: Bytes::from_static(b"{}"),
            kind: ErrorKind::Fault,
            replaces: Some("the server's answer is not valid HTTP: the head is too long".into()),
        })))
    });
    *engine.card.lock() = Arc::new(ModelCard { is_relayed: true, ..card() });
    assert_eq!(send(&engine.router(), chat(json!({}))).await.status, StatusCode::BAD_GATEWAY);
    assert_eq!(lines()[0]["error"], "the server's answer is not valid HTTP: the head is too long");
}

#[tokio::test]
async fn a_line_of_a_path_without_a_route_has_the_beginning_of_the_path() {
    collect();
    let router = FakeEngine::with_steps(vec![]).router();
    let long = format!("/v1/{}", "x".repeat(300));
    for (path, expected) in [("/v1/nothing?key=secret", json!("/v1/nothing")), (&long, json!(long[..200]))] {
        send(&router, Request::get(path).body(Body::empty()).unwrap()).await;
        let lines = lines();
        assert_eq!((&lines[0]["endpoint"], &lines[0]["path"]), (&json!("unmatched"), &expected));
    }
    send(&router, chat(json!({ "temperature": 9 }))).await;
    assert_eq!(lines()[0].get("path"), None, "the endpoint says it");
}

#[tokio::test]
async fn a_request_whose_client_disconnects_is_cancelled_not_rejected() {
    collect();
    let router = FakeEngine::with_steps(vec![first("ab"), Step::Hang]).router();
    let response = router.oneshot(chat(json!({ "stream": true }))).await.unwrap();
    let mut body = response.into_body().into_data_stream();
    body.next().await.unwrap().unwrap();
    drop(body);
    let lines = lines();
    let [line] = &lines[..] else { panic!("{lines:?}") };
    assert_eq!(
        (&line["message"], &line["level"], &line["status"]),
        (&json!("request cancelled"), &json!("INFO"), &json!(499)),
        "{line}"
    );
}

#[tokio::test]
async fn cancelled_requests_do_not_use_up_the_lines_of_rejected_ones() {
    collect();
    tokio::time::pause();
    let engine = FakeEngine::with_steps(vec![Step::Hang]);
    let router = engine.router();
    for _ in 0..100 {
        let mut asking = Box::pin(send(&router, chat(json!({}))));
        while engine.open() == 0 {
            assert!((&mut asking).now_or_never().is_none());
        }
    }
    send(&router, Request::get("/v1/nothing").body(Body::empty()).unwrap()).await;
    let lines = lines();
    let count = |message: &str| lines.iter().filter(|line| line["message"] == message).count();
    assert!((1..=40).contains(&count("request cancelled")), "{} lines", lines.len());
    assert_eq!(count("request rejected"), 1);
}

/// Another gateway in front asks for these pages every few seconds, and expects a 404.
#[tokio::test]
async fn pages_that_gateways_ask_for_are_not_logged_as_rejected() {
    collect();
    let router = FakeEngine::with_steps(vec![]).router();
    for path in ["/kv_event_sources", "/openapi.json", "/get_server_info"] {
        let answer = send(&router, Request::get(path).body(Body::empty()).unwrap()).await;
        assert_eq!(answer.status, 404, "{path}");
    }
    assert_eq!(lines(), Vec::<Value>::new());
}

#[tokio::test]
async fn lines_of_refused_requests_are_bounded() {
    let router = FakeEngine::with_steps(vec![]).router();
    collect();
    tokio::time::pause();
    for _ in 0..1000 {
        send(&router, Request::get("/v1/nothing").body(Body::empty()).unwrap()).await;
    }
    tokio::time::advance(std::time::Duration::from_secs(1)).await;
    send(&router, Request::get("/v1/nothing").body(Body::empty()).unwrap()).await;
    let lines = lines();
    assert!((1..=60).contains(&lines.len()), "{} lines", lines.len());
    assert!(lines.last().unwrap()["suppressed"].as_u64().unwrap() >= 900, "{:?}", lines.last());
}

#[tokio::test]
async fn the_clients_request_id_is_in_the_id_of_the_answer() {
    let router = FakeEngine::with_steps(vec![last("a", FinishReason::Stop)]).router();
    for (id, prefix) in [(Some("mine-1"), "chatcmpl-mine-1"), (None, "chatcmpl-"), (Some("not sane"), "chatcmpl-")] {
        let mut request = chat(json!({}));
        if let Some(id) = id {
            request.headers_mut().insert("x-request-id", id.parse().unwrap());
        }
        let answer = send(&router, request).await;
        let answered = answer.json()["id"].as_str().unwrap().to_owned();
        assert_eq!(answered, format!("chatcmpl-{}", answer.header("x-request-id")));
        assert!(answered.starts_with(prefix), "{answered}");
    }
}
