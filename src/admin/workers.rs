//! `/admin/workers`: which workers there are, and taking them out of service and back.

use crate::config::HumanDuration;
use axum::extract::rejection::QueryRejection;
use axum::extract::{Path, Query, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use router::{NoSuchWorker, WorkerStatus};
use serde::Deserialize;
use serde_json::json;
use std::sync::{Arc, Weak};
use worker::plane::WorkerId;

/// How long a drain waits for an answer unless it is said: as long as most clients wait.
const DRAIN_TIMEOUT: HumanDuration = HumanDuration::secs(30);

type Reached = State<Weak<router::Router>>;

pub(super) fn routes(router: Weak<router::Router>) -> Router {
    Router::new()
        .route("/admin/workers", get(list))
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

/// Why there is no answer.
enum Error {
    /// The node has ended.
    Gone,
    /// No worker has this name.
    NoSuchWorker(String),
    /// The query cannot be read.
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
            Self::Gone => (StatusCode::SERVICE_UNAVAILABLE, "the node is shutting down".to_owned()),
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

async fn list(router: Reached) -> Result<Json<Vec<WorkerStatus>>, Error> {
    Ok(Json(reach(&router)?.workers()))
}

async fn cordon(router: Reached, Path(id): Path<String>) -> Result<Json<WorkerStatus>, Error> {
    let (router, id) = (reach(&router)?, named(&id)?);
    router.cordon(id)?;
    status(&router, id)
}

async fn uncordon(router: Reached, Path(id): Path<String>) -> Result<Json<WorkerStatus>, Error> {
    let (router, id) = (reach(&router)?, named(&id)?);
    router.uncordon(id)?;
    status(&router, id)
}

/// Cordons, and answers 200 once the worker has no requests, or 202 when it still has some after the timeout.
async fn drain(
    router: Reached,
    Path(id): Path<String>,
    wait: Result<Query<Wait>, QueryRejection>,
) -> Result<(StatusCode, Json<WorkerStatus>), Error> {
    let Query(wait) = wait.map_err(Error::Query)?;
    let (router, id) = (reach(&router)?, named(&id)?);
    router.cordon(id)?;
    let timeout = wait.timeout.unwrap_or(DRAIN_TIMEOUT).0;
    let drained = match tokio::time::timeout(timeout, router.drained(id)).await {
        Ok(drained) => drained.map(|()| StatusCode::OK)?,
        Err(_) => StatusCode::ACCEPTED,
    };
    Ok((drained, status(&router, id)?))
}

fn reach(State(router): &Reached) -> Result<Arc<router::Router>, Error> {
    router.upgrade().ok_or(Error::Gone)
}

/// `w1` or `1`.
fn named(id: &str) -> Result<WorkerId, Error> {
    let number = id.strip_prefix('w').unwrap_or(id).parse();
    number.map(WorkerId).map_err(|_| Error::NoSuchWorker(id.to_owned()))
}

fn status(router: &router::Router, id: WorkerId) -> Result<Json<WorkerStatus>, Error> {
    let found = router.workers().into_iter().find(|status| status.worker == id.to_string());
    found.map(Json).ok_or_else(|| NoSuchWorker(id).into())
}

#[cfg(test)]
mod tests {
    use super::named;
    use worker::plane::WorkerId;

    #[test]
    fn a_worker_is_named_as_in_the_log_or_by_its_number() {
        assert!(matches!((named("w2"), named("2")), (Ok(WorkerId(2)), Ok(WorkerId(2)))));
        assert!(["", "w", "x2", "w-1"].iter().all(|name| named(name).is_err()));
    }
}
