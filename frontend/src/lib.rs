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
//! # use std::sync::Arc;
//! # async fn run(engine: Arc<dyn worker::engine::Engine>) -> Result<(), Box<dyn std::error::Error>> {
//! let metrics = prometheus::Registry::new();
//! let settings = frontend::Settings::default();
//! let server = frontend::Server::new(&settings, &metrics)?;
//! let router = frontend::router(engine, metrics, settings)?;
//! let listener = tokio::net::TcpListener::bind("127.0.0.1:8000").await?;
//! let shutdown = frontend::Shutdown::default(); // `close` ends it, with a time for running requests to finish
//! server.serve(listener, router, shutdown).await?;
//! # Ok(())
//! # }
//! ```

#![forbid(unsafe_code)]

mod api;
mod error;
mod http;
mod limits;
mod metrics;
mod model;
mod output;
mod params;
mod settings;
mod state;
#[cfg(test)]
#[path = "../tests/it/tiny_tokenizer.rs"]
mod tiny_tokenizer;

pub use api::{OpenError, guard_admin, router};
pub use http::{Server, Shutdown};
pub use model::check_model;
pub use params::{Domains, SecretError};
pub use settings::{Origin, Settings, TenantHeader};
