//! The tokens of a prompt, asked from the engine's `/tokenize` (vLLM).
//!
//! The blocks that such an engine announces are hashed from its own tokens, so only these find them. The question goes
//! the way of every relayed request: any engine of the model answers it.

use crate::error::Error;
use crate::state::AppState;
use axum::http::uri::PathAndQuery;
use futures::StreamExt;
use serde::Deserialize;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::timeout;
use worker::engine::{HttpRequest, Output, Request, Work};

/// Time for the answer. An engine that takes longer has no time for the prompt either.
const TIMEOUT: Duration = Duration::from_secs(2);
/// Maximum size of the answer: the ids of a million tokens.
const MAX_BYTES: usize = 8 << 20;
/// Endpoints whose body `/tokenize` understands.
const ENDPOINTS: [&str; 2] = ["/v1/chat/completions", "/v1/completions"];

#[derive(Deserialize)]
struct Tokenized {
    tokens: Vec<u32>,
}

/// The tokens of the prompt of `request`; `None` if the engine does not say them. Then the request is placed by load.
pub(super) async fn ask(state: &AppState, request: &Request) -> Option<Arc<[u32]>> {
    let Work::Relay(http) = &request.work else { return None };
    if !ENDPOINTS.contains(&http.target.path()) {
        return None;
    }
    let question = Request {
        tokens: Arc::default(),
        work: Work::Relay(Arc::new(HttpRequest {
            target: PathAndQuery::from_static("/tokenize"),
            is_stream: false,
            ..HttpRequest::clone(http)
        })),
        explain: false,
        group: None,
        ..request.clone()
    };
    match timeout(TIMEOUT, answer(state, question)).await {
        Ok(Ok(tokens)) => Some(tokens.into()),
        Ok(Err(error)) => {
            tracing::debug!(request_id = %request.id, %error, "the engine does not tokenize the prompt");
            None
        }
        Err(_) => {
            tracing::debug!(request_id = %request.id, "the engine does not tokenize the prompt in time");
            None
        }
    }
}

async fn answer(state: &AppState, question: Request) -> Result<Vec<u32>, Error> {
    let mut outputs = state.engine.generate(question).await?;
    let mut body = Vec::new();
    while let Some(output) = outputs.next().await {
        if let Output::Body(bytes) = output? {
            body.extend_from_slice(&bytes);
        }
        if body.len() > MAX_BYTES {
            return Err(Error::TooLarge(MAX_BYTES));
        }
    }
    let tokenized: Tokenized = serde_json::from_slice(&body).map_err(|error| Error::Failed(error.to_string()))?;
    Ok(tokenized.tokens)
}
