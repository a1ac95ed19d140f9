//! Servers that cannot be used, and how the error names the reason.

use super::*;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpListener;

/// A server that says which version it has.
async fn server_of_version(version: &'static str) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("nats://{}", listener.local_addr().unwrap());
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let info =
                format!(r#"INFO {{"server_name":"old","version":"{version}","jetstream":true,"max_payload":1048576}}"#);
            tokio::spawn(async move {
                stream.write_all(format!("{info}\r\n").as_bytes()).await.unwrap();
                let (reader, mut writer) = stream.split();
                let mut lines = BufReader::new(reader).lines();
                while let Ok(Some(line)) = lines.next_line().await {
                    if line == "PING" {
                        writer.write_all(b"PONG\r\n").await.unwrap();
                    }
                }
                // Bytes of TLS are no line of text.
                let _ = writer.write_all(b"-ERR 'Unknown Protocol Operation'\r\n").await;
            });
        }
    });
    url
}

#[tokio::test]
async fn an_old_server_is_refused_with_its_version() {
    let url = server_of_version("2.9.10").await;
    let error = refused(only(&url)).await;
    let expected = format!("NATS at {url} (server old) has version 2.9.10; 2.11 or later is needed");
    assert_eq!(error.to_string(), expected);
}

#[tokio::test]
async fn a_server_without_tls_is_named_as_such() {
    let url = server_of_version("2.11.0").await.replace("nats://", "tls://");
    let error = refused(with_short_connect_timeout(only(&url))).await.to_string();
    assert!(error.starts_with(&format!("NATS at {url} refuses the connection: ")), "{error}");
    assert!(error.contains("; the server offers no TLS: turn it on there"), "{error}");
}

#[tokio::test]
async fn a_server_that_cannot_be_reached_is_named() {
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let url = format!("nats://127.0.0.1:{port}");
    let error = refused(with_short_connect_timeout(only(&url))).await;
    assert!(matches!(&error, ConnectError::Unreachable { servers, .. } if *servers == url), "{error}");
}

#[tokio::test]
async fn a_server_without_jetstream_is_refused() {
    let Some(server) = Server::without_jetstream().await else { return };
    let error = refused(with_short_connect_timeout(only(&server.url()))).await;
    assert!(error.to_string().contains("is JetStream enabled"), "{error}");
}

#[tokio::test]
async fn a_bucket_whose_keys_do_not_expire_is_refused() {
    let Some(server) = shared() else { return };
    let settings = settings(&server);
    let client = async_nats::connect(&server).await.unwrap();
    let config = async_nats::jetstream::kv::Config { bucket: settings.bucket.clone(), ..Default::default() };
    let jetstream = async_nats::jetstream::new(client);
    jetstream.create_key_value(config.clone()).await.unwrap();
    let error = refused(settings.clone()).await;
    assert!(error.to_string().contains("keys do not expire"), "{error}");
    let long = Duration::from_mins(1);
    let bucket = format!("{}-long", settings.bucket);
    let config = async_nats::jetstream::kv::Config { bucket: bucket.clone(), limit_markers: Some(long), ..config };
    jetstream.create_key_value(config).await.unwrap();
    let error = refused(Settings { bucket, ..settings }).await;
    assert!(error.to_string().contains("no key expires sooner"), "{error}");
}
