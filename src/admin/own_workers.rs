//! `/admin/workers` of a worker process: lists its workers; cordons, drains and uncordons one for all routers.
//!
//! A cordoned worker is deregistered: routers send it no requests, its running requests finish, and other workers can
//! still read its blocks. The process may be stopped then without ending a request.

use super::request::{Error, WaitQuery, parse_id, timeout};
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::routing::{get, post};
use axum::{Json, Router};
use serde::Serialize;
use std::sync::Arc;
use worker::plane::{Role, WorkerId};
use worker::serve::Cordon;

/// The workers of the process. A cordon does not keep its worker alive.
type Workers = State<Arc<[(WorkerId, Cordon)]>>;

/// State of a worker for an operator.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
struct Status {
    /// Id of the worker in logs, like `w1`.
    worker: String,
    /// Role: prefill, decode or both.
    role: Role,
    /// Whether it is to get no new requests.
    cordoned: bool,
    /// Whether routers can send it requests.
    registered: bool,
    /// Number of requests on the worker: queued, running, and paused because their output is not read.
    requests: u32,
}

/// The routes.
pub fn routes(workers: Vec<(WorkerId, Cordon)>) -> Router {
    Router::new()
        .route("/admin/workers", get(list))
        .route("/admin/workers/{id}/cordon", post(cordon))
        .route("/admin/workers/{id}/drain", post(drain))
        .route("/admin/workers/{id}/uncordon", post(uncordon))
        .with_state(workers.into())
}

async fn list(State(workers): Workers) -> Json<Vec<Status>> {
    Json(workers.iter().map(|(id, cordon)| status(*id, cordon)).collect())
}

async fn cordon(workers: Workers, Path(id): Path<String>) -> Result<Json<Status>, Error> {
    let (id, cordon) = find(&workers, &id)?;
    cordon.cordon();
    Ok(Json(status(id, cordon)))
}

async fn uncordon(workers: Workers, Path(id): Path<String>) -> Result<Json<Status>, Error> {
    let (id, cordon) = find(&workers, &id)?;
    cordon.uncordon();
    Ok(Json(status(id, cordon)))
}

/// Cordons the worker. Answers 200 once it has no requests, or 202 if it still has some after the timeout.
async fn drain(workers: Workers, Path(id): Path<String>, wait: WaitQuery) -> Result<(StatusCode, Json<Status>), Error> {
    let timeout = timeout(wait)?;
    let (id, cordon) = find(&workers, &id)?;
    cordon.cordon();
    let drained = tokio::time::timeout(timeout, cordon.drained()).await;
    let code = if drained.is_ok() { StatusCode::OK } else { StatusCode::ACCEPTED };
    Ok((code, Json(status(id, cordon))))
}

fn find<'a>(State(workers): &'a Workers, id: &str) -> Result<(WorkerId, &'a Cordon), Error> {
    let wanted = parse_id(id)?;
    let found = workers.iter().find(|(own, _)| *own == wanted);
    found.map(|(id, cordon)| (*id, cordon)).ok_or_else(|| Error::NoSuchWorker(id.to_owned()))
}

fn status(id: WorkerId, cordon: &Cordon) -> Status {
    let load = cordon.load();
    Status {
        worker: id.to_string(),
        role: cordon.role(),
        cordoned: cordon.is_cordoned(),
        registered: cordon.is_registered(),
        requests: load.running + load.waiting + load.paused,
    }
}

#[cfg(test)]
mod tests;
