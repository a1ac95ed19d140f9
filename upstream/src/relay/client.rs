//! Connections to one engine.
//!
//! **Dropping an answer cancels the request.** HTTP/1.1 has no other way than to close the connection, HTTP/2 resets
//! the stream; engines stop computing at either.
//!
//! **Everything has a limit.** A request of HTTP/1.1 has a connection of its own, so the limit of relayed requests is
//! one of connections too. Health checks and questions to the engine do not count.
//!
//! Not here: how many requests an engine should have (the router admits), retries on another engine, and time limits of
//! answers.

mod connect;
mod http1;
mod http2;
mod location;
mod pool;

use super::error::{Answer, RelayError};
use super::stream::{Relay, UsageInStream, chain};
use bytes::Bytes;
use connect::{Connected, Connector, Socket};
use http::uri::{Authority, PathAndQuery, Scheme};
use http::{HeaderMap, Method, Request, Response, StatusCode, Uri, Version};
use http_body::{Frame, SizeHint};
use http_body_util::Full;
use hyper::body::Incoming;
use pool::Pool;
use std::error::Error;
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use worker::engine::may_be_repeated;

/// Sends requests to one engine. A clone shares the connections.
#[derive(Clone, Debug)]
pub struct Client(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    connector: Connector,
    idle: Arc<Pool>,
    http2: http2::Shared,
    /// A permit for each relayed request that may run.
    places: Arc<Semaphore>,
    max_requests: usize,
    /// The address, without path.
    origin: Uri,
    /// Value of the `Host` header.
    host: String,
    /// Path of the address, without a slash at its end.
    prefix: String,
}

/// The answer to a request to switch to another protocol.
#[derive(Debug)]
pub enum Upgrade {
    /// The engine has switched.
    Switched(Switched),
    /// The engine has answered without switching.
    Answered(Box<Relay<Body>>),
}

/// A connection on which an engine has switched to another protocol. Dropping it closes it.
#[derive(Debug)]
pub struct Switched {
    /// The headers of the engine's answer.
    pub headers: HeaderMap,
    /// What came after the answer.
    pub received: Bytes,
    /// The connection.
    pub socket: Socket,
    /// Counts among the relayed requests that run, until it is dropped.
    pub place: OwnedSemaphorePermit,
}

/// The body of an answer. Dropping it cancels the request.
#[derive(Debug)]
pub struct Body {
    of: BodyOf,
    /// The place of a relayed request.
    _place: Option<OwnedSemaphorePermit>,
}

#[derive(Debug)]
enum BodyOf {
    Http1(http1::Body),
    Http2 { body: Incoming, _place: http2::Place },
}

/// How to connect.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The version of HTTP.
    pub protocol: Protocol,
    /// Time for the name's resolution, TCP and TLS together. 2 s by default: engines are near, and another one can be
    /// tried.
    pub connect_timeout: Duration,
    /// An unused connection is closed after this time. 4 s by default: uvicorn, which vLLM and SGLang use, closes after
    /// 5 s, and a request that is sent at that moment is lost.
    pub idle_timeout: Duration,
    /// Maximum number of unused connections that are kept. 256 by default, which is vLLM's default of running
    /// sequences.
    pub max_idle: usize,
    /// Maximum number of relayed requests that run at the same time. 4096 by default: more than an engine computes at a
    /// time, and as many connections as clients may have to a gateway.
    pub max_requests: usize,
    /// The addresses to connect to instead of those of the host name, which stays the name for TLS and in the `Host`
    /// header. By default none: the name is resolved at each connection.
    pub addresses: Vec<IpAddr>,
    /// The authorities that may sign the engine's certificate. By default those of the operating system, or of the file
    /// that `SSL_CERT_FILE` names.
    pub roots: Option<rustls::RootCertStore>,
}

/// The version of HTTP.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum Protocol {
    /// HTTP/2 if TLS negotiates it (ALPN), else HTTP/1.1.
    #[default]
    Negotiated,
    /// HTTP/2, without TLS by prior knowledge.
    Http2,
}

/// Why there is no client for an address.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The address is not `http://…` or `https://…` with a host.
    #[error("address {0}: not an http or https URL")]
    Address(Uri),
    /// The certificates of the operating system cannot be read.
    #[error("no certificates of authorities: {0}")]
    Roots(#[source] std::io::Error),
    /// The TLS settings contradict each other.
    #[error("tls: {0}")]
    Tls(#[from] rustls::Error),
}

/// Longest path with its query: that of the `http` crate, which reads those of clients.
const MAX_PATH: usize = 65_534;

impl Default for Settings {
    fn default() -> Self {
        Self {
            protocol: Protocol::default(),
            connect_timeout: Duration::from_secs(2),
            idle_timeout: Duration::from_secs(4),
            max_idle: 256,
            max_requests: 4096,
            addresses: Vec::new(),
            roots: None,
        }
    }
}

impl Client {
    /// A client of the engine at `address`, whose path is put before that of each request. Nothing is connected yet.
    pub fn new(address: &Uri, settings: &Settings) -> Result<Self, ClientError> {
        let (Some(scheme), Some(authority)) = (address.scheme(), address.authority()) else {
            return Err(ClientError::Address(address.clone()));
        };
        if ![Scheme::HTTP, Scheme::HTTPS].contains(scheme) || authority.host().is_empty() {
            return Err(ClientError::Address(address.clone()));
        }
        let origin = Uri::builder().scheme(scheme.clone()).authority(authority.clone()).path_and_query("/").build();
        Ok(Self(Arc::new(Shared {
            connector: Connector::new(scheme, settings)?,
            idle: Pool::new(settings.idle_timeout, settings.max_idle),
            http2: http2::Shared::default(),
            places: Arc::new(Semaphore::new(settings.max_requests)),
            max_requests: settings.max_requests,
            origin: origin.map_err(|_| ClientError::Address(address.clone()))?,
            host: host(scheme, authority),
            prefix: address.path().trim_end_matches('/').to_owned(),
        })))
    }

    /// Sends a request and returns the answer once its headers are there, whatever its status.
    ///
    /// An engine may close a connection just when the next request is sent on it. A request that fails so, on a
    /// connection that has answered before and without a byte of its answer, is sent once more on a new connection. One
    /// that [may not be repeated](may_be_repeated) is sent on a new connection in the first place, but for HTTP/2. A
    /// request that the engine refuses without processing it is sent once more, whatever it is.
    pub async fn send(
        &self,
        method: Method,
        path: &PathAndQuery,
        headers: HeaderMap,
        body: Bytes,
    ) -> Result<Response<Body>, RelayError> {
        self.exchange(&method, path, &headers, &body).await
    }

    /// [`send`](Self::send) of what its caller holds, so that a future has no second copy of it.
    async fn exchange(
        &self,
        method: &Method,
        path: &PathAndQuery,
        headers: &HeaderMap,
        body: &Bytes,
    ) -> Result<Response<Body>, RelayError> {
        match self.exchange_once(method, path, headers, body).await {
            // Boxed, because it is rare.
            Err(RelayError::Refused(_)) => Box::pin(self.exchange_once(method, path, headers, body)).await,
            outcome => outcome,
        }
    }

    async fn exchange_once(
        &self,
        method: &Method,
        path: &PathAndQuery,
        headers: &HeaderMap,
        body: &Bytes,
    ) -> Result<Response<Body>, RelayError> {
        let shared = &*self.0;
        shared.check_path(path)?;
        if let Some(stream) = shared.http2.get() {
            let request = shared.http2_request(method, path, headers, body)?;
            match Box::pin(shared.http2.send(stream, request)).await {
                // The connection ended before the request was sent.
                Err(error) if error.is_canceled() => {}
                outcome => return of_http2(outcome),
            }
        }
        let target = [&shared.prefix, path.as_str()];
        let mut request = None;
        let mut outgoing = || {
            let new = || http1::Outgoing::new(method.clone(), target, &shared.host, headers, body.clone());
            request.get_or_insert_with(new).clone()
        };
        let mut was_sent = false;
        // A request that is lost on an open connection is sent again. One that may not be repeated gets a new
        // connection.
        if may_be_repeated(method, path.path())
            && let Some(socket) = shared.idle.take()
        {
            match http1::send(socket, outgoing(), Arc::clone(&shared.idle)).await {
                Err(http1::Failed::Closed { error, is_sent }) => {
                    tracing::debug!(engine = shared.host, %error, "idle connection was closed, sending again");
                    was_sent = is_sent;
                }
                outcome => return of_http1(outcome),
            }
        }
        let http2 = || shared.http2_request(method, path, headers, body);
        // Boxed, because most requests go over an open connection.
        match Box::pin(shared.send_on_new_connection(outgoing, http2)).await {
            // An engine that closes idle connections takes new ones. One that takes none may have ended with the
            // request.
            Err(RelayError::Unreachable(why)) if was_sent => {
                Err(RelayError::NoAnswer(format!("no other connection can be opened: {why}")))
            }
            outcome => outcome,
        }
    }

    /// The same on a connection of its own, while those that are open may be dead. Later requests use it too.
    pub async fn send_on_new_connection(
        &self,
        method: Method,
        path: &PathAndQuery,
        headers: HeaderMap,
        body: Bytes,
    ) -> Result<Response<Body>, RelayError> {
        let shared = &*self.0;
        shared.check_path(path)?;
        let target = [&shared.prefix, path.as_str()];
        let http1 = || http1::Outgoing::new(method.clone(), target, &shared.host, &headers, body.clone());
        let http2 = || shared.http2_request(&method, path, &headers, &body);
        shared.send_on_new_connection(http1, http2).await
    }

    /// Sends a request and relays its answer. One that is neither a success nor 304 is an error. At the maximum of
    /// requests nothing is sent.
    pub async fn relay(
        &self,
        method: Method,
        path: &PathAndQuery,
        headers: HeaderMap,
        body: Bytes,
        usage: UsageInStream,
    ) -> Result<Relay<Body>, RelayError> {
        let place = self.0.place()?;
        let response = self.exchange(&method, path, &headers, &body).await?;
        if is_answer(response.status()) {
            return Ok(relayed(response, place, usage));
        }
        Err(Box::pin(self.0.refused(path, response)).await)
    }

    /// Asks the engine to switch to `protocol`, on a connection of its own. `headers` say so. Only an answer with the
    /// status 101 and this protocol switches; any other one is relayed as [`relay`](Self::relay) does, and the
    /// connection stays one of HTTP.
    pub async fn upgrade(
        &self,
        method: Method,
        path: &PathAndQuery,
        headers: &HeaderMap,
        protocol: &str,
    ) -> Result<Upgrade, RelayError> {
        let shared = &*self.0;
        if shared.connector.is_http2_only() {
            return Err(RelayError::Http2Only);
        }
        let place = shared.place()?;
        shared.check_path(path)?;
        let target = [&shared.prefix, path.as_str()];
        let request = http1::Outgoing::new(method, target, &shared.host, headers, Bytes::new());
        let connected = Box::pin(shared.connector.connect_http1(shared.origin.clone())).await;
        let socket = connected.map_err(|error| not_connected(&*error))?;
        match http1::upgrade(socket, request, protocol, Arc::clone(&shared.idle)).await {
            Ok(http1::Upgrade::Switched { headers, received, socket }) => {
                Ok(Upgrade::Switched(Switched { headers, received, socket, place }))
            }
            Ok(http1::Upgrade::Answered(response)) => {
                let response = of_http1(Ok(response))?;
                if is_answer(response.status()) {
                    return Ok(Upgrade::Answered(Box::new(relayed(response, place, UsageInStream::Keep))));
                }
                Err(Box::pin(shared.refused(path, response)).await)
            }
            Err(failed) => Err(of_failed(failed)),
        }
    }
}

/// The relay of an answer that is a success.
fn relayed(response: Response<Body>, place: OwnedSemaphorePermit, usage: UsageInStream) -> Relay<Body> {
    Relay::new(response.map(|body| Body { _place: Some(place), ..body }), usage)
}

/// Whether an answer has what was asked for: a success, or that the client has it already.
fn is_answer(status: StatusCode) -> bool {
    status.is_success() || status == StatusCode::NOT_MODIFIED
}

impl Shared {
    /// A place for a relayed request, if there is one left.
    fn place(&self) -> Result<OwnedSemaphorePermit, RelayError> {
        Arc::clone(&self.places).try_acquire_owned().map_err(|_| RelayError::Full(self.max_requests))
    }

    /// The error of an answer without what was asked for.
    async fn refused(&self, path: &PathAndQuery, mut response: Response<Body>) -> RelayError {
        let status = response.status();
        if status.is_redirection() {
            location::keep_at_gateway(status, response.headers_mut(), &self.host, &self.prefix, path.path());
        }
        RelayError::Answered(Box::new(Answer::read(response).await))
    }

    fn check_path(&self, path: &PathAndQuery) -> Result<(), RelayError> {
        let is_too_long = self.prefix.len() + path.as_str().len() > MAX_PATH;
        if is_too_long { Err(RelayError::PathTooLong(MAX_PATH)) } else { Ok(()) }
    }

    /// Connects, and sends the request in the version that the connection has.
    async fn send_on_new_connection(
        &self,
        http1: impl FnOnce() -> http1::Outgoing,
        http2: impl FnOnce() -> Result<Request<Full<Bytes>>, RelayError>,
    ) -> Result<Response<Body>, RelayError> {
        // Boxed, because the futures of TLS and HTTP/2 take 150 KB, and most requests need none.
        let connected = Box::pin(self.connector.connect(self.origin.clone())).await;
        match connected.map_err(|error| not_connected(&*error))? {
            Connected::Http1(socket) => of_http1(http1::send(socket, http1(), Arc::clone(&self.idle)).await),
            Connected::Http2(socket) => {
                let request = http2()?;
                let begun = Box::pin(self.http2.begin(socket)).await;
                let stream = begun.map_err(|error| RelayError::Unreachable(chain(&error)))?;
                of_http2(Box::pin(self.http2.send(stream, request)).await)
            }
        }
    }

    fn http2_request(
        &self,
        method: &Method,
        path: &PathAndQuery,
        headers: &HeaderMap,
        body: &Bytes,
    ) -> Result<Request<Full<Bytes>>, RelayError> {
        let mut parts = self.origin.clone().into_parts();
        let path = PathAndQuery::try_from(format!("{}{path}", self.prefix));
        parts.path_and_query = path.ok();
        let uri = Uri::from_parts(parts).map_err(|_| RelayError::PathTooLong(MAX_PATH))?;
        let mut request = Request::new(Full::new(body.clone()));
        *request.method_mut() = method.clone();
        *request.uri_mut() = uri;
        *request.headers_mut() = headers.clone();
        *request.version_mut() = Version::HTTP_2;
        Ok(request)
    }
}

/// Why there is no connection.
fn not_connected(error: &(dyn Error + 'static)) -> RelayError {
    if transport::is_out_of_files(error) { RelayError::OutOfFiles } else { RelayError::Unreachable(chain(error)) }
}

fn of_http1(outcome: Result<Response<http1::Body>, http1::Failed>) -> Result<Response<Body>, RelayError> {
    match outcome {
        Ok(response) => Ok(response.map(|body| Body { of: BodyOf::Http1(body), _place: None })),
        Err(failed) => Err(of_failed(failed)),
    }
}

fn of_failed(failed: http1::Failed) -> RelayError {
    match failed {
        http1::Failed::Closed { error, is_sent: false } => RelayError::Unreachable(chain(&error)),
        http1::Failed::Closed { error, is_sent: true } => RelayError::NoAnswer(chain(&error)),
        http1::Failed::Malformed(error) => RelayError::Malformed(chain(&error)),
        http1::Failed::BrokenOff(error) => RelayError::BrokenOff(chain(&error)),
    }
}

fn of_http2(outcome: hyper::Result<Response<(Incoming, http2::Place)>>) -> Result<Response<Body>, RelayError> {
    match outcome {
        Ok(response) => {
            Ok(response.map(|(body, place)| Body { of: BodyOf::Http2 { body, _place: place }, _place: None }))
        }
        Err(error) if http2::is_unprocessed(&error) => Err(RelayError::Refused(chain(&error))),
        // There was an answer, but not one of HTTP.
        Err(error) if error.is_parse() => Err(RelayError::Malformed(chain(&error))),
        Err(error) if http2::is_malformed(&error) => {
            let limit = http1::MAX_HEAD >> 10;
            let why = format!("{}; a head may have at most {limit} KiB, and not the status 101", chain(&error));
            Err(RelayError::Malformed(why))
        }
        // The connection ended before the request was sent.
        Err(error) if error.is_canceled() || error.is_closed() => Err(RelayError::Unreachable(chain(&error))),
        Err(error) => Err(RelayError::NoAnswer(chain(&error))),
    }
}

/// Value of the `Host` header: the default port is not named, and neither is a user.
fn host(scheme: &Scheme, authority: &Authority) -> String {
    let default = if *scheme == Scheme::HTTPS { 443 } else { 80 };
    match authority.port_u16().filter(|port| *port != default) {
        Some(port) => format!("{}:{port}", authority.host()),
        None => authority.host().to_owned(),
    }
}

impl http_body::Body for Body {
    type Data = Bytes;
    type Error = Box<dyn Error + Send + Sync>;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        match &mut self.of {
            BodyOf::Http1(body) => Pin::new(body).poll_frame(context).map_err(Into::into),
            BodyOf::Http2 { body, .. } => Pin::new(body).poll_frame(context).map_err(Into::into),
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.of {
            BodyOf::Http1(body) => body.is_end_stream(),
            BodyOf::Http2 { body, .. } => body.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.of {
            BodyOf::Http1(body) => body.size_hint(),
            BodyOf::Http2 { body, .. } => body.size_hint(),
        }
    }
}

#[cfg(test)]
mod tests;
