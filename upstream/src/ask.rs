//! Requests of this program itself to a server, such as for its models: the whole answer, within a size and a time.
//!
//! A page that only some servers have is absent, too large to be read, or not answered. The program works without a
//! page of the first two kinds. A server that did not answer may have the page, so the request is sent again later.
//!
//! Not here: what an answer means (`models`, `kv_sources` and others); requests of clients (`relay`).

use crate::relay::client::Client;
use crate::relay::error::RelayError;
use crate::relay::headers;
use bytes::Bytes;
use http::uri::PathAndQuery;
use http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use std::time::{Duration, SystemTime};
use tokio::time::timeout;

/// Limits on the size of an answer and on the time to receive it.
#[derive(Clone, Copy, Debug)]
pub struct AnswerLimits {
    /// Maximum size of the body.
    pub bytes: usize,
    /// Time for the whole answer.
    pub time: Duration,
}

/// For what a server says of itself beside OpenAI's API. The metrics of a server with many adapters have 1 MiB. The
/// server answers without its engine, though its event loop may be busy.
const PAGE: AnswerLimits = AnswerLimits { bytes: 8 << 20, time: Duration::from_secs(5) };

/// A whole answer.
#[derive(Clone, Debug)]
pub struct ServerAnswer {
    /// Its status, of any kind.
    pub status: StatusCode,
    /// Its headers.
    pub headers: HeaderMap,
    /// Its body.
    pub body: Bytes,
}

/// Why there is no whole answer.
#[derive(Debug, thiserror::Error)]
pub enum AskError {
    /// The server cannot be reached, or the connection ended before the answer was complete.
    #[error(transparent)]
    Relay(#[from] RelayError),
    /// The answer is longer than what is read.
    #[error("{path} answered more than {bytes} bytes")]
    TooLarge {
        /// What was asked for.
        path: &'static str,
        /// The limit.
        bytes: usize,
    },
    /// The answer did not come in time.
    #[error("{path} did not answer within {} s", .time.as_secs())]
    Late {
        /// What was asked for.
        path: &'static str,
        /// The limit.
        time: Duration,
    },
}

/// What a server has at a path.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Page {
    /// The page.
    Body(Bytes),
    /// No such page.
    Absent,
    /// A page that is longer than what is read.
    TooLarge,
    /// No answer in time, or the status of a server that fails.
    Failed,
}

impl ServerAnswer {
    /// The clock of the server when it answered, in whole seconds; `None` if it does not say.
    pub fn date(&self) -> Option<SystemTime> {
        httpdate::parse_http_date(self.headers.get(header::DATE)?.to_str().ok()?).ok()
    }

    /// A header as text.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name)?.to_str().ok()
    }
}

/// The answer to `GET path`.
pub async fn get(
    client: &Client,
    api_key: Option<&HeaderValue>,
    path: &'static str,
    limits: AnswerLimits,
) -> Result<ServerAnswer, AskError> {
    send(client, headers::request(&HeaderMap::new(), api_key), Method::GET, path, Bytes::new(), limits).await
}

/// The answer of a data-parallel rank to `POST path` with a body of JSON.
pub async fn post_to_rank(
    client: &Client,
    api_key: Option<&HeaderValue>,
    rank: u32,
    path: &'static str,
    body: Bytes,
    limits: AnswerLimits,
) -> Result<ServerAnswer, AskError> {
    let mut headers = headers::request(&HeaderMap::new(), api_key);
    headers::set_rank(&mut headers, rank);
    send(client, headers, Method::POST, path, body, limits).await
}

/// The answer to `POST path` with a body of JSON.
pub async fn post(
    client: &Client,
    api_key: Option<&HeaderValue>,
    path: &'static str,
    body: Bytes,
    limits: AnswerLimits,
) -> Result<ServerAnswer, AskError> {
    send(client, headers::request(&HeaderMap::new(), api_key), Method::POST, path, body, limits).await
}

/// The page at `path`.
pub(crate) async fn page(client: &Client, api_key: Option<&HeaderValue>, path: &'static str) -> Page {
    match get(client, api_key, path, PAGE).await {
        Ok(ServerAnswer { status, body, .. }) if status.is_success() => Page::Body(body),
        Ok(ServerAnswer { status, .. }) if status.is_server_error() => Page::Failed,
        Ok(_) => Page::Absent,
        Err(AskError::TooLarge { .. }) => Page::TooLarge,
        Err(AskError::Relay(_) | AskError::Late { .. }) => Page::Failed,
    }
}

async fn send(
    client: &Client,
    mut headers: HeaderMap,
    method: Method,
    path: &'static str,
    body: Bytes,
    AnswerLimits { bytes, time }: AnswerLimits,
) -> Result<ServerAnswer, AskError> {
    if method == Method::POST {
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    }
    let answer = async {
        let (parts, body) = client.send(method, &PathAndQuery::from_static(path), headers, body).await?.into_parts();
        let body = Limited::new(body, bytes).collect().await.map_err(|error| {
            let too_large = error.is::<LengthLimitError>();
            if too_large { AskError::TooLarge { path, bytes } } else { RelayError::BrokenOff(error.to_string()).into() }
        })?;
        Ok::<_, AskError>(ServerAnswer { status: parts.status, headers: parts.headers, body: body.to_bytes() })
    };
    timeout(time, answer).await.unwrap_or(Err(AskError::Late { path, time }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::relay::client::Settings;
    use crate::relay::fake::{FakeEngine, Script};
    use serde_json::json;

    #[tokio::test]
    async fn a_page_is_absent_too_large_or_not_answered() {
        let server = FakeEngine::start([]).await.unwrap();
        let client = Client::new(&server.uri(), &Settings::default()).unwrap();
        let text = Page::Body(Bytes::from_static(b"\"text\""));
        for (script, expected) in [
            (Script::json(200, &json!("text")), text),
            (Script::json(404, &json!({})), Page::Absent),
            (Script::json(200, &json!("x".repeat(PAGE.bytes))), Page::TooLarge),
            (Script::json(503, &json!({})), Page::Failed),
            (Script::close(), Page::Failed),
        ] {
            server.set_page("/metrics", script);
            assert_eq!(page(&client, None, "/metrics").await, expected);
        }
    }

    #[tokio::test]
    async fn an_answer_has_a_time_limit() {
        let silent = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = format!("http://{}", silent.local_addr().unwrap()).parse().unwrap();
        let client = Client::new(&address, &Settings::default()).unwrap();
        let limits = AnswerLimits { bytes: 1, time: Duration::from_millis(1) };
        let answer = get(&client, None, "/version", limits).await;
        assert!(matches!(answer, Err(AskError::Late { path: "/version", .. })), "{answer:?}");
    }
}
