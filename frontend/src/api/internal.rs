//! The HTTP API of a process that serves no clients but other processes of the deployment.

use super::operations;
use super::routes::check_access;
use crate::error::Error;
use crate::metrics::Scrapes;
use crate::settings::Settings;
use axum::Router;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use prometheus::Registry;
use std::sync::Arc;
use worker::engine::Readiness;

/// What `/ready` says.
pub trait Health: Send + Sync + 'static {
    /// Whether requests can be served.
    fn readiness(&self) -> Readiness;

    /// Failed components without which requests are still served.
    fn degraded(&self) -> Vec<String>;
}

/// `routes`, with health checks, version and metrics beside them, and with the access checks. During shutdown `/ready`
/// answers 503, and `routes` are still served.
pub fn internal_router(routes: Router, health: Arc<dyn Health>, registry: Registry, settings: &Settings) -> Router {
    let ready = get(ready).with_state(health);
    let metrics = async |State(scrapes): State<Arc<Scrapes>>, headers: HeaderMap| {
        operations::respond_metrics(&scrapes, &headers).await
    };
    let router = routes
        .route("/ready", ready.clone())
        .route("/health", ready)
        .route("/live", get(operations::live))
        .route("/version", get(operations::version))
        .route("/metrics", get(metrics).with_state(Arc::new(Scrapes::new(registry))))
        .fallback(operations::no_worker_route)
        .method_not_allowed_fallback(operations::no_method);
    check_access(router, settings)
}

async fn ready(State(health): State<Arc<dyn Health>>, connection: operations::Connection) -> Response {
    if operations::is_shutting_down(connection) {
        return Error::ShuttingDown.into_response();
    }
    operations::respond_ready(health.readiness(), || health.degraded())
}
