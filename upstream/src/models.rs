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

/// A model in the list. Only its id is needed. Servers differ in the other fields, such as a time with a fraction, and
/// one of another type is like one that is missing.
#[derive(Deserialize)]
struct Listed {
    id: String,
    #[serde(default)]
    created: Value,
    #[serde(default)]
    max_model_len: Value,
    #[serde(default)]
    owned_by: Value,
    /// The model that an adapter is of.
    #[serde(default)]
    parent: Value,
    /// Where vLLM has loaded the model from.
    #[serde(default)]
    root: Value,
    /// What llama.cpp says of the model.
    #[serde(default)]
    meta: Value,
}

/// A model that a server lists.
#[derive(Debug)]
pub struct ListedModel {
    /// Its card, with [`DEFAULT_BLOCK_SIZE`].
    pub card: ModelCard,
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
    let length = |field: &Value| field.as_u64().and_then(|tokens| usize::try_from(tokens).ok()).filter(|len| *len > 0);
    let text = |field: Value| field.as_str().map(str::to_owned);
    let context = length(&max_model_len).or_else(|| length(&meta["n_ctx"])).unwrap_or(UNKNOWN_CONTEXT);
    let card = ModelCard {
        // Names blocks in the router's index only: what a server computes is never stored by this program.
        identity: format!("upstream {id}"),
        parent: text(parent),
        created: created.as_u64().unwrap_or_else(now),
        is_relayed: true,
        has_exact_blocks: false,
        ..ModelCard::new(&id, context, DEFAULT_BLOCK_SIZE.get() as usize)
    };
    ListedModel { card, root: text(root), owned_by: text(owned_by) }
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

    #[test]
    fn fields_of_another_type_are_like_missing_ones() {
        for len in [json!(-1), json!("4096"), json!(0), json!(1e20), json!(null), json!([])] {
            let fields = json!({ "id": "m", "max_model_len": len, "created": 1.5, "owned_by": 1, "parent": {} });
            let model = listed_model(serde_json::from_value(fields).unwrap());
            assert_eq!((model.card.id.as_str(), model.card.context), ("m", UNKNOWN_CONTEXT), "{len}");
            assert_eq!((model.card.parent, model.owned_by), (None, None));
        }
        assert!(serde_json::from_value::<Listed>(json!({ "id": 1 })).is_err());
    }
}
