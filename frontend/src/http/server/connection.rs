//! One connection, from its first byte to its last.

use super::Limits;
use super::activity::{Activity, Expired, RequestGuard};
use super::connections::Slot;
use super::stream::{self, Stream};
use crate::error::Error;
use crate::limits::{LogLimit, OfConnection};
use axum::Router;
use axum::body::{Body, HttpBody};
use axum::http::header::CONNECTION;
use axum::http::{Request, Response, Version};
use bytes::Bytes;
use futures::FutureExt;
use futures::future::BoxFuture;
use hyper::body::{Frame, Incoming, SizeHint};
use hyper::service::Service;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto::Builder;
use hyper_util::service::TowerToHyperService;
use std::convert::Infallible;
use std::net::IpAddr;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_util::sync::CancellationToken;

/// hyper's least buffer for a connection. A request's head must fit into the buffer.
const MIN_BUFFER: usize = 8 << 10;
/// HTTP/2 connections of proxies stay open; a peer that is gone is noticed by a ping that gets no answer.
const PING_INTERVAL: Duration = Duration::from_secs(30);
/// After its response a client that still sends is read on for so long, else the kernel would discard the response together
/// with the unread bytes.
const LINGER: Duration = Duration::from_secs(2);

/// Where and how a connection came in. Every request of it carries this.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Arrival {
    /// Its listener is bound to a loopback address.
    pub(crate) loopback_only: bool,
    /// It is over the limit of connections, and there for health checks and metrics alone.
    pub(crate) reserved: bool,
    /// The address on which it was accepted.
    pub(crate) local: Option<IpAddr>,
}

/// Serves a connection to its end. Answers with what ended it, as a label.
pub(super) async fn run(
    socket: TcpStream,
    slot: &Slot,
    router: Router,
    arrival: Arrival,
    limits: &Limits,
    closed: &CancellationToken,
    refused: &Arc<LogLimit>,
) -> &'static str {
    let activity = &slot.activity;
    let (inner, choices) = (TowerToHyperService::new(router), OfConnection::default());
    let service = Requests { inner, activity: Arc::clone(activity), arrival, choices };
    let mut builder = Builder::new(TokioExecutor::new());
    // The time limits of hyper do not tell an idle connection from a slow one, so `Activity` has its own.
    builder.http1().header_read_timeout(None);
    builder.http1().max_buf_size(limits.max_headers.max(MIN_BUFFER));
    let header_list = u32::try_from(limits.max_headers).unwrap_or(u32::MAX);
    builder.http2().timer(TokioTimer::new()).max_header_list_size(header_list).keep_alive_interval(PING_INTERVAL);
    let io = TokioIo::new(Stream::new(socket, Arc::clone(activity), limits.max_headers, Arc::clone(refused)));

    let expired = {
        let mut connection = pin!(builder.serve_connection(io, service));
        let mut closing = false;
        loop {
            tokio::select! {
                biased;
                ended = connection.as_mut() => {
                    if let Err(error) = ended {
                        tracing::trace!(%error, "connection failed");
                    }
                    break None;
                }
                () = closed.cancelled(), if !closing => {
                    connection.as_mut().graceful_shutdown();
                    closing = true;
                }
                expired = activity.expired(&limits.timeouts) => break Some(expired),
            }
        }
    };
    // The connection is dropped; its stream has given the socket back.
    if let Some(socket) = activity.take_stream() {
        Box::pin(close(socket, expired, activity, limits, closed, refused)).await;
    }
    match expired {
        None => "client",
        Some(Expired::Header { .. }) => "header_timeout",
        Some(Expired::Idle) => "idle_timeout",
        Some(Expired::Write) => "write_timeout",
        Some(Expired::Evicted) => "evicted",
    }
}

/// Closes a socket so that a client that still sends gets what was written.
async fn close(
    mut socket: TcpStream,
    expired: Option<Expired>,
    activity: &Activity,
    limits: &Limits,
    closed: &CancellationToken,
    refused: &LogLimit,
) {
    match expired {
        Some(Expired::Header { begun: true }) => {
            let error = Error::HeaderTimeout(limits.timeouts.header);
            // The first bytes ever written, or after a response that was read: there is room for them in the socket.
            let _ = socket.try_write(&stream::refuse(&error, refused));
            activity.linger();
        }
        Some(Expired::Write) => {
            // What the client does not take must not stay in the kernel.
            if let Err(error) = socket.set_zero_linger() {
                tracing::debug!(%error, "cannot reset a connection");
            }
        }
        _ => {}
    }
    if !activity.lingers() || closed.is_cancelled() {
        return;
    }
    let lingering = async {
        let _ = socket.shutdown().await;
        let mut discarded = [0; 16 << 10];
        while socket.read(&mut discarded).await.is_ok_and(|read| read > 0) {}
    };
    tokio::select! {
        () = closed.cancelled() => {}
        () = activity.evicted() => {}
        () = tokio::time::sleep(LINGER) => {}
        () = lingering => {}
    }
}

/// Counts the requests of a connection, and says to each where it came in.
struct Requests {
    inner: TowerToHyperService<Router>,
    activity: Arc<Activity>,
    arrival: Arrival,
    choices: OfConnection,
}

impl Service<Request<Incoming>> for Requests {
    type Response = Response<Counted>;
    type Error = Infallible;
    type Future = BoxFuture<'static, Result<Response<Counted>, Infallible>>;

    fn call(&self, request: Request<Incoming>) -> Self::Future {
        let mut guard = self.activity.request(request.version() == Version::HTTP_2);
        let mut request = request.map(Body::new);
        request.extensions_mut().insert(self.arrival);
        request.extensions_mut().insert(self.choices.clone());
        let (response, activity) = (self.inner.call(request), Arc::clone(&self.activity));
        async move {
            let response = response.await?;
            // A response that ends the connection may come before the end of its request.
            if response.headers().get(CONNECTION).is_some_and(|value| value == "close") {
                activity.linger();
            }
            guard.handed_over();
            Ok(response.map(|body| Counted { body, guard }))
        }
        .boxed()
    }
}

/// A response's body, which is one of the connection's requests until it is handed over.
struct Counted {
    body: Body,
    guard: RequestGuard,
}

impl HttpBody for Counted {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let frame = Pin::new(&mut self.body).poll_frame(cx);
        match &frame {
            Poll::Ready(_) => self.guard.handed_over(),
            Poll::Pending => self.guard.works(),
        }
        frame
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
