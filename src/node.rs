//! One process: the components that it runs, and how they are connected. `serve` runs all of them:
//!
//! ```text
//!   frontend ─▶ router ─▶ worker … worker      each an Engine
//!                 ▲          │  one Runtime: weights, compute threads
//!                 │          ▼
//!              planes ◀── G1 ⇄ G2 per worker ⇄ G3 of the process ⇄ G3.5 of a host ⇄ G4 of all nodes
//! ```
//! With upstreams the workers are servers of other processes, and there are no tiers. `frontend` runs frontend and
//! router, `worker` the rest ([`WorkerNode`]); then the planes are on NATS. A frontend may have upstreams beside
//! workers: it registers them in planes of its own, which only its router sees.
//!
//! The HTTP server starts before the model is loaded: health checks are answered from the first second on, and
//! completions get 503 with `Retry-After` until the node is ready.

pub mod sizes;

pub(crate) mod aliases;
pub mod banner;
mod cache_audit;
mod drain_copies;
pub(crate) mod gc;
mod health;
mod http_server;
mod model;
mod native;
mod planes;
mod port_user;
mod preflight;
mod quotas;
mod refused_requests;
mod scope;
mod shutdown_timeout;
mod store_metrics;
pub(crate) mod stores;
mod tokenizers;
pub(crate) mod transforms;
mod upstreams;
mod usage;
mod worker_node;
mod workers;

pub(crate) use self::tokenizers::load as load_tokenizers;
pub use cache_audit::{CacheAudit, TierAudit};
pub use health::ReloadState;
pub(crate) use http_server::{PortError, bind, connections_within, files_for, listen};
pub(crate) use preflight::{NativeSizes, native_sizes};
pub use preflight::{Refused, preflight, restart_preflight};
pub use refused_requests::RefusedRequests;
pub(crate) use stores::access;
pub(crate) use transforms::Transforms;
pub use upstreams::{CheckedUpstream, Upstreams};
pub(crate) use upstreams::{START_SGLANG, START_VLLM};
pub use worker_node::WorkerNode;

use crate::config::{Config, Purpose};
use crate::otlp::{self, Exporter};
use crate::process::{log_writer, metrics, panics};
use aliases::{Aliased, Aliases};
use anyhow::Context;
use banner::{Banner, ClusterFacts, ExampleCertificate, Serves, UpstreamFacts};
use frontend::{KeyFile, Server, Tokenizers};
use health::{Health, MonitoredRouter};
use http_server::HttpServer;
use native::Native;
use prometheus::Registry;
use router::Router;
use scope::Scope;
use shutdown_timeout::{AT_ONCE, REQUEST_SHARE, request_share, request_time};
use spans::Tracer;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::net::TcpListener;
use tokio::time::{Instant, sleep, timeout};
use transport::CertificateMetrics;
use upstream::resolve::system_lookup;
use upstreams::AnsweredServers;
use usage::CacheUsage;
use worker::engine::{Engine, Readiness};
use worker::handoff::Peers;
use worker::llama::Limits;
use worker::plane::RouterId;
use worker::serve::Planes;

/// A process with a frontend and a router, and with all other components or none. Dropping it stops them at once;
/// [`Process::shutdown`] stops them in order.
#[must_use = "dropping a node stops it"]
pub struct Node {
    process: HttpProcess,
    router: Arc<Router>,
    /// The native engine, if it runs in this process.
    native: Option<Native>,
    upstreams: Option<Arc<Upstreams>>,
    shutdown_timeout: Duration,
    shutdown_delay: Duration,
    /// End of the shutdown timeout, once the shutdown was announced.
    deadline: Option<Instant>,
    tracer: Tracer,
    /// Sends the spans of the process, if there is a collector.
    exporter: Option<Exporter>,
}

/// What every process has: an HTTP server, and what is known of the process.
pub struct HttpProcess {
    banner: Banner,
    registry: Registry,
    http: HttpServer,
    /// Read by the metrics, too.
    audit: Arc<CacheAudit>,
    /// Read by `/ready`, too.
    reload: Arc<ReloadState>,
}

/// Time that the start waits for the upstreams to answer. Requests are served as soon as one has.
const UPSTREAM_TIMEOUT: Duration = Duration::from_secs(5);

/// Limit of the time until the router has discovered the workers of the same process.
const DISCOVERY_TIMEOUT: Duration = Duration::from_secs(10);

/// Time that the start of a frontend waits for workers, which its banner names.
const WORKERS_TIMEOUT: Duration = Duration::from_secs(2);

/// A process that runs until it is stopped.
pub trait Process {
    /// What every process has.
    fn process(&self) -> &HttpProcess;

    /// The banner that the process prints.
    fn banner(&self) -> &Banner {
        &self.process().banner
    }

    /// The metrics of the process.
    fn registry(&self) -> &Registry {
        &self.process().registry
    }

    /// The HTTP server, with the limits of the frontend.
    fn server(&self) -> &Server {
        self.process().http.server()
    }

    /// The audit of stored against indexed blocks.
    fn audit(&self) -> &Arc<CacheAudit> {
        &self.process().audit
    }

    /// What `/ready` says of the last reload of the configuration.
    fn reload_state(&self) -> &Arc<ReloadState> {
        &self.process().reload
    }

    /// Resolves when the HTTP server has failed, with the reason. A worker that fails is deregistered; the others
    /// continue.
    fn failed(&mut self) -> impl Future<Output = anyhow::Error>;

    /// What the log says when the shutdown begins, with the times that requests get. `announced`: it begins with
    /// [`announce_shutdown`](Self::announce_shutdown).
    fn shutdown_notice(&self, announced: bool) -> String;

    /// Announces the shutdown, and waits until those that send requests have noticed.
    fn announce_shutdown(&mut self) -> impl Future<Output = ()>;

    /// Stops in order, within the shutdown timeout.
    fn shutdown(self) -> impl Future<Output = ()>;
}

/// The parts of the frontend to which workers and upstreams are connected when they start.
struct Parts {
    health: Arc<Health>,
    aliases: Arc<Aliases>,
    tokenizers: Arc<Tokenizers>,
}

impl Node {
    /// Starts all components, and resolves when requests are served.
    pub async fn start(config: &Config) -> anyhow::Result<Self> {
        let listener = http_server::listen_to_clients(config).await?;
        check(config, Purpose::Serve).await?;
        let registry = Registry::new();
        let (planes, upstream_metrics) = (planes::local(), upstream::Metrics::new(&registry)?);
        let (mut node, Parts { health, aliases, tokenizers }) =
            Self::open(config, Purpose::Serve, listener, &planes, registry).await?;
        if config.upstreams.is_empty() {
            node.start_native(config, planes, &health).await?;
        } else {
            let upstreams = Upstreams::new(planes, system_lookup(), aliases, tokenizers, upstream_metrics);
            node.process.banner.serves = Serves::Upstreams(node.start_upstreams(config, upstreams, &health).await?);
            node.watch_aliases();
        }
        Ok(node)
    }

    /// Starts the frontend and the router for workers of other processes and for the upstreams of its configuration.
    /// Resolves when requests are accepted; they are served once there are workers or upstreams.
    pub async fn start_frontend(config: &Config) -> anyhow::Result<Self> {
        let listener = http_server::listen_to_clients(config).await?;
        check(config, Purpose::Frontend).await?;
        let registry = Registry::new();
        let certificates = CertificateMetrics::new("cluster", &registry)?;
        let credentials = planes::credentials(config, &certificates, &registry)?;
        // This process registers no worker and offers no log.
        let shared = planes::open(config, None, credentials, &registry).await?;
        let connection = Arc::downgrade(&shared.connection);
        // Also without upstreams: the first may come with a reload.
        let local = planes::local();
        let planes = planes::combined(shared, &local);
        let upstream_metrics = upstream::Metrics::new(&registry)?;
        let (mut node, Parts { health, aliases, tokenizers }) =
            Self::open(config, Purpose::Frontend, listener, &planes, registry).await?;
        health.watch_nats(connection);
        health.watch_certificates(certificates);
        let upstreams = Upstreams::new(local, system_lookup(), aliases, tokenizers, upstream_metrics);
        let router = Arc::clone(&node.router);
        // Not an error: workers may start later.
        let workers = timeout(WORKERS_TIMEOUT, until_discovered(&router));
        let (upstreams, _) = tokio::join!(node.start_upstreams(config, upstreams, &health), workers);
        node.watch_aliases();
        node.process.banner.serves = Serves::Cluster(ClusterFacts {
            nats: config.nats.servers.clone(),
            prefix: config.nats.prefix.clone(),
            models: router.models().iter().map(|model| model.id.clone()).collect(),
            upstreams: upstreams?,
        });
        Ok(node)
    }

    /// Opens the HTTP server and the router.
    async fn open(
        config: &Config,
        purpose: Purpose,
        listener: TcpListener,
        planes: &Planes,
        registry: Registry,
    ) -> anyhow::Result<(Self, Parts)> {
        let address = listener.local_addr()?;
        register_process_metrics(&registry)?;
        if let Some(warning) = shutdown_timeout::short_drain(config) {
            tracing::warn!("{warning}");
        }
        if let Some(note) = shutdown_timeout::long_drain(config) {
            tracing::info!("{note}");
        }
        if let Some(warning) = guessable_domains(config) {
            tracing::warn!("{warning}");
        }
        let (tracer, exporter) = otlp::start(config, purpose, &address.to_string(), &registry)?;
        let router = Router::new(
            router_id(),
            Arc::clone(&planes.discovery),
            Arc::clone(&planes.events),
            config.router.clone(),
            &registry,
        )?;
        let (health, aliases) = (Arc::new(Health::default()), Arc::new(Aliases::default()));
        let is_gateway = purpose == Purpose::Serve && !config.upstreams.is_empty();
        let engine = Arc::new(MonitoredRouter { router: Arc::clone(&router), health: Arc::clone(&health), is_gateway });
        let engine = Arc::new(Aliased::new(engine, Arc::clone(&aliases)));
        let (server, settings) = http_server::server(config.frontend.clone(), &registry)?;
        health.watch_certificates(server.certificates().clone());
        let loaded = config.clone();
        let loaded = tokio::task::spawn_blocking(move || tokenizers::load(&loaded, purpose)).await;
        let tokenizers = Arc::new(Tokenizers::new(loaded.context("loading the tokenizers failed")??, &registry)?);
        let parts = frontend::Parts { tokenizers: Arc::clone(&tokenizers), tracer: tracer.clone() };
        let app = frontend::router_with(parts, engine, registry.clone(), settings)?;
        let process = HttpProcess {
            banner: Banner {
                address,
                has_tls: config.frontend.tls_cert_file.is_some(),
                certificate: ExampleCertificate::of(&config.frontend, address.ip()),
                needs_key: config.frontend.needs_key(),
                serves: Serves::Upstreams(Vec::new()),
            },
            registry,
            // From here on an early return closes the HTTP server.
            http: HttpServer::start(server, listener, app),
            audit: Arc::new(CacheAudit { router: Some(Arc::clone(&router)), workers: Vec::new(), stores: Vec::new() }),
            reload: Arc::clone(&health.reload),
        };
        let node = Self {
            process,
            router,
            native: None,
            upstreams: None,
            shutdown_timeout: shutdown_timeout::of_frontend(config),
            shutdown_delay: config.frontend.shutdown_delay.0,
            deadline: None,
            tracer,
            exporter,
        };
        Ok((node, Parts { health, aliases, tokenizers }))
    }

    async fn start_native(&mut self, config: &Config, planes: Planes, health: &Health) -> anyhow::Result<()> {
        let (scope, peers, tracer) = (Scope::Process, Peers::default(), self.tracer.clone());
        health.set_loading(true);
        let native = Native::start(config, planes, scope, (peers, tracer), health, &self.process.registry).await?;
        let discovered = timeout(DISCOVERY_TIMEOUT, until_discovered(&self.router)).await;
        discovered.context("the router has not discovered the workers")?;
        health.set_loading(false);
        let (router, stores) = (Arc::clone(&self.router), native.stores.digests());
        self.process.audit = Arc::new(CacheAudit { router: Some(router), workers: native.managers(), stores });
        let usage = CacheUsage::of(Arc::downgrade(&self.process.audit), native.stores.weak())?;
        self.process.registry.register(Box::new(usage))?;
        self.process.banner.serves = Serves::Native(Box::new(native.facts.clone()));
        self.native = Some(native);
        Ok(())
    }

    /// Starts the upstreams, and waits until one has answered and the others have answered or failed, so that the
    /// banner names their models. If that takes longer than [`UPSTREAM_TIMEOUT`], the node starts all the same.
    async fn start_upstreams(
        &mut self,
        config: &Config,
        upstreams: Upstreams,
        health: &Health,
    ) -> anyhow::Result<Vec<UpstreamFacts>> {
        let upstreams = Arc::new(upstreams);
        health.watch_upstreams(Arc::downgrade(&upstreams));
        upstreams.apply(Upstreams::check(&config.upstreams, config.frontend.has_tenants())?);
        upstreams.set_aliases(config.aliases.clone());
        if !config.upstreams.is_empty() {
            upstreams.until_known(Instant::now() + UPSTREAM_TIMEOUT).await;
        }
        let facts = config.upstreams.iter().map(|upstream| {
            let AnsweredServers { servers, models } = upstreams.known(&upstream.url.to_string());
            UpstreamFacts { url: upstream.shown_url(), servers, models }
        });
        let facts = facts.collect();
        self.upstreams = Some(upstreams);
        Ok(facts)
    }

    /// Watches whether servers and workers have the models of the aliases.
    fn watch_aliases(&self) {
        let router = Arc::clone(&self.router);
        if let Some(upstreams) = &self.upstreams {
            upstreams.watch_aliases(move || router.models());
        }
    }

    /// The router of the node.
    pub fn router(&self) -> &Arc<Router> {
        &self.router
    }

    /// The servers behind the node, if it is a gateway.
    pub fn upstreams(&self) -> Option<&Arc<Upstreams>> {
        self.upstreams.as_ref()
    }

    /// The limits of the native engines, if they run in this process.
    pub fn limits(&self) -> Option<Vec<Arc<Limits>>> {
        self.native.as_ref().map(Native::limits)
    }

    /// Time after the announcement of a shutdown for which new requests are served.
    fn delay(&self) -> Duration {
        self.shutdown_delay.min(self.shutdown_timeout.mul_f64(REQUEST_SHARE))
    }

    /// The address of the OpenAI-compatible API.
    pub fn address(&self) -> SocketAddr {
        self.process.banner.address
    }
}

impl Process for Node {
    fn process(&self) -> &HttpProcess {
        &self.process
    }

    async fn failed(&mut self) -> anyhow::Error {
        self.process.http.failed().await
    }

    fn shutdown_notice(&self, announced: bool) -> String {
        let delay = if announced { self.delay() } else { Duration::ZERO };
        let request_time = request_time(self.shutdown_timeout);
        if delay.is_zero() {
            return format!("shutting down: no new requests are served, {request_time}; {AT_ONCE}");
        }
        format!(
            "shutting down: /ready is 503; new requests are served for {} s more (frontend.shutdown_delay), \
             {request_time}; {AT_ONCE}",
            delay.as_secs_f64()
        )
    }

    /// Makes `/ready` fail, and serves new requests for `frontend.shutdown_delay` (within the shutdown timeout) so that
    /// load balancers notice.
    async fn announce_shutdown(&mut self) {
        let now = Instant::now();
        self.deadline = Some(now + self.shutdown_timeout);
        self.process.http.announce_shutdown();
        sleep(self.delay()).await;
    }

    /// Accepts no more connections, waits for running requests, and writes blocks, each within its share of the
    /// shutdown timeout.
    async fn shutdown(mut self) {
        let deadline = self.deadline.unwrap_or_else(|| Instant::now() + self.shutdown_timeout);
        let for_blocks = self.shutdown_timeout.mul_f64(1.0 - REQUEST_SHARE);
        let limit = format!("they get {}; raise it for longer requests", request_share(self.shutdown_timeout));
        let drain = deadline.saturating_duration_since(Instant::now()).saturating_sub(for_blocks);
        self.process.http.close(drain, limit).await;
        let stores = match self.native {
            // The HTTP server has ended the requests.
            Some(native) => Some(native.drain(deadline, deadline, None, || ()).await),
            None => None,
        };
        if let Some(upstreams) = self.upstreams {
            upstreams.stop().await;
        }
        drop(self.process.audit);
        self.router.stop().await;
        if let Some(stores) = stores {
            stores.close(deadline).await;
        }
        flush_spans(self.exporter, deadline).await;
    }
}

/// The warning for tenants whose cache domains are derived from their names alone. A key file that cannot be read is an
/// error elsewhere.
fn guessable_domains(config: &Config) -> Option<&'static str> {
    let frontend::Settings { tenant_header, api_keys_file, tenant_secret_file, .. } = &config.frontend;
    let names_tenant = |path| KeyFile::read(path).is_ok_and(|file| file.keys.iter().any(|key| key.tenant.is_some()));
    let has_tenants = tenant_header.is_some() || api_keys_file.as_deref().is_some_and(names_tenant);
    (has_tenants && tenant_secret_file.is_none()).then_some(
        "requests have tenants, but frontend.tenant_secret_file is not set: the cache domain and the cache_salt of a \
         tenant can be computed from its name, so a reader of the store, or a client that reaches an upstream \
         directly, can test for its prompts; set it to a file with a secret (openssl rand -hex 32 > FILE), the same on \
         all nodes that share blocks",
    )
}

/// Sends the last spans, within what is left of the shutdown timeout.
async fn flush_spans(exporter: Option<Exporter>, deadline: Instant) {
    if let Some(exporter) = exporter {
        exporter.flush(deadline.saturating_duration_since(Instant::now())).await;
    }
}

/// An id of the router of this process, different after each start.
fn router_id() -> RouterId {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    RouterId(since.as_nanos() as u64 ^ u64::from(std::process::id()) << 48)
}

/// Waits until the router has discovered a worker that decodes.
async fn until_discovered(router: &Router) {
    while router.readiness() != Readiness::Ready {
        sleep(Duration::from_millis(2)).await;
    }
}

/// Registers the metrics that every process has.
fn register_process_metrics(registry: &Registry) -> anyhow::Result<()> {
    metrics::register(registry)?;
    panics::register(registry)?;
    log_writer::register(registry)?;
    Ok(())
}

/// Checks the configuration of a command, on a thread that may block, and that the port of the admin API is free: it is
/// opened when the model is loaded, which may take minutes.
async fn check(config: &Config, purpose: Purpose) -> anyhow::Result<()> {
    let checked = config.clone();
    tokio::task::spawn_blocking(move || preflight(&checked, purpose))
        .await
        .context("checking the configuration failed")??;
    if let Some(at) = &config.admin.listen {
        listen(at, "--set admin.listen=").await?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use frontend::{ApiKey, KeyEntry};

    #[test]
    fn tenants_without_a_secret_are_a_warning() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("keys.toml");
        let mut config = Config::with_cache("".as_ref());
        config.frontend.api_keys_file = Some(path.clone());
        let add = |tenant: Option<&str>| {
            let mut entry = KeyEntry::new(tenant.unwrap_or("none"), ApiKey::generate().unwrap().hash());
            entry.tenant = tenant.map(str::to_owned);
            KeyFile::change(&path, |file| {
                file.keys.push(entry);
                Ok(())
            })
            .unwrap();
        };
        add(None);
        assert_eq!(guessable_domains(&config), None, "no key has a tenant");
        add(Some("ann"));
        assert!(guessable_domains(&config).is_some_and(|warning| warning.contains("frontend.tenant_secret_file")));
        config.frontend.tenant_secret_file = Some(path);
        assert_eq!(guessable_domains(&config), None);
    }
}
