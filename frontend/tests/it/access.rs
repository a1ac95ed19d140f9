//! Access of web pages: `Host`, `Origin`, `Sec-Fetch-Site` and CORS, over real connections.

use crate::fake::{FakeEngine, last};
use axum::Router;
use axum::routing::get;
use frontend::{Server, Settings, Shutdown};
use prometheus::Registry;
use std::net::SocketAddr;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use worker::engine::FinishReason;

const BODY: &str = r#"{"model":"org/tiny","messages":[{"role":"user","content":"hello"}]}"#;

/// Serves on an address, with settings as TOML has them.
async fn serve(at: &str, settings: &str, admin: bool) -> SocketAddr {
    let settings: Settings = toml::from_str(settings).unwrap();
    let listener = TcpListener::bind(at).await.unwrap();
    let address = listener.local_addr().unwrap();
    let registry = Registry::new();
    let server = Server::new(&settings, &registry).unwrap();
    let router = if admin {
        frontend::guard_admin(Router::new().route("/admin/config", get(async || "{}")), &settings)
    } else {
        frontend::router(FakeEngine::with_steps(vec![last("a", FinishReason::Stop)]), registry, settings).unwrap()
    };
    tokio::spawn(async move { server.serve(listener, router, Shutdown::default()).await });
    address
}

/// The whole response to a request line with headers.
async fn ask(address: SocketAddr, line: &str, headers: &[&str]) -> String {
    let mut connection = TcpStream::connect(address).await.unwrap();
    let body = if line.starts_with("POST") { BODY } else { "" };
    let headers = headers.iter().map(|header| format!("{header}\r\n")).collect::<Vec<_>>().concat();
    let length = body.len();
    let request = format!("{line} HTTP/1.1\r\n{headers}content-length: {length}\r\nconnection: close\r\n\r\n{body}");
    connection.write_all(request.as_bytes()).await.unwrap();
    let mut response = String::new();
    connection.read_to_string(&mut response).await.unwrap();
    response
}

async fn status(address: SocketAddr, line: &str, headers: &[&str]) -> u16 {
    ask(address, line, headers).await[9..12].parse().unwrap()
}

#[tokio::test]
async fn a_loopback_server_answers_to_loopback_hosts_only() {
    let address = serve("127.0.0.1:0", "allowed_hosts = ['Box.Lan']", false).await;
    let port = address.port();
    for host in ["localhost", "LOCALHOST.", "app.localhost", "127.0.0.1", "127.1.2.3", "[::1]", "box.lan"] {
        let header = format!("host: {host}:{port}");
        assert_eq!(status(address, "GET /metrics", &[&header]).await, 200, "{host}");
    }
    for host in ["evil.example", "localhost.evil.example", "box.lan.evil.example", "192.168.0.1", "[fe80::1]", "a b"] {
        let header = format!("host: {host}");
        let response = ask(address, "GET /metrics", &[&header]).await;
        assert!(response.starts_with("HTTP/1.1 403") && response.contains("host_not_allowed"), "{host}: {response}");
    }
    assert_eq!(status(address, "GET /live", &["host: localhost", "host: evil.example"]).await, 400);
    assert_eq!(status(address, "GET http://evil.example/live", &["host: localhost"]).await, 403);
    for line in ["GET /live", "GET http://localhost/live"] {
        assert_eq!(status(address, line, &[]).await, 400, "HTTP/1.1 needs a Host header");
    }
}

#[tokio::test]
async fn an_unknown_path_of_the_admin_api_is_answered_with_the_known_ones() {
    let address = serve("127.0.0.1:0", "", true).await;
    let response = ask(address, "GET /admin", &["host: localhost", "x-blockyard-admin: 1"]).await;
    assert!(response.starts_with("HTTP/1.1 404"), "{response}");
    for known in ["GET /admin/config", "POST /admin/reload", "POST /admin/workers/ID/drain", "GET /admin/planner"] {
        assert!(response.contains(known), "{known} is not in {response}");
    }
}

#[tokio::test]
async fn a_public_server_accepts_any_host_or_the_allowed_ones() {
    let any = serve("0.0.0.0:0", "", false).await;
    let any = SocketAddr::from(([127, 0, 0, 1], any.port()));
    assert_eq!(status(any, "GET /live", &["host: api.example.com"]).await, 200);
    let named = serve("0.0.0.0:0", "allowed_hosts = ['api.example.com']", false).await;
    let named = SocketAddr::from(([127, 0, 0, 1], named.port()));
    for (host, expected) in [("api.example.com", 200), ("127.0.0.1", 200), ("evil.example", 403)] {
        assert_eq!(status(named, "GET /live", &[&format!("host: {host}")]).await, expected, "{host}");
    }
}

#[tokio::test]
async fn requests_of_pages_of_other_sites_are_refused() {
    let address = serve("127.0.0.1:0", "", false).await;
    let host = format!("host: {address}");
    let own = format!("origin: http://{address}");
    let cases: [(&[&str], u16); 7] = [
        (&[], 200),
        (&[&own], 200),
        (&["origin: https://evil.example"], 403),
        (&["origin: http://localhost:1"], 403),
        (&["origin: null"], 403),
        (&["sec-fetch-site: cross-site"], 403),
        (&["sec-fetch-site: same-origin"], 200),
    ];
    for (headers, expected) in cases {
        let all = [&[host.as_str(), "content-type: application/json"], headers].concat();
        assert_eq!(status(address, "POST /v1/chat/completions", &all).await, expected, "{headers:?}");
    }
    let preflight = [host.as_str(), "origin: https://evil.example", "access-control-request-method: POST"];
    let response = ask(address, "OPTIONS /v1/chat/completions", &preflight).await;
    assert!(response.starts_with("HTTP/1.1 403") && response.contains("origin_not_allowed"), "{response}");
    assert!(!response.contains("access-control-allow-origin"), "{response}");
}

#[tokio::test]
async fn an_allowed_origin_gets_its_preflight_and_its_response() {
    for origins in ["['https://Chat.example.com', 'http://localhost:3000']", "['*']"] {
        let address = serve("127.0.0.1:0", &format!("cors_origins = {origins}"), false).await;
        let host = format!("host: {address}");
        let page = [host.as_str(), "origin: https://chat.example.com", "sec-fetch-site: cross-site"];
        let asks = [
            "access-control-request-method: POST",
            "access-control-request-headers: authorization,content-type,x-stainless-os",
            "access-control-request-private-network: true",
        ];
        let preflight = ask(address, "OPTIONS /v1/chat/completions", &[&page[..], &asks].concat()).await;
        assert!(preflight.starts_with("HTTP/1.1 204"), "{preflight}");
        for header in [
            "access-control-allow-origin: https://chat.example.com",
            "access-control-allow-methods: GET, POST, OPTIONS",
            "access-control-allow-headers: authorization,content-type,x-stainless-os",
            "access-control-allow-private-network: true",
            "vary: origin",
        ] {
            assert!(preflight.contains(&format!("{header}\r\n")), "{header}: {preflight}");
        }
        let asks = [&page[..], &["access-control-request-method: DELETE"]].concat();
        let preflight = ask(address, "OPTIONS /v1/files/file-1", &asks).await;
        let methods = "access-control-allow-methods: GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS\r\n";
        assert!(preflight.contains(methods), "requests are relayed with any of these: {preflight}");
        for (line, status) in [("POST /v1/chat/completions", "200"), ("GET /v1/nothing", "404")] {
            let response = ask(address, line, &page).await;
            assert!(response.starts_with(&format!("HTTP/1.1 {status}")), "{response}");
            assert!(response.contains("access-control-allow-origin: https://chat.example.com\r\n"), "{response}");
        }
    }
}

#[tokio::test]
async fn the_admin_api_wants_its_header_and_its_host() {
    let address = serve("127.0.0.1:0", "cors_origins = ['*']", true).await;
    let host = format!("host: {address}");
    let cases: [(&[&str], u16); 4] = [
        (&[&host, "x-blockyard-admin: 1"], 200),
        (&[&host], 403),
        (&["host: evil.example", "x-blockyard-admin: 1"], 403),
        (&[&host, "x-blockyard-admin: 1", "origin: https://evil.example"], 403),
    ];
    for (headers, expected) in cases {
        assert_eq!(status(address, "GET /admin/config", headers).await, expected, "{headers:?}");
    }
    let response = ask(address, "GET /admin/nothing", &[&host, "x-blockyard-admin: 1"]).await;
    assert!(response.starts_with("HTTP/1.1 404") && response.contains("unknown_url"), "{response}");
}

#[test]
fn origins_that_are_none_are_refused() {
    for origins in ["'chat.example.com'", "'https://a.example/path'", "''", "'ftp://a'"] {
        let error = toml::from_str::<Settings>(&format!("cors_origins = [{origins}]")).unwrap_err();
        assert!(error.to_string().contains("https://chat.example.com"), "{error}");
    }
}
