use super::*;
use crate::models::discover;
use crate::relay::client::Settings;
use crate::relay::fake::{FakeEngine, Script};
use crate::relay::stream::Usage;
use kvbm::Domain;
use serde_json::json;
use std::collections::BTreeSet;
use tokio::time::timeout;
use worker::engine::{ErrorKind, RequestGroup};

/// For what must happen soon, on any machine.
const SOON: Duration = Duration::from_secs(20);
const NEVER: Duration = Duration::from_hours(1);

/// A server with one model, and its engine. A connection to it is open and idle. `health`: its next answers.
async fn engine(health: impl IntoIterator<Item = Script>) -> (FakeEngine, UpstreamEngine) {
    let server = FakeEngine::start(health).await.unwrap();
    server.set_page("/v1/models", Script::json(200, &json!({ "data": [{ "id": "org/m" }] })));
    let client = Client::new(&server.uri(), &Settings::default()).unwrap();
    let card = Arc::new(discover(&client, None).await.unwrap().remove(0).card);
    let metrics = Metrics::new(&prometheus::Registry::new()).unwrap();
    (server, UpstreamEngine::new(client, UpstreamSettings::default(), card, metrics))
}

#[test]
fn a_server_with_all_requests_that_it_may_have_is_no_fault() {
    assert_eq!(error_of(RelayError::Full(9)), Error::Overloaded { retry_after: RETRY_WHEN_FULL });
}

#[test]
fn a_limit_of_open_files_of_this_process_is_no_fault_of_a_server() {
    assert_eq!(error_of(RelayError::OutOfFiles), Error::OutOfFiles);
}

#[test]
fn a_server_that_closes_the_connection_with_a_request_may_have_computed_it() {
    let error = error_of(RelayError::NoAnswer("end of file".to_owned()));
    assert_eq!((error.is_refusal(), &error), (false, &Error::NoAnswer("end of file".to_owned())));
    assert!(error_of(RelayError::Unreachable("connection refused".to_owned())).is_refusal());
}

#[tokio::test]
async fn a_path_that_is_too_long_for_the_server_gets_an_error_object() {
    let path = |length: usize| format!("/{}", "x".repeat(length));
    let address = format!("http://localhost{}", path(60_000)).parse().unwrap();
    let client = Client::new(&address, &Settings::default()).unwrap();
    let metrics = Metrics::new(&prometheus::Registry::new()).unwrap();
    let card = Arc::new(ModelCard::new("org/m", 64, 16));
    let engine = UpstreamEngine::new(client, UpstreamSettings::default(), card, metrics);
    let http = HttpRequest { target: path(6_000).parse().unwrap(), ..HttpRequest::post("/") };
    let request = Request { work: Work::Relay(Arc::new(http)), ..Request::greedy("r", "org/m", &[1], 4) };
    let Err(Error::Relayed(answer)) = engine.generate(request).await else { panic!("it is refused") };
    assert_eq!((answer.status, answer.kind), (StatusCode::URI_TOO_LONG, ErrorKind::Request));
    assert_eq!(answer.headers[header::CONTENT_TYPE], "application/json");
    let body: serde_json::Value = serde_json::from_slice(&answer.body).unwrap();
    assert_eq!(body["error"]["code"], "url_too_long");
    assert!(answer.replaces.is_some(), "it is no answer of the server, so it gets the form of the endpoint");
}

/// A request with this body.
fn request(path: &'static str, content_type: &'static str, body: &'static [u8]) -> Request {
    let http = HttpRequest {
        headers: [(header::CONTENT_TYPE, HeaderValue::from_static(content_type))].into_iter().collect(),
        body: Bytes::from_static(body),
        ..HttpRequest::post(path)
    };
    Request { work: Work::Relay(Arc::new(http)), ..Request::greedy("r", "org/m", &[1], 4) }
}

/// The connections of the requests for the health of a server.
fn probed(server: &FakeEngine) -> Vec<usize> {
    let health = server.requests().into_iter().filter(|request| request.uri.path() == "/health");
    health.map(|request| request.connection).collect()
}

#[tokio::test]
async fn a_server_that_answers_on_another_connection_is_healthy() {
    let dead = Script::default().after(NEVER);
    let (server, engine) = engine([dead, Script::json(200, &json!({}))]).await;
    timeout(SOON, engine.probe()).await.expect("an answer").unwrap();
    assert_eq!(probed(&server), [0, 1], "the open connection, and a new one");
    timeout(SOON, server.cancelled(1)).await.expect("the first probe ends");
}

#[tokio::test]
async fn a_server_that_does_not_answer_on_a_new_connection_either_is_not_healthy() {
    let (server, engine) = engine([]).await;
    server.set_page("/health", Script::default().after(NEVER));
    assert!(timeout(Duration::from_secs(3), engine.probe()).await.is_err());
    assert_eq!(probed(&server), [0, 1]);
    timeout(SOON, server.cancelled(2)).await.expect("both probes end with their caller");
    server.set_page("/health", Script::json(500, &json!({})));
    assert!(matches!(timeout(SOON, engine.probe()).await.unwrap(), Err(Error::Failed(_))));
    drop(server);
}

#[tokio::test]
async fn a_page_for_browsers_is_no_answer_of_an_engine() {
    let (server, engine) = engine([]).await;
    for path in ["/v1/completions", "/v1/other"] {
        let page = Script::json(200, &json!("maintenance")).header(header::CONTENT_TYPE, "text/html; charset=utf-8");
        server.set_page(path, page);
    }
    let of_engine = engine.generate(request("/v1/completions", "application/json", b"{}")).await;
    assert!(matches!(of_engine, Err(Error::Failed(_))));
    let other = engine.generate(request("/v1/other", "application/json", b"{}")).await;
    assert!(other.is_ok(), "what else a server has may be a page");
}

#[tokio::test]
async fn a_stream_of_an_endpoint_that_is_not_known_ends_with_its_body() {
    let (server, engine) = engine([]).await;
    let texts = "event: log\ndata: building\n\nevent: end\ndata: ok\n\n";
    let bodies = [texts, "data: \"hello\"\n\n", "event: end\ndata:\n\n", ": ping\n\n", "", "data: no line end"];
    for body in bodies {
        let mut relayed = Vec::new();
        for path in ["/v1/other", "/v1/completions"] {
            server.set_page(path, Script::events(Some(body).filter(|body| !body.is_empty())));
            let outputs = engine.generate(request(path, "application/json", b"{}")).await.unwrap();
            relayed.push(outputs.collect::<Vec<_>>().await);
        }
        let [Ok(Output::Head(_)), parts @ .., Ok(Output::End(RelayReport { failed: false, .. }))] = &relayed[0][..]
        else {
            panic!("{body:?}: {:?}", relayed[0])
        };
        let parts = parts.iter().map(|part| if let Ok(Output::Body(part)) = part { &part[..] } else { b"?" });
        assert_eq!(parts.collect::<Vec<_>>().concat(), body.as_bytes());
        assert!(matches!(relayed[1].last(), Some(Err(Error::Failed(_)))), "{body:?}: its end is missing");
    }
    server.set_page("/v1/other", Script::events([texts, texts]).broken_after(1));
    let outputs = engine.generate(request("/v1/other", "application/json", b"{}")).await.unwrap();
    let last = outputs.collect::<Vec<_>>().await.pop();
    assert!(matches!(last, Some(Err(Error::Failed(_)))), "its body has no end: {last:?}");
}

#[tokio::test]
async fn a_request_has_ended_at_done_also_if_its_body_goes_on() {
    let (server, engine) = engine([]).await;
    let script = Script::default();
    server.set_page("/v1/completions", script.clone().hanging_after(4));
    let mut outputs = engine.generate(request("/v1/completions", "application/json", b"{}")).await.unwrap();
    let mut bytes = Vec::new();
    loop {
        match timeout(SOON, outputs.next()).await.expect("an output") {
            Some(Ok(Output::Body(part))) => bytes.extend_from_slice(&part),
            Some(Ok(Output::End(_))) => break,
            other => assert!(matches!(other, Some(Ok(Output::Head(_)))), "{other:?}"),
        }
    }
    assert_eq!(bytes, script.body());
    assert_eq!(engine.load().borrow().running, 0);
    assert!(timeout(SOON, outputs.next()).await.expect("the end").is_none());
    timeout(SOON, server.cancelled(1)).await.expect("the connection is closed");
}

#[tokio::test]
async fn a_body_with_a_salt_is_an_object() {
    let (_server, mut engine) = engine([]).await;
    (engine.settings.salted, engine.settings.has_tenants) = (SaltedEndpoints::All, true);
    let sent_to = |path: &'static str, domain: &Domain, content_type: &'static str, body: &'static [u8]| {
        let request = Request { domain: domain.clone(), ..request(path, content_type, body) };
        let Work::Relay(http) = &request.work else { unreachable!("it is relayed") };
        let salt = engine.salt(http, &request.domain)?;
        engine.body(http, &request, salt.as_deref(), false).map(|(body, _)| body)
    };
    let sent = |domain: &Domain, kind: &'static str, body: &'static [u8]| sent_to("/v1/responses", domain, kind, body);
    let (shared, tenant) = (Domain::shared(), Domain::derived(b"s", "ann"));
    let json = "application/json";
    let salted = sent(&tenant, json, br#"{"cache_salt":"of-bob"}"#).unwrap();
    assert!(salted.starts_with(br#"{"cache_salt":"#) && !salted.ends_with(br#"of-bob"}"#), "{salted:?}");
    let salted = sent(&tenant, json, br#"{"extra_key":"of-bob"}"#).unwrap();
    assert!(salted.starts_with(br#"{"cache_salt":"#), "{salted:?}");
    let with_mark = b"\xef\xbb\xbf{\"cache_salt\":\"of-bob\"}";
    for (content_type, body) in [
        (json, &with_mark[..]),
        ("multipart/form-data; boundary=b", with_mark),
        (json, b"{\0\"\0"),
        (json, br#"[{"cache_salt":"of-bob"}]"#),
        ("audio/wav", b"--b\r\n"),
        ("Multipart/Form-Data; boundary=b", b"--b\r\n"),
    ] {
        assert!(matches!(sent(&tenant, content_type, body), Err(Error::Invalid { .. })), "{content_type} {body:?}");
    }
    assert_eq!(sent(&tenant, json, b" \n").unwrap(), b" \n"[..]);
    assert_eq!(sent(&shared, json, with_mark).unwrap(), with_mark[..]);
    let form = ("multipart/form-data; boundary=b", &b"--b\r\n"[..]);
    assert_eq!(sent(&shared, form.0, form.1).unwrap(), form.1, "it has no tenant");
    assert_eq!(sent_to("/v1/embeddings", &tenant, form.0, form.1).unwrap(), form.1, "it uses no cache");
    assert!(sent_to("/v1/embeddings", &tenant, json, with_mark).is_err(), "a server may read it as JSON");
}

#[tokio::test]
async fn without_tenants_a_salt_passes_where_its_endpoint_gets_none() {
    let (_server, mut engine) = engine([]).await;
    let paths = BTreeSet::from([Box::from("/v1/chat/completions")]);
    engine.settings.salted = SaltedEndpoints::Described(Arc::new(paths));
    let body = br#"{"text":"x", "extra_key":["s"]}"#;
    let to = |path| Request { domain: Domain::shared().salted("s"), ..request(path, "application/json", body) };
    let sent = |engine: &UpstreamEngine, path| {
        let request = to(path);
        let Work::Relay(http) = &request.work else { unreachable!("it is relayed") };
        let salt = engine.salt(http, &request.domain)?;
        engine.body(http, &request, salt.as_deref(), false).map(|(body, _)| body)
    };
    assert_eq!(sent(&engine, "/generate").unwrap(), body[..], "a field of SGLang");
    assert!(!engine.refuses(&to("/generate")));
    let salted = sent(&engine, "/v1/chat/completions").unwrap();
    let salted: serde_json::Value = serde_json::from_slice(&salted).unwrap();
    assert!(salted["cache_salt"].is_string() && salted.get("extra_key").is_none(), "{salted}");
    engine.settings.has_tenants = true;
    assert!(matches!(sent(&engine, "/generate"), Err(Error::Invalid { field: "cache_salt", .. })));
    assert!(engine.refuses(&to("/generate")), "its cache would be shared with tenants");
}

#[tokio::test]
async fn a_request_for_tokens_names_the_model() {
    let (_server, engine) = engine([]).await;
    for (path, body, expected) in [
        ("/tokenize", &br#"{"prompt":"x"}"#[..], &br#"{"prompt":"x","model":"org/m"}"#[..]),
        ("/detokenize", b"{}", br#"{"model":"org/m"}"#),
        ("/tokenize", br#"{"model":null}"#, br#"{"model":"org/m"}"#),
        ("/v1/responses", b"{}", b"{}"),
    ] {
        let request = request(path, "application/json", body);
        let Work::Relay(http) = &request.work else { unreachable!("it is relayed") };
        assert_eq!(engine.body(http, &request, None, false).unwrap().0, expected, "{path}");
    }
}

#[tokio::test]
async fn a_client_does_not_choose_the_id_of_a_stored_response() {
    let (_server, engine) = engine([]).await;
    for (path, expected) in [
        ("/v1/responses", r#"{"model":"org/m"}"#),
        ("/v1/Responses/", r#"{"model":"org/m"}"#),
        ("/v1/chat/completions", r#"{"model":"org/m","request\u005fid":"resp_1"}"#),
    ] {
        let body = br#"{"model":"org/m","request\u005fid":"resp_1"}"#;
        let request = request(path, "application/json", body);
        let Work::Relay(http) = &request.work else { unreachable!("it is relayed") };
        assert_eq!(engine.body(http, &request, None, false).unwrap().0, expected, "{path}");
    }
}

#[tokio::test]
async fn a_metered_response_reports_what_is_known_before_its_end() {
    let usage = Usage { prompt_tokens: Some(7), completion_tokens: Some(2), cached_tokens: Some(4) };
    for is_metered in [true, false] {
        let (_server, engine) = engine([Script::chat(&["a", "b"], Some(usage))]).await;
        let request = request("/v1/chat/completions", "application/json", br#"{"model":"org/m"}"#);
        let Work::Relay(http) = &request.work else { unreachable!("it is relayed") };
        let http = HttpRequest { is_metered, wants_usage: true, is_stream: true, ..HttpRequest::clone(http) };
        let request = Request { work: Work::Relay(Arc::new(http)), ..request };
        let mut outputs = engine.generate(request).await.unwrap();
        let Some(Ok(Output::Head(head))) = outputs.next().await else { panic!("a head") };
        while let Some(Ok(Output::Body(_))) = outputs.next().await {}
        let prompt_tokens = head.progress.map(|progress| progress.get().prompt_tokens);
        assert_eq!(prompt_tokens, is_metered.then_some(Some(7)));
    }
}

#[tokio::test]
async fn a_server_gets_one_word_for_the_usage_of_a_stream() {
    let (_server, engine) = engine([]).await;
    let asked = r#"{"model":"org/m","stream_options":{"include_usage":true}}"#;
    let sent = |path: &'static str, options: &str, change: &dyn Fn(&mut HttpRequest)| {
        let request = request(path, "application/json", b"{}");
        let Work::Relay(http) = &request.work else { unreachable!("it is relayed") };
        let mut http = HttpRequest { is_stream: true, ..HttpRequest::clone(http) };
        http.body = format!(r#"{{"model":"org/m"{options}}}"#).into();
        change(&mut http);
        // Two choices, of which no usage is asked for unless it is charged.
        let request = Request { group: http.is_metered.then(|| RequestGroup::new(2)), ..request };
        let (body, usage) = engine.body(&http, &request, None, false).unwrap();
        (String::from_utf8(body.to_vec()).unwrap(), usage)
    };
    let (chat, invocations) = ("/v1/chat/completions", "/invocations");
    for value in ["false", r#""no""#, "0", "null", r#""False""#] {
        for path in [chat, invocations] {
            let options = format!(r#","stream_options":{{"include_usage":{value}}}"#);
            let metered = |http: &mut HttpRequest| http.is_metered = true;
            assert_eq!(sent(path, &options, &|_| ()), (asked.to_owned(), UsageInStream::Strip), "{value}");
            assert_eq!(sent(path, &options, &metered), (asked.to_owned(), UsageInStream::Strip), "{value}");
        }
    }
    for value in ["true", r#""yes""#, "1"] {
        let options = format!(r#","stream_options":{{"include_usage":{value}}}"#);
        let sent = sent(chat, &options, &|http| http.wants_usage = true);
        assert_eq!(sent, (asked.to_owned(), UsageInStream::Keep), "the client gets it: {value}");
    }
    let (body, usage) = sent(chat, r#","stream_options":{"continuous_usage_stats":true}"#, &|_| ());
    let options = r#""stream_options":{"continuous_usage_stats":false,"include_usage":true}"#;
    assert_eq!((body, usage), (format!(r#"{{"model":"org/m",{options}}}"#), UsageInStream::Strip));
    let unchanged = r#"{"model":"org/m"}"#.to_owned();
    let plain = |http: &mut HttpRequest| http.is_stream = false;
    assert_eq!(sent(chat, "", &plain), (unchanged.clone(), UsageInStream::Keep));
    assert_eq!(sent("/v1/responses", "", &|_| ()), (unchanged, UsageInStream::Keep));
}
