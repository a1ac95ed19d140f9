//! The routes and the layers around them.

use super::chat::Chat;
use super::completions::Completion;
use super::{generate, operations, relay, tokenize};
use crate::error::Error;
use crate::http::access::{self, AccessRules};
use crate::http::authenticate::{Authentication, authenticate};
use crate::http::request_context::{self, Observer};
use crate::http::upload::{self, UploadLimits};
use crate::http::{BodyMemory, Via};
use crate::keys::{ApiKeys, KeyFileError};
use crate::limits::{ChoiceLimits, WorkQueues};
use crate::metrics::{Metrics, Scrapes};
use crate::model::{ModelCache, ModelOptions};
use crate::params::{CacheDomains, SecretError};
use crate::settings::Settings;
use crate::state::AppState;
use crate::tokenizers::Tokenizers;
use axum::Router;
use axum::extract::{Request, State};
use axum::handler::Handler;
use axum::http::HeaderName;
use axum::middleware::{Next, from_fn, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use futures::future::BoxFuture;
use prometheus::Registry;
use spans::Tracer;
use std::collections::BTreeMap;
use std::sync::Arc;
use worker::engine::Engine;

/// Every request of the admin API must have this header, with any value.
const ADMIN: HeaderName = HeaderName::from_static("x-blockyard-admin");

/// Why the routes cannot be built.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The registry has the frontend's metrics already.
    #[error(transparent)]
    Metrics(#[from] prometheus::Error),
    /// The secret file of cache domains cannot be used.
    #[error(transparent)]
    Secret(#[from] SecretError),
    /// The file of API keys cannot be used.
    #[error("frontend.api_keys_file: {0}")]
    Keys(#[from] KeyFileError),
}

/// The routes of the HTTP API before `engine`.
///
/// Registers the frontend's metrics in `registry` and serves all of the registry at `/metrics`; fails if they are
/// registered already. Reads the files that the settings name. With a file of API keys it must be called within a
/// runtime, whose task follows changes of the file.
pub fn router(engine: Arc<dyn Engine>, registry: Registry, settings: Settings) -> Result<Router, OpenError> {
    let tokenizers = Arc::new(Tokenizers::new(BTreeMap::new(), &registry)?);
    router_with(Parts { tokenizers, tracer: Tracer::off() }, engine, registry, settings)
}

/// What the API uses besides an engine.
pub struct Parts {
    /// The tokenizers of relayed models.
    pub tokenizers: Arc<Tokenizers>,
    /// Begins the traces of requests.
    pub tracer: Tracer,
}

/// As [`router`], with these parts.
pub fn router_with(
    Parts { tokenizers, tracer }: Parts,
    engine: Arc<dyn Engine>,
    registry: Registry,
    settings: Settings,
) -> Result<Router, OpenError> {
    let metrics = Metrics::new(&registry, settings.tenant_metrics)?;
    metrics.follow_models(&engine);
    let domains = CacheDomains::open(&settings)?;
    let models = ModelCache::new(ModelOptions {
        parse_special_tokens: settings.parse_special_tokens,
        ignore_generation_config: !settings.use_generation_config,
    });
    let keys = ApiKeys::open(settings.api_keys_file.clone(), settings.api_key, metrics.key_reloads.clone())?;
    if let Some((tenants, keys)) = metrics.tenants.as_ref().zip(keys.as_ref()) {
        tenants.export_limits(keys);
    }
    let (metrics_need_key, tenant_header) = (settings.metrics_need_key, settings.tenant_header.clone());
    let authentication = |keys| Authentication { keys, metrics_need_key, tenant_header };
    let layers = Arc::new(Layers {
        observer: Observer::new(metrics.clone(), tracer),
        uploads: UploadLimits::new(&settings),
        access: AccessRules::new(&settings),
        authentication: keys.clone().map(authentication),
    });
    let state = Arc::new(AppState {
        engine,
        scrapes: Scrapes::new(registry),
        metrics,
        models,
        tokenizers,
        work: WorkQueues::default(),
        body_memory: BodyMemory::new(&settings),
        choices: ChoiceLimits::new(&settings),
        stored_objects: Arc::default(),
        domains,
        via: Via::default(),
        keys,
        settings,
    });
    let ready = layers.around(operations::ready);
    let router = Router::new()
        .route("/v1/chat/completions", post(layers.around(generate::handle::<Chat>)))
        .route("/v1/completions", post(layers.around(generate::handle::<Completion>)))
        .route("/v1/models", get(layers.around(operations::models)))
        .route("/v1/models/{*id}", get(layers.around(operations::model)))
        .route("/tokenize", post(layers.around(tokenize::tokenize)))
        .route("/detokenize", post(layers.around(tokenize::detokenize)))
        .route("/version", get(layers.around(operations::version)))
        .route("/ping", get(ready.clone()).post(ready.clone()))
        .route("/health", get(ready.clone()))
        .route("/ready", get(ready))
        .route("/live", get(layers.around(operations::live)))
        .route("/metrics", get(layers.around(operations::metrics)))
        .fallback(layers.around(relay::fallback))
        .method_not_allowed_fallback(layers.around(operations::no_method));
    Ok(router.with_state(state))
}

/// What a request passes on its way to its handler.
struct Layers {
    observer: Observer,
    uploads: UploadLimits,
    access: AccessRules,
    /// `None`: requests need no key.
    authentication: Option<Authentication>,
}

/// A handler behind the layers.
///
/// Layers of a router would be cloned for every request together with all below them, which takes several allocations
/// each.
#[derive(Clone)]
struct Layered<H> {
    layers: Arc<Layers>,
    handler: H,
}

impl Layers {
    fn around<H>(self: &Arc<Self>, handler: H) -> Layered<H> {
        Layered { layers: Arc::clone(self), handler }
    }

    async fn pass(&self, request: Request, handler: impl AsyncFnOnce(Request) -> Response) -> Response {
        let authenticated = async |request| match &self.authentication {
            Some(authentication) => authenticate(authentication, request, handler).await,
            None => handler(request).await,
        };
        let checked = async |request| access::check_and_admit(&self.access, request, authenticated).await;
        let read = async |request| upload::discard_rest(&self.uploads, request, checked).await;
        request_context::observe(&self.observer, request, read).await
    }
}

impl<H: Handler<T, Arc<AppState>>, T> Handler<T, Arc<AppState>> for Layered<H> {
    type Future = BoxFuture<'static, Response>;

    fn call(self, request: Request, state: Arc<AppState>) -> Self::Future {
        let Self { layers, handler } = self;
        Box::pin(async move { layers.pass(request, async |request| handler.call(request, state).await).await })
    }
}

/// Adds the access checks to the admin API, and requires the header `x-blockyard-admin`.
///
/// A web page cannot send that header to another site without a preflight request, which is rejected. `settings` names
/// the hosts of this server.
pub fn guard_admin(router: Router, settings: &Settings) -> Router {
    let header = async |request: Request, next: Next| {
        if request.headers().contains_key(ADMIN) {
            next.run(request).await
        } else {
            Error::NoAdminHeader.into_response()
        }
    };
    let router = router.fallback(operations::no_admin_route).method_not_allowed_fallback(operations::no_method);
    check_access(router.layer(from_fn(header)), settings)
}

/// Adds the access checks; pages of other sites may use nothing.
pub(super) fn check_access(router: Router, settings: &Settings) -> Router {
    let access = Arc::new(AccessRules { origins: Vec::new(), ..AccessRules::new(settings) });
    router.layer(from_fn_with_state(access, async |State(access): State<Arc<AccessRules>>, request, next: Next| {
        access::check(&access, request, async |request| next.run(request).await).await
    }))
}
