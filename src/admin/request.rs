//! What the two admin APIs of workers have in common: the path of a worker, the wait of a drain, and the errors.

use crate::config::HumanDuration;
use axum::Json;
use axum::extract::Query;
use axum::extract::rejection::QueryRejection;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use router::NoSuchWorker;
use serde::Deserialize;
use serde_json::json;
use std::time::Duration;
use worker::plane::WorkerId;

/// Default time that a drain request waits before it answers 202: shorter than the timeout of most clients.
const DRAIN_TIMEOUT: HumanDuration = HumanDuration::secs(30);

/// The query string of a drain request.
pub(super) type WaitQuery = Result<Query<Wait>, QueryRejection>;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Wait {
    timeout: Option<HumanDuration>,
}

/// Why a request fails.
pub(super) enum Error {
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
        error(status, &message)
    }
}

/// An error in the form of OpenAI's API.
pub(super) fn error(status: StatusCode, message: &str) -> Response {
    let kind = if status.is_server_error() { "server_error" } else { "invalid_request_error" };
    let error = json!({ "message": message, "type": kind, "param": null, "code": null });
    (status, Json(json!({ "error": error }))).into_response()
}

/// How long a drain request waits.
pub(super) fn timeout(wait: WaitQuery) -> Result<Duration, Error> {
    let Query(wait) = wait.map_err(Error::Query)?;
    Ok(wait.timeout.unwrap_or(DRAIN_TIMEOUT).0)
}

/// Parses `w1` or `1`.
pub(super) fn parse_id(id: &str) -> Result<WorkerId, Error> {
    let number = id.strip_prefix('w').unwrap_or(id).parse();
    number.map(WorkerId).map_err(|_| Error::NoSuchWorker(id.to_owned()))
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
