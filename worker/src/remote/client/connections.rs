//! HTTP/2 connections to one process, with a limited number of streams on each.
//!
//! The server's limit of streams (hyper's default is 200) is never reached, so no request waits for another to end. The
//! window of a connection has room for all of its streams, so an output that is not read delays no other.

use super::super::connect::Endpoint;
use crate::plane::WorkerId;
use bytes::Bytes;
use http::{Request, Response};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::client::conn::http2::{Builder, SendRequest};
use hyper::rt::Executor;
use hyper_util::rt::{TokioIo, TokioTimer};
use parking_lot::Mutex;
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

/// Connections to one process.
pub(super) struct Connections {
    endpoint: Arc<Endpoint>,
    open: Mutex<Vec<Connection>>,
    /// Held while a connection is made, so that requests that come at the same time share it.
    connecting: tokio::sync::Mutex<()>,
}

#[derive(Clone)]
pub(super) struct Connection {
    endpoint: Arc<Endpoint>,
    sender: SendRequest<Full<Bytes>>,
    /// Cloned by each stream.
    streams: Stream,
    /// Cancelled to close the connection, which fails its streams.
    closed: CancellationToken,
    end: Arc<End>,
}

/// Why there is no connection.
#[derive(Debug, thiserror::Error)]
pub(super) enum ConnectError {
    /// This process can open no more files.
    #[error("the limit of open files of this process is reached")]
    OutOfFiles,
    #[error("{0}")]
    Failed(String),
}

/// How a connection has ended.
#[derive(Default)]
struct End {
    /// Cancelled at its end.
    ended: CancellationToken,
    /// The problem for error messages, if the connection has failed.
    problem: OnceLock<String>,
}

/// Counts a stream of a connection until dropped.
#[derive(Clone)]
pub(super) struct Stream(Arc<()>);

/// Streams on a connection.
const MAX_STREAMS: usize = 100;
/// Bytes that a stream may send before they are read: thousands of tokens.
const STREAM_WINDOW: u32 = 64 << 10;
/// Interval and timeout of pings. They show that a process was frozen or its machine is gone, also in mid-stream.
const PING: Duration = Duration::from_secs(10);
/// A path that every process answers without computing anything.
const LIVE: &str = "/live";
/// Time for the answer of a process that has left discovery. Workers are near, and compute on other threads than those
/// that answer. If this time is too short, a stream is interrupted and continued on another worker; it loses no text.
const LIVE_TIMEOUT: Duration = Duration::from_secs(2);

impl Connections {
    /// Connections to a process.
    pub(super) fn new(endpoint: Endpoint) -> Self {
        Self { endpoint: Arc::new(endpoint), open: Mutex::default(), connecting: tokio::sync::Mutex::default() }
    }

    /// Where the process is.
    pub(super) fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    /// A connection that can take a request; a new one if there is none.
    pub(super) async fn get(&self) -> Result<Connection, ConnectError> {
        if let Some(connection) = self.open() {
            return Ok(connection);
        }
        let _connecting = self.connecting.lock().await;
        if let Some(connection) = self.open() {
            return Ok(connection);
        }
        let connection = connect(&self.endpoint).await?;
        self.open.lock().push(connection.clone());
        Ok(connection)
    }

    /// Asks the process on each of its connections whether it is alive, and closes those that it does not answer. A new
    /// connection would not show it: the kernel accepts it for a frozen process, and another process may listen now.
    pub(super) fn check(&self, worker: WorkerId) {
        for connection in self.open.lock().iter().cloned() {
            let mut request = Request::new(Full::default());
            *request.uri_mut() = self.endpoint.uri(LIVE);
            tokio::spawn(async move {
                let closed = connection.closed.clone();
                let problem = match timeout(LIVE_TIMEOUT, connection.send(request)).await {
                    // Any status is an answer.
                    Ok(Ok(_)) => return,
                    Ok(Err(problem)) => problem,
                    Err(_) => format!("no answer within {LIVE_TIMEOUT:?}"),
                };
                tracing::warn!(%worker, problem, "the worker has left and does not answer; its requests are given up");
                closed.cancel();
            });
        }
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
        let sent = match self.sender.ready().await {
            Ok(()) => self.sender.send_request(request).await,
            Err(error) => Err(error),
        };
        match sent {
            Ok(response) => Ok((response, self.streams)),
            Err(error) => Err(self.explain(&error).await),
        }
    }

    /// Why a request has failed. One that was not sent does not know why its connection has ended.
    async fn explain(&self, error: &hyper::Error) -> String {
        if error.is_canceled() || error.is_closed() {
            self.end.ended.cancelled().await;
            if let Some(problem) = self.end.problem.get() {
                return problem.clone();
            }
        }
        self.endpoint.explain(error)
    }
}

/// Runs the tasks of a connection until it is closed. One of them owns the socket: dropping only what `handshake`
/// returns would let the streams wait on.
#[derive(Clone)]
struct UntilClosed(CancellationToken);

impl<F: Future<Output = ()> + Send + 'static> Executor<F> for UntilClosed {
    fn execute(&self, task: F) {
        let closed = self.0.clone();
        tokio::spawn(async move { closed.run_until_cancelled(task).await });
    }
}

async fn connect(endpoint: &Arc<Endpoint>) -> Result<Connection, ConnectError> {
    let socket = endpoint.connect(b"h2").await.map_err(|error| {
        let is_own = transport::is_out_of_files(&error);
        if is_own { ConnectError::OutOfFiles } else { ConnectError::Failed(endpoint.explain(&error)) }
    })?;
    let closed = CancellationToken::new();
    let mut builder = Builder::new(UntilClosed(closed.clone()));
    builder.timer(TokioTimer::new()).keep_alive_interval(PING).keep_alive_timeout(PING);
    builder.initial_stream_window_size(STREAM_WINDOW);
    builder.initial_connection_window_size(STREAM_WINDOW * (MAX_STREAMS as u32 + 1));
    let handshake = builder.handshake(TokioIo::new(socket)).await;
    let (sender, connection) = handshake.map_err(|error| ConnectError::Failed(endpoint.explain(&error)))?;
    let end = Arc::new(End::default());
    tokio::spawn({
        let (closed, end, endpoint) = (closed.clone(), Arc::clone(&end), Arc::clone(endpoint));
        // Said in every case: also if the task is dropped.
        let ended = end.ended.clone().drop_guard();
        async move {
            let _ended = ended;
            if let Some(Err(error)) = closed.run_until_cancelled(connection).await {
                let _ = end.problem.set(endpoint.explain(&error));
            }
        }
    });
    let endpoint = Arc::clone(endpoint);
    Ok(Connection { endpoint, sender, streams: Stream(Arc::new(())), closed, end })
}
