//! Endpoints for operators: liveness, readiness, version, models, metrics.

use super::caller;
use crate::error::Error;
use crate::http::{ConnectionInfo, RequestContext};
use crate::metrics::{Format, Scrapes};
use crate::state::AppState;
use axum::Json;
use axum::extract::rejection::PathRejection;
use axum::extract::{Extension, Path, State};
use axum::http::header::CONTENT_TYPE;
use axum::http::{HeaderMap, Method, Uri};
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use serde_json::json;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::timeout;
use worker::engine::{ModelCard, Readiness, UNKNOWN_CONTEXT};

/// `GET /live`: the process responds.
pub(crate) async fn live() -> Response {
    Json(json!({ "status": "ok" })).into_response()
}

/// `GET /ready`, `/health`, `/ping`: 200 if requests can be served, with a list of degraded parts; 503 with the reason
/// otherwise.
pub(crate) async fn ready(State(state): State<Arc<AppState>>, connection: Connection) -> Response {
    if is_shutting_down(connection) {
        return Error::ShuttingDown.into_response();
    }
    let readiness = match state.engine.readiness() {
        Readiness::Ready if !has_models(&state).await => {
            Readiness::NotReady("the tokenizer of a model is being loaded".to_owned())
        }
        other => other,
    };
    let keys = state.keys.as_ref().and_then(|keys| keys.problem());
    let keys = keys.map(|problem| format!("frontend.api_keys_file {problem}"));
    respond_ready(readiness, || state.engine.degraded().into_iter().chain(keys).collect())
}

/// Loads the models that are served, so that the first requests do not wait for it. `false` while that takes longer
/// than a health check waits; it goes on then.
async fn has_models(state: &Arc<AppState>) -> bool {
    if state.models.is_preloaded(&*state.engine) {
        return true;
    }
    let loading = Arc::clone(state);
    let loading = tokio::spawn(async move { loading.models.preload(&*loading.engine).await });
    timeout(LOADING_WAIT, loading).await.is_ok()
}

/// Kubernetes' probes wait for a second.
const LOADING_WAIT: Duration = Duration::from_millis(800);

/// The connection of a request; `None` within this process.
pub(super) type Connection = Option<Extension<Arc<ConnectionInfo>>>;

pub(super) fn is_shutting_down(connection: Connection) -> bool {
    connection.is_some_and(|Extension(connection)| connection.shutdown.is_announced())
}

pub(super) fn respond_ready(readiness: Readiness, degraded: impl FnOnce() -> Vec<String>) -> Response {
    match readiness {
        Readiness::Ready => match degraded() {
            none if none.is_empty() => Json(json!({ "status": "ok" })).into_response(),
            degraded => Json(json!({ "status": "ok", "degraded": degraded })).into_response(),
        },
        Readiness::NotReady(why) => Error::Unavailable(why).into_response(),
    }
}

/// `GET /metrics`: the Prometheus text format, or OpenMetrics when `Accept` prefers it.
pub(crate) async fn metrics(State(state): State<Arc<AppState>>, headers: HeaderMap) -> Response {
    respond_metrics(&state.scrapes, &headers).await
}

pub(super) async fn respond_metrics(scrapes: &Scrapes, headers: &HeaderMap) -> Response {
    let format = Format::negotiated(headers);
    match scrapes.text(format).await {
        Ok(text) => ([(CONTENT_TYPE, format.content_type())], text).into_response(),
        Err(error) => Error::Failed(error).into_response(),
    }
}

/// `GET /version`: the version of this build.
pub(crate) async fn version() -> Response {
    Json(json!({ "version": env!("CARGO_PKG_VERSION") })).into_response()
}

/// OpenAI's model object, with vLLM's additional fields.
#[derive(Serialize)]
pub(crate) struct ModelObject {
    id: String,
    object: &'static str,
    created: u64,
    owned_by: &'static str,
    /// The model that it is a further name of, else itself.
    root: String,
    parent: Option<String>,
    /// Maximum number of prompt and output tokens together; `None` if the server of the model does not say it.
    #[serde(skip_serializing_if = "Option::is_none")]
    max_model_len: Option<usize>,
}

/// `GET /v1/models`.
pub(crate) async fn models(
    State(state): State<Arc<AppState>>,
    Extension(context): Extension<Arc<RequestContext>>,
) -> Response {
    let data: Vec<ModelObject> = caller::models(&state, &context).iter().map(|card| model_object(card)).collect();
    Json(json!({ "object": "list", "data": data })).into_response()
}

/// `GET /v1/models/{id}`; an id may hold slashes.
pub(crate) async fn model(
    State(state): State<Arc<AppState>>,
    Extension(context): Extension<Arc<RequestContext>>,
    id: Result<Path<String>, PathRejection>,
) -> Result<Json<ModelObject>, Error> {
    let Path(id) = id.map_err(|_| Error::BadPath)?;
    caller::model(&state, &context, &id).map(|card| Json(model_object(&card)))
}

/// The error of an unknown route of the API.
pub(crate) fn no_route(method: &Method, uri: &Uri) -> Error {
    let hint = "The main endpoints are POST /v1/chat/completions, POST /v1/completions, POST /tokenize, \
                GET /v1/models, GET /ready and GET /metrics.";
    Error::NoRoute { method: method.to_string(), path: uri.path().into(), hint }
}

/// The error of an unknown route of the admin API.
pub(crate) async fn no_admin_route(method: Method, uri: Uri) -> Error {
    let hint = "The endpoints are GET /admin/config, POST /admin/reload, PUT /admin/log-filter, GET /admin/index, \
                GET /admin/workers, POST /admin/workers/ID/cordon, POST /admin/workers/ID/drain, \
                POST /admin/workers/ID/uncordon and, where a router runs, GET /admin/planner.";
    Error::NoRoute { method: method.to_string(), path: uri.path().into(), hint }
}

/// What the port of a worker says to requests of clients.
pub const WORKER_PORT: &str = "This is the port of a worker for frontends. Clients send requests to a frontend.";

/// The error of an unknown route of a worker.
pub(crate) async fn no_worker_route(method: Method, uri: Uri) -> Error {
    Error::NoRoute { method: method.to_string(), path: uri.path().into(), hint: WORKER_PORT }
}

/// The error of a known route with another method.
pub(crate) async fn no_method(method: Method, uri: Uri) -> Error {
    Error::MethodNotAllowed { method: method.to_string(), path: uri.path().into() }
}

fn model_object(card: &ModelCard) -> ModelObject {
    ModelObject {
        id: card.id.clone(),
        object: "model",
        created: card.created,
        owned_by: "blockyard",
        root: card.first_name().to_owned(),
        parent: card.parent.clone(),
        max_model_len: Some(card.context).filter(|context| *context != UNKNOWN_CONTEXT),
    }
}
