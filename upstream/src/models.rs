//! Which models a server serves, as it says itself.

use crate::relay::client::Client;
use crate::relay::error::RelayError;
use crate::relay::headers;
use http::uri::PathAndQuery;
use http::{HeaderMap, HeaderValue, Method, StatusCode};
use http_body_util::{BodyExt, Limited};
use serde::Deserialize;
use std::num::NonZero;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::time::timeout;
use worker::engine::{ModelCard, SamplingDefaults};

/// Maximum size of the list. That of a server with a thousand adapters has 300 KiB.
const MAX_BYTES: usize = 4 << 20;
/// Time for the whole answer.
const TIMEOUT: Duration = Duration::from_secs(5);
/// Tokens per block where neither the server nor the configuration says: vLLM's default.
pub const DEFAULT_BLOCK_SIZE: NonZero<u32> = NonZero::new(16).expect("not zero");
/// Context of a server that does not say its own: no prompt is too long for the router, since the server checks it.
const UNKNOWN_CONTEXT: usize = 1 << 30;

/// Why the models of a server are unknown.
#[derive(Debug, thiserror::Error)]
pub enum DiscoverError {
    /// The server cannot be asked.
    #[error(transparent)]
    Relay(#[from] RelayError),
    /// The server answers with an error status.
    #[error("/v1/models answered {0}")]
    Status(StatusCode),
    /// The answer is not the list of OpenAI's API.
    #[error("/v1/models answered no list of models: {0}")]
    Format(String),
    /// The list is empty.
    #[error("/v1/models lists no model")]
    Empty,
    /// The answer did not come in time.
    #[error("/v1/models did not answer within {} s", TIMEOUT.as_secs())]
    Timeout,
}

#[derive(Deserialize)]
struct List {
    data: Vec<Listed>,
}

#[derive(Deserialize)]
struct Listed {
    id: String,
    created: Option<u64>,
    max_model_len: Option<usize>,
    /// The model that an adapter is of.
    parent: Option<String>,
}

/// A model that a server lists.
#[derive(Debug)]
pub struct ListedModel {
    /// Its card, with [`DEFAULT_BLOCK_SIZE`].
    pub card: ModelCard,
    /// Whether it is an adapter of another one.
    pub is_adapter: bool,
}

/// The models that a server lists.
pub async fn discover(client: &Client, api_key: Option<&HeaderValue>) -> Result<Vec<ListedModel>, DiscoverError> {
    timeout(TIMEOUT, list(client, api_key)).await.map_err(|_| DiscoverError::Timeout)?
}

async fn list(client: &Client, api_key: Option<&HeaderValue>) -> Result<Vec<ListedModel>, DiscoverError> {
    let headers = headers::request(&HeaderMap::new(), api_key);
    let path = PathAndQuery::from_static("/v1/models");
    let response = client.send(Method::GET, &path, headers, bytes::Bytes::new()).await?;
    if !response.status().is_success() {
        return Err(DiscoverError::Status(response.status()));
    }
    let body = Limited::new(response.into_body(), MAX_BYTES).collect().await;
    let body = body.map_err(|error| DiscoverError::Format(error.to_string()))?.to_bytes();
    let list: List = serde_json::from_slice(&body).map_err(|error| DiscoverError::Format(error.to_string()))?;
    if list.data.is_empty() {
        return Err(DiscoverError::Empty);
    }
    Ok(list.data.into_iter().map(listed_model).collect())
}

fn listed_model(Listed { id, created, max_model_len, parent }: Listed) -> ListedModel {
    let now = || SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    let card = ModelCard {
        // Names blocks in the router's index only: what a server computes is never stored by this program.
        identity: format!("upstream {id}"),
        id,
        created: created.unwrap_or_else(now),
        context: max_model_len.unwrap_or(UNKNOWN_CONTEXT),
        block_size: DEFAULT_BLOCK_SIZE.get() as usize,
        vocabulary: 0,
        eos: Vec::new(),
        tokenizer: None,
        chat_template: None,
        special_tokens: Vec::new(),
        sampling: SamplingDefaults::default(),
        random_weights: false,
        is_relayed: true,
        has_exact_blocks: false,
    };
    ListedModel { card, is_adapter: parent.is_some() }
}
