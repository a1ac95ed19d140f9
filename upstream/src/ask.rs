//! Requests of this program itself to a server, such as for its models: the whole answer, within a size.
//!
//! Not here: a time limit, which depends on the request; requests of clients (`relay`).

use crate::relay::client::Client;
use crate::relay::error::RelayError;
use crate::relay::headers;
use bytes::Bytes;
use http::uri::PathAndQuery;
use http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use http_body_util::{BodyExt, Limited};
use std::time::SystemTime;

/// A whole answer.
#[derive(Clone, Debug)]
pub struct Asked {
    /// Its status, of any kind.
    pub status: StatusCode,
    /// Its headers.
    pub headers: HeaderMap,
    /// Its body.
    pub body: Bytes,
}

impl Asked {
    /// The clock of the server when it answered, in whole seconds; `None` if it does not say.
    pub fn date(&self) -> Option<SystemTime> {
        httpdate::parse_http_date(self.headers.get(header::DATE)?.to_str().ok()?).ok()
    }

    /// A header as text.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name)?.to_str().ok()
    }
}

/// The answer to `GET path`. A body of more than `max_bytes` is an error.
pub async fn get(
    client: &Client,
    api_key: Option<&HeaderValue>,
    path: &'static str,
    max_bytes: usize,
) -> Result<Asked, RelayError> {
    send(client, api_key, Method::GET, path, Bytes::new(), max_bytes).await
}

/// The answer to `POST path` with a body of JSON.
pub async fn post(
    client: &Client,
    api_key: Option<&HeaderValue>,
    path: &'static str,
    body: &serde_json::Value,
    max_bytes: usize,
) -> Result<Asked, RelayError> {
    send(client, api_key, Method::POST, path, body.to_string().into(), max_bytes).await
}

async fn send(
    client: &Client,
    api_key: Option<&HeaderValue>,
    method: Method,
    path: &'static str,
    body: Bytes,
    max_bytes: usize,
) -> Result<Asked, RelayError> {
    let mut headers = headers::request(&HeaderMap::new(), api_key);
    if method == Method::POST {
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    }
    let (parts, body) = client.send(method, &PathAndQuery::from_static(path), headers, body).await?.into_parts();
    let body = Limited::new(body, max_bytes).collect().await;
    let body = body.map_err(|error| RelayError::BrokenOff(error.to_string()))?.to_bytes();
    Ok(Asked { status: parts.status, headers: parts.headers, body })
}
