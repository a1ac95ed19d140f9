//! The front door: speaks OpenAI's HTTP to clients and holds one [`Engine`], never knowing which.
//!
//! ```text
//!   POST /v1/chat/completions ─ template ─┐
//!                                         ├─ tokenise ─ Engine ─ detokenise ─ stop strings ─ JSON or SSE
//!   POST /v1/completions ─────────────────┘
//! ```
//!
//! Text becomes tokens and tokens become text here, and only here. Which worker computes them is not known here.
//!
//! ```no_run
//! # use std::{io, sync::Arc, time::Duration};
//! # use tokio_util::sync::CancellationToken;
//! # async fn run(engine: Arc<dyn worker::engine::Engine>) -> Result<(), Box<dyn std::error::Error>> {
//! let metrics = prometheus::Registry::new();
//! let router = frontend::router(engine, metrics, frontend::Settings::default())?;
//! let listener = tokio::net::TcpListener::bind("127.0.0.1:8000").await?;
//! let shutdown = CancellationToken::new(); // whoever cancels it has 25 s of patience
//! frontend::serve(listener, router, shutdown, Duration::from_secs(25)).await?;
//! # Ok(())
//! # }
//! ```

#![forbid(unsafe_code)]

mod body;
mod cache;
mod chat;
mod choice;
mod completions;
mod controls;
mod detokenize;
mod endpoint;
mod error;
mod fields;
mod generation;
mod metrics;
mod model;
mod name;
mod observe;
mod operations;
mod serve;
mod sse;
mod stop;
mod template;
#[cfg(test)]
#[path = "../tests/it/tiny.rs"]
mod tiny;
mod urgency;
mod vocabulary;

pub use cache::{Domains, SecretError};
pub use serve::serve;
pub use urgency::TenantHeader;

use axum::Router;
use axum::middleware::from_fn_with_state;
use axum::routing::{get, post};
use prometheus::{Registry, TextEncoder};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use std::sync::Arc;
use worker::engine::Engine;

/// What can be chosen about the front door.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Settings {
    /// The largest request body. Default 16 MiB: a million tokens of text four times over.
    pub body_bytes_max: usize,
    /// The header in which a trusted proxy says for whom a request is. Default none: everybody is one tenant. A client that can
    /// set it itself can be anybody, so name it only behind a proxy that replaces it.
    pub tenant_header: Option<TenantHeader>,
    /// A file with the secret that tenants' cache domains are derived from, at least 16 bytes. Default none: tenants share no
    /// blocks all the same, but who reads a store may try what somebody's blocks would be called.
    pub tenant_secret_file: Option<PathBuf>,
}

impl Default for Settings {
    fn default() -> Self {
        Self { body_bytes_max: 16 << 20, tenant_header: None, tenant_secret_file: None }
    }
}

/// What every handler sees.
pub(crate) struct Gate {
    pub(crate) engine: Arc<dyn Engine>,
    pub(crate) registry: Registry,
    pub(crate) metrics: metrics::Metrics,
    pub(crate) models: model::Models,
    pub(crate) domains: cache::Domains,
    pub(crate) settings: Settings,
}

/// The front door cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// Its metrics are in the registry already.
    #[error(transparent)]
    Metrics(#[from] prometheus::Error),
    /// Its secret cannot be used.
    #[error(transparent)]
    Secret(#[from] SecretError),
}

/// The routes, in front of `engine`. Registers the front door's metrics in `registry`, and serves all of it at `/metrics`;
/// fails when it was done before on the same registry. Reads the secret that the settings name.
pub fn router(engine: Arc<dyn Engine>, registry: Registry, settings: Settings) -> Result<Router, OpenError> {
    let metrics = metrics::Metrics::new(&registry)?;
    let domains = cache::Domains::open(&settings)?;
    let gate = Arc::new(Gate { engine, registry, metrics, models: model::Models::default(), domains, settings });
    Ok(Router::new()
        .route("/v1/chat/completions", post(endpoint::answer::<chat::Chat>))
        .route("/v1/completions", post(endpoint::answer::<completions::Completion>))
        .route("/v1/models", get(operations::models))
        .route("/v1/models/{*id}", get(operations::model))
        .route("/health", get(operations::ready))
        .route("/ready", get(operations::ready))
        .route("/live", get(operations::live))
        .route("/metrics", get(operations::metrics))
        .fallback(operations::no_route)
        .method_not_allowed_fallback(operations::no_method)
        .layer(from_fn_with_state(gate.clone(), observe::observe))
        .with_state(gate))
}

fn metrics_text(registry: &Registry) -> Result<String, prometheus::Error> {
    TextEncoder::new().encode_to_string(&registry.gather())
}
