//! Which models a server serves, as it says itself.

use crate::ask::{self, AnswerLimits, AskError};
use crate::relay::client::Client;
use http::{HeaderValue, StatusCode};
use serde::Deserialize;
use serde_json::Value;
use std::num::NonZero;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use worker::engine::{ModelCard, UNKNOWN_CONTEXT};

/// The list of a server with a thousand adapters has 300 KiB.
const LIST: AnswerLimits = AnswerLimits { bytes: 4 << 20, time: Duration::from_secs(5) };
/// Tokens per block where neither the server nor the configuration says: vLLM's default.
pub const DEFAULT_BLOCK_SIZE: NonZero<u32> = NonZero::new(16).expect("not zero");

/// Why the models of a server are unknown.
#[derive(Debug, thiserror::Error)]
pub enum DiscoverError {
    /// The server cannot be asked.
    #[error(transparent)]
    Ask(#[from] AskError),
    /// The server answers with an error status.
    #[error("/v1/models answered {0}")]
    Status(StatusCode),
    /// The answer is not the list of OpenAI's API.
    #[error("/v1/models answered no list of models: {0}")]
    Format(String),
    /// The list is empty.
    #[error("/v1/models lists no model")]
    Empty,
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
    owned_by: Option<String>,
    /// The model that an adapter is of.
    parent: Option<String>,
    /// Where vLLM has loaded the model from. Other servers may have anything here.
    #[serde(default)]
    root: Value,
    /// What llama.cpp says of the model. Other servers may have anything here.
    #[serde(default)]
    meta: Value,
}

/// A model that a server lists.
#[derive(Debug)]
pub struct ListedModel {
    /// Its card, with [`DEFAULT_BLOCK_SIZE`].
    pub card: ModelCard,
    /// The model that it is an adapter of.
    pub parent: Option<String>,
    /// Where the server has loaded it from. vLLM serves one model, so models with the same one are names of it.
    pub root: Option<String>,
    /// Its owner, where vLLM and SGLang name themselves.
    pub owned_by: Option<String>,
}

/// The models that a server lists.
pub async fn discover(client: &Client, api_key: Option<&HeaderValue>) -> Result<Vec<ListedModel>, DiscoverError> {
    let answer = ask::get(client, api_key, "/v1/models", LIST).await?;
    if !answer.status.is_success() {
        return Err(DiscoverError::Status(answer.status));
    }
    let list: List = serde_json::from_slice(&answer.body).map_err(|error| DiscoverError::Format(error.to_string()))?;
    if list.data.is_empty() {
        return Err(DiscoverError::Empty);
    }
    Ok(list.data.into_iter().map(listed_model).collect())
}

fn listed_model(Listed { id, created, max_model_len, owned_by, parent, root, meta }: Listed) -> ListedModel {
    let now = || SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    let context_of_slot = meta["n_ctx"].as_u64().and_then(|context| usize::try_from(context).ok());
    let context = max_model_len.or(context_of_slot).unwrap_or(UNKNOWN_CONTEXT);
    let card = ModelCard {
        // Names blocks in the router's index only: what a server computes is never stored by this program.
        identity: format!("upstream {id}"),
        created: created.unwrap_or_else(now),
        is_relayed: true,
        has_exact_blocks: false,
        ..ModelCard::new(&id, context, DEFAULT_BLOCK_SIZE.get() as usize)
    };
    ListedModel { card, parent, root: root.as_str().map(str::to_owned), owned_by }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn each_server_says_its_context_in_its_own_field() {
        let context = |fields: serde_json::Value| listed_model(serde_json::from_value(fields).unwrap()).card.context;
        assert_eq!(context(json!({ "id": "m", "max_model_len": 4096 })), 4096);
        let llama_cpp = json!({ "id": "m", "meta": { "n_ctx": 2048, "n_ctx_train": 4096 }, "owned_by": "llamacpp" });
        assert_eq!(context(llama_cpp), 2048);
        assert_eq!(context(json!({ "id": "m", "meta": null })), UNKNOWN_CONTEXT);
        assert_eq!(context(json!({ "id": "m", "meta": "other", "root": {} })), UNKNOWN_CONTEXT);
    }
}
