//! The process of a peer: its idle connections, and what requests to it look like.
//!
//! While packets to the process are lost, neither an attempt to connect nor a request over an idle connection fails:
//! both time out. After a timeout no request waits for the process for a while, so that blocks are computed at once.
//! Then it is connected to aside, while a request waits for much less than a timeout. A process may also accept the
//! connection and answer nothing, as one that is frozen does. Until one request has an answer, the others go on not to
//! wait.

use super::connection::{Connection, Response};
use crate::remote::connect::{Credentials, Endpoint};
use crate::remote::{PROTOCOL, PROTOCOL_HEADER};
use http::header::{AUTHORIZATION, CONTENT_LENGTH, HOST};
use parking_lot::Mutex;
use spans::LogLimit;
use std::io;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{Instant, timeout};
use transport::Socket;

/// The process of a peer.
pub(super) struct PeerEndpoint {
    endpoint: Endpoint,
    idle: Mutex<Vec<Connection<Socket>>>,
    /// When the process may be connected to again, after a timeout. `None`: it has answered since.
    retry_at: Mutex<Option<Instant>>,
    /// Limits log lines about reads that fail: there is one for each prompt while the process cannot be reached.
    failures: LogLimit,
}

/// How a request gets a new connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Attempt {
    /// It connects.
    Own,
    /// A pause has ended: a task connects.
    Aside,
    /// Not during a pause.
    Paused,
}

/// Idle connections that are kept: those of two loads.
const MAX_IDLE: usize = 8;
/// Pause after a timeout.
const RETRY_PAUSE: Duration = Duration::from_secs(5);
/// Time that a request waits for an attempt to connect aside. A process that is reached answers in a few milliseconds.
const ASIDE_WAIT: Duration = Duration::from_millis(100);
/// Time until the head of a response, which is sent before blocks are read: as much as for connecting.
const HEAD_TIMEOUT: Duration = Duration::from_secs(2);
/// Longest text of an error that is read.
const MAX_ERROR_BYTES: usize = 64 << 10;

impl PeerEndpoint {
    /// The process that listens at `url`. A wrong URL fails at each request.
    pub(super) fn new(url: &str, credentials: Credentials) -> Self {
        Self {
            endpoint: Endpoint::new(url, credentials),
            idle: Mutex::default(),
            retry_at: Mutex::default(),
            failures: LogLimit::default(),
        }
    }

    /// The URL of the process, for the log.
    pub(super) fn address(&self) -> Option<String> {
        self.endpoint.address()
    }

    /// Logs that something of the process cannot be read, once in half a minute.
    pub(super) fn log_failure(&self, error: &io::Error, what: &str) {
        if let Some(suppressed) = self.failures.admit() {
            tracing::warn!(address = self.address(), %error, suppressed, "{what}");
        }
    }

    /// The bytes of a request.
    pub(super) fn request(&self, method: &str, path: &str, body: &[u8]) -> Vec<u8> {
        let uri = self.endpoint.uri(path);
        let host = uri.authority().map_or("", |authority| authority.as_str());
        let mut request = format!("{method} {path} HTTP/1.1\r\n{HOST}: {host}\r\n").into_bytes();
        request.extend(format!("{PROTOCOL_HEADER}: {PROTOCOL}\r\n{CONTENT_LENGTH}: {}\r\n", body.len()).bytes());
        if let Some(secret) = self.endpoint.authorization() {
            request.extend(format!("{AUTHORIZATION}: ").bytes().chain(secret.as_bytes().iter().copied()));
            request.extend(b"\r\n");
        }
        request.extend(b"\r\n");
        request.extend(body);
        request
    }

    /// Sends a request over an idle connection or a new one. A response with an error is an error.
    pub(super) async fn send(self: &Arc<Self>, request: &[u8]) -> io::Result<Response<Socket>> {
        let connection = match self.idle_connection() {
            Some(connection) => connection,
            None => self.connect().await?,
        };
        let Ok(response) = timeout(HEAD_TIMEOUT, connection.send(request)).await else { return Err(self.silent()) };
        // A worker that rejects the client's certificate says so only now.
        let explained = |error: io::Error| io::Error::new(error.kind(), self.endpoint.explain(&error));
        let mut response = response.map_err(explained)?;
        *self.retry_at.lock() = None;
        if response.status != 200 {
            let text = response.rest(MAX_ERROR_BYTES).await.unwrap_or_default();
            let text = String::from_utf8_lossy(&text);
            self.endpoint.log_refusal(text.trim());
            return Err(io::Error::other(format!("status {}: {}", response.status, text.trim())));
        }
        Ok(response)
    }

    /// A new connection.
    async fn connect(self: &Arc<Self>) -> io::Result<Connection<Socket>> {
        match self.begin_attempt() {
            Attempt::Own => self.open().await,
            Attempt::Aside => {
                let endpoint = Arc::clone(self);
                let aside = tokio::spawn(async move {
                    let connection = endpoint.open().await?;
                    endpoint.keep_idle(connection);
                    io::Result::Ok(())
                });
                // It goes on after this wait: then later requests find the connection.
                if let Ok(Ok(Err(error))) = timeout(ASIDE_WAIT, aside).await {
                    return Err(error);
                }
                self.idle_connection().ok_or_else(|| self.paused())
            }
            Attempt::Paused => Err(self.paused()),
        }
    }

    /// Connects. A timeout begins a pause, and any other error ends it. A connection does not: only an answer does.
    async fn open(&self) -> io::Result<Connection<Socket>> {
        let connected = self.endpoint.connect(b"http/1.1").await;
        if let Err(error) = &connected {
            let is_timeout = error.kind() == io::ErrorKind::TimedOut;
            *self.retry_at.lock() = is_timeout.then(|| Instant::now() + RETRY_PAUSE);
        }
        connected.map(Connection::new)
    }

    /// The first attempt after a pause begins the next one, so that other requests do not wait beside it.
    fn begin_attempt(&self) -> Attempt {
        let (mut retry_at, now) = (self.retry_at.lock(), Instant::now());
        match *retry_at {
            None => Attempt::Own,
            Some(at) if now < at => Attempt::Paused,
            Some(_) => {
                *retry_at = Some(now + RETRY_PAUSE);
                Attempt::Aside
            }
        }
    }

    /// The error of a request during a pause.
    fn paused(&self) -> io::Error {
        let address = self.endpoint.address().unwrap_or_default();
        let problem = format!("{address}: it did not answer in time; the next attempt is {RETRY_PAUSE:?} later");
        io::Error::new(io::ErrorKind::TimedOut, problem)
    }

    /// The error of a request without an answer. The idle connections are as silent, so they are closed.
    fn silent(&self) -> io::Error {
        self.idle.lock().clear();
        *self.retry_at.lock() = Some(Instant::now() + RETRY_PAUSE);
        let address = self.endpoint.address().unwrap_or_default();
        io::Error::new(io::ErrorKind::TimedOut, format!("{address}: no answer after {HEAD_TIMEOUT:?}"))
    }

    /// Keeps the connection of a response for other requests, if it can be used again.
    pub(super) fn keep(&self, response: Response<Socket>) {
        if let Some(connection) = response.into_connection() {
            self.keep_idle(connection);
        }
    }

    fn keep_idle(&self, connection: Connection<Socket>) {
        let mut idle = self.idle.lock();
        if idle.len() < MAX_IDLE {
            idle.push(connection);
        }
    }

    fn idle_connection(&self) -> Option<Connection<Socket>> {
        let mut idle = self.idle.lock();
        std::iter::from_fn(|| idle.pop()).find_map(|mut connection| connection.is_open().then_some(connection))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::AsyncWriteExt;
    use tokio::net::TcpListener;

    /// A process that accepts connections, as the kernel does for it, and answers nothing.
    async fn silent() -> (TcpListener, Arc<PeerEndpoint>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        (listener, Arc::new(PeerEndpoint::new(&url, Credentials::from(None))))
    }

    #[test]
    fn the_log_names_a_peer_by_its_url() {
        let address = |url: &str| PeerEndpoint::new(url, Credentials::from(None)).address();
        assert_eq!(address("http://host:8100").as_deref(), Some("http://host:8100"));
        assert_eq!(address("http://user:secret@host:8100"), None);
    }

    #[tokio::test(start_paused = true)]
    async fn reads_that_fail_are_logged_once_in_half_a_minute() {
        let peer = PeerEndpoint::new("http://host:8100", Credentials::from(None));
        peer.log_failure(&io::ErrorKind::TimedOut.into(), "nothing can be read");
        assert_eq!(peer.failures.admit(), None, "the first line has used the limit");
        tokio::time::advance(Duration::from_secs(30)).await;
        peer.log_failure(&io::ErrorKind::TimedOut.into(), "nothing can be read");
        assert_eq!(peer.failures.admit(), None);
    }

    #[tokio::test(start_paused = true)]
    async fn a_process_that_does_not_answer_is_left_alone_for_a_while() {
        let (_listener, peer) = silent().await;
        let request = peer.request("GET", "/workers/1/handoffs/1", &[]);
        for _ in 0..2 {
            let connection = peer.open().await.unwrap();
            peer.keep_idle(connection);
        }
        let failed = async || peer.send(&request).await.err().map(|error| error.kind());
        assert_eq!(failed().await, Some(io::ErrorKind::TimedOut));
        assert!(peer.idle.lock().is_empty(), "the other idle connection is as silent");
        let now = Instant::now();
        assert_eq!(failed().await, Some(io::ErrorKind::TimedOut));
        assert_eq!(now, Instant::now(), "it is not waited for");
        assert_eq!(peer.begin_attempt(), Attempt::Paused);
        tokio::time::advance(RETRY_PAUSE).await;
        assert_eq!([peer.begin_attempt(), peer.begin_attempt()], [Attempt::Aside, Attempt::Paused]);
    }

    #[tokio::test]
    async fn a_process_that_answers_after_a_pause_is_used_again() {
        let (listener, peer) = silent().await;
        *peer.retry_at.lock() = Some(Instant::now());
        if let Ok(connection) = peer.connect().await {
            peer.keep_idle(connection);
        }
        // On a busy machine it takes longer than the request waits.
        while peer.idle.lock().is_empty() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        assert_ne!(peer.begin_attempt(), Attempt::Own, "it has only accepted the connection");
        let request = peer.request("GET", "/workers/1/handoffs/1", &[]);
        let answer = async {
            let (mut socket, _) = listener.accept().await.unwrap();
            socket.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").await.unwrap();
            socket
        };
        let (sent, _socket) = tokio::join!(peer.send(&request), answer);
        assert!(sent.is_ok());
        assert_eq!(peer.begin_attempt(), Attempt::Own);
    }
}
