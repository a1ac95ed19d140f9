//! Connections to one engine.
//!
//! **Dropping an answer cancels the request.** HTTP/1.1 has no other way than to close the connection, HTTP/2 resets
//! the stream; engines stop computing at either.
//!
//! Not here: a limit of concurrent requests (the router admits), retries on another engine, and time limits of answers.

mod connect;

use super::error::{Answer, RelayError};
use super::stream::{Relay, UsageInStream, chain};
use bytes::Bytes;
use connect::{Answered, Connector};
use http::uri::{Authority, PathAndQuery, Scheme};
use http::{Extensions, HeaderMap, Method, Request, Response, Uri, Version};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper_util::client::legacy;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use std::error::Error;
use std::io;
use std::net::IpAddr;
use std::time::Duration;

/// Sends requests to one engine. A clone shares the connections.
#[derive(Clone, Debug)]
pub struct Client {
    pooled: legacy::Client<Connector, Full<Bytes>>,
    /// Keeps no connections, so each of its requests gets a new one.
    fresh: legacy::Client<Connector, Full<Bytes>>,
    scheme: Scheme,
    authority: Authority,
    /// Path of the address, without a slash at its end.
    prefix: String,
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
    /// Most unused connections that are kept. 256 by default, which is vLLM's default of running sequences.
    pub max_idle: usize,
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

/// HTTP/2 has no end of a dead connection but this. An engine that starves its event loop for less stays connected.
const HTTP2_PING_INTERVAL: Duration = Duration::from_secs(20);
const HTTP2_PING_TIMEOUT: Duration = Duration::from_secs(20);

impl Default for Settings {
    fn default() -> Self {
        Self {
            protocol: Protocol::default(),
            connect_timeout: Duration::from_secs(2),
            idle_timeout: Duration::from_secs(4),
            max_idle: 256,
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
        let connector = Connector::new(scheme, settings)?;
        let client = |max_idle| {
            legacy::Client::builder(TokioExecutor::new())
                .timer(TokioTimer::new())
                .pool_timer(TokioTimer::new())
                .pool_idle_timeout(settings.idle_timeout)
                .pool_max_idle_per_host(max_idle)
                .http2_only(settings.protocol == Protocol::Http2)
                .http2_adaptive_window(true)
                .http2_keep_alive_interval(HTTP2_PING_INTERVAL)
                .http2_keep_alive_timeout(HTTP2_PING_TIMEOUT)
                .build(connector.clone())
        };
        Ok(Self {
            pooled: client(settings.max_idle),
            fresh: client(0),
            scheme: scheme.clone(),
            authority: authority.clone(),
            prefix: address.path().trim_end_matches('/').to_owned(),
        })
    }

    /// Sends a request and returns the answer once its headers are there, whatever its status.
    ///
    /// An engine may close a connection just when the next request is sent on it. A request that fails so, on a
    /// connection that has answered before and without headers of its answer, is sent once more on a new connection.
    pub async fn send(
        &self,
        method: Method,
        path: &PathAndQuery,
        headers: HeaderMap,
        body: Bytes,
    ) -> Result<Response<Incoming>, RelayError> {
        let uri = Uri::builder().scheme(self.scheme.clone()).authority(self.authority.clone());
        let Ok(uri) = uri.path_and_query(format!("{}{path}", self.prefix)).build() else {
            return Err(RelayError::Answered(Box::new(Answer::uri_too_long())));
        };
        let request = || {
            let mut request = Request::new(Full::new(body.clone()));
            *request.method_mut() = method.clone();
            *request.uri_mut() = uri.clone();
            *request.headers_mut() = headers.clone();
            *request.version_mut() = Version::HTTP_11;
            request
        };
        let error = match self.pooled.request(request()).await {
            Ok(response) => {
                if let Some(answered) = response.extensions().get::<Answered>() {
                    answered.set();
                }
                return Ok(response);
            }
            Err(error) => error,
        };
        if !was_closed_when_idle(&error) {
            return Err(relay_error(&error));
        }
        tracing::debug!(engine = %self.authority, error = chain(&error), "pooled connection was closed, sending again");
        self.fresh.request(request()).await.map_err(|error| relay_error(&error))
    }

    /// Sends a request and relays its answer. An answer that is no success is an error.
    pub async fn relay(
        &self,
        method: Method,
        path: &PathAndQuery,
        headers: HeaderMap,
        body: Bytes,
        usage: UsageInStream,
    ) -> Result<Relay<Incoming>, RelayError> {
        let response = self.send(method, path, headers, body).await?;
        if response.status().is_success() {
            return Ok(Relay::new(response, usage));
        }
        Err(RelayError::Answered(Box::new(Answer::read(response).await)))
    }
}

/// Whether the connection was closed, but had answered before: its end need not mean that of the engine.
///
/// A stream of HTTP/2 that the engine resets is no such case. The engine has seen that request.
fn was_closed_when_idle(error: &legacy::Error) -> bool {
    let mut extras = Extensions::new();
    if let Some(connection) = error.connect_info() {
        connection.get_extras(&mut extras);
    }
    let closed = hyper_error(error).is_some_and(|error| {
        let io = error.source().is_some_and(<dyn Error>::is::<io::Error>);
        error.is_incomplete_message() || io
    });
    closed && extras.get::<Answered>().is_some_and(Answered::get)
}

fn relay_error(error: &legacy::Error) -> RelayError {
    let text = chain(error);
    // There was an answer, but not one of HTTP.
    let malformed = hyper_error(error).is_some_and(hyper::Error::is_parse);
    if malformed { RelayError::BrokenOff(text) } else { RelayError::Unreachable(text) }
}

fn hyper_error(error: &legacy::Error) -> Option<&hyper::Error> {
    error.source()?.downcast_ref()
}

#[cfg(test)]
mod tests;
