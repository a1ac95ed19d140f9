//! Both sides over real sockets.

mod authority;

use super::*;
use authority::Authority;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

/// A certificate of an authority for a name, which is also the name of the files.
fn sign(authority: &Authority, folder: &Path, name: &str, is_expired: bool) -> Identity {
    let [certificate, key] = authority.sign(folder, name, &[name], is_expired);
    Identity::of(("cert_file", Some(certificate)), ("key_file", Some(key))).unwrap().unwrap()
}

fn metrics() -> CertificateMetrics {
    CertificateMetrics::new("test", &prometheus::Registry::new()).unwrap()
}

fn authorities(path: PathBuf) -> NamedFile {
    NamedFile { key: "ca_file", path }
}

/// A client that trusts an authority.
fn client(path: PathBuf, identity: Option<Identity>) -> ClientTls {
    ClientTls::open(ClientFiles { authorities: authorities(path), identity }, metrics()).unwrap()
}

/// Connects, and exchanges a byte in both directions. Returns whether the server has seen a certificate, or the error
/// of the client.
async fn exchange(server: &ServerTls, client: &ClientTls, host: &str) -> Result<bool, String> {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let serve = async {
        let mut socket = server.accept(listener.accept().await.unwrap().0).await.ok()?;
        let has_certificate = has_certificate(&socket);
        socket.write_u8(1).await.ok()?;
        socket.flush().await.ok()?;
        socket.read_u8().await.ok().map(|_| has_certificate)
    };
    let ask = async {
        let tcp = TcpStream::connect(address).await.unwrap();
        let text =
            |error: std::io::Error| client.explain_alert(&error.to_string()).unwrap_or_else(|| error.to_string());
        let mut socket = client.connect(tcp, host, b"h2").await.map_err(text)?;
        socket.read_u8().await.map_err(text)?;
        socket.write_u8(1).await.map_err(text)?;
        socket.flush().await.map_err(text)
    };
    let (served, asked) = tokio::join!(serve, ask);
    asked.map(|()| served.expect("the server has read the byte"))
}

#[tokio::test]
async fn both_sides_show_certificates_of_their_authority() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let (ours, other) = (Authority::new(), Authority::new());
    let (ca, other_ca) = (ours.write(&at("ca.pem")), other.write(&at("other.pem")));
    let clients = Some(NamedFile { key: "client_ca_file", path: ca.clone() });
    let identity = sign(&ours, folder.path(), "localhost", false);
    let server = ServerTls::open(ServerFiles { identity, clients }, metrics()).unwrap();
    let own = sign(&ours, folder.path(), "frontend", false);
    assert_eq!(exchange(&server, &client(ca.clone(), Some(own)), "localhost").await, Ok(true));
    assert_eq!(exchange(&server, &client(ca.clone(), None), "localhost").await, Ok(false), "the caller decides");
    let foreign = sign(&other, folder.path(), "foreign", false);
    let expired = sign(&ours, folder.path(), "expired", true);
    for (client, host, expected) in [
        (client(other_ca, None), "localhost", "signed by no authority in ca_file = "),
        (client(ca.clone(), None), "127.0.0.1", "not for this host"),
        (client(ca.clone(), Some(foreign)), "localhost", "refuses the certificate of this process, cert_file = "),
        (client(ca.clone(), Some(expired)), "localhost", "certificate of this process has expired"),
        (client(ca.clone(), None), "a b", "no name of a host"),
    ] {
        let error = exchange(&server, &client, host).await.unwrap_err();
        assert!(error.contains(expected), "{expected}: {error}");
    }
    let identity = sign(&ours, folder.path(), "localhost", true);
    let server = ServerTls::open(ServerFiles { identity, clients: None }, metrics()).unwrap();
    let error = exchange(&server, &client(ca, None), "localhost").await.unwrap_err();
    assert!(error.contains("the certificate of the server has expired"), "{error}");
}

#[test]
fn a_chain_says_its_hosts_and_whether_it_is_self_signed() {
    let folder = tempfile::tempdir().unwrap();
    let authority = Authority::new();
    let identity = sign(&authority, folder.path(), "localhost", false);
    let path = identity.files()[0].path.clone();
    let chain = identity.chain().unwrap();
    assert!(chain.is_for("localhost") && !chain.is_for("127.0.0.1") && !chain.is_for("a b"));
    assert!(!chain.is_self_signed(), "its authority may be any");
    std::fs::write(&path, [std::fs::read_to_string(&path).unwrap(), authority.pem()].concat()).unwrap();
    assert!(identity.chain().unwrap().is_self_signed(), "the file has its authority");
    std::fs::write(&path, include_str!("../../frontend/tests/fixtures/tls/one.pem")).unwrap();
    assert!(identity.chain().unwrap().is_self_signed());
}

#[tokio::test]
async fn a_peer_without_tls_is_told_so() {
    let folder = tempfile::tempdir().unwrap();
    let ours = Authority::new();
    let client = client(ours.write(&folder.path().join("ca.pem")), None);
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let plain = async {
        let (mut socket, _) = listener.accept().await.unwrap();
        socket.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").await.unwrap();
        socket
    };
    let connecting = client.connect(TcpStream::connect(address).await.unwrap(), "localhost", b"h2");
    let (_socket, connected) = tokio::join!(plain, connecting);
    assert!(connected.err().unwrap().to_string().contains("speaks no TLS"));
    let identity = sign(&ours, folder.path(), "localhost", false);
    let server = ServerTls::open(ServerFiles { identity, clients: None }, metrics()).unwrap();
    let mut caller = TcpStream::connect(address).await.unwrap();
    caller.write_all(b"GET / HTTP/1.1\r\n\r\n").await.unwrap();
    let accepted = server.accept(listener.accept().await.unwrap().0).await;
    assert!(matches!(accepted, Err(AcceptError::Http(_))));
}

#[tokio::test]
async fn new_connections_use_the_files_as_they_are_now() {
    let folder = tempfile::tempdir().unwrap();
    let (before, after) = (Authority::new(), Authority::new());
    let ca = before.write(&folder.path().join("ca.pem"));
    let identity = sign(&before, folder.path(), "localhost", false);
    let server = Arc::new(ServerTls::open(ServerFiles { identity, clients: None }, metrics()).unwrap());
    let client = client(ca.clone(), None);
    assert_eq!(exchange(&server, &client, "localhost").await, Ok(false));
    sign(&after, folder.path(), "localhost", false);
    let deadline = tokio::time::Instant::now() + Duration::from_mins(1);
    while exchange(&server, &client, "localhost").await.is_ok() {
        assert!(tokio::time::Instant::now() < deadline, "the server has read its certificate again");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    after.write(&ca);
    while exchange(&server, &client, "localhost").await.is_err() {
        assert!(tokio::time::Instant::now() < deadline, "the client has read the authority again");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test]
async fn a_rejected_change_is_a_problem_until_one_is_applied() {
    let folder = tempfile::tempdir().unwrap();
    let authority = Authority::new();
    let (ca, identity) =
        (authority.write(&folder.path().join("ca.pem")), sign(&authority, folder.path(), "localhost", false));
    let [certificate, _] = identity.files();
    let metrics = metrics();
    let files = ServerFiles { identity: identity.clone(), clients: None };
    let server = ServerTls::open(files, metrics.clone()).unwrap();
    let files = ClientFiles { authorities: authorities(ca), identity: Some(identity) };
    let client = ClientTls::open(files, metrics.clone()).unwrap();
    assert_eq!(metrics.problems(), [""; 0]);

    let content = std::fs::read(&certificate.path).unwrap();
    std::fs::write(&certificate.path, "").unwrap();
    let expected = format!("TLS certificate not reloaded: cert_file = {:?}: expected PEM", certificate.path);
    let is_listed = |problem: &String| problem.starts_with(&expected);
    until(|| metrics.problems().iter().any(is_listed)).await;
    assert_eq!(metrics.problems().len(), 1, "both have the same one");
    std::fs::write(&certificate.path, content).unwrap();
    until(|| metrics.problems().is_empty()).await;

    std::fs::remove_file(&certificate.path).unwrap();
    until(|| !metrics.problems().is_empty()).await;
    drop((server, client));
    // A check that runs may have the last reference.
    until(|| metrics.problems().is_empty()).await;
}

/// Waits until files have been read again with this result.
async fn until(condition: impl Fn() -> bool) {
    let waiting = async {
        while !condition() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(Duration::from_mins(1), waiting).await.expect("the files are read again");
}
