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

mod access;
mod body;
mod cache;
mod chat;
mod choice;
mod choices;
mod completions;
mod controls;
mod detokenize;
mod encode;
mod endpoint;
mod error;
mod exposition;
mod fields;
mod generation;
mod known;
mod log_limit;
mod metrics;
mod model;
mod name;
mod observe;
mod operations;
mod scores;
mod serve;
mod special;
mod sse;
mod stop;
mod template;
#[cfg(test)]
#[path = "../tests/it/tiny.rs"]
mod tiny;
mod tokenize;
mod upload;
mod urgency;
mod vocabulary;
mod work;

pub use access::{Origin, guard_admin};
pub use cache::{Domains, SecretError};
pub use serve::{Server, Shutdown};
pub use urgency::TenantHeader;

use axum::Router;
use axum::middleware::{from_fn, from_fn_with_state};
use axum::routing::{get, post};
use prometheus::Registry;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use std::sync::Arc;
use units::{ByteSize, HumanDuration};
use worker::engine::{Engine, ModelCard};

/// Settings of the HTTP API: the `[frontend]` section of the configuration.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Settings {
    /// Maximum size of a request body. Default 16 MiB: four times a million tokens of text.
    pub max_body: ByteSize,
    /// Maximum size of all request bodies that are read or processed at the same time, without the first 64 KiB of
    /// each. Default 256 MiB: 16 of the largest. Further requests get 429. A body takes up to four times its size while
    /// it is processed, but few are processed at the same time.
    pub max_inflight_bodies: ByteSize,
    /// Maximum number of choices (prompts times `n`) that run at the same time for one connection. Default 256: twice
    /// the largest request, and more than the 200 streams that a proxy multiplexes over a connection. Further requests
    /// get 429.
    pub max_choices_per_connection: usize,
    /// Maximum number of choices that run at the same time for one tenant. It does not limit requests without a tenant.
    /// Default 1024: the queue of one engine. Further requests get 429.
    pub max_choices_per_tenant: usize,
    /// The header in which a trusted proxy names the tenant of a request. Default none: all requests are of one tenant.
    /// A client that can set the header itself can claim any tenant, so set it only behind a proxy that replaces the
    /// header.
    pub tenant_header: Option<TenantHeader>,
    /// A file with the secret from which cache domains of tenants are derived, at least 16 bytes. Default none: tenants
    /// share no blocks either way, but a reader of the store can test whether a tenant has blocks of a known prompt.
    pub tenant_secret_file: Option<PathBuf>,
    /// Maximum number of open connections. Default 4096: more clients than one node serves, at about 20 KiB each. At
    /// most half of the limit of open files. At the maximum the connection that is idle for longest is closed; when
    /// none is idle, a few more are accepted for health checks and metrics only.
    pub max_connections: usize,
    /// Time within which the headers of a request must arrive. Default 10 s: they are one packet or a few.
    pub header_timeout: HumanDuration,
    /// Maximum size of a request's headers, at least 8 KiB. Default 64 KiB: proxies add a few KiB of cookies and
    /// traces.
    pub max_headers: ByteSize,
    /// Time after which a connection without a request is closed. Default 75 s: longer than the 60 s for which load
    /// balancers keep theirs, so that they close first and no request meets a closed connection.
    pub idle_timeout: HumanDuration,
    /// Time for which a client may pause within a request's body. Default 30 s.
    pub body_timeout: HumanDuration,
    /// Minimum average rate, as a size per second, of a body that takes longer than `body_timeout`. Default 1000 B per
    /// second: a slow mobile line is ten times faster.
    pub min_body_rate: ByteSize,
    /// Time for which a client may stop reading its response. Default 30 s: the system buffers megabytes before that.
    pub write_timeout: HumanDuration,
    /// Time after SIGTERM for which the listener stays open while `/ready` and new requests get 503. Default 5 s: load
    /// balancers check every few seconds. It is a part of `shutdown_timeout`.
    pub shutdown_delay: HumanDuration,
    /// Names of this server that requests may have in `Host`, besides its addresses and `localhost`; `*` for any.
    /// Default none: on a loopback address no other is allowed, which keeps out web pages that rebind a name to it. On
    /// other addresses any name is allowed unless some are named here.
    pub allowed_hosts: Vec<String>,
    /// Origins of web pages that may use the API from a browser, like `https://chat.example.com`; `*` for any. Default
    /// none: requests of pages of other sites are refused.
    pub cors_origins: Vec<Origin>,
    /// Read the text of special tokens in messages, like `<|im_end|>`, as these tokens. Default false: such text is
    /// encoded as text, because with it a message could end its turn and write the next one. Completions always read it
    /// as tokens.
    pub parse_special_tokens: bool,
    /// Where a request does not say how to sample, do as the model's `generation_config.json` says, as vLLM and SGLang
    /// do. Default true. With false, OpenAI's defaults hold for every model.
    pub use_generation_config: bool,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            max_body: ByteSize(16 << 20),
            max_inflight_bodies: ByteSize(256 << 20),
            max_choices_per_connection: 256,
            max_choices_per_tenant: 1024,
            tenant_header: None,
            tenant_secret_file: None,
            max_connections: 4096,
            header_timeout: HumanDuration::secs(10),
            max_headers: ByteSize(64 << 10),
            idle_timeout: HumanDuration::secs(75),
            body_timeout: HumanDuration::secs(30),
            min_body_rate: ByteSize(1000),
            write_timeout: HumanDuration::secs(30),
            shutdown_delay: HumanDuration::secs(5),
            allowed_hosts: Vec::new(),
            cors_origins: Vec::new(),
            parse_special_tokens: false,
            use_generation_config: true,
        }
    }
}

impl Settings {
    fn access(&self) -> access::Access {
        let hosts = self.allowed_hosts.iter().map(|host| host.trim_end_matches('.').to_ascii_lowercase()).collect();
        access::Access { hosts, origins: self.cors_origins.clone() }
    }
}

/// What every handler sees.
pub(crate) struct Gate {
    pub(crate) engine: Arc<dyn Engine>,
    pub(crate) registry: Registry,
    pub(crate) metrics: metrics::Metrics,
    pub(crate) models: model::Models,
    pub(crate) lanes: work::Lanes,
    pub(crate) bodies: body::Memory,
    pub(crate) choices: choices::Choices,
    pub(crate) domains: cache::Domains,
    pub(crate) settings: Settings,
    pub(crate) lines: Arc<observe::Lines>,
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

/// The routes, in front of `engine`. Registers the front door's metrics in `registry`, and serves all of it at
/// `/metrics`; fails when it was done before on the same registry. Reads the secret that the settings name.
pub fn router(engine: Arc<dyn Engine>, registry: Registry, settings: Settings) -> Result<Router, OpenError> {
    let metrics = metrics::Metrics::new(&registry)?;
    let domains = cache::Domains::open(&settings)?;
    let access = Arc::new(settings.access());
    let models = model::Models::new(model::Options {
        parse_special_tokens: settings.parse_special_tokens,
        ignore_generation_config: !settings.use_generation_config,
    });
    let gate = Arc::new(Gate {
        engine,
        registry,
        metrics,
        models,
        lanes: work::Lanes::default(),
        bodies: body::Memory::new(&settings),
        choices: choices::Choices::new(&settings),
        lines: Arc::default(),
        domains,
        settings,
    });
    Ok(Router::new()
        .route("/v1/chat/completions", post(endpoint::answer::<chat::Chat>))
        .route("/v1/completions", post(endpoint::answer::<completions::Completion>))
        .route("/v1/models", get(operations::models))
        .route("/v1/models/{*id}", get(operations::model))
        .route("/tokenize", post(tokenize::tokenize))
        .route("/detokenize", post(tokenize::detokenize))
        .route("/version", get(operations::version))
        .route("/ping", get(operations::ready).post(operations::ready))
        .route("/health", get(operations::ready))
        .route("/ready", get(operations::ready))
        .route("/live", get(operations::live))
        .route("/metrics", get(operations::metrics))
        .fallback(operations::no_route)
        .method_not_allowed_fallback(operations::no_method)
        .layer(from_fn(access::admit))
        .layer(from_fn(move |request, next| access::check(access.clone(), request, next)))
        .layer(from_fn_with_state(gate.clone(), upload::discard_rest))
        .layer(from_fn_with_state(gate.clone(), observe::observe))
        .with_state(gate))
}

/// Logs what about a model will make requests fail, so that it is seen at the start and not with the first request.
pub fn check_model(card: &Arc<ModelCard>) {
    let model = card.id.as_str();
    match model::Model::new(Arc::clone(card), model::Options::default()) {
        Ok(made) => {
            if let Some(problem) = made.template_problem() {
                tracing::warn!(model, problem, "chat requests will be rejected; completion requests are served");
            }
        }
        Err(error) => tracing::warn!(model, %error, "requests for this model will fail"),
    }
}
