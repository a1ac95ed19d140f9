//! Changes of the key file, and files without keys.

use super::setup::engine;
use crate::fake::ready;
use crate::key_file::Keys;
use crate::test_server::TestServer;
use frontend::KeyFile;
use std::fs;
use std::net::SocketAddr;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::{Instant, sleep};

/// Time for what takes less than a second on an idle machine.
const TIMEOUT: Duration = Duration::from_mins(1);

/// The response to a request over a connection of its own.
async fn ask(address: SocketAddr, path: &str, key: &str) -> String {
    let mut connection = TcpStream::connect(address).await.unwrap();
    let request =
        format!("GET {path} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {key}\r\nconnection: close\r\n\r\n");
    connection.write_all(request.as_bytes()).await.unwrap();
    let mut response = String::new();
    connection.read_to_string(&mut response).await.unwrap();
    response
}

async fn status(address: SocketAddr, path: &str, key: &str) -> u16 {
    ask(address, path, key).await[9..12].parse().unwrap()
}

#[tokio::test]
async fn changes_of_the_file_take_effect_while_it_serves() {
    let keys = Keys::new();
    let (one, two) = (keys.add("one", |_| ()), keys.add("two", |_| ()));
    let server = TestServer::start(&engine(), keys.settings()).await;
    let address = server.address;
    let until = async |path: &'static str, key: &str, expected: u16| {
        let deadline = Instant::now() + TIMEOUT;
        while status(address, path, key).await != expected {
            assert!(Instant::now() < deadline, "{path} gets {expected}");
            sleep(Duration::from_millis(20)).await;
        }
    };
    assert_eq!([status(address, "/v1/models", &one).await, status(address, "/v1/models", &two).await], [200; 2]);
    KeyFile::change(&keys.path(), |file| {
        file.keys.retain(|key| key.name != "one");
        Ok(())
    })
    .unwrap();
    until("/v1/models", &one, 401).await;
    assert_eq!(status(address, "/v1/models", &two).await, 200);
    let good = fs::read(keys.path()).unwrap();
    fs::write(keys.path(), "[[keys]]\nname = 'broken'").unwrap();
    let deadline = Instant::now() + TIMEOUT;
    while !ask(address, "/ready", "").await.contains("frontend.api_keys_file") {
        assert!(Instant::now() < deadline, "/ready names the file");
        sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(status(address, "/v1/models", &two).await, 200, "the previous keys stay in effect");
    fs::write(keys.path(), good).unwrap();
    let three = keys.add("three", |_| ());
    until("/v1/models", &three, 200).await;
    assert!(!ask(address, "/ready", "").await.contains("frontend.api_keys_file"));
}

#[tokio::test]
async fn a_key_file_without_keys_is_listed_as_degraded() {
    let keys = Keys::new();
    fs::write(keys.path(), "").unwrap();
    let router = engine().router_with(keys.settings());
    let answer = ready(&router).await;
    let degraded = answer.json()["degraded"].to_string();
    assert_eq!(answer.status, 200);
    assert!(degraded.contains("frontend.api_keys_file has no keys"), "{degraded}");
}

#[tokio::test]
async fn a_key_file_that_is_missing_or_wrong_is_refused() {
    let keys = Keys::new();
    let refused = || {
        let error = frontend::router(engine(), prometheus::Registry::new(), keys.settings()).unwrap_err();
        error.to_string()
    };
    let missing = refused();
    assert!(missing.contains("frontend.api_keys_file") && missing.contains("blockyard key add --file"), "{missing}");
    fs::write(keys.path(), "keys = 1").unwrap();
    assert!(refused().contains("keys.toml"));
}
