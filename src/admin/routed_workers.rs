//! `/admin/workers` of a process with a router: lists the workers; cordons, drains and uncordons one for this router.
//! `/admin/planner`: how many there should be.

use super::request::{Error, WaitQuery, parse_id, timeout};
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::routing::{get, post};
use axum::{Json, Router};
use router::{NoSuchWorker, PlanStatus, WorkerStatus};
use std::sync::{Arc, Weak};
use worker::plane::WorkerId;

type RouterState = State<Weak<router::Router>>;

/// The routes. The node is held by weak references only.
pub fn routes(router: Weak<router::Router>) -> Router {
    Router::new()
        .route("/admin/workers", get(list))
        .route("/admin/planner", get(plans))
        .route("/admin/workers/{id}/cordon", post(cordon))
        .route("/admin/workers/{id}/drain", post(drain))
        .route("/admin/workers/{id}/uncordon", post(uncordon))
        .with_state(router)
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
    wait: WaitQuery,
) -> Result<(StatusCode, Json<WorkerStatus>), Error> {
    let timeout = timeout(wait)?;
    let (router, id) = (upgrade(&router)?, parse_id(&id)?);
    router.cordon(id)?;
    let drained = match tokio::time::timeout(timeout, router.drained(id)).await {
        Ok(drained) => drained.map(|()| StatusCode::OK)?,
        Err(_) => StatusCode::ACCEPTED,
    };
    Ok((drained, status(&router, id)?))
}

fn upgrade(State(router): &RouterState) -> Result<Arc<router::Router>, Error> {
    router.upgrade().ok_or(Error::ShuttingDown)
}

fn status(router: &router::Router, id: WorkerId) -> Result<Json<WorkerStatus>, Error> {
    let found = router.workers().into_iter().find(|status| status.worker == id.to_string());
    found.map(Json).ok_or_else(|| NoSuchWorker(id).into())
}
