//! Relaying: an engine that is a server with the client's API answers the client's HTTP request itself.
//!
//! The request and its response pass as bytes, so fields that this program does not know reach the server, and the
//! client gets the server's own answer. Not here: which headers pass, and how the bytes are sent. That is the engine's.

use bytes::Bytes;
use http::uri::PathAndQuery;
use http::{HeaderMap, Method, StatusCode};
use parking_lot::Mutex;
use std::fmt;
use std::hash::{DefaultHasher, Hasher};
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};

/// A client's HTTP request.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct HttpRequest {
    /// The method.
    pub method: Method,
    /// Path and query, as the client sent them.
    pub target: PathAndQuery,
    /// All headers of the client.
    pub headers: HeaderMap,
    /// The whole body.
    pub body: Bytes,
    /// The response is a stream of server-sent events. Otherwise its first output is also its last.
    pub is_stream: bool,
    /// The client asked for the usage at the end of the stream. What the gateway asks for itself does not reach it.
    pub wants_usage: bool,
    /// The tokens of the output count against a limit of the client, so the server is to say them.
    pub is_metered: bool,
    /// Top-level fields of the body that are meant for this program. The engine removes them: a strict server rejects
    /// fields that it does not know.
    pub private_fields: &'static [&'static str],
    /// The protocol that the connection is to switch to (RFC 9110, section 7.8); `None`: it stays one of HTTP.
    pub upgrade: Option<&'static str>,
    /// The stream that the response continues; `None`: none, it is a response of its own.
    pub continues: Option<Continuation>,
}

/// The stream of a server that broke off, for the engine that continues it; opaque to all but engines of one kind.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Continuation(pub Bytes);

/// The request for the rest of a stream that broke off.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RelayRest {
    /// The tokens of the prompt, and after them those that were generated.
    pub tokens: Arc<[u32]>,
    /// How many of the last `tokens` were generated.
    pub generated_tokens: usize,
    /// The request, which another engine of the model takes.
    pub http: HttpRequest,
}

/// A kind of endpoints. A server may have those of one kind only: vLLM has them by the runner of its model.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum EndpointKind {
    /// The output is text.
    Generate,
    /// The output is a vector or a score of each input.
    Pooling,
}

impl EndpointKind {
    /// The paths of the endpoints.
    pub const fn paths(self) -> &'static [&'static str] {
        match self {
            Self::Generate => &[
                "/v1/chat/completions",
                "/v1/chat/completions/batch",
                "/v1/completions",
                "/v1/responses",
                "/v1/messages",
                "/v1/messages/count_tokens",
                "/cohere/v2/chat",
                "/generate",
                "/generative_scoring",
            ],
            Self::Pooling => &[
                "/v1/embeddings",
                "/v2/embed",
                "/encode",
                "/pooling",
                "/classify",
                "/v1/classify",
                "/score",
                "/v1/score",
                "/rerank",
                "/v1/rerank",
                "/v2/rerank",
            ],
        }
    }
}

/// Endpoints besides those of pooling that compute no tokens: nothing of a prompt can be found in a cache, and nothing
/// is charged.
const WITHOUT_TOKENS: [&str; 12] = [
    "/tokenize",
    "/detokenize",
    "/v1/tokenize",
    "/v1/detokenize",
    "/v1/messages/count_tokens",
    "/v1/chat/completions/render",
    "/v1/completions/render",
    "/v1/messages/render",
    "/v1/responses/render",
    "/cohere/v2/chat/render",
    "/v1/chat/completions/derender",
    "/v1/completions/derender",
];

/// Whether the endpoint with this path computes tokens: it reads a prompt with the model, or generates.
pub fn computes_tokens(path: &str) -> bool {
    !WITHOUT_TOKENS.contains(&path)
}

/// Endpoints besides those of a kind and those without tokens that compute an answer and change nothing.
const INFERENCE: [&str; 7] = [
    "/invocations",
    "/v1/moderations",
    "/v1/audio/transcriptions",
    "/v1/audio/translations",
    "/v1/audio/speech",
    "/v1/images/generations",
    "/v1/images/edits",
];

/// Whether the endpoint with this path is known to compute an answer and to change nothing.
pub fn is_inference(path: &str) -> bool {
    let kinds = [EndpointKind::Generate.paths(), EndpointKind::Pooling.paths()];
    kinds.into_iter().chain([&WITHOUT_TOKENS[..], &INFERENCE]).any(|paths| paths.contains(&path))
}

/// Whether a request may be sent again although a server may have carried it out: its method is safe (RFC 9110, section
/// 9.2.1), or its endpoint is known to compute an answer and to change nothing. A response that is stored by a server
/// which then fails has an id that no client knows.
pub fn may_be_repeated(method: &Method, path: &str) -> bool {
    method.is_safe() || ([Method::POST, Method::PUT].contains(method) && is_inference(path))
}

/// Endpoints at which a server creates and stores objects, each of which is found by its id in a path below. No other
/// server has it.
const COLLECTIONS: [&str; 4] = ["/v1/responses", "/v1/conversations", "/v1/files", "/v1/batches"];

/// The rest of a path of stored objects: empty where they are created, else from the slash on. `None`: the path is
/// another one.
pub fn below_collection(path: &str) -> Option<&str> {
    let below = COLLECTIONS.iter().find_map(|collection| path.strip_prefix(collection))?;
    (below.is_empty() || below.starts_with('/')).then_some(below)
}

impl HttpRequest {
    /// A `POST` to a valid path, without headers and body, whose response is not a stream.
    pub fn post(path: &'static str) -> Self {
        Self {
            method: Method::POST,
            target: PathAndQuery::from_static(path),
            headers: HeaderMap::new(),
            body: Bytes::new(),
            is_stream: false,
            wants_usage: false,
            is_metered: false,
            private_fields: &[],
            upgrade: None,
            continues: None,
        }
    }

    /// The kind of its endpoint. `None`: an endpoint that any server may have, such as one for tokens or files.
    pub fn kind(&self) -> Option<EndpointKind> {
        let path = self.target.path();
        [EndpointKind::Generate, EndpointKind::Pooling].into_iter().find(|kind| kind.paths().contains(&path))
    }
}

/// Status and headers of a relayed response. Default: status 200, and nothing else.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct ResponseHead {
    /// The status, below 400. 101 means that the server has switched to the protocol that the request asks for.
    pub status: StatusCode,
    /// The headers for the client.
    pub headers: HeaderMap,
    /// The worker that answers, where a router chose it.
    pub worker: Option<Arc<str>>,
    /// The server that answers, where a router chose it: a number that its engines share.
    pub server: Option<u64>,
    /// The router's decision as one line of JSON, when requested.
    pub explain: Option<Arc<str>>,
    /// What the response reports of itself before its end; `None` if nothing is charged for it.
    pub progress: Option<Arc<RelayProgress>>,
    /// The connection to the server, if it has switched to another protocol. No output follows this head.
    pub tunnel: Option<Tunnel>,
}

/// A connection that bytes pass over in both directions.
pub trait Duplex: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Duplex for T {}

/// The connection to a server that has switched to another protocol. A clone stands for the same connection, which one
/// of them takes.
#[derive(Clone)]
pub struct Tunnel(Arc<Mutex<Option<Switched>>>);

/// What a [`Tunnel`] is taken for.
pub struct Switched {
    /// What the server has sent after its response.
    pub received: Bytes,
    /// The connection. Dropping it closes it.
    pub server: Box<dyn Duplex>,
}

impl Tunnel {
    /// The tunnel to a server over `server`, on which `received` has come after the response.
    pub fn new(received: Bytes, server: impl Duplex + 'static) -> Self {
        Self(Arc::new(Mutex::new(Some(Switched { received, server: Box::new(server) }))))
    }

    /// The connection, if it was not taken before.
    pub fn take(&self) -> Option<Switched> {
        self.0.lock().take()
    }
}

impl fmt::Debug for Tunnel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Tunnel")
    }
}

impl PartialEq for Tunnel {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for Tunnel {}

/// What a relayed response has reported of itself so far. The engine writes it while the response is read, so that a
/// response which the client leaves before its end is charged too.
#[derive(Default, Debug)]
pub struct RelayProgress(Mutex<RelayReport>);

impl RelayProgress {
    /// Replaces the report by a later one.
    pub fn set(&self, report: RelayReport) {
        *self.0.lock() = report;
    }

    /// The latest report.
    pub fn get(&self) -> RelayReport {
        *self.0.lock()
    }
}

impl PartialEq for RelayProgress {
    fn eq(&self, other: &Self) -> bool {
        self.get() == other.get()
    }
}

impl Eq for RelayProgress {}

/// A hash of the id of a response, or of another object, that can be retrieved again. `written`: the id as it stands
/// between its quotes in JSON, or decoded in the path of a URL.
pub fn response_id(written: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    hasher.write(written);
    hasher.finish()
}

/// A relayed response with an error status, or a redirect.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ErrorResponse {
    /// The status, from 300 on.
    pub status: StatusCode,
    /// The headers for the client.
    pub headers: HeaderMap,
    /// The body.
    pub body: Bytes,
    /// What the response says about the server that sent it.
    pub kind: ErrorKind,
    /// What is wrong with the server's answer, or why there is none, if the gateway made this response in its place. It
    /// has no text of a prompt, so it is for the log.
    pub replaces: Option<Box<str>>,
}

impl ErrorResponse {
    /// What the server did, for the log.
    pub(crate) fn summary(&self) -> String {
        match &self.replaces {
            Some(wrong) => wrong.to_string(),
            None => format!("the engine answered with status {}", self.status),
        }
    }
}

/// What an error response says about the server that sent it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ErrorKind {
    /// It is about the request, and another server would answer the same: the request is wrong, the model does not have
    /// what it asks for (501), or it is redirected.
    Request,
    /// Back-pressure, of status 429 or 503: the server takes no requests for this time.
    Busy(Duration),
    /// The server failed, and another one may not.
    Fault,
}

/// What a relayed response reports of itself. `None`: it reports no such number.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct RelayReport {
    /// Tokens of the prompt.
    pub prompt_tokens: Option<u32>,
    /// Tokens of the prompt that the engine found in its cache.
    pub cached_tokens: Option<u32>,
    /// Tokens that the engine generated, over all choices.
    pub completion_tokens: Option<u32>,
    /// The [hash](response_id()) of the id of the response, by which a client can retrieve it again.
    pub response_id: Option<u64>,
    /// The server failed after the first output. The body contains its error.
    pub failed: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_that_may_change_something_is_not_repeated() {
        for (method, path, expected) in [
            (Method::POST, "/v1/chat/completions", true),
            (Method::POST, "/v1/responses", true),
            (Method::POST, "/tokenize", true),
            (Method::POST, "/rerank", true),
            (Method::PUT, "/generate", true),
            (Method::POST, "/v1/audio/speech", true),
            (Method::GET, "/v1/files/id", true),
            (Method::HEAD, "/v1/thing", true),
            (Method::OPTIONS, "/v1/batches", true),
            (Method::POST, "/v1/batches", false),
            (Method::POST, "/v1/responses/id/cancel", false),
            (Method::DELETE, "/v1/responses", false),
            (Method::PUT, "/v1/thing", false),
            (Method::PATCH, "/v1/chat/completions", false),
        ] {
            assert_eq!(may_be_repeated(&method, path), expected, "{method} {path}");
        }
    }
}
