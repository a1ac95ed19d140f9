//! Streamed chat completions that are open at the same time. Their content is read and discarded.

use anyhow::{Context, Result, bail, ensure};
use serde_json::json;
use std::net::SocketAddr;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::timeout;

/// Time until every stream has its first event. A thousand prompts take seconds.
const START_TIMEOUT: Duration = Duration::from_mins(2);

/// Open streams. Dropping them closes their connections, which cancels the requests.
pub struct Streams(JoinSet<Result<()>>);

impl Streams {
    /// Sends `count` requests, each with a prompt and a connection of its own, and returns when each has an event.
    pub async fn open(address: SocketAddr, model: &str, count: usize, max_tokens: u32) -> Result<Self> {
        let (begun, mut beginnings) = mpsc::channel(count);
        let mut streams = JoinSet::new();
        for number in 0..count {
            let messages = json!([{"role": "user", "content": format!("{number} is the number of this stream")}]);
            let body = json!({
                "model": model, "messages": messages, "max_tokens": max_tokens, "ignore_eos": true, "stream": true,
            });
            streams.spawn(read(address, body.to_string(), begun.clone()));
        }
        drop(begun);
        let all = async {
            for _ in 0..count {
                if beginnings.recv().await.is_none() {
                    break;
                }
            }
        };
        timeout(START_TIMEOUT, all).await.context("not every stream began")?;
        let mut streams = Self(streams);
        streams.check()?;
        Ok(streams)
    }

    /// Fails if a stream has ended.
    pub fn check(&mut self) -> Result<()> {
        match self.0.try_join_next() {
            None => Ok(()),
            Some(Ok(Err(error))) => Err(error),
            Some(Ok(Ok(()))) => bail!("a stream ended before the measurement"),
            Some(Err(error)) => Err(error.into()),
        }
    }
}

/// Sends one request and reads its response until the end. Reports the first event.
async fn read(address: SocketAddr, body: String, begun: mpsc::Sender<()>) -> Result<()> {
    let mut socket = TcpStream::connect(address).await.context("connect")?;
    let head = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: {address}\r\ncontent-type: application/json\r\n\
         content-length: {}\r\n\r\n",
        body.len()
    );
    socket.write_all((head + &body).as_bytes()).await.context("write")?;
    let mut buffer = Vec::with_capacity(16 << 10);
    while !contains(&buffer, b"\ndata: ") {
        ensure!(
            socket.read_buf(&mut buffer).await.context("read")? > 0,
            "closed: {}",
            String::from_utf8_lossy(&buffer)
        );
        ensure!(buffer.starts_with(b"HTTP/1.1 200 "), "{}", String::from_utf8_lossy(&buffer));
    }
    // The receiver waits for one message of each stream.
    let _ = begun.send(()).await;
    drop(begun);
    // The end of the response; the server keeps the connection open.
    while !buffer.ends_with(b"\r\n0\r\n\r\n") {
        buffer.clear();
        ensure!(socket.read_buf(&mut buffer).await.context("read")? > 0, "the stream broke off");
    }
    Ok(())
}

fn contains(bytes: &[u8], part: &[u8]) -> bool {
    bytes.windows(part.len()).any(|window| window == part)
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::net::TcpListener;

    const EVENT: &[u8] = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nb\r\ndata: {}\n\n\r\n";

    /// Answers each connection with `answer` and keeps it open.
    async fn serve(answer: &'static [u8]) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("an address");
        tokio::spawn(async move {
            let mut open = Vec::new();
            while let Ok((mut socket, _)) = listener.accept().await {
                socket.write_all(answer).await.expect("the client reads");
                open.push(socket);
            }
        });
        address
    }

    #[tokio::test]
    async fn streams_are_open_once_each_has_an_event() {
        let mut streams = Streams::open(serve(EVENT).await, "tiny", 3, 5).await.expect("three streams");
        assert!(streams.check().is_ok() && streams.0.len() == 3);
        let refused = b"HTTP/1.1 429 Too Many Requests\r\ncontent-length: 0\r\n\r\n";
        assert!(Streams::open(serve(refused).await, "tiny", 1, 5).await.is_err());
    }
}
