//! Errors of requests, and the only place that maps them to HTTP statuses and to the error objects of OpenAI, Anthropic
//! and Cohere.

mod form;

pub(crate) use form::ErrorForm;

use axum::http::header::{RETRY_AFTER, WWW_AUTHENTICATE};
use axum::http::{HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use serde_json::Value;
use std::sync::Arc;
use std::time::Duration;
use worker::engine::{self, ErrorResponse};

/// The status that nginx logs for a client that disconnected, which cannot receive it.
pub(crate) const CLIENT_CLOSED: u16 = 499;

/// OpenAI's error code for a prompt that exceeds the context.
pub(crate) const CONTEXT: &str = "context_length_exceeded";

/// `Retry-After` when no worker can serve a request. A worker needs seconds to start, or longer for a large model.
const WORKER_RETRY: Duration = Duration::from_secs(5);

/// Maximum models that the error of an unknown one lists. A gateway may serve a thousand, whose names together would be
/// longer than most responses.
const MAX_LISTED_MODELS: usize = 10;

/// Maximum characters of an error message in the log: enough for the field and the value.
const MAX_LOGGED_CHARS: usize = 300;

/// Maximum bytes of the `type` or `code` of a server's error in the log. A longer one is no identifier.
const MAX_IDENTIFIER_BYTES: usize = 64;

/// Why a request failed.
#[derive(Clone, PartialEq, Debug, thiserror::Error)]
pub(crate) enum Error {
    /// The body is not JSON.
    #[error("{0}")]
    Malformed(String),
    /// The content type of the body is not supported.
    #[error("Unsupported content type '{0}'. Send the request as 'application/json'.")]
    ContentType(String),
    /// The body is compressed.
    #[error("Unsupported content encoding '{0}'. Send the request without compression.")]
    ContentEncoding(String),
    /// The body has a transfer coding besides chunked.
    #[error("Unsupported transfer coding '{0}'. Send the body without one, or chunked only.")]
    TransferCoding(String),
    /// The body is larger than the limit in bytes.
    #[error("The request body is larger than the limit of {0} bytes.")]
    TooLarge(usize),
    /// The body did not arrive in time.
    #[error("The request body arrives too slowly: beyond {} s the client must send at least {min_rate} bytes per \
             second, and must not pause for longer than that.", .pause.as_secs_f64())]
    TooSlow {
        /// The maximum pause.
        pause: Duration,
        /// The minimum rate in bytes per second.
        min_rate: usize,
    },
    /// The upload of the body was ended: it was slow, and held memory that other requests needed.
    #[error("The request body arrives too slowly while memory for request bodies is short. Send the request again.")]
    UploadEvicted,
    /// The request's line and headers did not arrive in time.
    #[error("The request's headers did not arrive within {} s.", .0.as_secs_f64())]
    HeaderTimeout(Duration),
    /// The request's line and headers are not HTTP.
    #[error("The request is not valid HTTP: its request line or its headers cannot be parsed.")]
    InvalidHead,
    /// The request came without TLS to a port that needs it.
    #[error("This port speaks HTTPS. Send the request to https:// instead of http://.")]
    PlainHttp,
    /// The request's line and headers are larger than the limit in bytes.
    #[error("The request's headers are larger than {0} bytes together, or more than 100.")]
    HeadersTooLarge(usize),
    /// The URL is longer than the limit in bytes.
    #[error("The URL is longer than {0} bytes.")]
    UrlTooLong(usize),
    /// A percent-encoded part of the path is not UTF-8.
    #[error("The path of the URL is not UTF-8 once it is decoded.")]
    BadPath,
    /// The request names a host that is not this server.
    #[error("The host '{0}' is not allowed. If it is a name of this server, add it to frontend.allowed_hosts.")]
    HostNotAllowed(String),
    /// The request comes from a web page of another site.
    #[error(
        "Requests of web pages of other sites are not allowed ({0}). To allow an origin, add it to \
             frontend.cors_origins."
    )]
    OriginNotAllowed(String),
    /// A request of the admin API lacks the header that keeps web pages out.
    #[error("Requests of the admin API need the header 'x-blockyard-admin: 1'.")]
    NoAdminHeader,
    /// The request has no API key.
    #[error("You didn't provide an API key. Send it in the header 'Authorization: Bearer KEY'.")]
    NoKey,
    /// The request has different API keys in several headers.
    #[error("The request has several different API keys. Send one, in the header 'Authorization: Bearer KEY'.")]
    SeveralKeys,
    /// The API key is not known.
    #[error("Incorrect API key provided.")]
    WrongKey,
    /// The API key may not use the model.
    #[error("This API key may not use the model `{0}`.")]
    ModelNotAllowed(String),
    /// The API key may use some models only, and the request names none that could be checked.
    #[error(
        "This API key may use some models only, so requests must name the model in a JSON body, with the content type \
         'application/json'."
    )]
    ModelNotNamed,
    /// The API key may use some models only, and a field of the request selects an adapter that is none of them.
    #[error("This API key may use some models only, and '{0}' selects another one. Name the model in 'model' only.")]
    AdapterNotAllowed(String),
    /// The API key has a limit that cannot be checked on a WebSocket connection.
    #[error("This API key cannot open WebSocket connections: {0}.")]
    WebSocketNotAllowed(&'static str),
    /// The API key of a WebSocket connection was removed, or got a limit that cannot be checked on one.
    #[error("The WebSocket connection was ended: its API key was removed, or got 'models' or 'tokens_per_minute'.")]
    WebSocketKeyEnded,
    /// A limit of the API key is reached.
    #[error("Rate limit reached for this API key: {per_minute} {what} per minute. Try again in {} s.", seconds(*.wait))]
    RateLimited {
        /// What is limited.
        what: &'static str,
        /// The limit.
        per_minute: u32,
        /// Time until the request would be admitted.
        wait: Duration,
    },
    /// The connection limit is reached, and the connection is reserved for health checks.
    #[error("The server has too many connections. Try again in 1 s.")]
    TooManyConnections,
    /// The server is shutting down.
    #[error("The server is shutting down. Send the request to another one, or try again.")]
    ShuttingDown,
    /// A field has an invalid value.
    #[error("{message}")]
    Invalid {
        /// The field's path, like `messages[1].content`.
        param: String,
        /// OpenAI's error code.
        code: &'static str,
        /// The message for the user.
        message: String,
    },
    /// The model is not served here.
    #[error("The model `{model}` does not exist.{}", served_models(.known))]
    UnknownModel {
        /// The requested model.
        model: String,
        /// The served models that the client may use, in the order in which the message lists them.
        known: Vec<String>,
    },
    /// The route does not exist.
    #[error("Unknown request URL: {method} {path}. {hint}")]
    NoRoute {
        /// The request's method.
        method: String,
        /// The request's path.
        path: String,
        /// Which routes there are.
        hint: &'static str,
    },
    /// The route exists for another method.
    #[error("Not allowed to {method} on {path}.")]
    MethodNotAllowed {
        /// The request's method.
        method: String,
        /// The request's path.
        path: String,
    },
    /// Too many requests are queued.
    #[error("The server is overloaded. Try again in {} s.", seconds(*.0))]
    Overloaded(Duration),
    /// The deadline cannot be met, or has passed.
    #[error("The deadline of the request cannot be met: its first token would come too late.")]
    DeadlineExceeded,
    /// The response was not complete within `frontend.max_request_time`.
    #[error("The request was ended: its response was not complete within {} s of its arrival.", seconds(*.0))]
    RequestTimeExceeded(Duration),
    /// The client disconnected before its request was read and parsed. It does not receive this error, unless it has
    /// closed only its half of the connection.
    #[error("The client closed the connection before the request was read.")]
    ClientClosed,
    /// The client did not read its stream for this time.
    #[error("The stream was ended: it was not read for {} s.", .0.as_secs())]
    StreamNotRead(Duration),
    /// No byte was sent on a WebSocket connection for this time.
    #[error("The WebSocket connection was ended: neither side has sent a byte for {} s (frontend.idle_timeout).",
            .0.as_secs_f64())]
    WebSocketIdle(Duration),
    /// No worker can serve the request now.
    #[error("The service is unavailable: {0}")]
    Unavailable(String),
    /// The request was relayed here before.
    #[error(
        "The request is in a loop: it came back to a gateway that had relayed it. One of the gateway's upstreams is \
         the gateway itself, or has it as an upstream."
    )]
    Loop,
    /// The engine or this program failed.
    #[error("The server failed on this request: {0}")]
    Failed(String),
    /// The engine that the request was relayed to answered with an error. The client gets the response as it is.
    #[error("The engine answered: {}", String::from_utf8_lossy(&.0.body))]
    Relayed(Arc<ErrorResponse>),
}

/// Fields of the log line for an error.
#[derive(Clone, Debug)]
pub(crate) struct LoggedError {
    pub(crate) code: Option<&'static str>,
    pub(crate) message: Arc<str>,
    /// Why the request was rejected, as the metrics of tenants name it, if its status is one of rejections.
    pub(crate) rejection: &'static str,
}

impl From<&Error> for LoggedError {
    fn from(error: &Error) -> Self {
        let message = match error {
            Error::Relayed(response) => summary(response),
            // The message contains text of the client, which may be long.
            error => error.to_string().chars().take(MAX_LOGGED_CHARS).collect(),
        };
        Self { code: error.body().code(), message: message.into(), rejection: error.rejection() }
    }
}

/// The body of an error, as OpenAI writes it, and Anthropic with the `type` beside it.
#[derive(Serialize)]
pub(crate) struct Body<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    r#type: Option<&'static str>,
    error: Detail<'a>,
}

impl Body<'_> {
    /// OpenAI's error code.
    pub(crate) fn code(&self) -> Option<&'static str> {
        self.error.code
    }
}

#[derive(Serialize)]
struct Detail<'a> {
    message: String,
    r#type: &'static str,
    param: Option<&'a str>,
    code: Option<&'static str>,
}

impl Error {
    /// The error of an invalid value of a field.
    pub(crate) fn invalid(param: impl Into<String>, code: &'static str, message: impl Into<String>) -> Self {
        Self::Invalid { param: param.into(), code, message: message.into() }
    }

    /// The error of a field, or a value, that is not supported.
    pub(crate) fn unsupported(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self::invalid(param, "unsupported_value", message)
    }

    /// Replaces the message of `Invalid`; other errors stay as they are.
    pub(crate) fn map_message(self, map: impl FnOnce(&str) -> String) -> Self {
        match self {
            Self::Invalid { param, code, message } => Self::Invalid { param, code, message: map(&message) },
            other => other,
        }
    }

    /// Names the field of the prompt in an error of the engine, which does not know it.
    pub(crate) fn with_prompt_field(mut self, prompt: &str) -> Self {
        if let Self::Invalid { param, code: CONTEXT, .. } = &mut self {
            prompt.clone_into(param);
        }
        self
    }

    /// The error for which hyper rejected a request's head.
    pub(crate) fn from_head_status(status: StatusCode, max_headers: usize) -> Self {
        match status {
            StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE => Self::HeadersTooLarge(max_headers),
            // hyper's own limit, far above the limit of this server.
            StatusCode::URI_TOO_LONG => Self::UrlTooLong(u16::MAX as usize - 1),
            _ => Self::InvalidHead,
        }
    }

    /// The HTTP status of the error. No other code maps errors to statuses.
    pub(crate) fn status(&self) -> StatusCode {
        match self {
            // RFC 9112, section 6.1, recommends 501 for a transfer coding. Clients send a request with a status of 5xx
            // again, and alerts count it as a fault of this server.
            Self::Malformed(_)
            | Self::Invalid { .. }
            | Self::InvalidHead
            | Self::PlainHttp
            | Self::BadPath
            | Self::TransferCoding(_) => StatusCode::BAD_REQUEST,
            Self::UnknownModel { .. } | Self::NoRoute { .. } => StatusCode::NOT_FOUND,
            Self::MethodNotAllowed { .. } => StatusCode::METHOD_NOT_ALLOWED,
            Self::NoKey | Self::SeveralKeys | Self::WrongKey => StatusCode::UNAUTHORIZED,
            Self::HostNotAllowed(_)
            | Self::OriginNotAllowed(_)
            | Self::NoAdminHeader
            | Self::ModelNotAllowed(_)
            | Self::ModelNotNamed
            | Self::AdapterNotAllowed(_)
            | Self::WebSocketNotAllowed(_)
            | Self::WebSocketKeyEnded => StatusCode::FORBIDDEN,
            Self::TooSlow { .. }
            | Self::UploadEvicted
            | Self::HeaderTimeout(_)
            | Self::StreamNotRead(_)
            | Self::WebSocketIdle(_) => StatusCode::REQUEST_TIMEOUT,
            Self::ClientClosed => StatusCode::from_u16(CLIENT_CLOSED).expect("the number is within those of HTTP"),
            Self::UrlTooLong(_) => StatusCode::URI_TOO_LONG,
            Self::HeadersTooLarge(_) => StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE,
            Self::TooLarge(_) => StatusCode::PAYLOAD_TOO_LARGE,
            Self::ContentType(_) | Self::ContentEncoding(_) => StatusCode::UNSUPPORTED_MEDIA_TYPE,
            Self::Overloaded(_) | Self::RateLimited { .. } => StatusCode::TOO_MANY_REQUESTS,
            Self::TooManyConnections | Self::ShuttingDown | Self::Unavailable(_) => StatusCode::SERVICE_UNAVAILABLE,
            Self::DeadlineExceeded | Self::RequestTimeExceeded(_) => StatusCode::GATEWAY_TIMEOUT,
            Self::Loop => StatusCode::LOOP_DETECTED,
            Self::Failed(_) => StatusCode::INTERNAL_SERVER_ERROR,
            Self::Relayed(response) => response.status,
        }
    }

    /// Why a request is rejected, as the metrics of tenants name it.
    fn rejection(&self) -> &'static str {
        match self {
            Self::RateLimited { what: "requests", .. } => "request_limit",
            Self::RateLimited { .. } => "token_limit",
            Self::Overloaded(_) => "overloaded",
            Self::ModelNotAllowed(_) | Self::ModelNotNamed | Self::AdapterNotAllowed(_) => "model_not_allowed",
            Self::Relayed(_) => "server",
            _ => "invalid_request",
        }
    }

    /// OpenAI's error object.
    pub(crate) fn body(&self) -> Body<'_> {
        let param = match self {
            Self::Invalid { param, .. } => Some(param.as_str()),
            Self::AdapterNotAllowed(field) => Some(field.as_str()),
            Self::UnknownModel { .. } | Self::ModelNotAllowed(_) | Self::ModelNotNamed => Some("model"),
            _ => None,
        };
        let code = match self {
            Self::Invalid { code, .. } => Some(*code),
            Self::UnknownModel { .. } => Some("model_not_found"),
            Self::NoRoute { .. } => Some("unknown_url"),
            Self::MethodNotAllowed { .. } => Some("method_not_supported"),
            Self::TooLarge(_) => Some("request_too_large"),
            Self::Overloaded(_) | Self::RateLimited { .. } => Some("rate_limit_exceeded"),
            Self::NoKey | Self::SeveralKeys | Self::WrongKey => Some("invalid_api_key"),
            Self::ModelNotAllowed(_) | Self::ModelNotNamed | Self::AdapterNotAllowed(_) => Some("model_not_allowed"),
            Self::DeadlineExceeded => Some("deadline_exceeded"),
            Self::RequestTimeExceeded(_) => Some("request_time_exceeded"),
            Self::StreamNotRead(_) => Some("stream_not_read"),
            Self::WebSocketNotAllowed(_) | Self::WebSocketKeyEnded => Some("websocket_not_allowed"),
            Self::WebSocketIdle(_) => Some("websocket_idle"),
            Self::Unavailable(_) => Some("service_unavailable"),
            Self::Loop => Some("loop_detected"),
            Self::Failed(_) => Some("internal_error"),
            Self::HostNotAllowed(_) => Some("host_not_allowed"),
            Self::OriginNotAllowed(_) => Some("origin_not_allowed"),
            Self::NoAdminHeader => Some("admin_header_required"),
            Self::UrlTooLong(_) => Some("url_too_long"),
            Self::HeadersTooLarge(_) => Some("headers_too_large"),
            Self::TooSlow { .. } | Self::UploadEvicted | Self::HeaderTimeout(_) => Some("request_timeout"),
            Self::TooManyConnections => Some("too_many_connections"),
            Self::ShuttingDown => Some("shutting_down"),
            Self::Malformed(_)
            | Self::ContentType(_)
            | Self::ContentEncoding(_)
            | Self::TransferCoding(_)
            | Self::InvalidHead
            | Self::PlainHttp
            | Self::BadPath
            | Self::ClientClosed
            | Self::Relayed(_) => None,
        };
        let r#type = match self.status() {
            StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
            status if status.is_server_error() => "server_error",
            _ => "invalid_request_error",
        };
        Body { r#type: None, error: Detail { message: self.to_string(), r#type, param, code } }
    }
}

impl From<engine::Error> for Error {
    fn from(error: engine::Error) -> Self {
        match error {
            engine::Error::UnknownModel(model) => Self::UnknownModel { model, known: Vec::new() },
            engine::Error::PromptTooLong { .. } => Self::invalid("prompt", CONTEXT, format!("The {error}.")),
            engine::Error::Invalid { field, problem } => {
                Self::invalid(field, "invalid_value", format!("Invalid '{field}': {problem}."))
            }
            engine::Error::Overloaded { retry_after } => Self::Overloaded(retry_after),
            engine::Error::DeadlineExceeded => Self::DeadlineExceeded,
            engine::Error::Unread(time) => Self::StreamNotRead(time),
            engine::Error::Unavailable(why) | engine::Error::NoAnswer(why) | engine::Error::Unresponsive(why) => {
                Self::Unavailable(why)
            }
            engine::Error::OutOfFiles => Self::Unavailable(error.to_string()),
            engine::Error::Failed(why) => Self::Failed(why),
            engine::Error::Relayed(response) => Self::Relayed(response),
        }
    }
}

impl IntoResponse for Error {
    fn into_response(self) -> Response {
        let mut response = match &self {
            Self::Relayed(relayed) => {
                let mut response = Response::new(relayed.body.clone().into());
                (*response.status_mut(), *response.headers_mut()) = (relayed.status, relayed.headers.clone());
                response
            }
            error => (error.status(), axum::Json(error.body())).into_response(),
        };
        let wait = match &self {
            Self::Overloaded(wait) | Self::RateLimited { wait, .. } => Some(*wait),
            // A load balancer has other servers, and a connection may become free soon.
            Self::TooManyConnections | Self::ShuttingDown => Some(Duration::from_secs(1)),
            Self::Unavailable(_) => Some(WORKER_RETRY),
            _ => None,
        };
        if let Some(wait) = wait {
            response.headers_mut().insert(RETRY_AFTER, HeaderValue::from(seconds(wait)));
        }
        if matches!(self, Self::NoKey | Self::SeveralKeys | Self::WrongKey) {
            response.headers_mut().insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        // For the log, and for the form that clients of the endpoint expect.
        response.extensions_mut().insert(self);
        response
    }
}

/// What the log says of a server's error response. Its text may quote the prompt, so it is left out.
fn summary(response: &ErrorResponse) -> String {
    if let Some(wrong) = &response.replaces {
        return wrong.to_string();
    }
    let object: Value = serde_json::from_slice(&response.body).unwrap_or_default();
    // Some servers have the fields in an object `error`, others at the top.
    let error = object.get("error").filter(|error| error.is_object()).unwrap_or(&object);
    let named = |name| error.get(name).and_then(identifier).map(|value| format!(", {name} {value}"));
    let fields: String = ["type", "code"].into_iter().filter_map(named).collect();
    format!(
        "the server answered with status {}{fields}, and a body of {} bytes, which is not logged",
        response.status.as_u16(),
        response.body.len()
    )
}

/// A number, or text that looks like an identifier and not like a part of a prompt.
fn identifier(value: &Value) -> Option<String> {
    let text = match value {
        Value::Number(number) => number.to_string(),
        Value::String(text) => text.clone(),
        _ => return None,
    };
    let is_plain = text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_.-".contains(&byte));
    ((1..=MAX_IDENTIFIER_BYTES).contains(&text.len()) && is_plain).then_some(text)
}

/// Whole seconds, rounded up, at least one: with 0 a client would retry immediately.
fn seconds(wait: Duration) -> u64 {
    wait.as_millis().div_ceil(1000).max(1) as u64
}

fn served_models(known: &[String]) -> String {
    if known.is_empty() {
        return String::new();
    }
    let (listed, others) = known.split_at(known.len().min(MAX_LISTED_MODELS));
    let listed = listed.join(", ");
    match others.len() {
        0 => format!(" Served here: {listed}."),
        more => format!(" Served here: {listed}, and {more} more. GET /v1/models lists all of them."),
    }
}
