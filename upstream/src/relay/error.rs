//! What an engine answers instead of output, and what goes wrong on the way to it.
//!
//! **A busy engine is not a faulty one, and a wrong request is neither.** 429 and 503 are back-pressure, and so is 401:
//! the key is that of the gateway. Other 4xx are the client's, 501 is the model's, and a redirect is for a client. Only
//! what is left counts against the engine.

use bytes::{Bytes, BytesMut};
use http::{HeaderMap, Response, StatusCode, header};
use http_body::Body;
use http_body_util::BodyExt;
use serde::Deserialize;
use std::time::{Duration, SystemTime};
use tokio::time::timeout;
use worker::engine::ErrorKind;

/// Maximum number of bytes of an error's body that are kept. Validation errors quote the request, but 1 MiB tells
/// enough.
const MAX_BODY: usize = 1 << 20;
/// Time limit for the body of an error response. It arrives with its headers; an engine that stops in between must not
/// delay the request.
const BODY_TIMEOUT: Duration = Duration::from_secs(5);
/// Used where a busy engine does not say when to come back. Queues of engines move within seconds.
const DEFAULT_RETRY_AFTER: Duration = Duration::from_secs(1);
/// Used where the engine refuses the gateway's key, as after a restart with another one. Within this time it is asked
/// for its models, and gets no more requests if it refuses that too. Longer than the time above, so that of several
/// errors a client does not get this one.
const RETRY_AFTER_REFUSED_KEY: Duration = Duration::from_secs(2);
/// Limits what an engine asks for, so that one wrong clock does not take it out of service for a day.
const MAX_RETRY_AFTER: Duration = Duration::from_mins(10);

/// Why there is no answer, or no whole one.
#[derive(Debug, thiserror::Error)]
pub enum RelayError {
    /// No connection, or it ended before the request was sent.
    #[error("cannot connect: {0}")]
    Unreachable(String),
    /// The connection ended after the request was sent, and before the answer began. The engine may have computed the
    /// request.
    #[error("the server closed the connection without an answer: {0}")]
    NoAnswer(String),
    /// The engine refused the request and has not processed it, as HTTP/2 can say.
    #[error("the server refused the request without processing it: {0}")]
    Refused(String),
    /// This process can open no more files, so it cannot connect. It says nothing about the engine.
    #[error("this process has reached its limit of open files; raise it (ulimit -n, LimitNOFILE= in systemd)")]
    OutOfFiles,
    /// As many requests as the engine may have run already.
    #[error("{0} requests run on the engine already, the most that it may have")]
    Full(usize),
    /// The engine answered with an error.
    #[error("engine answered {}", .0.status)]
    Answered(Box<Answer>),
    /// No connection to the engine can switch to another protocol.
    #[error("the connection speaks HTTP/2 only, in which it cannot switch to another protocol")]
    Http2Only,
    /// Nothing was sent: the path is too long behind that of the engine's address, which together may have this many
    /// bytes.
    #[error("the URL is too long for the server: behind the path of the server's own URL it has more than {0} bytes")]
    PathTooLong(usize),
    /// The answer is not one of HTTP.
    #[error("the server's answer is not valid HTTP: {0}")]
    Malformed(String),
    /// The answer broke off.
    #[error("the server broke off its answer: {0}")]
    BrokenOff(String),
    /// The stream ended properly, but neither with `[DONE]` nor with a finish reason.
    #[error("engine ended its stream without a finish reason")]
    Unfinished,
}

/// An answer that is an error, or a redirect. `Location` of a redirect is that at the gateway, if it has one.
#[derive(Clone, Debug)]
pub struct Answer {
    /// The status, 500 for an error without one in a stream.
    pub status: StatusCode,
    /// All headers of the answer; see [`headers::response`](super::headers::response) for which to pass on.
    pub headers: HeaderMap,
    /// The body, or its beginning.
    pub body: Bytes,
    /// Why `body` is not all of it; `None`: it is.
    pub cut: Option<Cut>,
    /// What it says of the engine.
    pub kind: ErrorKind,
}

/// Why only the beginning of a body was read.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Cut {
    /// It is longer than what is kept.
    #[error("a body of more than {} MiB", MAX_BODY >> 20)]
    TooLong,
    /// Its connection ended before it did.
    #[error("a body that broke off")]
    BrokenOff,
    /// The time for it has passed.
    #[error("a body that had not arrived after {} s", BODY_TIMEOUT.as_secs())]
    Slow,
}

/// What an answer with these headers says of the engine. vLLM answers 501 where the model does not have what the
/// request asks for.
fn kind_of(status: StatusCode, headers: &HeaderMap, now: SystemTime) -> ErrorKind {
    match status {
        StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE => {
            ErrorKind::Busy(retry_after(headers, now).unwrap_or(DEFAULT_RETRY_AFTER))
        }
        StatusCode::UNAUTHORIZED => ErrorKind::Busy(RETRY_AFTER_REFUSED_KEY),
        StatusCode::NOT_IMPLEMENTED => ErrorKind::Request,
        status if status.is_client_error() || status.is_redirection() => ErrorKind::Request,
        _ => ErrorKind::Fault,
    }
}

impl Answer {
    /// Reads an answer that is no success, or the beginning of it.
    pub async fn read<B: Body<Data = Bytes> + Unpin>(response: Response<B>) -> Self {
        let (parts, mut body) = response.into_parts();
        let kind = kind_of(parts.status, &parts.headers, SystemTime::now());
        let mut read = BytesMut::new();
        let all = async {
            while let Some(frame) = body.frame().await {
                let Ok(frame) = frame else { return Some(Cut::BrokenOff) };
                let data = frame.into_data().unwrap_or_default();
                let room = MAX_BODY - read.len();
                read.extend_from_slice(&data[..data.len().min(room)]);
                if data.len() > room {
                    return Some(Cut::TooLong);
                }
            }
            None
        };
        // What was read until then is in `read`.
        let cut = timeout(BODY_TIMEOUT, all).await.unwrap_or(Some(Cut::Slow));
        Self { status: parts.status, headers: parts.headers, body: read.freeze(), cut, kind }
    }

    /// An error that came as an event of a stream, where the status is in the JSON if anywhere.
    pub fn of_event(data: Bytes) -> Self {
        #[derive(Deserialize)]
        struct Error {
            error: Option<serde_json::Value>,
            code: Option<serde_json::Value>,
        }
        let code = || -> Option<u16> {
            let Error { error, code } = serde_json::from_slice(&data).ok()?;
            let code = error.as_ref().and_then(|error| error.get("code")).or(code.as_ref())?;
            // A number, or a number as text.
            code.as_u64().or_else(|| code.as_str()?.parse().ok())?.try_into().ok()
        };
        let error = |status: &StatusCode| status.is_client_error() || status.is_server_error();
        let status = code().and_then(|code| StatusCode::from_u16(code).ok()).filter(error);
        let status = status.unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let headers = HeaderMap::new();
        let kind = kind_of(status, &headers, SystemTime::UNIX_EPOCH);
        Self { status, headers, body: data, cut: None, kind }
    }
}

/// The time from `now` that a `Retry-After` header names, as seconds or as a date.
fn retry_after(headers: &HeaderMap, now: SystemTime) -> Option<Duration> {
    let value = headers.get(header::RETRY_AFTER)?.to_str().ok()?.trim();
    let after = match value.parse() {
        Ok(seconds) => Duration::from_secs(seconds),
        // A date in the past means at once.
        Err(_) => httpdate::parse_http_date(value).ok()?.duration_since(now).unwrap_or_default(),
    };
    Some(after.min(MAX_RETRY_AFTER))
}

#[cfg(test)]
mod tests;
