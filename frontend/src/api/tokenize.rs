//! `POST /tokenize` and `POST /detokenize`, as in vLLM: text or a conversation to tokens, and tokens to text.

use super::caller;
use super::chat::{self, Chat};
use super::generate::Endpoint;
use super::relay::{self, Contents, Incoming};
use crate::error::Error;
use crate::http::{RequestContext, body};
use crate::model::{EncodeJob, ServedModel};
use crate::params::{Fields, integer};
use crate::state::AppState;
use axum::Json;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use std::sync::Arc;

/// The response of `/tokenize`.
#[derive(Serialize)]
pub(crate) struct Tokenized {
    count: usize,
    max_model_len: usize,
    tokens: Vec<u32>,
    /// The tokens' strings in the tokenizer, if requested.
    token_strs: Option<Vec<String>>,
}

/// The response of `/detokenize`.
#[derive(Serialize)]
pub(crate) struct Detokenized {
    prompt: String,
}

/// `POST /tokenize`.
pub(crate) async fn tokenize(State(state): State<Arc<AppState>>, request: Request) -> Result<Response, Error> {
    with_model(&state, request, |mut fields, model, job| {
        let with_names = fields.boolean("return_token_strs")?.unwrap_or(false);
        let tokens = match fields.text("prompt")? {
            Some(prompt) => {
                let special = fields.boolean("add_special_tokens")?.unwrap_or(true);
                model.encode("prompt", &prompt, special, job)?
            }
            None if fields.remaining().any(|name| name == Chat::PROMPT) => chat::tokens(&mut fields, model, job)?,
            None => return Err(fields.missing("prompt")),
        };
        let names = |tokens: &Vec<u32>| tokens.iter().map(|token| model.token_name(*token)).collect();
        let token_strs = with_names.then(|| names(&tokens));
        Ok(Tokenized { count: tokens.len(), max_model_len: model.card.context, tokens, token_strs })
    })
    .await
}

/// `POST /detokenize`.
pub(crate) async fn detokenize(State(state): State<Arc<AppState>>, request: Request) -> Result<Response, Error> {
    with_model(&state, request, |mut fields, model, _| {
        let ids = fields.array("tokens")?.ok_or_else(|| fields.missing("tokens"))?;
        let last = i64::try_from(model.card.vocabulary).unwrap_or(i64::MAX) - 1;
        let id = |(i, id)| integer(&format!("tokens[{i}]"), id, 0..=last).map(|id| id as u32);
        let ids = ids.iter().enumerate().map(id).collect::<Result<Vec<_>, _>>()?;
        Ok(Detokenized { prompt: model.decode(&ids)? })
    })
    .await
}

/// Reads a request's fields and runs `work` with the model that it names. `model` may be absent if one model is served.
/// A request for a relayed model is relayed to its engine.
async fn with_model<T: Serialize + Send + 'static>(
    state: &Arc<AppState>,
    request: Request,
    work: impl FnOnce(Fields, &ServedModel, &EncodeJob) -> Result<T, Error> + Send + 'static,
) -> Result<Response, Error> {
    let (parts, body) = request.into_parts();
    let context = RequestContext::of(&parts.extensions);
    let body::BufferedBody { bytes, memory } =
        body::read(&parts.headers, body, &state.settings, &state.body_memory).await?;
    let permit = state.work.acquire(bytes.len(), memory).await;
    let unparsed = bytes.clone();
    let mut fields = permit.run(move || Fields::parse(&unparsed)).await?;
    let served = caller::models(state, &context);
    let card = match (caller::named_model(&context, &mut fields)?, &served[..]) {
        (Some(id), _) => caller::model(state, &context, &id)?,
        (None, [only]) => Arc::clone(only),
        (None, _) => caller::only_model(state, &context).ok_or_else(|| fields.missing("model"))?,
    };
    if card.is_relayed {
        let incoming = Incoming::read(state, &card, parts, bytes, Contents::Json(fields), permit).await?;
        return relay::respond(state, incoming, card).await;
    }
    let model = state.models.get(&*state.engine, &card).await?;
    // When the client disconnects, this future is dropped, which cancels the work.
    let domain = state.domains.of(&caller::tenant(state, &context, &parts.headers)?);
    let job = EncodeJob::new(domain);
    let _cancel_on_drop = job.cancel_on_drop();
    permit.run(move || work(fields, &model, &job)).await.map(|answer| Json(answer).into_response())
}
