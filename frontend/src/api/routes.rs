//! The routes and the layers around them.

use super::chat::Chat;
use super::completions::Completion;
use super::{generate, operations, tokenize};
use crate::error::Error;
use crate::http::BodyMemory;
use crate::http::access::{self, Access};
use crate::http::request_context::{self, Observer};
use crate::http::upload::{self, UploadLimits};
use crate::limits::{Choices, Lanes};
use crate::metrics::Metrics;
use crate::model::{Models, Options};
use crate::params::{Domains, SecretError};
use crate::settings::Settings;
use crate::state::Gate;
use axum::Router;
use axum::extract::Request;
use axum::http::HeaderName;
use axum::middleware::{Next, from_fn, from_fn_with_state};
use axum::response::IntoResponse;
use axum::routing::{get, post};
use prometheus::Registry;
use std::sync::Arc;
use worker::engine::Engine;

/// Every request of the admin API has it, with any value.
const ADMIN: HeaderName = HeaderName::from_static("x-blockyard-admin");

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
    let metrics = Metrics::new(&registry)?;
    let domains = Domains::open(&settings)?;
    let access = Arc::new(Access::new(&settings));
    let uploads = UploadLimits::new(&settings);
    let observer = Observer::new(metrics.clone());
    let models = Models::new(Options {
        parse_special_tokens: settings.parse_special_tokens,
        ignore_generation_config: !settings.use_generation_config,
    });
    let gate = Arc::new(Gate {
        engine,
        registry,
        metrics,
        models,
        lanes: Lanes::default(),
        bodies: BodyMemory::new(&settings),
        choices: Choices::new(&settings),
        domains,
        settings,
    });
    Ok(Router::new()
        .route("/v1/chat/completions", post(generate::answer::<Chat>))
        .route("/v1/completions", post(generate::answer::<Completion>))
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
        .layer(from_fn_with_state(uploads, upload::discard_rest))
        .layer(from_fn_with_state(observer, request_context::observe))
        .with_state(gate))
}

/// The admin API behind the same checks, and behind a header that a web page cannot send to another site without a
/// preflight, which is refused. `settings` says which hosts are the server's own.
pub fn guard_admin(router: Router, settings: &Settings) -> Router {
    let access = Arc::new(Access { origins: Vec::new(), ..Access::new(settings) });
    let header = async |request: Request, next: Next| {
        if request.headers().contains_key(ADMIN) {
            next.run(request).await
        } else {
            Error::NoAdminHeader.into_response()
        }
    };
    router
        .fallback(operations::no_route)
        .method_not_allowed_fallback(operations::no_method)
        .layer(from_fn(header))
        .layer(from_fn(move |request, next| access::check(access.clone(), request, next)))
}
