//! `POST /tokenize` and `POST /detokenize`, in vLLM's shapes: what a text, or a conversation, is in a model's tokens.

use super::chat::{self, Chat};
use super::generate::Endpoint;
use crate::error::Error;
use crate::http::body;
use crate::model::Model;
use crate::params::{Fields, integer};
use crate::state::Gate;
use axum::Json;
use axum::extract::{Request, State};
use serde::Serialize;
use std::sync::Arc;
use tokio_util::sync::CancellationToken;

/// What a text is in tokens.
#[derive(Serialize)]
pub(crate) struct Tokenized {
    count: usize,
    max_model_len: usize,
    tokens: Vec<u32>,
    /// What the tokenizer calls them, when asked for.
    token_strs: Option<Vec<String>>,
}

/// What tokens are as text.
#[derive(Serialize)]
pub(crate) struct Detokenized {
    prompt: String,
}

/// Answers `POST /tokenize`.
pub(crate) async fn tokenize(State(gate): State<Arc<Gate>>, request: Request) -> Result<Json<Tokenized>, Error> {
    with_model(&gate, request, |mut fields, model, gone| {
        let with_names = fields.flag("return_token_strs")?.unwrap_or(false);
        let tokens = match fields.text("prompt")? {
            Some(prompt) => {
                let special = fields.flag("add_special_tokens")?.unwrap_or(true);
                model.encode("prompt", &prompt, special, gone)?
            }
            None if fields.left().any(|name| name == Chat::PROMPT) => chat::tokens(&mut fields, model, gone)?,
            None => return Err(fields.missing("prompt")),
        };
        let names = |tokens: &Vec<u32>| tokens.iter().map(|token| model.token_name(*token)).collect();
        let token_strs = with_names.then(|| names(&tokens));
        Ok(Tokenized { count: tokens.len(), max_model_len: model.card.context, tokens, token_strs })
    })
    .await
}

/// Answers `POST /detokenize`.
pub(crate) async fn detokenize(State(gate): State<Arc<Gate>>, request: Request) -> Result<Json<Detokenized>, Error> {
    with_model(&gate, request, |mut fields, model, _| {
        let ids = fields.array("tokens")?.ok_or_else(|| fields.missing("tokens"))?;
        let last = i64::try_from(model.card.vocabulary).unwrap_or(i64::MAX) - 1;
        let id = |(i, id)| integer(&format!("tokens[{i}]"), id, 0..=last).map(|id| id as u32);
        let ids = ids.iter().enumerate().map(id).collect::<Result<Vec<_>, _>>()?;
        Ok(Detokenized { prompt: model.decode(&ids)? })
    })
    .await
}

/// Reads a request's fields and does `work` with the model that it names. A server of one model need not be told which.
async fn with_model<T: Send + 'static>(
    gate: &Gate,
    request: Request,
    work: impl FnOnce(Fields, &Model, &CancellationToken) -> Result<T, Error> + Send + 'static,
) -> Result<Json<T>, Error> {
    let (parts, body) = request.into_parts();
    let body::Held { bytes, share } = body::read(&parts.headers, body, &gate.settings, &gate.bodies).await?;
    let turn = gate.lanes.turn(bytes.len(), share).await;
    let mut fields = turn.run(move || Fields::parse(&bytes)).await?;
    let served = gate.engine.models();
    let id = match (fields.text("model")?, &served[..]) {
        (Some(id), _) => id,
        (None, [only]) => only.id.clone(),
        (None, _) => return Err(fields.missing("model")),
    };
    let model = gate.models.get(&*gate.engine, &id).await?;
    // When the client goes away, this future is dropped, and the work learns of it.
    let gone = CancellationToken::new();
    let _when_dropped = gone.clone().drop_guard();
    turn.run(move || work(fields, &model, &gone)).await.map(Json)
}
