//! `/admin/workers`: lists the workers; cordons, drains and uncordons one. `/admin/planner`: how many there should be.

use crate::config::HumanDuration;
use axum::extract::rejection::QueryRejection;
use axum::extract::{Path, Query, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use router::{NoSuchWorker, PlanStatus, WorkerStatus};
use serde::Deserialize;
use serde_json::json;
use std::sync::{Arc, Weak};
use worker::plane::WorkerId;

/// Default time that a drain request waits before it answers 202: shorter than the timeout of most clients.
const DRAIN_TIMEOUT: HumanDuration = HumanDuration::secs(30);

type RouterState = State<Weak<router::Router>>;

pub(super) fn routes(router: Weak<router::Router>) -> Router {
    Router::new()
        .route("/admin/workers", get(list))
        .route("/admin/planner", get(plans))
        .route("/admin/workers/{id}/cordon", post(cordon))
        .route("/admin/workers/{id}/drain", post(drain))
        .route("/admin/workers/{id}/uncordon", post(uncordon))
        .with_state(router)
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Wait {
    timeout: Option<HumanDuration>,
}

/// Why a request fails.
enum Error {
    /// The node is shutting down.
    ShuttingDown,
    /// No worker has this id.
    NoSuchWorker(String),
    /// The query string is invalid.
    Query(QueryRejection),
}

impl From<NoSuchWorker> for Error {
    fn from(NoSuchWorker(id): NoSuchWorker) -> Self {
        Self::NoSuchWorker(id.to_string())
    }
}

impl IntoResponse for Error {
    fn into_response(self) -> Response {
        let (status, message) = match self {
            Self::ShuttingDown => (StatusCode::SERVICE_UNAVAILABLE, "the node is shutting down".to_owned()),
            Self::NoSuchWorker(id) => {
                (StatusCode::NOT_FOUND, format!("there is no worker {id:?}; GET /admin/workers lists them"))
            }
            Self::Query(problem) => (StatusCode::BAD_REQUEST, problem.body_text()),
        };
        let kind = if status.is_server_error() { "server_error" } else { "invalid_request_error" };
        let error = json!({ "message": message, "type": kind, "param": null, "code": null });
        (status, Json(json!({ "error": error }))).into_response()
    }
}

async fn list(router: RouterState) -> Result<Json<Vec<WorkerStatus>>, Error> {
    Ok(Json(upgrade(&router)?.workers()))
}

async fn plans(router: RouterState) -> Result<Json<Vec<PlanStatus>>, Error> {
    Ok(Json(upgrade(&router)?.plans()))
}

async fn cordon(router: RouterState, Path(id): Path<String>) -> Result<Json<WorkerStatus>, Error> {
    let (router, id) = (upgrade(&router)?, parse_id(&id)?);
    router.cordon(id)?;
    status(&router, id)
}

async fn uncordon(router: RouterState, Path(id): Path<String>) -> Result<Json<WorkerStatus>, Error> {
    let (router, id) = (upgrade(&router)?, parse_id(&id)?);
    router.uncordon(id)?;
    status(&router, id)
}

/// Cordons the worker. Answers 200 once it has no requests, or 202 if it still has some after the timeout.
async fn drain(
    router: RouterState,
    Path(id): Path<String>,
    wait: Result<Query<Wait>, QueryRejection>,
) -> Result<(StatusCode, Json<WorkerStatus>), Error> {
    let Query(wait) = wait.map_err(Error::Query)?;
    let (router, id) = (upgrade(&router)?, parse_id(&id)?);
    router.cordon(id)?;
    let timeout = wait.timeout.unwrap_or(DRAIN_TIMEOUT).0;
    let drained = match tokio::time::timeout(timeout, router.drained(id)).await {
        Ok(drained) => drained.map(|()| StatusCode::OK)?,
        Err(_) => StatusCode::ACCEPTED,
    };
    Ok((drained, status(&router, id)?))
}

fn upgrade(State(router): &RouterState) -> Result<Arc<router::Router>, Error> {
    router.upgrade().ok_or(Error::ShuttingDown)
}

/// Parses `w1` or `1`.
fn parse_id(id: &str) -> Result<WorkerId, Error> {
    let number = id.strip_prefix('w').unwrap_or(id).parse();
    number.map(WorkerId).map_err(|_| Error::NoSuchWorker(id.to_owned()))
}

fn status(router: &router::Router, id: WorkerId) -> Result<Json<WorkerStatus>, Error> {
    let found = router.workers().into_iter().find(|status| status.worker == id.to_string());
    found.map(Json).ok_or_else(|| NoSuchWorker(id).into())
}

#[cfg(test)]
mod tests {
    use super::parse_id;
    use worker::plane::WorkerId;

    #[test]
    fn a_worker_id_is_w2_or_2() {
        assert!(matches!((parse_id("w2"), parse_id("2")), (Ok(WorkerId(2)), Ok(WorkerId(2)))));
        assert!(["", "w", "x2", "w-1"].iter().all(|name| parse_id(name).is_err()));
    }
}
