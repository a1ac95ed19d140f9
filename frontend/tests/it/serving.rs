//! Over real connections: ending well.

use crate::fake::{Fake, Step, first, last};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use worker::engine::Finish;

const BODY: &str = r#"{"model":"org/tiny","stream":true,"messages":[{"role":"user","content":"hello"}]}"#;

async fn start(
    engine: &Arc<Fake>,
    drain: Duration,
) -> (SocketAddr, CancellationToken, JoinHandle<std::io::Result<()>>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let (address, shutdown) = (listener.local_addr().unwrap(), CancellationToken::new());
    let serving = frontend::serve(listener, engine.router(), shutdown.clone(), drain);
    (address, shutdown, tokio::spawn(serving))
}

/// A connection with a request.
async fn ask(address: SocketAddr, body: &str) -> TcpStream {
    let mut connection = TcpStream::connect(address).await.unwrap();
    let request =
        format!("POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n{body}", body.len());
    connection.write_all(request.as_bytes()).await.unwrap();
    connection
}

/// A connection whose stream has begun.
async fn begin(address: SocketAddr) -> TcpStream {
    let mut connection = ask(address, BODY).await;
    let mut seen = Vec::new();
    while !String::from_utf8_lossy(&seen).contains("delta") {
        assert_ne!(connection.read_buf(&mut seen).await.unwrap(), 0, "{}", String::from_utf8_lossy(&seen));
    }
    connection
}

async fn rest(mut connection: TcpStream) -> String {
    let mut rest = String::new();
    connection.read_to_string(&mut rest).await.unwrap();
    rest
}

#[tokio::test]
async fn trap_15_shutting_down_lets_streams_finish_and_takes_no_more() {
    let gate = Arc::new(Semaphore::new(0));
    let engine = Fake::saying(vec![first("a"), Step::Wait(gate.clone()), last("b", Finish::Stop)]);
    let (address, shutdown, serving) = start(&engine, Duration::from_mins(10)).await;
    let connection = begin(address).await;
    shutdown.cancel();
    while TcpStream::connect(address).await.is_ok() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert!(!serving.is_finished());
    gate.add_permits(1);
    assert!(rest(connection).await.contains("data: [DONE]"));
    serving.await.unwrap().unwrap();
}

#[tokio::test]
async fn at_the_deadline_what_runs_is_told_and_ended() {
    let engine = Fake::saying(vec![first("a"), Step::Hang]);
    let (address, shutdown, serving) = start(&engine, Duration::from_millis(20)).await;
    let connection = begin(address).await;
    shutdown.cancel();
    let rest = rest(connection).await;
    assert!(rest.contains("shutting down") && !rest.contains("[DONE]"), "{rest}");
    serving.await.unwrap().unwrap();
    assert_eq!(engine.open(), 0);
}

#[tokio::test]
async fn trap_5_a_closed_connection_stops_the_engine() {
    let engine = Fake::saying(vec![first("a"), Step::Hang]);
    let (address, _shutdown, _serving) = start(&engine, Duration::ZERO).await;
    let streaming = begin(address).await;
    let waiting = ask(address, &BODY.replace("true", "false")).await;
    while engine.open() < 2 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    drop((streaming, waiting));
    while engine.open() > 0 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Most clients read only after they have sent everything.
#[tokio::test]
async fn an_oversized_body_gets_its_answer() {
    let settings = frontend::Settings { body_bytes_max: 1 << 20, ..frontend::Settings::default() };
    let router = frontend::router(Fake::saying(vec![]), prometheus::Registry::new(), settings).unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(frontend::serve(listener, router, CancellationToken::new(), Duration::ZERO));
    let mut connection = TcpStream::connect(address).await.unwrap();
    let body = vec![b'x'; 3 << 20];
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nconnection: close\r\nhost: x\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    connection.write_all(head.as_bytes()).await.unwrap();
    connection.write_all(&body).await.unwrap();
    assert!(rest(connection).await.starts_with("HTTP/1.1 413"));
}
