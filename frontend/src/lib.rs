//! The HTTP frontend: OpenAI's API before one [`Engine`](worker::engine::Engine).
//!
//! ```text
//!   api       routes, endpoints, SSE
//!    ├─ output   tokens to text: detokenization, stop strings, log-probabilities, metrics of choices
//!    ├─ params   request fields to parameters
//!    ├─ tokenizers  tokens of the prompts of servers behind a gateway
//!    ├─ model    chat template, text to tokens
//!    ├─ http     connections, TLS, access checks, bodies, request ids and log lines
//!    ├─ keys     API keys and their limits
//!    └─ limits   concurrent choices, concurrent CPU work, output of stored responses that was counted
//!
//!   POST /v1/chat/completions ─ template ─┐
//!                                         ├─ tokenize ─ Engine ─ detokenize ─ stop strings ─ JSON or SSE
//!   POST /v1/completions ─────────────────┘
//! ```
//!
//! Only this crate converts between text and tokens. It does not know which worker computes a request: a worker
//! is an `Engine`, and so is the router.
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
mod keys;
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
mod tokenizers;

pub use api::{Health, OpenError, Parts, WORKER_PORT, guard_admin, internal_router, router, router_with};
pub use http::{ClientCertificate, Server, ServerError, Shutdown, check_tls, peer_address, tls_certificate};
pub use keys::{ApiKey, KeyEntry, KeyFile, KeyFileError, KeyHash};
pub use model::{LocalTokenizer, TokenizerText, check_model};
pub use params::{CacheDomains, SecretError};
pub use settings::{Origin, RelayPath, Settings, TenantHeader};
pub use tokenizers::{RegisteredTokenizer, TokenAgreement, TokenizerComparison, Tokenizers, compare_tokenizer};
