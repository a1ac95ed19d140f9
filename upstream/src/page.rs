//! What a server says of itself beside OpenAI's API: its metrics, its publishers of KV events, its schema.

use crate::relay::client::Client;
use crate::relay::headers;
use bytes::Bytes;
use http::uri::PathAndQuery;
use http::{HeaderMap, HeaderValue, Method};
use http_body_util::{BodyExt, Limited};
use std::time::Duration;
use tokio::time::timeout;

/// Maximum size of an answer; a longer one counts as absent. The metrics of a server with many adapters have 1 MiB.
const MAX_BYTES: usize = 8 << 20;
/// Time for an answer. The server answers these pages without its engine, though its event loop may be busy.
const TIMEOUT: Duration = Duration::from_secs(5);

/// An answer.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Page {
    /// The page.
    Body(Bytes),
    /// The server has no such page.
    Absent,
}

/// The page at `path`. `None`: the server does not answer in time, or fails.
pub(crate) async fn get(client: &Client, api_key: Option<&HeaderValue>, path: &'static str) -> Option<Page> {
    let answer = async {
        let headers = headers::request(&HeaderMap::new(), api_key);
        let response = client.send(Method::GET, &PathAndQuery::from_static(path), headers, Bytes::new()).await.ok()?;
        if response.status().is_server_error() {
            return None;
        }
        if !response.status().is_success() {
            return Some(Page::Absent);
        }
        match Limited::new(response.into_body(), MAX_BYTES).collect().await {
            Ok(body) => Some(Page::Body(body.to_bytes())),
            Err(error) if error.is::<http_body_util::LengthLimitError>() => Some(Page::Absent),
            Err(_) => None,
        }
    };
    timeout(TIMEOUT, answer).await.ok().flatten()
}
