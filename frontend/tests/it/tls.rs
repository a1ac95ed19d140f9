//! TLS over real connections: both versions of HTTP, changes of the certificate, and clients that do not speak it.

use crate::fake::{FakeEngine, last};
use crate::test_server::TestServer;
use frontend::{Settings, check_tls};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::{Instant, sleep};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use units::HumanDuration;
use worker::engine::FinishReason;

/// Time for what takes less than a second on an idle machine.
const TIMEOUT: Duration = Duration::from_mins(1);

/// The pairs in `tests/fixtures/tls`.
#[derive(Clone, Copy)]
enum Pair {
    One,
    Two,
}

impl Pair {
    fn certificate(self) -> &'static str {
        match self {
            Self::One => include_str!("../fixtures/tls/one.pem"),
            Self::Two => include_str!("../fixtures/tls/two.pem"),
        }
    }

    fn key(self) -> &'static str {
        match self {
            Self::One => include_str!("../fixtures/tls/one.key"),
            Self::Two => include_str!("../fixtures/tls/two.key"),
        }
    }
}

/// A server whose certificate and key are in a folder of its own.
struct TlsServer {
    folder: tempfile::TempDir,
    http: TestServer,
}

fn paths(folder: &Path) -> [PathBuf; 2] {
    [folder.join("server.pem"), folder.join("server.key")]
}

fn settings(folder: &Path) -> Settings {
    let [certificate, key] = paths(folder);
    Settings { tls_cert_file: Some(certificate), tls_key_file: Some(key), ..Settings::default() }
}

impl TlsServer {
    async fn start(change: impl FnOnce(&mut Settings)) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let [certificate, key] = paths(folder.path());
        fs::write(certificate, Pair::One.certificate()).unwrap();
        fs::write(key, Pair::One.key()).unwrap();
        let mut settings = settings(folder.path());
        change(&mut settings);
        let engine = FakeEngine::with_steps(vec![last("a", FinishReason::Stop)]);
        Self { folder, http: TestServer::start(&engine, settings).await }
    }

    /// A connection whose server has the certificate of a pair.
    async fn connect(&self, trusted: Pair, alpn: &str) -> std::io::Result<TlsStream<TcpStream>> {
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_slice(trusted.certificate().as_bytes()).unwrap()).unwrap();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
        let mut config = config.with_root_certificates(roots).with_no_client_auth();
        config.alpn_protocols = vec![alpn.into()];
        let socket = TcpStream::connect(self.http.address).await?;
        TlsConnector::from(Arc::new(config)).connect(ServerName::try_from("localhost").unwrap(), socket).await
    }

    fn metric(&self, series: &str) -> u64 {
        self.http.metric(series).map_or(0, |value| value.parse().unwrap())
    }
}

/// Sends a chat request, and reads the whole response.
async fn chat(mut connection: TlsStream<TcpStream>) -> String {
    let body = r#"{"model":"org/tiny","messages":[{"role":"user","content":"hello"}]}"#;
    let head = "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length:";
    connection.write_all(format!("{head} {}\r\n\r\n{body}", body.len()).as_bytes()).await.unwrap();
    let mut response = String::new();
    // The server ends the stream of TLS, so what was read is all.
    connection.read_to_string(&mut response).await.unwrap();
    response
}

async fn until(condition: impl AsyncFn() -> bool) {
    let deadline = Instant::now() + TIMEOUT;
    while !condition().await {
        assert!(Instant::now() < deadline, "it happens within a second on an idle machine");
        sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test]
async fn http1_is_served_over_tls() {
    let server = TlsServer::start(|_| ()).await;
    let connection = server.connect(Pair::One, "http/1.1").await.unwrap();
    assert_eq!(connection.get_ref().1.alpn_protocol(), Some(&b"http/1.1"[..]));
    let response = chat(connection).await;
    assert!(response.starts_with("HTTP/1.1 200") && response.contains("chat.completion"), "{response}");
    assert!(server.connect(Pair::Two, "http/1.1").await.is_err(), "the client does not trust another certificate");
    assert!(server.connect(Pair::One, "spdy/1").await.is_err(), "there is no common protocol");
    until(async || server.metric("blockyard_frontend_connections_closed_total{reason=\"tls_handshake\"}") == 2).await;
}

#[tokio::test]
async fn http2_is_served_over_tls() {
    let server = TlsServer::start(|_| ()).await;
    let mut connection = server.connect(Pair::One, "h2").await.unwrap();
    assert_eq!(connection.get_ref().1.alpn_protocol(), Some(&b"h2"[..]));
    // The preface, empty SETTINGS, and HEADERS that end stream 1: GET https://localhost/live, with indices of HPACK's
    // static table (RFC 7541, appendix A).
    let mut headers = vec![0x82, 0x87, 0x04, 5];
    headers.extend(b"/live\x01\x09localhost");
    let mut request = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0\0\0".to_vec();
    request.extend([headers.len() as u8, 0x01, 0x05, 0, 0, 0, 1]);
    request.extend(headers);
    connection.write_all(&request).await.unwrap();
    loop {
        let mut head = [0; 9];
        connection.read_exact(&mut head).await.unwrap();
        let mut payload = vec![0; u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize];
        connection.read_exact(&mut payload).await.unwrap();
        if head[3] == 0x01 {
            assert_eq!(payload[0], 0x88, ":status 200");
            break;
        }
    }
}

#[tokio::test]
async fn a_changed_certificate_is_used_and_a_broken_one_is_not() {
    // The first connection has no request for as long as the test needs.
    let server = TlsServer::start(|settings| settings.header_timeout = HumanDuration(10 * TIMEOUT)).await;
    let [certificate, key] = paths(server.folder.path());
    let old = server.connect(Pair::One, "http/1.1").await.unwrap();
    let reloads =
        |outcome| server.metric(&format!("blockyard_frontend_certificate_reloads_total{{outcome={outcome:?}}}"));
    // The key of another certificate, as between two copies.
    fs::write(&certificate, Pair::Two.certificate()).unwrap();
    until(async || reloads("rejected") == 1).await;
    assert!(server.connect(Pair::One, "http/1.1").await.is_ok(), "the previous pair stays in effect");
    fs::write(&key, Pair::Two.key()).unwrap();
    until(async || server.connect(Pair::Two, "http/1.1").await.is_ok()).await;
    assert!(server.connect(Pair::One, "http/1.1").await.is_err());
    assert!(chat(old).await.starts_with("HTTP/1.1 200"), "open connections go on");
    assert_eq!((reloads("applied"), reloads("rejected")), (1, 1));
    // Both fixtures are valid for a hundred years.
    let expiry = server.metric(&format!(
        "blockyard_frontend_certificate_expiry_timestamp_seconds{{file=\"{}\"}}",
        certificate.display()
    ));
    assert!(expiry > 4_900_000_000, "{expiry}");
}

#[tokio::test]
async fn plain_http_to_the_port_of_tls_gets_400() {
    let server = TlsServer::start(|_| ()).await;
    let mut connection = TcpStream::connect(server.http.address).await.unwrap();
    connection.write_all(b"GET /live HTTP/1.1\r\nhost: localhost\r\n\r\n").await.unwrap();
    connection.shutdown().await.unwrap();
    let mut response = String::new();
    connection.read_to_string(&mut response).await.unwrap();
    assert!(response.starts_with("HTTP/1.1 400") && response.contains("https://"), "{response}");
    for garbage in [&b"\x16\x03\x01\x00\x05hello"[..], b"\0\0\0\0", b"\x16"] {
        let mut connection = TcpStream::connect(server.http.address).await.unwrap();
        connection.write_all(garbage).await.unwrap();
        connection.shutdown().await.unwrap();
        let mut response = Vec::new();
        // A reset is an end too.
        let _ = connection.read_to_end(&mut response).await;
        assert!(!response.starts_with(b"HTTP"), "{garbage:?}");
    }
    assert!(chat(server.connect(Pair::One, "http/1.1").await.unwrap()).await.starts_with("HTTP/1.1 200"));
}

#[tokio::test]
async fn a_handshake_that_stalls_ends_at_the_header_timeout() {
    let server = TlsServer::start(|settings| settings.header_timeout = HumanDuration(Duration::from_millis(100))).await;
    for begin in [&b""[..], b"\x16\x03\x01"] {
        let mut connection = TcpStream::connect(server.http.address).await.unwrap();
        connection.write_all(begin).await.unwrap();
        let mut response = Vec::new();
        let _ = connection.read_to_end(&mut response).await;
        assert!(response.is_empty());
    }
    let expired = "blockyard_frontend_connections_closed_total{reason=\"header_timeout\"}";
    until(async || server.metric(expired) == 2).await;
}

#[tokio::test]
async fn stalled_handshakes_give_way_to_new_connections() {
    let server = TlsServer::start(|settings| settings.max_connections = 2).await;
    let mut stalled = Vec::new();
    for _ in 0..8 {
        stalled.push(TcpStream::connect(server.http.address).await.unwrap());
    }
    let connection = server.connect(Pair::One, "http/1.1").await.unwrap();
    assert!(chat(connection).await.starts_with("HTTP/1.1 200"));
    until(async || server.metric("blockyard_frontend_open_connections") <= 2).await;
    server.http.shutdown.close(Duration::from_mins(10));
    until(async || server.metric("blockyard_frontend_open_connections") == 0).await;
}

#[test]
fn wrong_files_are_refused_with_what_is_expected() {
    let folder = tempfile::tempdir().unwrap();
    let [certificate, key] = paths(folder.path());
    let refused = |settings: &Settings| check_tls(settings).unwrap_err().to_string();
    let both = settings(folder.path());
    assert!(refused(&both).contains("frontend.tls_cert_file = "), "it is missing");
    let half = Settings { tls_key_file: None, ..both.clone() };
    assert!(refused(&half).contains("set both, or none"));
    let (one, two) = (Pair::One, Pair::Two);
    for (pem, secret, expected) in [
        ("", one.key(), "BEGIN CERTIFICATE"),
        (one.key(), one.key(), "BEGIN CERTIFICATE"),
        (one.certificate(), "", "BEGIN PRIVATE KEY"),
        (one.certificate(), one.certificate(), "BEGIN PRIVATE KEY"),
        (one.certificate(), two.key(), "not the key of the first certificate"),
        ("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n", one.key(), "frontend.tls_cert_file"),
    ] {
        fs::write(&certificate, pem).unwrap();
        fs::write(&key, secret).unwrap();
        let error = refused(&both);
        assert!(error.contains(expected), "{error}");
    }
    fs::write(&certificate, one.certificate()).unwrap();
    assert!(check_tls(&both).is_ok() && check_tls(&Settings::default()).is_ok());
}
