//! WebSocket connections to a server, which is a scripted one: it speaks HTTP/1.1 by hand.

use super::{Gateway, TIMEOUT};
use blockyard::config::{CacheSalt, Config, Upstream};
use parking_lot::Mutex;
use serde_json::json;
use std::path::Path;
use std::sync::Arc;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::timeout;

/// A server of `org/m`. A handshake at `/v1/realtime` switches its connection, whose bytes come back; all others get
/// 404.
struct Server {
    url: String,
    /// The heads of all handshakes.
    handshakes: Arc<Mutex<Vec<String>>>,
    /// Connections that have switched and are open.
    open: Arc<Mutex<usize>>,
}

impl Server {
    async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let server = Self { url, handshakes: Arc::default(), open: Arc::default() };
        let (handshakes, open) = (Arc::clone(&server.handshakes), Arc::clone(&server.open));
        tokio::spawn(async move {
            while let Ok((socket, _)) = listener.accept().await {
                tokio::spawn(serve(socket, Arc::clone(&handshakes), Arc::clone(&open)));
            }
        });
        server
    }

    fn upstream(&self) -> Upstream {
        Upstream::new(self.url.parse().unwrap())
    }
}

async fn serve(mut socket: TcpStream, handshakes: Arc<Mutex<Vec<String>>>, open: Arc<Mutex<usize>>) {
    let Some(head) = read_head(&mut socket).await else { return };
    let path = head.split(' ').nth(1).unwrap().to_owned();
    let is_handshake = head.contains("\r\nupgrade: websocket\r\n") && head.contains("\r\nconnection: upgrade\r\n");
    if is_handshake {
        handshakes.lock().push(head);
    }
    if !is_handshake || !path.starts_with("/v1/realtime") {
        let models = json!({ "object": "list", "data": [{ "id": "org/m", "max_model_len": 4096 }] }).to_string();
        let (status, body) = match &*path {
            "/v1/models" => ("200 OK", models),
            "/health" => ("200 OK", "{}".to_owned()),
            _ => ("404 Not Found", "{\"no\": \"such endpoint\"}".to_owned()),
        };
        let answer = format!(
            "HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {}\r\nx-server: s\r\n\
             connection: close\r\n\r\n{body}",
            body.len()
        );
        socket.write_all(answer.as_bytes()).await.unwrap();
        return;
    }
    *open.lock() += 1;
    let switching = "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\
                     Sec-WebSocket-Accept: accept\r\n\r\nhello";
    socket.write_all(switching.as_bytes()).await.unwrap();
    let mut bytes = [0; 1024];
    while let Ok(read @ 1..) = socket.read(&mut bytes).await {
        if socket.write_all(&bytes[..read]).await.is_err() || bytes[..read].ends_with(b"bye") {
            break;
        }
    }
    *open.lock() -= 1;
}

/// A head up to its empty line; `None` if the connection ends before.
async fn read_head(socket: &mut TcpStream) -> Option<String> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(socket.read_u8().await.ok()?);
    }
    Some(String::from_utf8(head).unwrap())
}

/// A connection to the gateway after a handshake, and the head of the response.
async fn open(gateway: &Gateway, path: &str) -> (TcpStream, String) {
    let mut socket = TcpStream::connect(gateway.node.address()).await.unwrap();
    let handshake = format!(
        "GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: keep-alive, Upgrade\r\nUpgrade: websocket\r\n\
         Sec-WebSocket-Key: key\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Protocol: realtime\r\n\
         Authorization: Bearer of-the-client\r\n\r\n"
    );
    socket.write_all(handshake.as_bytes()).await.unwrap();
    let head = timeout(TIMEOUT, read_head(&mut socket)).await.unwrap().expect("a head");
    (socket, head)
}

async fn expect(socket: &mut TcpStream, expected: &str) {
    let mut read = vec![0; expected.len()];
    timeout(TIMEOUT, socket.read_exact(&mut read)).await.unwrap().unwrap();
    assert_eq!(String::from_utf8(read).unwrap(), expected);
}

#[tokio::test]
async fn a_websocket_reaches_the_server_and_is_placed() {
    let servers = [Server::start().await, Server::start().await];
    let gateway = Gateway::of(servers.iter().map(Server::upstream).collect()).await;
    let mut sockets = Vec::new();
    for _ in 0..2 {
        let (mut socket, head) = open(&gateway, "/v1/realtime?model=org/m").await;
        assert!(head.starts_with("HTTP/1.1 101 Switching Protocols\r\n"), "{head}");
        assert!(head.to_ascii_lowercase().contains("\r\nsec-websocket-accept: accept\r\n"), "{head}");
        expect(&mut socket, "hello").await;
        sockets.push(socket);
    }
    assert_eq!(servers.iter().map(|server| *server.open.lock()).sum::<usize>(), 2);
    assert_eq!(gateway.metric("blockyard_router_requests_total"), 2);
    let handshake = servers.iter().flat_map(|server| server.handshakes.lock().clone()).next().unwrap();
    for header in ["sec-websocket-key: key\r\n", "sec-websocket-version: 13\r\n", "sec-websocket-protocol: realtime"] {
        assert!(handshake.contains(header), "{handshake}");
    }
    assert!(handshake.starts_with("GET /v1/realtime?model=org/m HTTP/1.1\r\n"), "{handshake}");
    assert!(!handshake.contains("of-the-client") && !handshake.contains("content-length"), "{handshake}");

    let long = "0123456789abcdef".repeat(10_000);
    let [first, second] = &mut sockets[..] else { panic!("two") };
    let (mut from, mut to) = first.split();
    let (sent, ()) = tokio::join!(to.write_all(long.as_bytes()), async {
        let mut read = vec![0; long.len()];
        timeout(TIMEOUT, from.read_exact(&mut read)).await.unwrap().unwrap();
        assert!(read == long.as_bytes());
    });
    sent.unwrap();
    second.write_all(b"bye").await.unwrap();
    expect(second, "bye").await;
    let end = timeout(TIMEOUT, second.read_u8()).await.unwrap();
    assert!(end.is_err(), "the server has ended it");
    drop(sockets);
    let both_end = async {
        while servers.iter().any(|server| *server.open.lock() > 0) {
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
    };
    timeout(TIMEOUT, both_end).await.expect("a client that leaves ends the connection to the server");
}

#[tokio::test]
async fn an_answer_that_does_not_switch_passes_as_it_came() {
    let server = Server::start().await;
    let gateway = Gateway::of(vec![server.upstream()]).await;
    let (mut socket, head) = open(&gateway, "/v1/other").await;
    assert!(head.starts_with("HTTP/1.1 404 Not Found\r\n") && head.contains("x-server: s\r\n"), "{head}");
    expect(&mut socket, "{\"no\": \"such endpoint\"}").await;
    // The connection is one of HTTP to the gateway.
    socket.write_all(b"GET /live HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n").await.unwrap();
    let head = timeout(TIMEOUT, read_head(&mut socket)).await.unwrap().unwrap();
    assert!(head.starts_with("HTTP/1.1 200 OK\r\n"), "{head}");
    assert_eq!((server.handshakes.lock().len(), *server.open.lock()), (1, 0));
    let (_, head) = open(&gateway, "/v1/realtime?model=unknown").await;
    assert!(head.starts_with("HTTP/1.1 404 ") && !head.contains("x-server"), "{head}");
    let (_, head) = open(&gateway, "/start_profile").await;
    assert!(head.starts_with("HTTP/1.1 404 ") && !head.contains("x-server"), "{head}");
    assert_eq!(server.handshakes.lock().len(), 1);
}

#[tokio::test]
async fn a_tenant_without_a_salt_of_its_own_gets_no_websocket() {
    let server = Server::start().await;
    let mut config = Config { upstreams: vec![server.upstream()], ..Config::with_cache(Path::new("/nonexistent")) };
    config.frontend.tenant_header = Some("x-tenant".to_owned().try_into().unwrap());
    config.upstreams[0].cache_salt = CacheSalt::On;
    let gateway = Gateway::with(config).await;
    let mut socket = TcpStream::connect(gateway.node.address()).await.unwrap();
    let handshake = "GET /v1/realtime HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: upgrade\r\nupgrade: websocket\r\n\
                     x-tenant: ann\r\nconnection: close\r\n\r\n";
    socket.write_all(handshake.as_bytes()).await.unwrap();
    let mut answer = String::new();
    timeout(TIMEOUT, socket.read_to_string(&mut answer)).await.unwrap().unwrap();
    assert!(answer.starts_with("HTTP/1.1 400 ") && answer.contains("gets no cache_salt"), "{answer}");
    assert!(server.handshakes.lock().is_empty());
}
