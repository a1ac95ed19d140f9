mod closed;
mod malformed_http2;

use super::*;
use crate::relay::chunk::Usage;
use crate::relay::fake::{Connections, FakeEngine, Script};
use crate::relay::headers;
use crate::relay::stream::Item;
use futures::StreamExt;
use http_body_util::BodyExt;
use parking_lot::Mutex;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{RootCertStore, ServerConfig};
use std::collections::VecDeque;
use std::net::Ipv4Addr;
use std::sync::Arc;
use tokio::net::TcpListener;
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;
use worker::engine::ErrorKind;

const PATH: PathAndQuery = PathAndQuery::from_static("/v1/chat/completions");
/// For what must happen soon, on any machine.
const SOON: Duration = Duration::from_secs(20);

fn client(address: &Uri, protocol: Protocol) -> Client {
    Client::new(address, &Settings { protocol, ..Settings::default() }).unwrap()
}

async fn relay(client: &Client) -> Result<Relay<Body>, RelayError> {
    let body = Bytes::from_static(br#"{"stream":true}"#);
    client.relay(Method::POST, &PATH, HeaderMap::new(), body, UsageInStream::Strip).await
}

/// The bytes of a whole answer.
async fn text(client: &Client) -> String {
    let mut bytes = Vec::new();
    let mut relay = relay(client).await.unwrap();
    while let Some(item) = relay.next().await {
        if let Item::Frame(frame) = item.unwrap() {
            bytes.extend_from_slice(&frame);
        }
    }
    String::from_utf8(bytes).unwrap()
}

#[tokio::test]
async fn a_request_arrives_as_it_was_sent() {
    let engine = FakeEngine::start([]).await.unwrap();
    let address = format!("{}base/", engine.uri()).parse().unwrap();
    let client = client(&address, Protocol::Negotiated);
    let mut from_client = HeaderMap::new();
    from_client.insert("traceparent", "00-1-2-01".parse().unwrap());
    from_client.insert("authorization", "Bearer of-the-client".parse().unwrap());
    let passed = headers::request(&from_client, headers::bearer("of-the-engine").as_ref());
    let body = Bytes::from_static(b"{ \"model\": \"m\" }");
    let path = PathAndQuery::from_static("/v1/completions?a=1");
    client.send(Method::POST, &path, passed, body.clone()).await.unwrap();
    let [request] = &engine.requests()[..] else { panic!() };
    assert_eq!((&request.method, request.uri.to_string()), (&Method::POST, "/base/v1/completions?a=1".into()));
    assert_eq!((&request.body, request.version), (&body, Version::HTTP_11));
    assert_eq!(request.headers["authorization"], "Bearer of-the-engine");
    assert_eq!(request.headers["traceparent"], "00-1-2-01");
    assert_eq!(request.headers["content-length"], "16");
    assert_eq!(request.headers["host"], *engine.uri().authority().unwrap().as_str());
}

#[tokio::test]
async fn no_more_requests_run_than_the_settings_allow() {
    for protocol in [Protocol::Negotiated, Protocol::Http2] {
        let engine = FakeEngine::start([]).await.unwrap();
        let client =
            Client::new(&engine.uri(), &Settings { protocol, max_requests: 2, ..Settings::default() }).unwrap();
        let [first, _second] = [relay(&client).await.unwrap(), relay(&client).await.unwrap()];
        assert!(matches!(relay(&client).await, Err(RelayError::Full(2))));
        let asked = post(&client, Method::POST, "{}").await;
        assert!(asked.is_ok(), "questions to the engine do not count: {asked:?}");
        drop(first);
        assert!(text(&client).await.ends_with("data: [DONE]\n\n"));
        assert_eq!(engine.requests().len(), 4, "nothing was sent at the maximum");
    }
}

#[tokio::test]
async fn a_connection_is_used_again() {
    let usage = Usage { prompt_tokens: Some(7), ..Usage::default() };
    let scripts = [Script::chat(&["a"], Some(usage)), Script::completion(&["b"], Some(usage)), Script::default()];
    let engine = FakeEngine::start(scripts.map(|script| script.paced(Duration::from_millis(2)))).await.unwrap();
    for protocol in [Protocol::Negotiated, Protocol::Http2] {
        let client = client(&engine.uri(), protocol);
        for _ in 0..3 {
            assert!(text(&client).await.ends_with("data: [DONE]\n\n"));
        }
    }
    let used: Vec<_> = engine.requests().iter().map(|request| (request.connection, request.version)).collect();
    assert_eq!(used, [[(0, Version::HTTP_11); 3], [(1, Version::HTTP_2); 3]].concat());
}

/// What a client gets that asks a server with this answer to switch, and what the server gets after its answer.
async fn upgrade(answer: &'static str) -> (Result<Upgrade, RelayError>, Client, tokio::task::JoinHandle<String>) {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let address = format!("http://{}/base", listener.local_addr().unwrap()).parse().unwrap();
    let server = tokio::spawn(async move {
        let mut socket = listener.accept().await.unwrap().0;
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            head.push(socket.read_u8().await.unwrap());
        }
        let head = String::from_utf8(head).unwrap();
        assert!(head.starts_with("GET /base/v1/realtime?a HTTP/1.1\r\n"), "{head}");
        assert!(head.contains("connection: upgrade\r\nupgrade: websocket\r\n"), "{head}");
        socket.write_all(answer.as_bytes()).await.unwrap();
        let mut rest = String::new();
        let _ = socket.read_to_string(&mut rest).await;
        rest
    });
    let client = Client::new(&address, &Settings { max_requests: 1, ..Settings::default() }).unwrap();
    let mut headers = HeaderMap::new();
    headers::set_upgrade(&mut headers, "websocket");
    let path = PathAndQuery::from_static("/v1/realtime?a");
    let answer = timeout(SOON, client.upgrade(Method::GET, &path, &headers, "websocket")).await.unwrap();
    (answer, client, server)
}

#[tokio::test]
async fn a_connection_switches_only_if_the_engine_says_so() {
    use tokio::io::AsyncWriteExt;
    let switches = "HTTP/1.1 101 Switching Protocols\r\nconnection: Upgrade\r\nupgrade: WebSocket\r\nx: y\r\n\r\nfirst";
    let (answer, client, server) = upgrade(switches).await;
    let Ok(Upgrade::Switched(mut switched)) = answer else { panic!("{answer:?}") };
    assert_eq!((&switched.received[..], &switched.headers["x"]), (&b"first"[..], &"y".parse().unwrap()));
    assert!(matches!(relay(&client).await, Err(RelayError::Full(1))), "it counts as a request");
    switched.socket.write_all(b"raw bytes").await.unwrap();
    drop(switched);
    assert_eq!(timeout(SOON, server).await.unwrap().unwrap(), "raw bytes");

    let (answer, client, server) = upgrade("HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}").await;
    let Ok(Upgrade::Answered(mut relay)) = answer else { panic!("{answer:?}") };
    let Some(Ok(Item::Head(head))) = relay.next().await else { panic!("a head") };
    assert_eq!(head.status, StatusCode::OK);
    while relay.next().await.is_some() {}
    assert_eq!(timeout(SOON, server).await.unwrap().unwrap(), "", "the connection is not used again");
    drop((relay, client));

    let (answer, ..) = upgrade("HTTP/1.1 403 Forbidden\r\ncontent-length: 2\r\n\r\nno").await;
    let Err(RelayError::Answered(answer)) = answer else { panic!("{answer:?}") };
    assert_eq!((answer.status.as_u16(), &answer.body[..], answer.kind), (403, &b"no"[..], ErrorKind::Request));
    for other in ["h2c", "websocket, h2c"] {
        let text = format!("HTTP/1.1 101 Switching Protocols\r\nconnection: Upgrade\r\nupgrade: {other}\r\n\r\n");
        let (answer, ..) = upgrade(text.leak()).await;
        assert!(matches!(answer, Err(RelayError::Malformed(_))), "{answer:?}");
    }
}

#[tokio::test]
async fn connections_of_http2_do_not_switch() {
    let engine = FakeEngine::start([]).await.unwrap();
    let client = client(&engine.uri(), Protocol::Http2);
    let asked = client.upgrade(Method::GET, &PATH, &HeaderMap::new(), "websocket").await;
    assert!(matches!(asked, Err(RelayError::Http2Only)), "{asked:?}");
    assert!(engine.requests().is_empty());
}

/// A server that answers each request with the next of these texts, and notes on which connection it came.
async fn answering(texts: &[&'static str]) -> (Client, Arc<Mutex<Vec<usize>>>) {
    use tokio::io::{AsyncReadExt, AsyncWriteExt, BufReader};
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap()).parse().unwrap();
    let (used, texts) = (Arc::new(Mutex::new(Vec::new())), Arc::new(Mutex::new(VecDeque::from(texts.to_vec()))));
    let noted = Arc::clone(&used);
    tokio::spawn(async move {
        for connection in 0.. {
            let mut socket = BufReader::new(listener.accept().await.unwrap().0);
            let (texts, noted) = (Arc::clone(&texts), Arc::clone(&noted));
            tokio::spawn(async move {
                // The body ends with the only brace.
                while let Ok(byte) = socket.read_u8().await {
                    if byte == b'}' {
                        noted.lock().push(connection);
                        let Some(text) = texts.lock().pop_front() else { return };
                        socket.write_all(text.as_bytes()).await.unwrap();
                        if text.starts_with("HTTP/1.0") {
                            return;
                        }
                    }
                }
            });
        }
    });
    (client(&address, Protocol::Negotiated), used)
}

async fn post(client: &Client, method: Method, body: &'static str) -> Result<(u16, String), RelayError> {
    let response = client.send(method, &PATH, HeaderMap::new(), Bytes::from_static(body.as_bytes())).await?;
    let status = response.status().as_u16();
    let body = response.into_body().collect().await.map_err(|error| RelayError::BrokenOff(error.to_string()))?;
    Ok((status, String::from_utf8(body.to_bytes().to_vec()).unwrap()))
}

#[tokio::test]
async fn answers_of_every_form_are_read() {
    let (client, used) = answering(&[
        "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n\
         HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\na",
        "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n2\r\nbc\r\n0\r\n\r\n",
        "HTTP/1.1 204 No Content\r\n\r\n",
        "HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n",
        "HTTP/1.1 200 OK\r\ncontent-length: 1\r\nconnection: close\r\n\r\na",
        "HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\na and more",
        "HTTP/1.0 200 OK\r\n\r\nuntil the end",
        "HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n",
    ])
    .await;
    let expected = [(200, "a"), (200, "abc"), (204, ""), (200, ""), (200, "a"), (200, "a"), (200, "until the end")];
    for (status, body) in expected {
        assert_eq!(post(&client, Method::POST, "{}").await.unwrap(), (status, body.to_owned()));
    }
    assert_eq!(post(&client, Method::HEAD, "{}").await.unwrap(), (200, String::new()));
    assert_eq!(*used.lock(), [0, 0, 0, 0, 0, 1, 2, 3], "not those that were closed, or said too much");
}

#[tokio::test]
async fn an_answer_that_breaks_off_is_an_error() {
    for text in ["HTTP/1.0 200 OK\r\ncontent-length: 5\r\n\r\nabc", "HTTP/1.0 200 OK\r\ncontent-length: 5\r\n"] {
        let (client, used) = answering(&[text]).await;
        let error = timeout(SOON, post(&client, Method::POST, "{}")).await.unwrap().unwrap_err();
        assert!(matches!(error, RelayError::BrokenOff(_)), "{text}: {error}");
        assert_eq!(used.lock().len(), 1, "{text}");
    }
}

#[tokio::test]
async fn an_answer_that_is_none_of_http_is_malformed() {
    for text in [
        "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\nabc",
        "HTTP/1.1 101 Switching Protocols\r\n\r\n",
        "HTTP/1.1 200 OK\r\nx: a\r\n b\r\ncontent-length: 0\r\n\r\n",
        "HTTP/1.1 200 OK\r\ncontent-length: x\r\n\r\n",
    ] {
        let (client, used) = answering(&[text]).await;
        let error = timeout(SOON, post(&client, Method::POST, "{}")).await.unwrap().unwrap_err();
        assert!(matches!(error, RelayError::Malformed(_)), "{text}: {error}");
        assert_eq!(used.lock().len(), 1, "{text}");
    }
}

#[tokio::test]
async fn an_answer_may_come_before_the_request_was_read() {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap()).parse().unwrap();
    tokio::spawn(async move {
        let mut open = Vec::new();
        loop {
            let (mut socket, _) = listener.accept().await.unwrap();
            socket.read_exact(&mut [0; 100]).await.unwrap();
            socket.write_all(b"HTTP/1.1 413 Too Large\r\ncontent-length: 2\r\n\r\n{}").await.unwrap();
            open.push(socket);
        }
    });
    let client = client(&address, Protocol::Negotiated);
    // More than the buffers of both sockets take.
    let body = Bytes::from(vec![b' '; 32 << 20]);
    for _ in 0..2 {
        let response = timeout(SOON, client.send(Method::POST, &PATH, HeaderMap::new(), body.clone())).await.unwrap();
        let response = response.unwrap();
        assert_eq!(response.status(), StatusCode::PAYLOAD_TOO_LARGE);
        assert_eq!(timeout(SOON, response.collect()).await.unwrap().unwrap().to_bytes(), "{}");
    }
}

#[tokio::test]
async fn idle_connections_are_closed_in_time() {
    let engine = FakeEngine::start([]).await.unwrap();
    let settings = Settings { idle_timeout: Duration::from_millis(50), ..Settings::default() };
    let client = Client::new(&engine.uri(), &settings).unwrap();
    text(&client).await;
    tokio::time::sleep(Duration::from_millis(100)).await;
    text(&client).await;
    assert_eq!(engine.requests()[1].connection, 1);
    assert!(Settings::default().idle_timeout < Duration::from_secs(5), "uvicorn's time");
}

#[tokio::test]
async fn dropping_an_answer_reaches_the_engine() {
    for protocol in [Protocol::Negotiated, Protocol::Http2] {
        // The role and one chunk are sent, and the answer does not end.
        let scripts = [Script::default().hanging_after(2), Script::default().after(Duration::from_hours(1))];
        let engine = FakeEngine::start(scripts).await.unwrap();
        let client = client(&engine.uri(), protocol);
        let mut answer = relay(&client).await.unwrap();
        assert!(matches!(answer.next().await, Some(Ok(Item::Head(_)))));
        drop(answer);
        timeout(SOON, engine.cancelled(1)).await.expect("cancelled while it streams");
        assert!(timeout(Duration::from_millis(100), relay(&client)).await.is_err());
        timeout(SOON, engine.cancelled(2)).await.expect("cancelled before its headers");
    }
}

#[tokio::test]
async fn an_engine_that_dies_breaks_the_answer_off() {
    for protocol in [Protocol::Negotiated, Protocol::Http2] {
        let scripts = [Script::default().broken_after(1), Script::default().broken_after(2)];
        let engine = FakeEngine::start(scripts).await.unwrap();
        let client = client(&engine.uri(), protocol);
        for heads in [0, 1] {
            let items: Vec<_> = relay(&client).await.unwrap().collect().await;
            assert_eq!(items.iter().filter(|item| matches!(item, Ok(Item::Head(_)))).count(), heads);
            assert!(matches!(items.last(), Some(Err(RelayError::BrokenOff(_)))), "{items:?}");
        }
    }
}

#[tokio::test]
async fn an_error_is_returned_with_its_kind() {
    let error = serde_json::json!({"error": {"message": "m", "code": 400}});
    let busy = Script::json(503, &error).header(http::header::RETRY_AFTER, "7");
    let engine = FakeEngine::start([Script::json(400, &error), busy, Script::json(500, &error)]).await.unwrap();
    let client = client(&engine.uri(), Protocol::Negotiated);
    for expected in [ErrorKind::Request, ErrorKind::Busy(Duration::from_secs(7)), ErrorKind::Fault] {
        let Err(RelayError::Answered(answer)) = relay(&client).await else { panic!("{expected:?}") };
        assert_eq!((answer.kind, &answer.body[..]), (expected, error.to_string().as_bytes()));
    }
}

#[tokio::test]
async fn no_engine_is_unreachable() {
    let address = {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        format!("http://{}", listener.local_addr().unwrap()).parse().unwrap()
    };
    let error = relay(&client(&address, Protocol::Negotiated)).await.unwrap_err();
    assert!(matches!(&error, RelayError::Unreachable(text) if text.contains("refused")), "{error}");
}

#[test]
fn a_limit_of_open_files_of_this_process_says_nothing_of_the_engine() {
    assert!(matches!(not_connected(&std::io::Error::from_raw_os_error(24)), RelayError::OutOfFiles));
    assert!(matches!(not_connected(&std::io::Error::from_raw_os_error(111)), RelayError::Unreachable(_)));
}

#[tokio::test]
async fn connecting_has_a_time_limit() {
    // The listener accepts TCP in the kernel, but TLS never begins.
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let address = format!("https://{}", listener.local_addr().unwrap()).parse().unwrap();
    let connect_timeout = Duration::from_millis(50);
    let settings = Settings { connect_timeout, roots: Some(RootCertStore::empty()), ..Settings::default() };
    let client = Client::new(&address, &settings).unwrap();
    let error = timeout(SOON, relay(&client)).await.unwrap().unwrap_err();
    assert!(matches!(&error, RelayError::Unreachable(text) if text.contains("50ms")), "{error}");
}

#[tokio::test]
async fn an_answer_that_is_not_http_is_broken() {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap()).parse().unwrap();
    tokio::spawn(async move {
        let (mut socket, _) = listener.accept().await.unwrap();
        // What comes before the request would not be an answer to it.
        socket.read_exact(&mut [0; 4]).await.unwrap();
        socket.write_all(b"SSH-2.0-OpenSSH_9.6\r\n\r\n").await.unwrap();
        std::future::pending::<()>().await;
    });
    let error = timeout(SOON, relay(&client(&address, Protocol::Negotiated))).await.unwrap().unwrap_err();
    assert!(matches!(error, RelayError::Malformed(_)), "{error}");
}

#[tokio::test]
async fn endless_heads_end_the_request() {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap()).parse().unwrap();
    tokio::spawn(async move {
        let (mut socket, _) = listener.accept().await.unwrap();
        socket.read_exact(&mut [0; 4]).await.unwrap();
        // Ends when the client closes the connection.
        while socket.write_all(b"HTTP/1.1 100 Continue\r\n\r\n").await.is_ok() {}
    });
    let error = timeout(SOON, relay(&client(&address, Protocol::Negotiated))).await.unwrap().unwrap_err();
    assert!(matches!(error, RelayError::Malformed(_)), "{error}");
}

#[test]
fn addresses_are_checked() {
    for address in ["/v1", "host:80", "ftp://host/", "unix://host"] {
        let client = Client::new(&address.parse().unwrap(), &Settings::default());
        assert!(matches!(client, Err(ClientError::Address(_))), "{address}");
    }
}

#[tokio::test]
async fn tls_negotiates_the_version_of_http() {
    let certificate = CertificateDer::from_pem_slice(include_bytes!("tests/localhost.pem")).unwrap();
    let key = PrivateKeyDer::from_pem_slice(include_bytes!("tests/localhost.key")).unwrap();
    let mut roots = RootCertStore::empty();
    roots.add(certificate.clone()).unwrap();
    for (alpn, version) in [("h2", Version::HTTP_2), ("http/1.1", Version::HTTP_11)] {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let tls = ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
        let tls = tls.with_no_client_auth().with_single_cert(vec![certificate.clone()], key.clone_key());
        let mut tls = tls.unwrap();
        tls.alpn_protocols = vec![alpn.into()];
        let acceptor = TlsAcceptor::from(Arc::new(tls));
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let address = format!("https://localhost:{}", listener.local_addr().unwrap().port()).parse().unwrap();
        let connections = Connections::new([]);
        let served = connections.clone();
        tokio::spawn(async move {
            while let Ok((socket, _)) = listener.accept().await {
                if let Ok(socket) = acceptor.accept(socket).await {
                    tokio::spawn(served.clone().serve(socket));
                }
            }
        });
        let settings = Settings { roots: Some(roots.clone()), ..Settings::default() };
        text(&Client::new(&address, &settings).unwrap()).await;
        assert_eq!(connections.requests()[0].version, version);

        let unknown = Settings { roots: Some(RootCertStore::empty()), ..Settings::default() };
        let error = relay(&Client::new(&address, &unknown).unwrap()).await.unwrap_err();
        assert!(matches!(&error, RelayError::Unreachable(text) if text.contains("certificate")), "{error}");
    }
    // A machine may have no certificates of authorities. Whatever else is wrong shows here.
    let system = Client::new(&"https://localhost".parse().unwrap(), &Settings::default());
    assert!(matches!(system, Ok(_) | Err(ClientError::Roots(_))), "{system:?}");
}

#[tokio::test]
async fn a_path_that_is_too_long_is_refused() {
    let address = format!("http://localhost/{}", "x".repeat(60_000)).parse().unwrap();
    let path = PathAndQuery::try_from(format!("/{}", "y".repeat(60_000))).unwrap();
    let error = client(&address, Protocol::Negotiated).send(Method::GET, &path, HeaderMap::new(), Bytes::new()).await;
    assert!(matches!(error, Err(RelayError::PathTooLong(_))), "{error:?}");
}

/// A server of HTTP/2 whose answers are this frame without end, and the number of its connections.
async fn endless_http2(frame: &'static [u8]) -> (Uri, Arc<Mutex<usize>>) {
    let frame = move || Ok::<_, std::io::Error>(Frame::data(Bytes::from_static(frame)));
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap()).parse().unwrap();
    let connections = Arc::new(Mutex::new(0));
    let counted = Arc::clone(&connections);
    let answer = move |_| {
        let body = http_body_util::StreamBody::new(futures::stream::repeat_with(frame));
        std::future::ready(Ok::<_, std::io::Error>(Response::new(body)))
    };
    tokio::spawn(async move {
        while let Ok((socket, _)) = listener.accept().await {
            *counted.lock() += 1;
            let server = hyper::server::conn::http2::Builder::new(hyper_util::rt::TokioExecutor::new());
            let service = hyper::service::service_fn(answer);
            tokio::spawn(server.serve_connection(hyper_util::rt::TokioIo::new(socket), service));
        }
    });
    (address, connections)
}

#[tokio::test]
async fn answers_of_http2_that_are_not_read_hold_no_other_one_up() {
    // As long as the shortest events with a token.
    let (address, connections) = endless_http2(&[b'x'; 64]).await;
    let client = client(&address, Protocol::Http2);
    let mut unread = Vec::new();
    for _ in 0..8 {
        unread.push(relay(&client).await.unwrap());
    }
    let (mut other, mut read) = (relay(&client).await.unwrap(), 0);
    // More than the windows of the others together.
    while read < 4 << 20 {
        let item = timeout(SOON, other.next()).await.expect("it is not held up").expect("it has no end");
        if let Item::Frame(frame) = item.expect("the connection goes on") {
            read += frame.len();
        }
    }
    assert_eq!(*connections.lock(), 1);
}

#[tokio::test]
async fn requests_of_http2_for_which_a_connection_has_no_stream_left_get_another_one() {
    let (address, connections) = endless_http2(&[b'x'; 16 << 10]).await;
    let client = client(&address, Protocol::Http2);
    let mut running = Vec::new();
    for number in 0..=http2::MAX_STREAMS * 2 {
        running.push(relay(&client).await.unwrap());
        assert_eq!(*connections.lock(), number / http2::MAX_STREAMS + 1);
    }
    // The places of answers that have ended are taken again.
    running.truncate(http2::MAX_STREAMS * 2);
    running.push(relay(&client).await.unwrap());
    drop(running.drain(..10));
    for _ in 0..http2::MAX_STREAMS + 9 {
        running.push(relay(&client).await.unwrap());
    }
    assert_eq!(*connections.lock(), 3);
}
