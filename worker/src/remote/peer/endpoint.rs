//! The process of a peer: its idle connections, and what requests to it look like.

use super::connection::{Connection, Response};
use crate::remote::connect::{Credentials, Endpoint};
use crate::remote::{PROTOCOL, PROTOCOL_HEADER};
use http::header::{AUTHORIZATION, CONTENT_LENGTH, HOST};
use parking_lot::Mutex;
use spans::LogLimit;
use std::io;
use std::time::Duration;
use tokio::time::Instant;
use transport::Socket;

/// The process of a peer.
pub(super) struct PeerEndpoint {
    endpoint: Endpoint,
    idle: Mutex<Vec<Connection<Socket>>>,
    /// When a request may connect again, after an attempt that timed out.
    retry_at: Mutex<Option<Instant>>,
    /// Limits log lines about reads that fail: there is one for each prompt while the process cannot be reached.
    failures: LogLimit,
}

/// Idle connections that are kept: those of two loads.
const MAX_IDLE: usize = 8;
/// Pause after an attempt to connect that timed out. While packets to the process are lost, one request in each pause
/// waits for the timeout, and the others recompute their blocks at once.
const RETRY_PAUSE: Duration = Duration::from_secs(5);
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
    pub(super) async fn send(&self, request: &[u8]) -> io::Result<Response<Socket>> {
        let connection = match self.idle_connection() {
            Some(connection) => connection,
            None => Connection::new(self.connect().await?),
        };
        // A worker that rejects the client's certificate says so only now.
        let explained = |error: io::Error| io::Error::new(error.kind(), self.endpoint.explain(&error));
        let mut response = connection.send(request).await.map_err(explained)?;
        if response.status != 200 {
            let text = response.rest(MAX_ERROR_BYTES).await.unwrap_or_default();
            let text = String::from_utf8_lossy(&text);
            self.endpoint.log_refusal(text.trim());
            return Err(io::Error::other(format!("status {}: {}", response.status, text.trim())));
        }
        Ok(response)
    }

    /// A new connection.
    async fn connect(&self) -> io::Result<Socket> {
        self.begin_attempt()?;
        let connected = self.endpoint.connect(b"http/1.1").await;
        let is_timeout = matches!(&connected, Err(error) if error.kind() == io::ErrorKind::TimedOut);
        *self.retry_at.lock() = is_timeout.then(|| Instant::now() + RETRY_PAUSE);
        connected
    }

    /// An error during the pause after an attempt that timed out. The first attempt after it begins the next pause, so
    /// that other requests do not wait beside it.
    fn begin_attempt(&self) -> io::Result<()> {
        let (mut retry_at, now) = (self.retry_at.lock(), Instant::now());
        if retry_at.is_some_and(|at| now < at) {
            let address = self.endpoint.address().unwrap_or_default();
            let problem = format!("{address}: an attempt to connect timed out; the next one is {RETRY_PAUSE:?} later");
            return Err(io::Error::new(io::ErrorKind::TimedOut, problem));
        }
        if retry_at.is_some() {
            *retry_at = Some(now + RETRY_PAUSE);
        }
        Ok(())
    }

    /// Keeps the connection of a response for other requests, if it can be used again.
    pub(super) fn keep(&self, response: Response<Socket>) {
        let Some(connection) = response.into_connection() else { return };
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
}
