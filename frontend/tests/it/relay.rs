//! Requests for a model whose engine has the API itself.

use crate::fake::{FakeEngine, Step, TestResponse, card, chat, say, send};
use crate::key_file::{Keys, with_key};
use axum::Router;
use axum::body::{Body, BodyDataStream};
use axum::http::{HeaderMap, Request as HttpRequest, StatusCode};
use bytes::Bytes;
use futures::{FutureExt, StreamExt};
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Semaphore;
use tower::ServiceExt;
use worker::engine::{
    Domain, Error, ErrorKind, ErrorResponse, ModelCard, Output, RelayReport, Request, ResponseHead, Work,
};

/// A server with the same steps for every request.
pub(crate) fn relaying(steps: Vec<Step>) -> Arc<FakeEngine> {
    FakeEngine::relaying(move |_| Ok(steps.clone()))
}

pub(crate) fn head() -> Step {
    head_of("text/x-engine")
}

/// The head of a response with this content type.
fn head_of(content_type: &str) -> Step {
    let headers: HeaderMap = [("content-type", content_type), ("x-engine", "yes")]
        .map(|(name, value)| (name.parse().unwrap(), value.parse().unwrap()))
        .into_iter()
        .collect();
    let explain = Some(r#"{"worker":"w7"}"#.into());
    Step::Relay(Output::Head(Box::new(ResponseHead {
        status: StatusCode::CREATED,
        headers,
        worker: Some("w7".into()),
        explain,
        ..ResponseHead::default()
    })))
}

pub(crate) fn part(text: impl Into<Bytes>) -> Step {
    Step::Relay(Output::Body(text.into()))
}

fn end() -> Step {
    Step::Relay(Output::End(RelayReport {
        prompt_tokens: Some(9),
        cached_tokens: Some(8),
        completion_tokens: Some(3),
        ..RelayReport::default()
    }))
}

async fn post(router: &Router, path: &str, body: &str) -> TestResponse {
    let request = HttpRequest::post(path).header("content-type", "application/json").header("x-custom", "kept");
    send(router, request.body(Body::from(body.to_owned())).unwrap()).await
}

/// The client's request.
pub(crate) fn relayed(request: &Request) -> &worker::engine::HttpRequest {
    match &request.work {
        Work::Relay(http) => http,
        other => panic!("expected a relayed request, not {other:?}"),
    }
}

#[tokio::test]
async fn request_and_response_pass_as_bytes() {
    let engine = relaying(vec![head(), part("{\"a\" : "), part("1}"), end()]);
    let router = engine.router();
    // No field of these is valid for the native engine.
    let body = r#"{ "model" : "org/tiny","messages":[{"role":"tool","content":[{"type":"image_url"}]}],
        "tool_choice":{"x":1},"response_format":{"type":"json_schema"},"top_logprobs":30,"n":4,"temperature":"hot",
        "best_of":7,"unheard_of":[{}]}"#;
    let answer = post(&router, "/v1/chat/completions?beam=2", body).await;
    assert_eq!((answer.status, &answer.body[..]), (StatusCode::CREATED, &b"{\"a\" : 1}"[..]));
    assert_eq!((answer.header("content-type"), answer.header("x-engine")), ("text/x-engine", "yes"));
    let request = engine.only();
    let http = relayed(&request);
    assert_eq!((http.method.as_str(), http.target.as_str()), ("POST", "/v1/chat/completions?beam=2"));
    assert_eq!((&http.body[..], http.headers["x-custom"].as_bytes()), (body.as_bytes(), &b"kept"[..]));
    assert_eq!((http.is_stream, request.choices()), (false, 4), "one request, with room for four choices");
    assert!(http.private_fields.contains(&"deadline_ms"));
    assert!(!request.tokens.is_empty());
    assert_eq!(engine.open(), 0);
    let metrics = send(&router, HttpRequest::get("/metrics").body(Body::empty()).unwrap()).await;
    let metrics = String::from_utf8(metrics.body).unwrap();
    let finished = metrics.lines().find(|line| line.contains("choices_finished_total{")).unwrap();
    assert!(finished.contains("relayed") && finished.ends_with(" 1"), "{finished}");
}

#[tokio::test]
async fn a_request_that_comes_back_is_refused() {
    let engine = relaying(vec![head(), part("x"), end()]);
    let router = engine.router();
    let body = r#"{"model":"org/tiny","prompt":"x"}"#;
    assert_eq!(post(&router, "/v1/completions", body).await.status, StatusCode::CREATED);
    let via = relayed(&engine.only()).headers["via"].clone();
    for path in ["/v1/completions", "/v1/embeddings"] {
        let request = HttpRequest::post(path).header("content-type", "application/json").header("via", via.clone());
        let answer = send(&router, request.body(Body::from(body)).unwrap()).await;
        let error = answer.json();
        assert_eq!((answer.status.as_u16(), &error["error"]["code"]), (508, &json!("loop_detected")), "{path}");
    }
    assert_eq!(engine.seen.lock().len(), 1);
    // Another gateway has another name, so a chain of gateways passes.
    let request = HttpRequest::post("/v1/completions").header("content-type", "application/json").header("via", via);
    let other = relaying(vec![head(), part("x"), end()]).router();
    assert_eq!(send(&other, request.body(Body::from(body)).unwrap()).await.status, StatusCode::CREATED);
}

#[tokio::test]
async fn an_error_of_the_engine_reaches_the_client_as_it_came() {
    let engine = FakeEngine::new(|_| {
        Err(Error::Relayed(Arc::new(ErrorResponse {
            status: StatusCode::TOO_MANY_REQUESTS,
            headers: [("retry-after".parse().unwrap(), "17".parse().unwrap())].into_iter().collect(),
            body: Bytes::from_static(b"{\"object\":\"error\"}"),
            kind: ErrorKind::Busy(Duration::from_secs(17)),
            replaces: None,
        })))
    });
    *engine.card.lock() = Arc::new(ModelCard { is_relayed: true, ..card() });
    let answer = post(&engine.router(), "/v1/completions", r#"{"model":"org/tiny","prompt":"x"}"#).await;
    assert_eq!((answer.status.as_u16(), answer.header("retry-after")), (429, "17"));
    assert_eq!(answer.body, b"{\"object\":\"error\"}");
}

fn broken() -> Step {
    Step::Fail(Error::Failed("the connection was reset".into()))
}

#[tokio::test]
async fn a_stream_that_breaks_off_ends_with_an_event() {
    let steps = vec![head_of("text/event-stream; charset=utf-8"), part("data: {}\n\n"), broken()];
    let router = relaying(steps).router();
    // What the request asks for makes no difference.
    for stream in [true, false] {
        let body = json!({ "model": "org/tiny", "prompt": "x", "stream": stream }).to_string();
        let answer = post(&router, "/v1/completions", &body).await;
        let text = String::from_utf8(answer.body).unwrap();
        let event = text.strip_prefix("data: {}\n\ndata: ").expect("the engine's bytes, then an event");
        let event: Value = serde_json::from_str(event.trim_end()).unwrap();
        assert!(event["error"]["message"].as_str().unwrap().contains("the connection was reset"));
    }
}

#[tokio::test]
async fn a_stream_that_breaks_off_within_an_event_ends_with_an_event_of_its_own() {
    let whole = ["data: {}\n\n", "data: {}\r\n\r\n", "data: {}\r\r"];
    for (parts, between) in [(["data: {\"long", "er"], "\n\n"), (["data: {\"long", "er\"}\n\n"], "")]
        .into_iter()
        .chain(whole.map(|event| (["", event], "")))
    {
        let steps = vec![head_of("text/event-stream"), part(parts[0]), part(parts[1]), broken()];
        let answer = post(&relaying(steps).router(), "/v1/completions", r#"{"model":"org/tiny","prompt":"x"}"#).await;
        let text = String::from_utf8(answer.body).unwrap();
        assert!(text.starts_with(&(parts.concat() + between + "data: {\"error\"")), "{text}");
    }
}

#[tokio::test]
async fn clients_of_messages_get_errors_in_the_form_of_anthropic() {
    let stream = vec![head_of("text/event-stream"), part("event: ping\ndata: {}\n\n"), broken()];
    for path in ["/v1/messages", "/v1/messages/count_tokens"] {
        let router = relaying(stream.clone()).router();
        let answer = post(&router, path, r#"{"model":"org/tiny","messages":[],"stream":true}"#).await;
        let text = String::from_utf8(answer.body).unwrap();
        // Anthropic's clients pass over an event without the name `error`, and take the message for complete.
        let event = text.strip_prefix("event: ping\ndata: {}\n\nevent: error\ndata: ").expect(&text);
        let event: Value = serde_json::from_str(event.trim_end()).unwrap();
        assert_eq!((&event["type"], &event["error"]["type"]), (&json!("error"), &json!("api_error")));
        assert!(event["error"]["message"].as_str().unwrap().contains("the connection was reset"));

        let unknown = post(&router, path, r#"{"model":"org/none","messages":[]}"#).await;
        assert_eq!((unknown.status.as_u16(), unknown.header("content-type")), (404, "application/json"));
        let error = unknown.json();
        assert_eq!((&error["type"], &error["error"]["type"]), (&json!("error"), &json!("not_found_error")));
        assert_eq!(error["error"]["code"], "model_not_found");
    }
    let keys = Keys::new();
    keys.add("ann", |_| {});
    let router = relaying(stream).router_with(keys.settings());
    let answer = post(&router, "/v1/messages", r#"{"model":"org/tiny","messages":[]}"#).await;
    let error = answer.json();
    assert_eq!((&error["type"], &error["error"]["type"]), (&json!("error"), &json!("authentication_error")));
    let answer = post(&router, "/v1/messagesx", r#"{"model":"org/tiny","messages":[]}"#).await;
    assert_eq!((answer.status.as_u16(), answer.json().get("type")), (401, None), "OpenAI's form elsewhere");
}

#[tokio::test]
async fn clients_of_cohere_get_errors_in_its_form() {
    let stream = vec![head_of("text/event-stream"), part("event: content-delta\ndata: {}\n\n"), broken()];
    let router = relaying(stream).router();
    let answer = post(&router, "/cohere/v2/chat", r#"{"model":"org/tiny","messages":[],"stream":true}"#).await;
    let text = String::from_utf8(answer.body).unwrap();
    // Cohere's clients read events by their type, and know none of an error.
    let event = text.strip_prefix("event: content-delta\ndata: {}\n\nevent: message-end\ndata: ").expect(&text);
    let event: Value = serde_json::from_str(event.trim_end()).unwrap();
    assert_eq!((&event["type"], &event["delta"]["finish_reason"]), (&json!("message-end"), &json!("ERROR")));
    assert!(event["delta"]["error"].as_str().unwrap().contains("the connection was reset"));
    for path in ["/cohere/v2/chat", "/cohere/v2/chat/render", "/v2/embed", "/v2/rerank"] {
        let unknown = post(&router, path, r#"{"model":"org/none","messages":[]}"#).await;
        assert_eq!((unknown.status.as_u16(), unknown.header("content-type")), (404, "application/json"));
        let error = unknown.json();
        assert_eq!(error.as_object().unwrap().len(), 1, "{path}: {error}");
        assert!(error["message"].as_str().unwrap().starts_with("The model `org/none` does not exist."), "{error}");
    }
}

#[tokio::test]
async fn an_error_in_place_of_a_servers_answer_has_the_form_of_the_endpoint() {
    let object = r#"{"error":{"message":"m","type":"server_error","param":null,"code":"bad_gateway"}}"#;
    for (path, is_of_gateway, expected) in [
        (
            "/v1/messages",
            true,
            r#"{"type":"error","error":{"message":"m","type":"api_error","param":null,"code":"bad_gateway"}}"#,
        ),
        ("/v1/messages", false, object),
        ("/cohere/v2/chat", true, r#"{"message":"m"}"#),
        ("/cohere/v2/chat", false, object),
        ("/v1/completions", true, object),
    ] {
        let engine = FakeEngine::new(move |_| {
            Err(Error::Relayed(Arc::new(ErrorResponse {
                status: StatusCode::BAD_GATEWAY,
                headers: [("content-type".parse().unwrap(), "application/json".parse().unwrap())].into_iter().collect(),
                body: Bytes::from_static(object.as_bytes()),
                kind: ErrorKind::Fault,
                replaces: is_of_gateway.then(|| "the server answered with a redirect".into()),
            })))
        });
        *engine.card.lock() = Arc::new(ModelCard { is_relayed: true, ..card() });
        let answer = post(&engine.router(), path, r#"{"model":"org/tiny","prompt":"x"}"#).await;
        assert_eq!((answer.status.as_u16(), answer.header("content-type")), (502, "application/json"));
        assert_eq!(String::from_utf8(answer.body).unwrap(), expected, "{path}");
    }
}

#[tokio::test]
async fn a_stream_in_which_the_server_sent_an_error_counts_as_failed() {
    let failed = Step::Relay(Output::End(RelayReport { failed: true, ..RelayReport::default() }));
    let error = part("data: {\"error\":{\"message\":\"m\"}}\n\ndata: [DONE]\n\n");
    let router = relaying(vec![head_of("text/event-stream"), part("data: {}\n\n"), error, failed]).router();
    let body = r#"{"model":"org/tiny","prompt":"x","stream":true}"#;
    let answer = post(&router, "/v1/completions", body).await;
    assert_eq!((answer.status, answer.events().len()), (StatusCode::CREATED, 3), "the client got the server's events");
    let metrics = send(&router, HttpRequest::get("/metrics").body(Body::empty()).unwrap()).await;
    let metrics = String::from_utf8(metrics.body).unwrap();
    let requests = r#"blockyard_frontend_requests_total{endpoint="/v1/completions",status="500"} 1"#;
    assert!(metrics.contains(requests), "{metrics}");
}

#[tokio::test]
async fn another_response_that_breaks_off_is_cut() {
    let router = relaying(vec![head(), part("{\"a\" : "), Step::Yield, broken()]).router();
    for stream in [true, false] {
        let body = json!({ "model": "org/tiny", "prompt": "x", "stream": stream }).to_string();
        let request = HttpRequest::post("/v1/completions").body(Body::from(body)).unwrap();
        let response = router.clone().oneshot(request).await.unwrap();
        assert_eq!(response.status(), StatusCode::CREATED);
        let mut body = response.into_body().into_data_stream();
        assert_eq!(body.next().await.unwrap().unwrap(), "{\"a\" : ");
        assert!(body.next().now_or_never().is_none(), "what was sent leaves first");
        assert!(body.next().await.unwrap().is_err(), "the connection is cut");
        assert!(body.next().await.is_none());
    }
}

#[tokio::test]
async fn a_response_that_breaks_off_at_once_is_an_error() {
    let no_end = vec![head(), part("{\"a\" : ")];
    for steps in [vec![head(), part("{\"a\" : "), broken()], vec![head(), broken()], no_end] {
        let engine = relaying(steps);
        let router = engine.router();
        let answer = post(&router, "/v1/completions", r#"{"model":"org/tiny","prompt":"x","stream":true}"#).await;
        assert_eq!(answer.status, StatusCode::INTERNAL_SERVER_ERROR);
        assert_eq!(answer.json()["error"]["code"], "internal_error");
        assert_eq!(engine.open(), 0);
        let metrics = send(&router, HttpRequest::get("/metrics").body(Body::empty()).unwrap()).await;
        let metrics = String::from_utf8(metrics.body).unwrap();
        let finished = metrics.lines().find(|line| line.contains("choices_finished_total{")).unwrap();
        assert!(finished.contains("\"error\"") && finished.ends_with(" 1"), "{finished}");
    }
}

#[tokio::test]
async fn a_relayed_response_ends_with_an_error_when_its_time_is_over() {
    let engine = relaying(vec![head_of("text/event-stream"), part("data: {}\n\n"), Step::Hang]);
    let max_request_time = Some(units::HumanDuration::millis(50));
    let router = engine.router_with(frontend::Settings { max_request_time, ..frontend::Settings::default() });
    let answer = post(&router, "/v1/completions", r#"{"model":"org/tiny","prompt":"x","stream":true}"#).await;
    let events = answer.events();
    let error: Value = serde_json::from_str(events.last().unwrap()).unwrap();
    assert_eq!((&*events[0], &error["error"]["code"]), ("{}", &json!("request_time_exceeded")));
    assert_eq!(engine.open(), 0, "the engine is stopped");
}

#[tokio::test]
async fn a_response_without_a_body_is_finished() {
    let router = relaying(vec![head(), end()]).router();
    let request = HttpRequest::post("/v1/completions").body(Body::from(r#"{"model":"org/tiny","prompt":"x"}"#));
    let response = router.clone().oneshot(request.unwrap()).await.unwrap();
    // As hyper does with a body that is empty by the status or by `content-length`.
    drop(response);
    let metrics = send(&router, HttpRequest::get("/metrics").body(Body::empty()).unwrap()).await;
    let metrics = String::from_utf8(metrics.body).unwrap();
    let requests = r#"blockyard_frontend_requests_total{endpoint="/v1/completions",status="201"} 1"#;
    assert!(metrics.contains(requests), "{metrics}");
}

#[tokio::test]
async fn a_client_that_disconnects_cancels_the_engine() {
    let engine = relaying(vec![head(), part("x"), Step::Hang]);
    let request = HttpRequest::post("/v1/completions").body(Body::from(r#"{"model":"org/tiny","prompt":"x"}"#));
    let response = engine.router().oneshot(request.unwrap()).await.unwrap();
    assert_eq!(engine.open(), 1);
    drop(response);
    assert_eq!(engine.open(), 0);
}

/// A server before this engine, and the body of a stream of which `[DONE]` was read.
async fn streamed_until_done(engine: &Arc<FakeEngine>) -> (Router, BodyDataStream) {
    let router = engine.router();
    let request = HttpRequest::post("/v1/completions");
    let request = request.body(Body::from(r#"{"model":"org/tiny","prompt":"x","stream":true}"#));
    let response = router.clone().oneshot(request.unwrap()).await.unwrap();
    let mut body = response.into_body().into_data_stream();
    assert_eq!(body.next().await.unwrap().unwrap(), "data: [DONE]\n\n");
    (router, body)
}

async fn assert_cached_tokens_are_counted(router: &Router) {
    let metrics = send(router, HttpRequest::get("/metrics").body(Body::empty()).unwrap()).await;
    let metrics = String::from_utf8(metrics.body).unwrap();
    assert!(metrics.contains("blockyard_frontend_cached_tokens_total{model=\"org/tiny\"} 8"), "{metrics}");
}

#[tokio::test]
async fn a_client_that_leaves_after_done_gets_its_usage_counted() {
    let permits = Arc::new(Semaphore::new(0));
    let head = head_of("text/event-stream");
    let engine = relaying(vec![head, part("data: [DONE]\n\n"), Step::Wait(permits.clone()), end()]);
    let (router, body) = streamed_until_done(&engine).await;
    drop(body);
    permits.add_permits(1);
    while engine.open() > 0 {
        tokio::task::yield_now().await;
    }
    assert_cached_tokens_are_counted(&router).await;
}

#[tokio::test]
async fn what_follows_the_end_of_a_stream_passes() {
    let permits = Arc::new(Semaphore::new(0));
    let (head, wait) = (head_of("text/event-stream"), Step::Wait(permits.clone()));
    let engine = relaying(vec![head, part("data: [DONE]\n\n"), end(), wait, part(": bye\n\n")]);
    let (router, mut body) = streamed_until_done(&engine).await;
    assert!(body.next().now_or_never().is_none(), "the body goes on");
    assert_cached_tokens_are_counted(&router).await;
    permits.add_permits(1);
    assert_eq!(body.next().await.unwrap().unwrap(), ": bye\n\n");
    assert!(body.next().await.is_none());
    assert_eq!(engine.open(), 0);
}

#[tokio::test]
async fn endpoints_of_the_engine_alone_are_relayed() {
    let engine = relaying(vec![head(), part("ok"), end()]);
    let router = engine.router();
    for (path, body) in [
        ("/v1/responses", r#"{"model":"org/tiny","input":"x"}"#),
        ("/v1/embeddings", r#"{"model":"org/tiny","input":["x","y"]}"#),
        ("/v1/audio/transcriptions", " "),
        ("/tokenize", r#"{"prompt":"x"}"#),
        ("/generative_scoring", r#"{"query":"x","items":["y","z"],"label_token_ids":[1]}"#),
        ("/v2/embed", r#"{"model":"org/tiny","texts":["x"],"embedding_types":["float"]}"#),
        ("/v1/something/new", ""),
        ("/v1/files/file-AbC123/content", ""),
        ("/v1/files/", ""),
    ] {
        let answer = post(&router, path, body).await;
        assert_eq!((answer.status, &answer.body[..]), (StatusCode::CREATED, &b"ok"[..]), "{path}");
        let request = engine.seen.lock().pop().unwrap();
        assert_eq!((relayed(&request).target.path(), &relayed(&request).body[..]), (path, body.as_bytes()));
    }
    let listed = send(&router, HttpRequest::get("/v1/files").body(Body::empty()).unwrap()).await;
    assert_eq!(listed.status, StatusCode::CREATED);
    assert_eq!(relayed(&engine.only()).method, "GET");
}

#[tokio::test]
async fn a_body_that_only_some_servers_read_is_refused() {
    let engine = relaying(vec![head(), part("ok"), end()]);
    let router = engine.router();
    let ask = async |headers: &[(&str, &str)], body: &[u8]| {
        let request = headers
            .iter()
            .fold(HttpRequest::post("/v1/responses"), |request, (name, value)| request.header(*name, *value));
        let answer = send(&router, request.body(Body::from(body.to_vec())).unwrap()).await;
        (answer.status.as_u16(), String::from_utf8(answer.body).unwrap())
    };
    let json = ("content-type", "application/json");
    let utf16: Vec<u8> = r#"{"model":"other"}"#.encode_utf16().flat_map(u16::to_le_bytes).collect();
    for (headers, body, expected) in [
        (&[json][..], &b"\xef\xbb\xbf{\"model\":\"other\"}"[..], "without a byte order mark"),
        (&[json], &utf16, "encoded in UTF-8"),
        (&[], &utf16, "encoded in UTF-8"),
        (&[json], b"{\"model\":\"other\",\"x\":\"\xff\"}", "invalid utf-8 sequence of 1 bytes from index 22"),
        (&[json], br#"{"model":"other","x":NaN}"#, "no NaN and no Infinity"),
        (&[], br#"{"model":"other","x":-Infinity}"#, "no NaN and no Infinity"),
        (&[("content-type", "text/plain")], br#"{"model":"other""#, "could not parse"),
        (&[json], br#"{"model":["other"]}"#, "expected a string"),
        (&[json], b"[]", "must be a JSON object"),
        (&[json, ("content-type", "text/plain")], br#"{"model":"org/tiny"}"#, "several headers"),
    ] {
        let (status, message) = ask(headers, body).await;
        assert!(status == 400 && message.contains(expected), "{headers:?} {status} {message}");
    }
    let (status, message) = ask(&[json, ("content-encoding", "gzip")], b"\x1f\x8b").await;
    assert!(status == 415 && message.contains("without compression"), "{status} {message}");
    assert!(engine.seen.lock().is_empty());
    assert_eq!(ask(&[("content-type", "audio/wav")], b"RIFF {}").await.0, 201);
}

#[tokio::test]
async fn endpoints_that_change_the_engine_are_not_relayed() {
    let engine = relaying(vec![head(), end()]);
    for path in [
        "/reset_prefix_cache",
        "/sleep",
        "/v1/load_lora_adapter",
        "/v1/LOAD_LORA_ADAPTER",
        "/v1/Unload_Lora_Adapter/",
        "/v1//load_lora_adapter",
        "//v1/load_lora_adapter",
        "/v1/load%5Flora_adapter",
        "/v1/../sleep",
        "/v1/./x",
        "/v1/%2e%2e/sleep",
        "/v1/files/a%2F..%2F..%2Fsleep",
        "/v1/files/a%00",
        "/flush_cache",
        "/metrics/x",
        "/v1x",
    ] {
        assert_eq!(post(&engine.router(), path, "{}").await.status, 404, "{path}");
    }
    assert!(engine.seen.lock().is_empty());
    let native = FakeEngine::with_steps(vec![say("x")]);
    assert_eq!(post(&native.router(), "/v1/responses", r#"{"model":"org/tiny"}"#).await.status, 404);
}

#[tokio::test]
async fn a_path_with_encoded_characters_arrives_as_it_came() {
    let engine = relaying(vec![head(), end()]);
    let paths = ["/v1/files/a%20b?after=%2e%2E", "/v1/responses/resp%3a1", "/v1/files/a%2Fb/content"];
    for path in paths {
        let request = HttpRequest::delete(path).body(Body::empty()).unwrap();
        assert_eq!(send(&engine.router(), request).await.status, 201, "{path}");
    }
    let seen: Vec<_> = engine.seen.lock().iter().map(|request| relayed(request).target.to_string()).collect();
    assert_eq!(seen, paths);
}

#[tokio::test]
async fn further_paths_are_relayed_if_the_settings_allow_them() {
    let engine = relaying(vec![head(), part("ok"), end()]);
    assert_eq!(post(&engine.router(), "/infill", "{}").await.status, 404);
    let router = engine.router_with(toml::from_str("relay_paths = ['/infill', '/api/*']").unwrap());
    for (path, expected) in [
        ("/infill", 201),
        ("/api/chat", 201),
        ("/infill/x", 404),
        ("/api", 404),
        ("/apix", 404),
        ("/api/../sleep", 404),
        ("/api/a%20b", 201),
        ("/api/%2e%2e/sleep", 404),
        ("/infil%6c", 404),
        ("/api//sleep", 404),
        ("/sleep", 404),
    ] {
        assert_eq!(post(&router, path, r#"{"model":"org/tiny","prompt":"x"}"#).await.status, expected, "{path}");
    }
    let seen: Vec<_> = engine.seen.lock().iter().map(|request| relayed(request).target.to_string()).collect();
    assert_eq!(seen, ["/infill", "/api/chat", "/api/a%20b"]);
}

#[tokio::test]
async fn other_protocols_than_websocket_are_not_switched_to() {
    let engine = relaying(vec![head(), end()]);
    let ask = async |upgrade: &str| {
        let request = HttpRequest::get("/v1/realtime?model=org/tiny").header("connection", "upgrade");
        send(&engine.router(), request.header("upgrade", upgrade).body(Body::empty()).unwrap()).await
    };
    assert_eq!(ask("h2c").await.status, 201, "clients offer HTTP/2 in this way");
    assert_eq!(relayed(&engine.only()).upgrade, None);
    let refused = ask("WebSocket").await;
    assert_eq!((refused.status.as_u16(), &refused.json()["error"]["param"]), (400, &json!("upgrade")));
    let message = refused.json()["error"]["message"].to_string();
    assert!(message.contains("begins with a GET request over HTTP/1.1"), "there is no connection: {message}");
}

#[tokio::test]
async fn methods_of_connections_are_not_relayed() {
    let engine = relaying(vec![head(), end()]);
    for (method, expected) in [("CONNECT", 405), ("TRACE", 405), ("DELETE", 201)] {
        let request = HttpRequest::builder().method(method).uri("/v1/responses/7").body(Body::empty()).unwrap();
        assert_eq!(send(&engine.router(), request).await.status, expected, "{method}");
    }
    assert_eq!(relayed(&engine.only()).method, "DELETE");
}

#[tokio::test]
async fn an_engine_gets_the_header_of_the_tenant_unless_the_key_has_one() {
    let keys = Keys::new();
    let ann = keys.add("ann", |key| key.tenant = Some("ann".into()));
    let any = keys.add("any", |_| ());
    let tenant_header = Some("x-tenant".to_owned().try_into().unwrap());
    let settings = frontend::Settings { tenant_header, ..keys.settings() };
    let engine = relaying(vec![head(), end()]);
    let router = engine.router_with(settings);
    for (key, expected) in [(ann, None), (any, Some("bob"))] {
        let mut request = with_key(chat(json!({})), &key);
        request.headers_mut().insert("x-tenant", "bob".parse().unwrap());
        assert_eq!(send(&router, request).await.status, 201);
        let seen = engine.seen.lock().pop().unwrap();
        let named = relayed(&seen).headers.get("x-tenant").map(|name| name.to_str().unwrap().to_owned());
        assert_eq!(named.as_deref(), expected, "the client named bob");
    }
}

#[tokio::test]
async fn tenants_and_salts_have_cache_domains_of_their_own() {
    let settings = frontend::Settings {
        tenant_header: Some("x-tenant".to_owned().try_into().unwrap()),
        ..frontend::Settings::default()
    };
    let engine = relaying(vec![head(), end()]);
    let router = engine.router_with(settings);
    let ask = async |tenant: Option<&str>, salt: Value| {
        let mut request = chat(json!({ "cache_salt": salt }));
        if let Some(tenant) = tenant {
            request.headers_mut().insert("x-tenant", tenant.parse().unwrap());
        }
        send(&router, request).await;
        engine.seen.lock().pop().unwrap().domain
    };
    let shared = ask(None, json!(null)).await;
    assert!(shared == Domain::shared());
    let ann = ask(Some("ann"), json!(null)).await;
    let salted = ask(Some("ann"), json!("s")).await;
    let bob = ask(Some("bob"), json!("s")).await;
    let domains = [shared, ann, salted, bob];
    for (at, one) in domains.iter().enumerate() {
        assert!(domains[at + 1..].iter().all(|other| other != one));
    }
}
