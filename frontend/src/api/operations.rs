//! What operators and their tools ask: is it alive, is it ready, what does it serve, what does it measure.

mod exposition;

use crate::error::Error;
use crate::http::Shutdown;
use crate::state::Gate;
use axum::Json;
use axum::extract::rejection::PathRejection;
use axum::extract::{Extension, Path, State};
use axum::http::header::CONTENT_TYPE;
use axum::http::{HeaderMap, Method, Uri};
use axum::response::{IntoResponse, Response};
use exposition::Format;
use serde::Serialize;
use serde_json::json;
use std::sync::Arc;
use worker::engine::{ModelCard, Readiness};

/// `GET /live`: the process answers.
pub(crate) async fn live() -> Response {
    Json(json!({ "status": "ok" })).into_response()
}

/// `GET /ready` and `GET /health`: requests can be served now, though something may not work; or why not.
pub(crate) async fn ready(State(gate): State<Arc<Gate>>, shutdown: Option<Extension<Shutdown>>) -> Response {
    if shutdown.is_some_and(|Extension(shutdown)| shutdown.is_announced()) {
        return Error::ShuttingDown.into_response();
    }
    match gate.engine.readiness() {
        Readiness::Ready => match gate.engine.degraded() {
            none if none.is_empty() => Json(json!({ "status": "ok" })).into_response(),
            degraded => Json(json!({ "status": "ok", "degraded": degraded })).into_response(),
        },
        Readiness::NotReady(why) => Error::Unavailable(why).into_response(),
    }
}

/// `GET /metrics`: the Prometheus text format, or OpenMetrics when `Accept` prefers it.
pub(crate) async fn metrics(State(gate): State<Arc<Gate>>, headers: HeaderMap) -> Response {
    let format = Format::negotiated(&headers);
    match format.write(&gate.registry) {
        Ok(text) => ([(CONTENT_TYPE, format.content_type())], text).into_response(),
        Err(error) => Error::Failed(error.to_string()).into_response(),
    }
}

/// `GET /version`: which build answers.
pub(crate) async fn version() -> Response {
    Json(json!({ "version": env!("CARGO_PKG_VERSION") })).into_response()
}

/// A model in OpenAI's words, and what vLLM adds to them.
#[derive(Serialize)]
pub(crate) struct Model {
    id: String,
    object: &'static str,
    created: u64,
    owned_by: &'static str,
    /// What it is a variant of: itself.
    root: String,
    parent: Option<String>,
    /// Prompt and output tokens together.
    max_model_len: usize,
}

/// `GET /v1/models`.
pub(crate) async fn models(State(gate): State<Arc<Gate>>) -> Response {
    let data: Vec<Model> = gate.engine.models().iter().map(|card| shown(card)).collect();
    Json(json!({ "object": "list", "data": data })).into_response()
}

/// `GET /v1/models/{id}`; an id may hold slashes.
pub(crate) async fn model(
    State(gate): State<Arc<Gate>>,
    id: Result<Path<String>, PathRejection>,
) -> Result<Json<Model>, Error> {
    let Path(id) = id.map_err(|_| Error::BadPath)?;
    let cards = gate.engine.models();
    match cards.iter().find(|card| card.id == id) {
        Some(card) => Ok(Json(shown(card))),
        None => Err(Error::UnknownModel { model: id, known: cards.iter().map(|card| card.id.clone()).collect() }),
    }
}

/// No such route.
pub(crate) async fn no_route(method: Method, uri: Uri) -> Error {
    Error::NoRoute { method: method.to_string(), path: uri.path().into() }
}

/// The route is there, for another method.
pub(crate) async fn no_method(method: Method, uri: Uri) -> Error {
    Error::Method { method: method.to_string(), path: uri.path().into() }
}

fn shown(card: &ModelCard) -> Model {
    Model {
        id: card.id.clone(),
        object: "model",
        created: card.created,
        owned_by: "blockyard",
        root: card.id.clone(),
        parent: None,
        max_model_len: card.context,
    }
}
