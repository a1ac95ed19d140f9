//! HTTP/2 connections to one process, with a limited number of streams on each.
//!
//! The server's limit of streams (hyper's default is 200) is never reached, so no request waits for another to end. The
//! window of a connection has room for all of its streams, so an output that is not read delays no other.

use bytes::Bytes;
use http::uri::{Authority, Scheme};
use http::{Request, Response, Uri};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::client::conn::http2::{Builder, SendRequest};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use parking_lot::Mutex;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpStream;
use tokio::time::timeout;

/// Connections to one process.
pub(super) struct Connections {
    target: Result<Authority, String>,
    open: Mutex<Vec<Connection>>,
    /// Held while a connection is made, so that requests that come at the same time share it.
    connecting: tokio::sync::Mutex<()>,
}

#[derive(Clone)]
pub(super) struct Connection {
    sender: SendRequest<Full<Bytes>>,
    /// Cloned by each stream.
    streams: Stream,
}

/// Counts a stream of a connection until dropped.
#[derive(Clone)]
pub(super) struct Stream(Arc<()>);

/// Streams on a connection.
const MAX_STREAMS: usize = 100;
/// Bytes that a stream may send before they are read: thousands of tokens.
const STREAM_WINDOW: u32 = 64 << 10;
/// Workers are near, and another one can be tried.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// Interval and timeout of pings. They show that a process was frozen or its machine is gone, also in mid-stream.
const PING: Duration = Duration::from_secs(10);

impl Connections {
    /// Connections to an address, `http://host:port`. A wrong one fails at each request.
    pub(super) fn new(address: &str) -> Self {
        let parse = || {
            let uri: Uri = address.parse().map_err(|error| format!("address {address:?}: {error}"))?;
            match (uri.scheme(), uri.authority()) {
                (Some(scheme), Some(authority)) if *scheme == Scheme::HTTP && authority.port().is_some() => {
                    Ok(authority.clone())
                }
                _ => Err(format!("address {address:?}: expected http://host:port")),
            }
        };
        Self { target: parse(), open: Mutex::default(), connecting: tokio::sync::Mutex::default() }
    }

    /// The URI of a path.
    pub(super) fn uri(&self, path: &str) -> Uri {
        let authority = self.target.as_ref().map_or("invalid", Authority::as_str);
        let uri = Uri::builder().scheme(Scheme::HTTP).authority(authority).path_and_query(path).build();
        uri.expect("authority and path are valid")
    }

    /// A connection that can take a request; a new one if there is none.
    pub(super) async fn get(&self) -> Result<Connection, String> {
        if let Some(connection) = self.open() {
            return Ok(connection);
        }
        let _connecting = self.connecting.lock().await;
        if let Some(connection) = self.open() {
            return Ok(connection);
        }
        let connection = connect(self.target.as_ref().map_err(Clone::clone)?).await?;
        self.open.lock().push(connection.clone());
        Ok(connection)
    }

    /// An open connection with room. The first one is preferred, so that the others end when they are idle.
    fn open(&self) -> Option<Connection> {
        let mut open = self.open.lock();
        open.retain(|connection| !connection.sender.is_closed());
        open.iter().find(|connection| Arc::strong_count(&connection.streams.0) <= MAX_STREAMS).cloned()
    }
}

impl Connection {
    /// Sends a request. Returns its response, with the guard that counts its stream.
    pub(super) async fn send(mut self, request: Request<Full<Bytes>>) -> Result<(Response<Incoming>, Stream), String> {
        let text = |error: hyper::Error| chain(&error);
        self.sender.ready().await.map_err(text)?;
        let response = self.sender.send_request(request).await.map_err(text)?;
        Ok((response, self.streams))
    }
}

async fn connect(target: &Authority) -> Result<Connection, String> {
    let socket = match timeout(CONNECT_TIMEOUT, TcpStream::connect(target.as_str())).await {
        Ok(connected) => connected.map_err(|error| format!("{target}: {error}"))?,
        Err(_) => return Err(format!("{target}: not connected after {CONNECT_TIMEOUT:?}")),
    };
    // Small frames must be sent at once, not wait for an acknowledgement (Nagle's algorithm).
    socket.set_nodelay(true).map_err(|error| format!("{target}: {error}"))?;
    let mut builder = Builder::new(TokioExecutor::new());
    builder.timer(TokioTimer::new()).keep_alive_interval(PING).keep_alive_timeout(PING);
    builder.initial_stream_window_size(STREAM_WINDOW);
    builder.initial_connection_window_size(STREAM_WINDOW * (MAX_STREAMS as u32 + 1));
    let (sender, connection) = builder.handshake(TokioIo::new(socket)).await.map_err(|error| chain(&error))?;
    // Its errors are those of its requests.
    tokio::spawn(async move { drop(connection.await) });
    Ok(Connection { sender, streams: Stream(Arc::new(())) })
}

/// The text of an error with its causes.
fn chain(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(error.source(), |cause| cause.source());
    causes.fold(error.to_string(), |text, cause| format!("{text}: {cause}"))
}
