//! What parts of the admin API have in common: the path of a worker, the wait of a drain, and the errors.

use crate::config::HumanDuration;
use axum::Json;
use axum::extract::Query;
use axum::extract::rejection::{QueryRejection, StringRejection};
use axum::http::header::CONNECTION;
use axum::http::{HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use router::NoSuchWorker;
use serde_json::json;
use std::time::Duration;
use worker::plane::WorkerId;

/// Default time that a drain request waits before it answers 202: shorter than the timeout of most clients.
const DRAIN_TIMEOUT: HumanDuration = HumanDuration::secs(30);

/// The query string of a drain request.
pub(super) type WaitQuery = Result<Query<Vec<(String, String)>>, QueryRejection>;

/// Why a request fails.
pub(super) enum Error {
    /// The node is shutting down.
    ShuttingDown,
    /// No worker has this id.
    NoSuchWorker(String),
    /// The query string is invalid.
    Query(String),
    /// The body is too large, or is no text.
    Body(StringRejection),
}

impl From<NoSuchWorker> for Error {
    fn from(NoSuchWorker(id): NoSuchWorker) -> Self {
        Self::NoSuchWorker(id.to_string())
    }
}

impl IntoResponse for Error {
    fn into_response(self) -> Response {
        let is_of_body = matches!(self, Self::Body(_));
        let (status, message) = match self {
            Self::ShuttingDown => (StatusCode::SERVICE_UNAVAILABLE, "the node is shutting down".to_owned()),
            Self::NoSuchWorker(id) => {
                (StatusCode::NOT_FOUND, format!("there is no worker {id:?}; GET /admin/workers lists them"))
            }
            Self::Query(problem) => (StatusCode::BAD_REQUEST, problem),
            Self::Body(problem) => (problem.status(), problem.body_text()),
        };
        let mut response = error(status, &message);
        if is_of_body {
            // The rest of a body that is too large is not read. A server that says so discards what still comes, so
            // that the client gets the response.
            response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
        }
        response
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
    let Query(parameters) = wait.map_err(|problem| Error::Query(problem.body_text()))?;
    let (mut parameters, mut timeout) = (parameters.into_iter(), DRAIN_TIMEOUT);
    if let Some((name, value)) = parameters.next() {
        if name != "timeout" {
            let problem = format!("unknown parameter {name:?} in the URL; a drain has one: /drain?timeout=30s");
            return Err(Error::Query(problem));
        }
        timeout = value.parse().map_err(|problem| Error::Query(format!("timeout={value} in the URL: {problem}")))?;
    }
    match parameters.next() {
        None => Ok(timeout.0),
        Some((name, _)) => {
            Err(Error::Query(format!("parameter {name:?} after another one in the URL; a drain has one: timeout")))
        }
    }
}

/// Parses `w1` or `1`.
pub(super) fn parse_id(id: &str) -> Result<WorkerId, Error> {
    let number = id.strip_prefix('w').unwrap_or(id).parse();
    number.map(WorkerId).map_err(|_| Error::NoSuchWorker(id.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::Router;
    use axum::body::{Body, to_bytes};
    use axum::http::Request;
    use axum::routing::put;
    use serde_json::Value;
    use tower::ServiceExt;

    #[test]
    fn a_worker_id_is_w2_or_2() {
        assert!(matches!((parse_id("w2"), parse_id("2")), (Ok(WorkerId(2)), Ok(WorkerId(2)))));
        assert!(["", "w", "x2", "w-1"].iter().all(|name| parse_id(name).is_err()));
    }

    #[test]
    fn the_timeout_of_a_drain_is_one_duration_with_its_unit() {
        let of = |query: &str| {
            let uri = format!("http://localhost/admin/workers/w1/drain{query}").parse().unwrap();
            timeout(Query::try_from_uri(&uri)).map_err(|error| match error {
                Error::Query(problem) => problem,
                _ => "another error".to_owned(),
            })
        };
        assert_eq!([of(""), of("?timeout=6s"), of("?timeout=0")], [30, 6, 0].map(|s| Ok(Duration::from_secs(s))));
        let of = |query| of(query).unwrap_err();
        assert_eq!(
            of("?timeout=6"),
            "timeout=6 in the URL: expected a duration with its unit, like \"250ms\", \"30s\" or \"5m\"; write 6 \
             seconds as \"6s\""
        );
        assert!(of("?time=6s").starts_with("unknown parameter \"time\" in the URL; a drain has one"));
        assert!(of("?timeout=6s&timeout=7s").starts_with("parameter \"timeout\" after another one"));
    }

    async fn put_text(body: Result<String, StringRejection>) -> Result<String, Error> {
        body.map_err(Error::Body)
    }

    #[tokio::test]
    async fn a_body_that_is_too_large_or_no_text_gets_an_error_object() {
        let app = Router::new().route("/", put(put_text));
        for (body, status) in [(vec![0xff], 400), (vec![b'x'; 10 << 20], 413)] {
            let request = Request::put("/").body(Body::from(body)).unwrap();
            let answer = app.clone().oneshot(request).await.unwrap();
            assert_eq!(answer.status().as_u16(), status);
            assert_eq!(answer.headers()[CONNECTION], "close");
            let body: Value = serde_json::from_slice(&to_bytes(answer.into_body(), usize::MAX).await.unwrap()).unwrap();
            assert_eq!(body["error"]["type"], "invalid_request_error");
            assert!(body["error"]["message"].is_string(), "{body}");
        }
    }
}
