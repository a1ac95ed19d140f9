//! HTTP/2 connections to one process, with a limited number of streams on each.
//!
//! The server's limit of streams (hyper's default is 200) is never reached, so no request waits for another to end. The
//! window of a connection has room for all of its streams, so an output that is not read delays no other, and does not
//! end the connection.

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
use std::pin::pin;
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;

/// Connections to one process.
pub(super) struct Connections {
    endpoint: Arc<Endpoint>,
    /// Bytes that a stream may send before they are read.
    stream_window: u32,
    open: Mutex<Vec<Arc<Connection>>>,
    /// Held while a connection is made, so that requests that come at the same time share it.
    connecting: tokio::sync::Mutex<()>,
}

struct Connection {
    endpoint: Arc<Endpoint>,
    sender: SendRequest<Full<Bytes>>,
    /// Cloned by each stream.
    streams: Arc<()>,
    /// Cancelled to close the connection, which fails its streams.
    closed: CancellationToken,
    end: Arc<End>,
}

/// Room for a request on a connection. It counts as one of its streams until dropped.
pub(super) struct Stream {
    connection: Arc<Connection>,
    _counted: Arc<()>,
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

/// Why a connection has failed, or a request on it.
#[derive(Clone, Debug, thiserror::Error)]
pub(super) enum ConnectionError {
    /// The process has not answered a check, so the connection was closed.
    #[error("{0}")]
    Unresponsive(String),
    #[error("{0}")]
    Failed(String),
}

/// How a connection has ended.
#[derive(Default)]
struct End {
    /// Cancelled at its end.
    ended: CancellationToken,
    /// Why, if it has failed. Set before its streams fail if the process has not answered a check.
    error: OnceLock<ConnectionError>,
}

/// Streams on a connection.
const MAX_STREAMS: usize = 100;
/// Window of a connection: the largest there is (RFC 9113, section 6.9.1), because each stream has a limit. The `h2`
/// crate adds up by how much each unread frame is shorter than 256 bytes, as one with a token is, and ends the
/// connection when the sum exceeds half of this window. 100 streams reach at most 330 MB, with windows of 64 KiB and
/// frames of 5 bytes.
const CONNECTION_WINDOW: u32 = (1 << 31) - 1;
/// A path that every process answers without computing anything.
const LIVE: &str = "/live";
/// Interval at which a process is checked on a connection that has streams. It shows that the process was frozen or its
/// machine is gone, also in mid-stream.
const CHECK_INTERVAL: Duration = Duration::from_secs(10);
/// Seconds for the answer to a check: long enough for a process that is only slow.
const CHECK_SECONDS: u32 = 10;
/// Seconds for the answer of a process that has left discovery, or is late. Workers are near, and compute on other
/// threads than those that answer. If this time is too short, a stream is interrupted and continued on another worker;
/// it loses no text.
const LEFT_SECONDS: u32 = 2;
/// Interval of the pings of HTTP/2, and half of their timeout. A process that shuts down takes no request on the
/// connection, so no check. Other processes are found by a check, which is earlier.
const PING: Duration = Duration::from_secs(10);

impl Connections {
    /// Connections to a process. `stream_window`: the bytes that a stream may send before they are read, at most
    /// 64 KiB.
    pub(super) fn new(endpoint: Endpoint, stream_window: u32) -> Self {
        let (open, connecting) = Default::default();
        Self { endpoint: Arc::new(endpoint), stream_window, open, connecting }
    }

    /// Where the process is.
    pub(super) fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    /// Room for a request; on a new connection if there is none.
    pub(super) async fn get(&self) -> Result<Stream, ConnectError> {
        if let Some(stream) = self.open() {
            return Ok(stream);
        }
        let _connecting = self.connecting.lock().await;
        if let Some(stream) = self.open() {
            return Ok(stream);
        }
        let connection = Arc::new(connect(&self.endpoint, self.stream_window).await?);
        tokio::spawn(check_while_open(Arc::downgrade(&connection)));
        let stream = Stream::on(&connection);
        self.open.lock().push(connection);
        Ok(stream)
    }

    /// Checks a process that has left discovery, or whose answer is late, on each of its connections. A new connection
    /// would not show that it is frozen: the kernel accepts it, and another process may listen now.
    pub(super) fn check(&self, worker: WorkerId) {
        for connection in self.open.lock().iter() {
            let connection = Arc::clone(connection);
            tokio::spawn(async move {
                if let Err(problem) = connection.check(LEFT_SECONDS).await {
                    let problem = problem.to_string();
                    let event = "the worker has left or is late, and does not answer; its requests fail";
                    tracing::warn!(%worker, problem, "{event}");
                }
            });
        }
    }

    /// Room on an open connection. The first one is preferred, so that the others end when they are idle.
    fn open(&self) -> Option<Stream> {
        let mut open = self.open.lock();
        open.retain(|connection| !connection.sender.is_closed());
        open.iter().find(|connection| connection.streams() < MAX_STREAMS).map(Stream::on)
    }
}

impl Stream {
    fn on(connection: &Arc<Connection>) -> Self {
        Self { connection: Arc::clone(connection), _counted: Arc::clone(&connection.streams) }
    }

    /// Sends a request. Returns its response, with the guard that counts its stream.
    pub(super) async fn send(
        self,
        request: Request<Full<Bytes>>,
    ) -> Result<(Response<Incoming>, Self), ConnectionError> {
        let response = self.connection.send(request).await?;
        Ok((response, self))
    }

    /// Why the connection has ended, if that is known.
    pub(super) fn connection_error(&self) -> Option<&ConnectionError> {
        self.connection.end.error.get()
    }
}

impl Connection {
    fn streams(&self) -> usize {
        Arc::strong_count(&self.streams) - 1
    }

    async fn send(&self, request: Request<Full<Bytes>>) -> Result<Response<Incoming>, ConnectionError> {
        let mut sender = self.sender.clone();
        let sent = match sender.ready().await {
            Ok(()) => sender.send_request(request).await,
            Err(error) => Err(error),
        };
        match sent {
            Ok(response) => Ok(response),
            Err(error) => Err(self.explain(&error).await),
        }
    }

    /// Why a request has failed. One that was not sent does not know why its connection has ended.
    async fn explain(&self, error: &hyper::Error) -> ConnectionError {
        if error.is_canceled() || error.is_closed() {
            self.end.ended.cancelled().await;
        }
        let error = || ConnectionError::Failed(self.endpoint.explain(error));
        self.end.error.get().cloned().unwrap_or_else(error)
    }

    /// Asks the process whether it is alive, and closes the connection if it does not answer.
    async fn check(&self, seconds: u32) -> Result<(), ConnectionError> {
        let mut request = Request::new(Full::default());
        *request.uri_mut() = self.endpoint.uri(LIVE);
        let mut answer = pin!(self.send(request));
        // Second by second, so that the time for which this process itself is frozen counts as one.
        for _ in 0..seconds {
            // Any status is an answer. A request that was not sent says nothing.
            if timeout(Duration::from_secs(1), &mut answer).await.is_ok() {
                return Ok(());
            }
        }
        let error = ConnectionError::Unresponsive(format!("no answer to GET {LIVE} within {seconds} s"));
        let _ = self.end.error.set(error.clone());
        self.closed.cancel();
        Err(error)
    }
}

/// Checks the process of a connection while it has streams.
async fn check_while_open(connection: Weak<Connection>) {
    loop {
        sleep(CHECK_INTERVAL).await;
        let Some(connection) = connection.upgrade().filter(|connection| !connection.sender.is_closed()) else { return };
        if connection.streams() > 0 && connection.check(CHECK_SECONDS).await.is_err() {
            return;
        }
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

async fn connect(endpoint: &Arc<Endpoint>, stream_window: u32) -> Result<Connection, ConnectError> {
    let socket = endpoint.connect(b"h2").await.map_err(|error| {
        let is_own = transport::is_out_of_files(&error);
        if is_own { ConnectError::OutOfFiles } else { ConnectError::Failed(endpoint.explain(&error)) }
    })?;
    let closed = CancellationToken::new();
    let mut builder = Builder::new(UntilClosed(closed.clone()));
    builder.timer(TokioTimer::new()).keep_alive_interval(PING).keep_alive_timeout(2 * PING);
    builder.initial_stream_window_size(stream_window).initial_connection_window_size(CONNECTION_WINDOW);
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
                let _ = end.error.set(ConnectionError::Failed(endpoint.explain(&error)));
            }
        }
    });
    let endpoint = Arc::clone(endpoint);
    Ok(Connection { endpoint, sender, streams: Arc::default(), closed, end })
}
