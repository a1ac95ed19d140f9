//! One connection, from its first byte to its last.

use super::activity::{Activity, Expired, ReceivingGuard, RequestGuard};
use super::connections::Slot;
use super::repoll::Repoll;
use super::stream::{self, Stream};
use super::{Limits, Shutdown};
use crate::error::Error;
use crate::http::upgrade::Upgrade;
use crate::limits::ConnectionChoices;
use axum::Router;
use axum::body::{Body, HttpBody};
use axum::http::header::{CONNECTION, CONTENT_LENGTH};
use axum::http::{Extensions, Request, Response, Version};
use bytes::Bytes;
use futures::FutureExt;
use futures::future::BoxFuture;
use hyper::body::{Frame, Incoming, SizeHint};
use hyper::service::{Service, service_fn};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto::Builder;
use hyper_util::service::TowerToHyperService;
use parking_lot::Mutex;
use spans::LogLimit;
use std::convert::Infallible;
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use transport::{AcceptError, ServerTls, Socket};

/// hyper's minimum buffer for a connection in bytes. A request's head must fit into the buffer.
const MIN_BUFFER: usize = 8 << 10;
/// Interval of HTTP/2 pings, which detect that a peer has disappeared.
const PING_INTERVAL: Duration = Duration::from_secs(30);
/// Maximum time of a lingering close. If a socket with unread bytes were closed at once, the kernel would discard the
/// response that was just written.
const LINGER: Duration = Duration::from_secs(2);
/// The same once the server shuts down, which a client that does not stop sending must not delay further.
const LAST_LINGER: Duration = Duration::from_secs(1);

/// How a connection was accepted, and what its requests share. Each has an `Arc` of this among its extensions.
pub(crate) struct ConnectionInfo {
    /// The listener is bound to a loopback address.
    pub(crate) loopback_only: bool,
    /// The connection is above the limit and serves only health checks and metrics.
    pub(crate) reserved: bool,
    /// The local address of the connection.
    pub(crate) local: Option<IpAddr>,
    /// The address of the other end.
    pub(crate) peer: Option<SocketAddr>,
    /// The `Host` of the first request that was allowed. Later requests with the same `Host` are not checked again.
    pub(crate) allowed_host: OnceLock<Box<[u8]>>,
    /// The running choices of its requests.
    pub(crate) choices: ConnectionChoices,
    /// The shutdown of the server.
    pub(crate) shutdown: Shutdown,
}

impl ConnectionInfo {
    /// The connection of a request; `None` within this process.
    pub(crate) fn of(extensions: &Extensions) -> Option<&Self> {
        extensions.get::<Arc<Self>>().map(|info| &**info)
    }
}

/// The address that a request came from, of its client or of a proxy. `None` within this process.
pub fn peer_address(extensions: &Extensions) -> Option<SocketAddr> {
    ConnectionInfo::of(extensions)?.peer
}

/// Among the extensions of a request whose client has shown a certificate, which was verified.
#[derive(Clone, Copy, Debug)]
pub struct ClientCertificate(());

/// A request that has switched its connection to another protocol.
struct Switched {
    rest: BoxFuture<'static, ()>,
    /// Counts the request until it ends.
    request: RequestGuard,
}

/// The request that ends HTTP on a connection, once there is one.
type SwitchedRequest = Arc<Mutex<Option<Switched>>>;

/// Serves a connection until it ends. Returns the `reason` label of its end.
pub(super) async fn run(
    socket: TcpStream,
    tls: Option<Arc<ServerTls>>,
    slot: &Slot,
    router: Router,
    info: &Arc<ConnectionInfo>,
    limits: &Limits,
    rejected_lines: &Arc<LogLimit>,
) -> &'static str {
    let (activity, shutdown) = (&slot.activity, &info.shutdown);
    let socket = match tls {
        None => Socket::Left(socket),
        Some(tls) => {
            let accepted = tokio::select! {
                biased;
                () = shutdown.closed() => return "client",
                expired = activity.expired(&limits.timeouts) => return reason(Some(expired)),
                accepted = tls.accept(socket) => accepted,
            };
            match accepted {
                Ok(socket) => socket,
                Err(AcceptError::Http(socket)) => {
                    // The client has not received anything yet, so the socket's buffer has room.
                    let _ = socket.try_write(&stream::error_response(&Error::PlainHttp, rejected_lines));
                    activity.linger();
                    let socket = Socket::Left(socket);
                    Box::pin(close(socket, None, activity, limits, shutdown, rejected_lines)).await;
                    return "tls_handshake";
                }
                Err(AcceptError::Refused(problem)) => {
                    if let Some(suppressed) = rejected_lines.admit() {
                        tracing::warn!(problem, suppressed, "the certificate of a client is not accepted");
                    }
                    return "tls_handshake";
                }
                Err(AcceptError::Failed) => return "tls_handshake",
            }
        }
    };
    let certificate = transport::has_certificate(&socket).then_some(ClientCertificate(()));
    let switched = SwitchedRequest::default();
    let service = service(router, Arc::clone(activity), Arc::clone(info), certificate, Arc::clone(&switched));
    let mut builder = Builder::new(TokioExecutor::new());
    // hyper's time limit does not distinguish idle connections from slow ones, so `Activity` has its own limits.
    builder.http1().header_read_timeout(None);
    // Clients cancel by closing the connection. That is the same to read as closing half of it, until a write fails.
    builder.http1().half_close(false);
    builder.http1().max_buf_size(limits.max_headers.max(MIN_BUFFER));
    let header_list = u32::try_from(limits.max_headers).unwrap_or(u32::MAX);
    builder.http2().timer(TokioTimer::new()).max_header_list_size(header_list).keep_alive_interval(PING_INTERVAL);
    let io = TokioIo::new(Stream::new(socket, Arc::clone(activity), limits.max_headers, Arc::clone(rejected_lines)));

    let mut expired = {
        let mut connection = Repoll::new(builder.serve_connection_with_upgrades(io, service));
        let mut closing = false;
        loop {
            tokio::select! {
                biased;
                ended = &mut connection => {
                    if let Err(error) = ended {
                        tracing::trace!(%error, "connection failed");
                    }
                    break None;
                }
                () = shutdown.closed(), if !closing => {
                    connection.inner().graceful_shutdown();
                    closing = true;
                }
                expired = activity.expired(&limits.timeouts) => break Some(expired),
            }
        }
    };
    let switched = switched.lock().take();
    if let Some(Switched { rest, request }) = switched
        && expired.is_none()
    {
        expired = tokio::select! {
            biased;
            () = rest => None,
            expired = activity.expired(&limits.timeouts) => Some(expired),
        };
        drop(request);
    }
    // The HTTP connection is dropped here, and its stream has returned the socket.
    if let Some(socket) = activity.take_stream() {
        Box::pin(close(socket, expired, activity, limits, shutdown, rejected_lines)).await;
    }
    reason(expired)
}

/// The `reason` label of a connection that `expired`, or that its client ended.
fn reason(expired: Option<Expired>) -> &'static str {
    match expired {
        None => "client",
        Some(Expired::Header { .. }) => "header_timeout",
        Some(Expired::Idle) => "idle_timeout",
        Some(Expired::Write) => "write_timeout",
        Some(Expired::Evicted) => "evicted",
    }
}

/// Closes a socket. A client that is still sending receives the response first.
async fn close(
    mut socket: Socket,
    expired: Option<Expired>,
    activity: &Activity,
    limits: &Limits,
    shutdown: &Shutdown,
    rejected_lines: &LogLimit,
) {
    match expired {
        Some(Expired::Header { begun: true }) => {
            let error = Error::HeaderTimeout(limits.timeouts.header);
            // These are the first bytes, or they follow a response that was read, so the socket's buffer has room.
            let response = stream::error_response(&error, rejected_lines);
            let write = async {
                socket.write_all(&response).await?;
                socket.flush().await
            };
            let _ = write.now_or_never();
            activity.linger();
        }
        Some(Expired::Write) => {
            // Discards the bytes that the client does not read, so that they do not stay in the kernel.
            if let Err(error) = transport::tcp(&socket).set_zero_linger() {
                tracing::debug!(%error, "cannot reset a connection");
            }
        }
        _ => {}
    }
    if !activity.lingers() {
        return;
    }
    let lingering = async {
        let _ = socket.shutdown().await;
        let mut discarded = [0; 16 << 10];
        while socket.read(&mut discarded).await.is_ok_and(|read| read > 0) {}
    };
    let end_of_shutdown = async {
        shutdown.closed().await;
        tokio::time::sleep(LAST_LINGER).await;
    };
    tokio::select! {
        () = end_of_shutdown => {}
        () = activity.evicted() => {}
        () = tokio::time::sleep(LINGER) => {}
        () = lingering => {}
    }
}

/// The service of a connection: counts its requests, and adds its extension to each. `switched` gets the rest of the
/// request that ends HTTP on the connection.
fn service(
    router: Router,
    activity: Arc<Activity>,
    info: Arc<ConnectionInfo>,
    certificate: Option<ClientCertificate>,
    switched: SwitchedRequest,
) -> impl Service<Request<Incoming>, Response = Response<TrackedBody>, Error = Infallible, Future: Send + 'static> {
    let inner = TowerToHyperService::new(router);
    service_fn(move |request: Request<Incoming>| {
        let mut guard = activity.request(request.version() == Version::HTTP_2);
        let mut request = request.map(|body| {
            let receiving = (!body.is_end_stream()).then(|| activity.receiving());
            Body::new(RequestBody { body, receiving })
        });
        request.extensions_mut().insert(Arc::clone(&info));
        if let Some(certificate) = certificate {
            request.extensions_mut().insert(certificate);
        }
        let (response, activity, switched) = (inner.call(request), Arc::clone(&activity), Arc::clone(&switched));
        async move {
            let mut response = response.await?;
            let rest = response.extensions_mut().remove::<Upgrade>().and_then(|upgrade| upgrade.take());
            if let Some(rest) = rest {
                activity.switch();
                // The routes add it, but no response with a status below 200 may have it (RFC 9110, section 8.6).
                response.headers_mut().remove(CONTENT_LENGTH);
                *switched.lock() = Some(Switched { rest, request: guard });
                return Ok(response.map(|body| TrackedBody { body, guard: None }));
            }
            // A response that closes the connection may be sent before the whole request has arrived.
            if response.headers().get(CONNECTION).is_some_and(|value| value == "close") {
                activity.linger();
            }
            guard.handed_over();
            Ok(response.map(|body| TrackedBody { body, guard: Some(guard) }))
        }
    })
}

/// A request's body, which counts as incomplete until its end has arrived or the body is dropped.
struct RequestBody {
    body: Incoming,
    receiving: Option<ReceivingGuard>,
}

impl HttpBody for RequestBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let frame = Pin::new(&mut self.body).poll_frame(cx);
        if matches!(frame, Poll::Ready(None | Some(Err(_)))) || self.body.is_end_stream() {
            self.receiving = None;
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

/// A response's body, which counts as a request of the connection until it is passed to the transport.
struct TrackedBody {
    body: Body,
    /// `None`: the request goes on after its response.
    guard: Option<RequestGuard>,
}

impl HttpBody for TrackedBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let frame = Pin::new(&mut self.body).poll_frame(cx);
        if let Some(guard) = &mut self.guard {
            match &frame {
                Poll::Ready(_) => guard.handed_over(),
                Poll::Pending => guard.working(),
            }
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
