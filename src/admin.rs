//! The admin API: workers, cache contents, log filter, configuration and its reload. It has no authentication, so it is
//! off unless `admin.listen` is set, and never shares a port with the OpenAI-compatible API or the API of workers.

pub mod own_workers;
pub mod routed_workers;

mod request;

use crate::config::Listen;
use crate::node::{CacheAudit, TierAudit, listen};
use crate::reload::{Outcome, Reload};
use axum::extract::State;
use axum::extract::rejection::StringRejection;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post, put};
use axum::{Json, Router};
use frontend::{Server, Shutdown, guard_admin};
use std::net::SocketAddr;
use std::sync::{Arc, Weak};

/// Opens the admin API, with the routes `workers` of [`routed_workers`] or [`own_workers`]. Returns its address and a
/// future that serves it while polled. It holds the node by weak references only.
pub async fn open(
    at: &Listen,
    reload: Arc<Reload>,
    audit: Weak<CacheAudit>,
    workers: Router,
    (server, settings): (Server, &frontend::Settings),
) -> anyhow::Result<(SocketAddr, impl Future<Output = ()> + use<>)> {
    let listener = listen(at, "--set admin.listen=").await?;
    let address = listener.local_addr()?;
    if !address.ip().is_loopback() {
        tracing::warn!(%address, "the admin API has no authentication and is reachable from other machines");
    }
    let app = Router::new()
        .route("/admin/config", get(async |State(reload): State<Arc<Reload>>| Json(reload.as_json())))
        .route("/admin/reload", post(reload_now))
        .route("/admin/log-filter", put(set_log_filter))
        .with_state(reload)
        .merge(Router::new().route("/admin/index", get(tiers)).with_state(audit))
        .merge(workers);
    let app = guard_admin(app, settings);
    Ok((address, async move {
        if let Err(error) = server.without_tls().serve(listener, app, Shutdown::default()).await {
            tracing::error!(%error, "admin API failed");
        }
    }))
}

async fn tiers(State(audit): State<Weak<CacheAudit>>) -> Result<Json<Vec<TierAudit>>, StatusCode> {
    let audit = audit.upgrade().ok_or(StatusCode::SERVICE_UNAVAILABLE)?;
    // Digests of millions of blocks take too long for an async thread.
    let tiers = tokio::task::spawn_blocking(move || audit.tiers()).await;
    Ok(Json(tiers.map_err(|_| StatusCode::INTERNAL_SERVER_ERROR)?))
}

/// The body is the new filter, as in `log.filter`. It stays until the next reload.
async fn set_log_filter(
    State(reload): State<Arc<Reload>>,
    filter: Result<String, StringRejection>,
) -> Result<Response, request::Error> {
    let filter = filter.map_err(request::Error::Body)?;
    Ok(match reload.set_log_filter(filter.trim()) {
        Ok(()) => Json(reload.as_json()["config"]["log.filter"].clone()).into_response(),
        Err(problem) => request::error(StatusCode::UNPROCESSABLE_ENTITY, &problem),
    })
}

async fn reload_now(State(reload): State<Arc<Reload>>) -> (StatusCode, Json<crate::reload::Report>) {
    let report = reload.now("admin");
    let status = match report.outcome {
        Outcome::Applied | Outcome::Unchanged => StatusCode::OK,
        Outcome::Rejected => StatusCode::UNPROCESSABLE_ENTITY,
    };
    (status, Json(report))
}
