//! The engine of a worker in another process, and its logs.

mod connections;
mod logs;
mod outputs;

pub use logs::RemoteLogs;

use super::connect::{Credentials, Endpoint};
use super::wire;
use super::{PROTOCOL, PROTOCOL_HEADER};
use crate::engine::{
    Engine, Error, ModelCard, OutputStream, PrefetchError, Prefetched, PrefixCopy, Readiness, Request,
};
use crate::plane::nats::Address;
use crate::plane::{Instance, WorkerId};
use bytes::Bytes;
use connections::{ConnectError, ConnectionError, Connections};
use futures::StreamExt;
use futures::future::BoxFuture;
use http::header::AUTHORIZATION;
use http::{HeaderValue, StatusCode};
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use std::fmt::Display;
use std::sync::Arc;
use tokio::time::Instant;

/// A worker in another process. Nothing is connected until the first request.
pub struct RemoteEngine {
    worker: WorkerId,
    model: Arc<ModelCard>,
    path: String,
    prefetch_path: String,
    connections: Connections,
}

/// Bytes of outputs that wait for a client that does not read: about 600 tokens. Each is a frame of its own, which
/// takes 270 bytes of memory until it is read, so a stream takes 160 KB. By calculation a stream that is read has more
/// than a hundred thousand tokens per second from a worker that is a millisecond away.
const OUTPUT_WINDOW: u32 = 8 << 10;

/// Longest text of an error that is read.
const MAX_ERROR_BYTES: usize = 64 << 10;

impl RemoteEngine {
    /// The engine of `instance`, whose process listens at `address`.
    pub fn new(instance: &Instance, address: &Address, credentials: impl Into<Credentials>) -> Self {
        Self {
            worker: instance.id,
            model: Arc::clone(&instance.model),
            path: format!("/workers/{}/generate", instance.id.0),
            prefetch_path: format!("/workers/{}/prefetch", instance.id.0),
            connections: Connections::new(Endpoint::new(&address.0, credentials.into()), OUTPUT_WINDOW),
        }
    }

    fn unavailable(&self, problem: impl Display) -> Error {
        Error::Unavailable(format!("worker {}: {problem}", self.worker))
    }

    fn request(&self, path: &str, body: Bytes, trace: &spans::Context) -> http::Request<Full<Bytes>> {
        let mut request = http::Request::new(Full::new(body));
        *request.method_mut() = http::Method::POST;
        *request.uri_mut() = self.connections.endpoint().uri(path);
        let headers = request.headers_mut();
        headers.insert(PROTOCOL_HEADER, HeaderValue::from(u16::from(PROTOCOL)));
        headers.extend(self.connections.endpoint().authorization().map(|secret| (AUTHORIZATION, secret)));
        spans::inject(trace, headers);
        request
    }

    async fn send(&self, request: Request) -> Result<OutputStream, Error> {
        let body = wire::encode_request(&request, Instant::now())
            .map_err(|wire::NotSent| self.unavailable("relayed requests cannot be sent to it"))?;
        let stream = self.connections.get().await.map_err(|error| match error {
            ConnectError::OutOfFiles => Error::out_of_files(),
            ConnectError::Failed(problem) => self.unavailable(problem),
        })?;
        let message = self.request(&self.path, body, &request.attributes.trace);
        let (response, stream) = stream.send(message).await.map_err(|error| match error {
            ConnectionError::Unresponsive(problem) => Error::Unresponsive(format!("worker {}: {problem}", self.worker)),
            ConnectionError::Failed(problem) => self.unavailable(problem),
        })?;
        match response.status() {
            StatusCode::OK => Ok(outputs::stream(self.worker, response.into_body(), stream).boxed()),
            StatusCode::UNPROCESSABLE_ENTITY => Err(match error_body(response.into_body()).await {
                Ok(body) => wire::decode_error(&body).unwrap_or_else(|error| self.unavailable(error)),
                Err(error) => self.unavailable(error),
            }),
            status => {
                let body = error_body(response.into_body()).await.unwrap_or_default();
                let text = String::from_utf8_lossy(&body);
                self.connections.endpoint().log_refusal(text.trim());
                Err(self.unavailable(format_args!("status {}: {}", status.as_u16(), text.trim())))
            }
        }
    }

    async fn send_prefetch(&self, body: Bytes) -> Result<Prefetched, PrefetchError> {
        let failed = |problem: String| PrefetchError::Failed(format!("worker {}: {problem}", self.worker));
        let message = self.request(&self.prefetch_path, body, &spans::Context::none());
        let stream = self.connections.get().await.map_err(|error| failed(error.to_string()))?;
        let (response, _stream) = stream.send(message).await.map_err(|error| failed(error.to_string()))?;
        let status = response.status();
        let body = error_body(response.into_body()).await.map_err(failed)?;
        match status {
            StatusCode::OK => wire::decode_prefetched(&body).map_err(|error| failed(error.to_string()))?,
            // A worker of a version without this endpoint, with another protocol number, or that has just left.
            StatusCode::NOT_FOUND | StatusCode::METHOD_NOT_ALLOWED | StatusCode::BAD_REQUEST => {
                Err(PrefetchError::Unsupported)
            }
            status => {
                let text = String::from_utf8_lossy(&body);
                self.connections.endpoint().log_refusal(text.trim());
                Err(failed(format!("status {}: {}", status.as_u16(), text.trim())))
            }
        }
    }
}

async fn error_body(body: Incoming) -> Result<Bytes, String> {
    Limited::new(body, MAX_ERROR_BYTES)
        .collect()
        .await
        .map(http_body_util::Collected::to_bytes)
        .map_err(|error| error.to_string())
}

impl Engine for RemoteEngine {
    fn generate(&self, request: Request) -> BoxFuture<'_, Result<OutputStream, Error>> {
        Box::pin(self.send(request))
    }

    fn models(&self) -> Vec<Arc<ModelCard>> {
        vec![Arc::clone(&self.model)]
    }

    /// Discovery says whether the worker is there.
    fn readiness(&self) -> Readiness {
        Readiness::Ready
    }

    fn prefetch(&self, copy: PrefixCopy) -> BoxFuture<'_, Result<Prefetched, PrefetchError>> {
        Box::pin(self.send_prefetch(wire::encode_prefix_copy(&copy)))
    }

    fn address(&self) -> Option<String> {
        self.connections.endpoint().address()
    }

    /// The streams of a process that does not answer fail now, and not after the next check.
    fn check_process(&self) {
        self.connections.check(self.worker);
    }
}
