//! The server over real connections: time limits, errors before a handler sees the request, and shutdown.

use crate::fake::{FakeEngine, Step, first, last};
use crate::relay::{head, part, relaying};
use crate::test_server::TestServer;
use frontend::Settings;
use serde_json::Value;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};
use tokio::sync::Semaphore;
use units::{ByteSize, HumanDuration};
use worker::engine::{Error, FinishReason};

const BODY: &str = r#"{"model":"org/tiny","stream":true,"messages":[{"role":"user","content":"hello"}]}"#;
/// A timeout that expires during the test. No test depends on being faster.
const SHORT: HumanDuration = HumanDuration(Duration::from_millis(100));

impl TestServer {
    async fn connect(&self) -> TcpStream {
        TcpStream::connect(self.address).await.unwrap()
    }

    /// The status and the error object of the response to some bytes.
    async fn read_error(&self, request: &[u8]) -> (u16, Value) {
        let mut connection = self.connect().await;
        connection.write_all(request).await.unwrap();
        read_error(connection).await
    }

    async fn is_alive(&self) -> bool {
        let mut connection = self.connect().await;
        connection.write_all(b"GET /live HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n").await.unwrap();
        read_to_end(connection).await.starts_with("HTTP/1.1 200")
    }
}

/// A connection with a request.
async fn send_request(server: &TestServer, body: &str) -> TcpStream {
    let mut connection = server.connect().await;
    let request = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    connection.write_all(request.as_bytes()).await.unwrap();
    connection
}

/// A connection whose stream has begun.
async fn start_stream(server: &TestServer) -> TcpStream {
    let mut connection = send_request(server, BODY).await;
    let mut seen = Vec::new();
    while !String::from_utf8_lossy(&seen).contains("delta") {
        assert_ne!(connection.read_buf(&mut seen).await.unwrap(), 0, "{}", String::from_utf8_lossy(&seen));
    }
    connection
}

/// Reads until the server closes the connection.
async fn read_to_end(mut connection: TcpStream) -> String {
    let mut rest = String::new();
    connection.read_to_string(&mut rest).await.unwrap();
    rest
}

/// The status and the error object of the response that ends a connection.
async fn read_error(connection: TcpStream) -> (u16, Value) {
    let response = read_to_end(connection).await;
    let (head, body) = response.split_once("\r\n\r\n").unwrap_or_else(|| panic!("no response: {response:?}"));
    let body: Value = serde_json::from_str(body).unwrap_or_else(|error| panic!("{error}: {response}"));
    assert!(head.to_lowercase().contains("content-type: application/json"), "{head}");
    assert!(body["error"]["message"].is_string() && body["error"]["type"].is_string(), "{body}");
    (head[9..12].parse().unwrap(), body["error"].clone())
}

async fn until(condition: impl Fn() -> bool) {
    while !condition() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test]
async fn shutdown_lets_streams_finish_and_accepts_no_more() {
    let permits = Arc::new(Semaphore::new(0));
    let engine = FakeEngine::with_steps(vec![first("a"), Step::Wait(permits.clone()), last("b", FinishReason::Stop)]);
    let server = TestServer::start(&engine, Settings::default()).await;
    let connection = start_stream(&server).await;
    server.shutdown.close(Duration::from_mins(10));
    while TcpStream::connect(server.address).await.is_ok() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert!(!server.serving.is_finished());
    permits.add_permits(1);
    assert!(read_to_end(connection).await.contains("data: [DONE]"));
    server.serving.await.unwrap().unwrap();
}

#[tokio::test]
async fn an_announced_shutdown_serves_requests_until_the_listener_is_closed() {
    let permits = Arc::new(Semaphore::new(0));
    let engine = FakeEngine::with_steps(vec![first("a"), Step::Wait(permits.clone()), last("b", FinishReason::Stop)]);
    let server = TestServer::start(&engine, Settings::default()).await;
    let running = start_stream(&server).await;
    server.shutdown.announce();
    let mut connection = server.connect().await;
    connection.write_all(b"GET /ready HTTP/1.1\r\nhost: localhost\r\n\r\n").await.unwrap();
    let response = read_to_end(connection).await;
    assert!(response.starts_with("HTTP/1.1 503") && response.contains("\"shutting_down\""), "{response}");
    assert!(response.contains("retry-after: 1\r\n") && response.contains("connection: close\r\n"), "{response}");
    // Of a client whose load balancer has not noticed yet.
    let late = start_stream(&server).await;
    assert!(server.is_alive().await, "the process is alive until it ends");
    // The running request finishes, and then its connection closes.
    server.shutdown.close(Duration::from_mins(10));
    permits.add_permits(2);
    for stream in [running, late] {
        assert!(read_to_end(stream).await.contains("data: [DONE]"));
    }
}

#[tokio::test]
async fn running_requests_get_an_error_at_the_drain_deadline() {
    let engine = FakeEngine::with_steps(vec![first("a"), Step::Hang]);
    let server = TestServer::start(&engine, Settings::default()).await;
    let connection = start_stream(&server).await;
    server.shutdown.close(Duration::from_millis(20));
    let rest = read_to_end(connection).await;
    assert!(rest.contains("shutting down") && !rest.contains("[DONE]"), "{rest}");
    server.serving.await.unwrap().unwrap();
    assert_eq!(engine.open(), 0);
}

#[tokio::test]
async fn a_request_with_half_a_body_gets_an_error_at_the_drain_deadline() {
    let server = TestServer::start(&FakeEngine::with_steps(vec![]), Settings::default()).await;
    let mut connection = server.connect().await;
    let head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n{\"model\":";
    connection.write_all(head.as_bytes()).await.unwrap();
    until(|| server.metric("blockyard_frontend_requests_in_flight") == Some("1".into())).await;
    server.shutdown.close(Duration::ZERO);
    let response = read_to_end(connection).await;
    assert!(response.starts_with("HTTP/1.1 503") && response.contains("\"shutting_down\""), "{response}");
    assert!(response.contains("connection: close\r\n"), "{response}");
    let series = "blockyard_frontend_requests_total{endpoint=\"/v1/completions\",status=\"503\"}";
    until(|| server.metric(series) == Some("1".into())).await;
    server.serving.await.unwrap().unwrap();
}

#[tokio::test]
async fn a_client_that_still_sends_during_a_drain_gets_its_error() {
    // More than the server discards of a body that is too large and than buffers hold: some is not sent at the close.
    const BODY: usize = 8 << 20;
    let settings = Settings { max_body: ByteSize(1024), ..Settings::default() };
    let server = TestServer::start(&FakeEngine::with_steps(vec![]), settings).await;
    let mut connection = server.connect().await;
    let head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n";
    connection.write_all(head.as_bytes()).await.unwrap();
    until(|| server.metric("blockyard_frontend_requests_in_flight") == Some("1".into())).await;
    server.shutdown.close(Duration::from_mins(10));
    let chunk = format!("{BODY:x}\r\n{}", " ".repeat(BODY));
    connection.write_all(chunk.as_bytes()).await.unwrap();
    let response = read_to_end(connection).await;
    assert!(response.starts_with("HTTP/1.1 413"), "{response}");
    server.serving.await.unwrap().unwrap();
}

#[tokio::test]
async fn a_transfer_coding_besides_chunked_is_rejected() {
    let engine = FakeEngine::with_steps(vec![last("", FinishReason::Stop)]);
    let server = TestServer::start(&engine, Settings::default()).await;
    let chunked = format!("{:x}\r\n{BODY}\r\n0\r\n\r\n", BODY.len());
    for (headers, accepted) in [
        ("transfer-encoding: Chunked", true),
        ("transfer-encoding: gzip, chunked", false),
        ("transfer-encoding: gzip\r\ntransfer-encoding: chunked", false),
        ("transfer-encoding: identity, chunked", false),
        ("transfer-encoding: chunked, gzip", false),
    ] {
        let mut connection = server.connect().await;
        let head = "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n";
        connection.write_all(format!("{head}{headers}\r\n\r\n{chunked}").as_bytes()).await.unwrap();
        if accepted {
            assert!(read_to_end(connection).await.starts_with("HTTP/1.1 200"), "{headers}");
        } else {
            let (status, error) = read_error(connection).await;
            assert_eq!((status, &error["type"]), (400, &"invalid_request_error".into()), "{headers}: {error}");
        }
    }
    assert_eq!(engine.seen.lock().len(), 1, "the engine gets no body that may be encoded");
}

#[tokio::test]
async fn a_closed_connection_stops_the_engine() {
    let engine = FakeEngine::with_steps(vec![first("a"), Step::Hang]);
    let server = TestServer::start(&engine, Settings::default()).await;
    let streaming = start_stream(&server).await;
    let waiting = send_request(&server, &BODY.replace("true", "false")).await;
    until(|| engine.open() == 2).await;
    drop((streaming, waiting));
    until(|| engine.open() == 0).await;
}

#[tokio::test]
async fn a_connection_that_is_half_closed_counts_as_closed() {
    let engine = FakeEngine::with_steps(vec![Step::Hang]);
    let server = TestServer::start(&engine, Settings::default()).await;
    let mut connection = send_request(&server, &BODY.replace("true", "false")).await;
    until(|| engine.open() == 1).await;
    connection.shutdown().await.unwrap();
    until(|| engine.open() == 0).await;
    assert_eq!(read_to_end(connection).await, "");
}

#[tokio::test]
async fn a_relayed_response_that_is_cut_off_begins_with_what_has_arrived() {
    let broken = Step::Fail(Error::Failed("the connection was reset".into()));
    let engine = relaying(vec![head(), part("{\"a\" : "), Step::Yield, broken]);
    let server = TestServer::start(&engine, Settings::default()).await;
    let mut connection = send_request(&server, &BODY.replace("true", "false")).await;
    let mut received = Vec::new();
    connection.read_to_end(&mut received).await.unwrap();
    let received = String::from_utf8(received).unwrap();
    assert!(received.starts_with("HTTP/1.1 201") && received.contains("{\"a\" : "), "{received}");
    assert!(!received.ends_with("0\r\n\r\n"), "it does not look complete: {received}");
}

#[tokio::test]
async fn a_body_that_its_client_cuts_off_counts_as_cancelled() {
    let server = TestServer::start(&FakeEngine::with_steps(vec![]), Settings::default()).await;
    let mut connection = server.connect().await;
    let request = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000\r\n\r\n{\"model\":";
    connection.write_all(request).await.unwrap();
    drop(connection);
    let cancelled = "blockyard_frontend_requests_total{endpoint=\"/v1/completions\",status=\"499\"}";
    until(|| server.metric(cancelled) == Some("1".into())).await;
}

#[tokio::test]
async fn a_stream_that_the_server_abandons_does_not_count_as_cancelled() {
    let engine = FakeEngine::with_steps(vec![first("a"), Step::Hang]);
    let server = TestServer::start(&engine, Settings::default()).await;
    let connection = start_stream(&server).await;
    // As at the second signal to stop: the first has set the time for running requests.
    server.shutdown.close(Duration::from_mins(10));
    server.shutdown.abandon();
    drop(connection);
    let ended = |status: u16| {
        let labels = format!("endpoint=\"/v1/chat/completions\",status=\"{status}\"");
        server.metric(&format!("blockyard_frontend_requests_total{{{labels}}}"))
    };
    until(|| ended(503) == Some("1".into())).await;
    assert_eq!(ended(499), None);
}

/// Most clients read the response only after they have sent the whole request.
#[tokio::test]
async fn a_body_that_no_handler_reads_gets_its_error() {
    let settings = Settings { max_body: ByteSize(1 << 20), ..Settings::default() };
    let server = TestServer::start(&FakeEngine::with_steps(vec![]), settings).await;
    let body = vec![b'x'; 3 << 20];
    let cases = [
        ("POST /v1/completions", "", 413),
        ("POST /v1/nothing", "", 404),
        ("PUT /v1/completions", "", 405),
        ("POST /v1/completions", "content-type: text/xml\r\n", 415),
        ("POST /v1/completions", "host: evil.example\r\n", 403),
    ];
    for (line, header, status) in cases {
        let host = if header.starts_with("host") { "" } else { "host: localhost\r\n" };
        let head = format!("{line} HTTP/1.1\r\n{host}{header}content-length: {}\r\n\r\n", body.len());
        let mut connection = server.connect().await;
        connection.write_all(head.as_bytes()).await.unwrap();
        connection.write_all(&body).await.unwrap();
        // The body was read to its end: the connection can be used again.
        connection.write_all(b"GET /live HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n").await.unwrap();
        let responses = read_to_end(connection).await;
        assert!(responses.starts_with(&format!("HTTP/1.1 {status}")), "{line}: {responses}");
        assert!(responses.contains("\"error\":{") && responses.ends_with("{\"status\":\"ok\"}"), "{line}: {responses}");
    }
}

/// A body above the discard limit: the client still receives the response before the connection closes.
#[tokio::test]
async fn a_body_beyond_what_is_discarded_gets_its_error() {
    let settings = Settings { max_body: ByteSize(64 << 10), ..Settings::default() };
    let server = TestServer::start(&FakeEngine::with_steps(vec![]), settings).await;
    let body = vec![b'x'; 8 << 20];
    let head = format!("POST /v1/nothing HTTP/1.1\r\nhost: localhost\r\ncontent-length: {}\r\n\r\n", body.len());
    let request = [head.as_bytes(), &body].concat();
    assert_eq!(server.read_error(&request).await.0, 404);
}

#[tokio::test]
async fn a_client_that_asks_before_it_sends_is_answered_at_once() {
    let server = TestServer::start(&FakeEngine::with_steps(vec![]), Settings::default()).await;
    let request = b"POST /v1/nothing HTTP/1.1\r\nhost: localhost\r\nexpect: 100-continue\r\ncontent-length: 5\r\n\r\n";
    assert_eq!(server.read_error(request).await.0, 404);
}

#[tokio::test]
async fn http_errors_have_an_error_object() {
    let server = TestServer::start(&FakeEngine::with_steps(vec![]), Settings::default()).await;
    let many = (0..200).map(|n| format!("x-{n}: y\r\n")).collect::<Vec<_>>().concat();
    let cases: [(Vec<u8>, u16, Value); 8] = [
        (format!("GET /live HTTP/1.1\r\nx: {}\r\n\r\n", "y".repeat(1 << 20)).into(), 431, "headers_too_large".into()),
        (format!("GET /live HTTP/1.1\r\n{many}\r\n").into(), 431, "headers_too_large".into()),
        (
            format!("GET /{} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n", "y".repeat(10_000)).into(),
            414,
            "url_too_long".into(),
        ),
        (b"GET /live HTTP/1.1\r\nbad header\r\n\r\n".into(), 400, Value::Null),
        (b"GET /a b HTTP/1.1\r\nhost: localhost\r\n\r\n".into(), 400, Value::Null),
        (b"\x16\x03\x01\x02\0\x01\0\x01\xfc\x03\x03\r\n\r\n".into(), 400, Value::Null),
        (b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: x\r\n\r\n".into(), 400, Value::Null),
        (b"GET /v1/models/%ff HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n".into(), 400, Value::Null),
    ];
    for (request, status, code) in cases {
        let shown = String::from_utf8_lossy(&request[..request.len().min(60)]).into_owned();
        let (was, error) = server.read_error(&request).await;
        assert_eq!((was, &error["code"]), (status, &code), "{shown:?}: {error}");
    }
}

#[tokio::test]
async fn slow_headers_and_idle_connections_are_closed() {
    let settings = Settings { header_timeout: SHORT, idle_timeout: SHORT, ..Settings::default() };
    let server = TestServer::start(&FakeEngine::with_steps(vec![]), settings).await;
    let (status, error) = server.read_error(b"GET /live HTTP/1.1\r\nhost: ").await;
    assert_eq!((status, error["code"].as_str()), (408, Some("request_timeout")));
    assert_eq!(
        read_to_end(server.connect().await).await,
        "",
        "a connection that sends nothing is closed without a response"
    );
    let mut kept = server.connect().await;
    kept.write_all(b"GET /live HTTP/1.1\r\nhost: localhost\r\n\r\n").await.unwrap();
    let answered = read_to_end(kept).await;
    assert!(answered.starts_with("HTTP/1.1 200") && answered.ends_with('}'), "{answered}");
    until(|| server.metric("blockyard_frontend_open_connections") == Some("0".into())).await;
    let closed = |reason| server.metric(&format!("blockyard_frontend_connections_closed_total{{reason=\"{reason}\"}}"));
    assert_eq!((closed("header_timeout"), closed("idle_timeout")), (Some("2".into()), Some("1".into())));
}

#[tokio::test]
async fn a_slow_body_is_refused_and_others_are_served() {
    let settings = Settings { body_timeout: HumanDuration(Duration::from_millis(300)), ..Settings::default() };
    let server = TestServer::start(&FakeEngine::with_steps(vec![]), settings).await;
    let connection = server.connect().await;
    let (reader, mut writer) = connection.into_split();
    let slow_upload = tokio::spawn(async move {
        let head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000\r\n\r\n";
        writer.write_all(head).await.unwrap();
        // Pauses are shorter than the maximum. The loop ends when the server closes the connection.
        while writer.write_all(b" ").await.is_ok() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        writer
    });
    assert!(server.is_alive().await);
    let mut reader = reader;
    let mut response = Vec::new();
    while !response.ends_with(b"}}") {
        assert_ne!(reader.read_buf(&mut response).await.unwrap(), 0, "{}", String::from_utf8_lossy(&response));
    }
    let response = String::from_utf8(response).unwrap();
    assert!(response.starts_with("HTTP/1.1 408") && response.contains("request_timeout"), "{response}");
    slow_upload.abort();
}

#[tokio::test]
async fn a_client_that_does_not_read_is_disconnected() {
    let settings = Settings { write_timeout: SHORT, ..Settings::default() };
    let text = "x".repeat(64 << 10);
    let engine = FakeEngine::new(move |_| Ok(std::iter::repeat_n(first(&text), 10_000).collect()));
    let server = TestServer::start(&engine, settings).await;
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(4096).unwrap();
    let mut connection = socket.connect(server.address).await.unwrap();
    let head = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {}\r\n\r\n{BODY}",
        BODY.len()
    );
    connection.write_all(head.as_bytes()).await.unwrap();
    until(|| engine.seen.lock().len() == 1 && engine.open() == 0).await;
    let closed = "blockyard_frontend_connections_closed_total{reason=\"write_timeout\"}";
    until(|| server.metric(closed) == Some("1".into())).await;
}

#[tokio::test]
async fn health_checks_are_answered_when_every_connection_is_busy() {
    let settings = Settings { max_connections: 4, ..Settings::default() };
    let engine = FakeEngine::with_steps(vec![first("a"), Step::Hang]);
    let server = TestServer::start(&engine, settings).await;
    let mut busy = Vec::new();
    for _ in 0..4 {
        busy.push(start_stream(&server).await);
    }
    assert!(server.is_alive().await);
    let mut connection = send_request(&server, BODY).await;
    let mut response = String::new();
    connection.read_to_string(&mut response).await.unwrap();
    assert!(response.starts_with("HTTP/1.1 503") && response.contains("too_many_connections"), "{response}");
    assert!(response.contains("retry-after: 1\r\n"), "{response}");
}

#[tokio::test]
async fn idle_connections_make_room_for_new_ones() {
    let settings = Settings { max_connections: 4, ..Settings::default() };
    let server = TestServer::start(&FakeEngine::with_steps(vec![last("a", FinishReason::Stop)]), settings).await;
    let mut idle = Vec::new();
    for _ in 0..40 {
        idle.push(server.connect().await);
    }
    let mut served = send_request(&server, &BODY.replace("true", "false")).await;
    let mut seen = Vec::new();
    while !seen.ends_with(b"}") {
        assert_ne!(served.read_buf(&mut seen).await.unwrap(), 0);
    }
    assert!(seen.starts_with(b"HTTP/1.1 200"));
    assert_eq!(read_to_end(idle.remove(0)).await, "", "the longest idle connection was closed");
}

#[tokio::test]
async fn http2_without_tls_is_served() {
    let server = TestServer::start(&FakeEngine::with_steps(vec![]), Settings::default()).await;
    let mut connection = server.connect().await;
    let no_settings = [0, 0, 0, 4, 0, 0, 0, 0, 0];
    connection.write_all(&[&b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"[..], &no_settings].concat()).await.unwrap();
    let mut frame = [0; 9];
    connection.read_exact(&mut frame).await.unwrap();
    assert_eq!(frame[3], 4, "a server opens with its settings: {frame:?}");
}

/// Over HTTP/2, the socket does not show that a client gives a stream no window.
#[tokio::test]
async fn an_http2_client_that_does_not_read_is_cut() {
    let settings = Settings { write_timeout: SHORT, ..Settings::default() };
    let engine = FakeEngine::with_steps(vec![first("a"), Step::Hang]);
    let server = TestServer::start(&engine, settings).await;
    let frame = |kind: u8, flags: u8, stream: u8, payload: &[u8]| {
        [&[0, 0, payload.len() as u8, kind, flags, 0, 0, 0, stream][..], payload].concat()
    };
    // SETTINGS_INITIAL_WINDOW_SIZE is 0.
    let settings = frame(4, 0, 0, &[0, 4, 0, 0, 0, 0]);
    // HPACK: the static entries `:method POST` and `:scheme http`; then `:path` and `:authority` as literals.
    let path = b"/v1/chat/completions";
    let head = [&[0x83, 0x86, 0x04, path.len() as u8][..], path, &[0x01, 9], b"localhost"].concat();
    let request = [frame(1, 4, 1, &head), frame(0, 1, 1, BODY.as_bytes())].concat();
    let mut connection = server.connect().await;
    connection.write_all(&[&b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"[..], &settings, &request].concat()).await.unwrap();
    until(|| engine.seen.lock().len() == 1 && engine.open() == 0).await;
    let closed = "blockyard_frontend_connections_closed_total{reason=\"write_timeout\"}";
    until(|| server.metric(closed) == Some("1".into())).await;
}
