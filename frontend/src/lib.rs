//! The front door: speaks OpenAI's HTTP to clients and holds one [`Engine`], never knowing which.
//!
//! ```text
//!   POST /v1/chat/completions ─ template ─┐
//!                                         ├─ tokenise ─ Engine ─ detokenise ─ stop strings ─ JSON or SSE
//!   POST /v1/completions ─────────────────┘
//! ```
//!
//! Text becomes tokens and tokens become text here, and only here. Which worker computes them is not known here.

#![forbid(unsafe_code)]

mod error;
mod metrics;
mod operations;
mod serve;

pub use serve::serve;

use axum::Router;
use axum::routing::get;
use prometheus::{Registry, TextEncoder};
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use worker::engine::Engine;

/// What can be chosen about the front door.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Settings {
    /// The largest request body. Default 16 MiB: a million tokens of text four times over.
    pub body_bytes_max: usize,
}

impl Default for Settings {
    fn default() -> Self {
        Self { body_bytes_max: 16 << 20 }
    }
}

/// What every handler sees.
pub(crate) struct Gate {
    pub(crate) engine: Arc<dyn Engine>,
    pub(crate) registry: Registry,
    pub(crate) metrics: metrics::Metrics,
    pub(crate) settings: Settings,
}

/// The routes, in front of `engine`. Registers the front door's metrics in `registry`, and serves all of it at `/metrics`;
/// fails when it was done before on the same registry.
pub fn router(engine: Arc<dyn Engine>, registry: Registry, settings: Settings) -> Result<Router, prometheus::Error> {
    let metrics = metrics::Metrics::new(&registry)?;
    let gate = Arc::new(Gate { engine, registry, metrics, settings });
    Ok(Router::new()
        .route("/v1/models", get(operations::models))
        .route("/v1/models/{*id}", get(operations::model))
        .route("/health", get(operations::ready))
        .route("/ready", get(operations::ready))
        .route("/live", get(operations::live))
        .route("/metrics", get(operations::metrics))
        .fallback(operations::no_route)
        .method_not_allowed_fallback(operations::no_method)
        .with_state(gate))
}

fn metrics_text(registry: &Registry) -> Result<String, prometheus::Error> {
    TextEncoder::new().encode_to_string(&registry.gather())
}
