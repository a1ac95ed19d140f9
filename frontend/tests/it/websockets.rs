//! WebSocket connections to an engine, over real connections.

use crate::fake::{FakeEngine, Step};
use crate::key_file::Keys;
use crate::relay::{head, part, relaying};
use crate::test_server::TestServer;
use axum::http::{HeaderMap, StatusCode};
use bytes::Bytes;
use frontend::{ApiKey, KeyEntry, KeyFile, Settings};
use std::num::NonZero;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex};
use tokio::net::TcpStream;
use tokio::time::{sleep, timeout};
use units::HumanDuration;
use worker::engine::{Output, RelayReport, ResponseHead, Tunnel, Work};

/// Time for what takes less than a second on an idle machine.
const TIMEOUT: Duration = Duration::from_mins(1);
/// A timeout that expires during the test. No test depends on being faster.
const SHORT: HumanDuration = HumanDuration(Duration::from_millis(100));

/// A gateway before an engine that switches.
struct Gateway {
    server: TestServer,
    engine: Arc<FakeEngine>,
}

/// An engine whose server greets, and sends everything back. It ends the connection after `bye`.
fn switching() -> Arc<FakeEngine> {
    FakeEngine::relaying(|_| {
        let (ours, theirs) = duplex(1024);
        tokio::spawn(echo(theirs));
        let headers: HeaderMap =
            [("sec-websocket-accept".parse().unwrap(), "x".parse().unwrap())].into_iter().collect();
        let tunnel = Some(Tunnel::new(Bytes::from_static(b"hello"), ours));
        let status = StatusCode::SWITCHING_PROTOCOLS;
        let head = ResponseHead { status, headers, tunnel, ..ResponseHead::default() };
        Ok(vec![Step::Relay(Output::Head(Box::new(head))), Step::Hang])
    })
}

async fn echo(mut client: DuplexStream) {
    let mut bytes = [0; 64];
    loop {
        let read = client.read(&mut bytes).await.unwrap();
        if read == 0 || client.write_all(&bytes[..read]).await.is_err() || bytes[..read].ends_with(b"bye") {
            return;
        }
    }
}

impl Gateway {
    async fn start(engine: Arc<FakeEngine>, settings: Settings) -> Self {
        Self { server: TestServer::start(&engine, settings).await, engine }
    }

    /// A connection on which a handshake with these further headers was sent, and the head of its response.
    async fn open(&self, further: &str) -> (TcpStream, String) {
        let request = format!(
            "GET /v1/realtime?model=org/tiny HTTP/1.1\r\nhost: localhost\r\nconnection: keep-alive, Upgrade\r\n\
             upgrade: WebSocket\r\nsec-websocket-key: k\r\nsec-websocket-version: 13\r\n{further}\r\n"
        );
        self.send(&request).await
    }

    async fn send(&self, request: &str) -> (TcpStream, String) {
        let mut connection = TcpStream::connect(self.server.address).await.unwrap();
        connection.write_all(request.as_bytes()).await.unwrap();
        let head = read_until(&mut connection, "\r\n\r\n").await;
        (connection, head)
    }

    /// A connection that has switched.
    async fn opened(&self, further: &str) -> TcpStream {
        let (mut connection, head) = self.open(further).await;
        assert!(head.starts_with("HTTP/1.1 101 Switching Protocols\r\n"), "{head}");
        assert_eq!(read_until(&mut connection, "hello").await, "hello");
        connection
    }

    /// Waits until a metric has this value.
    async fn until(&self, series: &str, value: &str) {
        let reached = async {
            while self.server.metric(series).as_deref() != Some(value) {
                sleep(Duration::from_millis(5)).await;
            }
        };
        let is_reached = timeout(TIMEOUT, reached).await.is_ok();
        assert!(is_reached, "{series} is {:?}, not {value}", self.server.metric(series));
    }

    async fn until_ended(&self, status: &str) {
        self.until(&format!("blockyard_frontend_requests_total{{endpoint=\"unmatched\",status=\"{status}\"}}"), "1")
            .await;
        self.until("blockyard_frontend_open_websockets", "0").await;
        self.until("blockyard_frontend_requests_in_flight", "0").await;
        assert_eq!(self.engine.open(), 0, "the engine is free again");
    }
}

async fn read_until(connection: &mut TcpStream, end: &str) -> String {
    let mut read = Vec::new();
    while !read.ends_with(end.as_bytes()) {
        let byte = timeout(TIMEOUT, connection.read_u8()).await.expect("bytes in time");
        read.push(byte.unwrap_or_else(|error| panic!("{error} after {:?}", String::from_utf8_lossy(&read))));
    }
    String::from_utf8(read).unwrap()
}

/// What comes until the connection ends, in whatever way.
async fn read_to_end(mut connection: TcpStream) -> String {
    let mut read = Vec::new();
    let _ = timeout(TIMEOUT, connection.read_to_end(&mut read)).await.expect("an end in time");
    String::from_utf8(read).unwrap()
}

#[tokio::test]
async fn bytes_pass_both_ways_and_are_counted() {
    let gateway = Gateway::start(switching(), Settings::default()).await;
    let (mut connection, head) = gateway.open("cookie: c\r\n").await;
    let headers = head.to_ascii_lowercase();
    for header in ["connection: upgrade\r\n", "upgrade: websocket\r\n", "sec-websocket-accept: x\r\n"] {
        assert!(headers.contains(header), "{head}");
    }
    assert!(!headers.contains("content-length") && !headers.contains("transfer-encoding"), "{head}");
    assert_eq!(read_until(&mut connection, "hello").await, "hello", "what the server has sent already");
    // It looks like an error of the HTTP layer, which has a body added on other connections.
    let looks_like_http = "HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n";
    connection.write_all(looks_like_http.as_bytes()).await.unwrap();
    assert_eq!(read_until(&mut connection, "\r\n\r\n").await, looks_like_http);
    gateway.until("blockyard_frontend_open_websockets", "1").await;
    gateway.until("blockyard_frontend_requests_in_flight", "1").await;
    let request = gateway.engine.only();
    let Work::Relay(http) = &request.work else { panic!("it is relayed") };
    assert_eq!((http.upgrade, http.target.as_str()), (Some("websocket"), "/v1/realtime?model=org/tiny"));
    assert_eq!((&http.headers["cookie"], http.body.len()), (&"c".parse().unwrap(), 0));
    connection.write_all(b"bye").await.unwrap();
    assert_eq!(read_to_end(connection).await, "bye", "the server has ended it");
    gateway.until_ended("101").await;
    let bytes = |direction: &str| {
        gateway
            .server
            .metric(&format!("blockyard_frontend_websocket_bytes_total{{direction=\"{direction}\"}}"))
            .unwrap()
    };
    let length = looks_like_http.len() + "bye".len();
    assert_eq!([bytes("received"), bytes("sent")], [length.to_string(), (length + "hello".len()).to_string()]);
}

#[tokio::test]
async fn bytes_that_come_with_the_handshake_reach_the_server() {
    let gateway = Gateway::start(switching(), Settings::default()).await;
    let mut connection = gateway.opened("\r\nearly").await;
    assert_eq!(read_until(&mut connection, "\r\n").await, "early\r\n");
}

#[tokio::test]
async fn a_client_that_leaves_ends_the_connection_to_the_server() {
    let gateway = Gateway::start(switching(), Settings::default()).await;
    let connection = gateway.opened("").await;
    drop(connection);
    gateway.until_ended("101").await;
}

#[tokio::test]
async fn another_answer_passes_and_the_connection_stays_one_of_http() {
    let end = Step::Relay(Output::End(RelayReport::default()));
    let gateway = Gateway::start(relaying(vec![head(), part("no"), end]), Settings::default()).await;
    let (mut connection, head) = gateway.open("").await;
    assert!(head.starts_with("HTTP/1.1 201 Created\r\n") && head.contains("x-engine: yes"), "{head}");
    assert!(read_until(&mut connection, "0\r\n\r\n").await.contains("no"));
    // These bytes are a request to the gateway, and none to the engine.
    connection.write_all(b"GET /sleep HTTP/1.1\r\nhost: localhost\r\n\r\n").await.unwrap();
    assert!(read_until(&mut connection, "\r\n\r\n").await.starts_with("HTTP/1.1 404 "));
    assert_eq!(gateway.engine.seen.lock().len(), 1);
    assert_eq!(gateway.server.metric("blockyard_frontend_open_websockets").as_deref(), Some("0"));
}

#[tokio::test]
async fn only_a_handshake_opens_a_connection() {
    let gateway = Gateway::start(switching(), Settings::default()).await;
    let get = "GET /v1/realtime HTTP/1.1\r\nhost: localhost\r\nupgrade: websocket\r\n";
    for request in [
        format!("{get}\r\n"),
        format!("{get}connection: keep-alive\r\n\r\n"),
        format!("{get}connection: upgrade\r\ncontent-length: 2\r\n\r\n{{}}"),
        format!("{get}connection: upgrade\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n"),
        format!("{}connection: upgrade\r\n\r\n", get.replace("GET", "POST")),
        format!("{}connection: upgrade\r\n\r\n", get.replace("HTTP/1.1", "HTTP/1.0")),
    ] {
        let (_, head) = gateway.send(&request).await;
        assert!(head.split_once(' ').unwrap().1.starts_with("400 "), "{request}: {head}");
    }
    for (path, expected) in [("/sleep", "404"), ("/v1/%2e%2e/x", "404"), ("/v1/chat/completions", "405")] {
        let (_, head) =
            gateway.send(&format!("{}connection: upgrade\r\n\r\n", get.replace("/v1/realtime", path))).await;
        assert!(head.starts_with(&format!("HTTP/1.1 {expected} ")), "{path}: {head}");
    }
    assert!(gateway.engine.seen.lock().is_empty());
}

/// A browser opens a connection of HTTP/1.1 for a WebSocket, unless the server announces extended CONNECT (RFC 8441).
#[tokio::test]
async fn http2_announces_no_websocket_and_opens_none() {
    let gateway = Gateway::start(switching(), Settings::default()).await;
    let frame = |kind: u8, flags: u8, stream: u8, payload: &[u8]| {
        [&[0, 0, payload.len() as u8, kind, flags, 0, 0, 0, stream][..], payload].concat()
    };
    // HPACK: `:method`, `:path` and `:authority` are names of the static table, and 0x86 is `:scheme http`.
    let literal = |name: &[u8], value: &str| [name, &[value.len() as u8][..], value.as_bytes()].concat();
    let head = [
        literal(&[2], "CONNECT"),
        vec![0x86],
        literal(&[4], "/v1/realtime"),
        literal(&[1], "localhost"),
        literal(b"\0\x09:protocol", "websocket"),
    ];
    let request = frame(1, 4, 1, &head.concat());
    let mut connection = TcpStream::connect(gateway.server.address).await.unwrap();
    let preface = [&b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"[..], &frame(4, 0, 0, &[])].concat();
    connection.write_all(&[preface, request].concat()).await.unwrap();
    loop {
        let mut head = [0; 9];
        timeout(TIMEOUT, connection.read_exact(&mut head)).await.expect("a frame in time").unwrap();
        let mut payload = vec![0; u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize];
        timeout(TIMEOUT, connection.read_exact(&mut payload)).await.expect("a frame in time").unwrap();
        match (head[3], head[8]) {
            (4, _) => assert!(payload.chunks(6).all(|setting| setting[..2] != [0, 8]), "SETTINGS {payload:?}"),
            (3, 1) => {
                assert_eq!(payload, [0, 0, 0, 1], "RST_STREAM with PROTOCOL_ERROR");
                break;
            }
            (kind, 1) if kind != 8 => panic!("frame {kind}: {payload:?}"),
            _ => {}
        }
    }
    assert!(gateway.engine.seen.lock().is_empty());
}

#[tokio::test]
async fn keys_with_limits_that_cannot_be_checked_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("keys.toml");
    let add = |name: &str, limit: fn(&mut KeyEntry)| {
        let key = ApiKey::generate().unwrap();
        let mut entry = KeyEntry::new(name, key.hash());
        limit(&mut entry);
        KeyFile::change(&path, |file| {
            file.keys.push(entry);
            Ok(())
        })
        .unwrap();
        format!("authorization: Bearer {}\r\n", key.reveal())
    };
    let all = add("all", |key| key.requests_per_minute = NonZero::new(1));
    let some = add("some", |key| key.models = Some(vec!["org/tiny".into()]));
    let limited = add("limited", |key| key.tokens_per_minute = NonZero::new(100));
    let gateway = Gateway::start(switching(), Settings { api_keys_file: Some(path), ..Settings::default() }).await;
    for (header, status, text) in [
        ("", 401, "You didn't provide an API key"),
        (&*some, 403, "messages on the connection can name others"),
        (&*limited, 403, "a limit of tokens per minute"),
    ] {
        let (connection, head) = gateway.open(&format!("connection: close\r\n{header}")).await;
        assert!(head.starts_with(&format!("HTTP/1.1 {status} ")), "{head}");
        let body = read_to_end(connection).await;
        assert!(body.contains(text), "{body}");
    }
    assert!(gateway.engine.seen.lock().is_empty());
    let connection = gateway.opened(&all).await;
    let request = gateway.engine.only();
    let Work::Relay(http) = &request.work else { panic!("it is relayed") };
    assert!(!http.headers.contains_key("authorization"));
    let (_, head) = gateway.open(&all).await;
    assert!(head.starts_with("HTTP/1.1 429 "), "it counts as a request: {head}");
    drop(connection);
}

#[tokio::test]
async fn an_open_connection_counts_for_its_tenant() {
    let settings = Settings {
        tenant_header: Some("x-tenant".to_owned().try_into().unwrap()),
        max_choices_per_tenant: 1,
        ..Settings::default()
    };
    let gateway = Gateway::start(switching(), settings).await;
    let ann = gateway.opened("x-tenant: ann\r\n").await;
    let (_, head) = gateway.open("x-tenant: ann\r\n").await;
    assert!(head.starts_with("HTTP/1.1 429 "), "{head}");
    drop(gateway.opened("x-tenant: bob\r\n").await);
    drop(ann);
    gateway.until("blockyard_frontend_open_websockets", "0").await;
    gateway.opened("x-tenant: ann\r\n").await;
}

#[tokio::test]
async fn a_shutdown_opens_none_and_ends_those_that_are_open() {
    let mut gateway = Gateway::start(switching(), Settings::default()).await;
    let mut open = gateway.opened("").await;
    gateway.server.shutdown.announce();
    let (_, head) = gateway.open("").await;
    assert!(head.starts_with("HTTP/1.1 503 "), "{head}");
    open.write_all(b"more").await.unwrap();
    assert_eq!(read_until(&mut open, "more").await, "more", "it goes on until the limit");
    gateway.server.shutdown.close(SHORT.0);
    assert_eq!(read_to_end(open).await, "");
    timeout(TIMEOUT, &mut gateway.server.serving).await.expect("the server ends").unwrap().unwrap();
    assert_eq!(gateway.engine.open(), 0);
    let series = "blockyard_frontend_requests_total{endpoint=\"unmatched\",status=\"503\"}";
    assert_eq!(gateway.server.metric(series).as_deref(), Some("2"));
}

#[tokio::test]
async fn a_connection_without_bytes_is_ended() {
    let settings = Settings { idle_timeout: SHORT, ..Settings::default() };
    let gateway = Gateway::start(switching(), settings).await;
    assert_eq!(read_to_end(gateway.opened("").await).await, "");
    gateway.until_ended("408").await;
}

#[tokio::test]
async fn a_connection_ends_when_the_time_of_requests_is_over() {
    // The handshake is to be over before.
    let settings = Settings { max_request_time: Some(HumanDuration::millis(1000)), ..Settings::default() };
    let gateway = Gateway::start(switching(), settings).await;
    assert_eq!(read_to_end(gateway.opened("").await).await, "");
    gateway.until_ended("504").await;
}

#[tokio::test]
async fn a_removed_key_loses_its_connections() {
    let keys = Keys::new();
    let header = |key: String| format!("authorization: Bearer {key}\r\n");
    let (removed, kept) = (header(keys.add("removed", |_| {})), header(keys.add("kept", |_| {})));
    let gateway = Gateway::start(switching(), keys.settings()).await;
    let (closed, mut open) = (gateway.opened(&removed).await, gateway.opened(&kept).await);
    KeyFile::change(&keys.path(), |file| {
        file.keys.retain(|entry| entry.name != "removed");
        Ok(())
    })
    .unwrap();
    assert_eq!(read_to_end(closed).await, "");
    open.write_all(b"more\r\n").await.unwrap();
    assert_eq!(read_until(&mut open, "\r\n").await, "more\r\n", "the other key keeps its own");
    gateway.until("blockyard_frontend_open_websockets", "1").await;
}
