//! One process: the components that it runs, and how they are connected.
//!
//! ```text
//!   frontend ─▶ router ─▶ worker … worker      each an Engine
//!                 ▲          │  one Runtime: weights, compute threads
//!                 │          ▼
//!              planes ◀── G1 ⇄ G2 per worker ⇄ G3 of the process ⇄ G3.5 of a host ⇄ G4 of all nodes
//! ```
//! With upstreams the workers are servers of other processes, and there are no tiers.
//!
//! The HTTP server starts before the model is loaded: health checks are answered from the first second on, and
//! completions get 503 with `Retry-After` until the node is ready.

pub mod sizes;

pub(crate) mod aliases;
pub mod banner;
mod cache_audit;
pub(crate) mod gc;
mod health;
mod model;
mod native;
mod preflight;
mod quotas;
mod store_metrics;
pub(crate) mod stores;
mod tokenizers;
pub(crate) mod transforms;
mod upstreams;
mod usage;
mod workers;

pub use cache_audit::{CacheAudit, TierAudit};
pub(crate) use preflight::{NativeSizes, native_sizes};
pub use preflight::{Refused, preflight};
pub(crate) use stores::access;
pub(crate) use transforms::Transforms;
pub(crate) use upstreams::START_VLLM;
pub use upstreams::{CheckedUpstream, Upstreams};

use crate::config::{Config, Listen};
use crate::process::machine;
use crate::process::{log_writer, metrics, panics};
use aliases::{Aliased, Aliases};
use anyhow::{Context, anyhow, bail};
use banner::{Banner, Serves, UpstreamFacts};
use frontend::{Server, Shutdown, Tokenizers};
use health::{Health, Watched};
use native::Native;
use prometheus::Registry;
use router::Router;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep};
use upstream::resolve::system_lookup;
use upstreams::Known;
use usage::CacheUsage;
use worker::engine::{Engine, Readiness};
use worker::plane::RouterId;
use worker::plane::local::{LocalDiscovery, LocalEvents};
use worker::serve::Planes;

/// All components in one process. Dropping it stops them at once; [`Node::shutdown`] stops them in order.
#[must_use = "dropping a node stops it"]
pub struct Node {
    banner: Banner,
    registry: Registry,
    close_on_drop: CloseOnDrop,
    server: Server,
    server_task: JoinHandle<io::Result<()>>,
    router: Arc<Router>,
    /// The native engine, unless upstreams are configured.
    native: Option<Native>,
    upstreams: Option<Arc<Upstreams>>,
    audit: Arc<CacheAudit>,
    shutdown_timeout: Duration,
    shutdown_delay: Duration,
    /// End of the shutdown timeout, once the shutdown was announced.
    deadline: Option<Instant>,
}

/// Closes the HTTP server when dropped.
struct CloseOnDrop(Shutdown);

impl Drop for CloseOnDrop {
    fn drop(&mut self) {
        self.0.close(Duration::ZERO);
    }
}

/// Share of the shutdown timeout that running requests get. The remainder is for writing blocks.
const REQUEST_SHARE: f64 = 0.8;

/// Time that the start waits for the first upstream to answer.
const UPSTREAM_TIMEOUT: Duration = Duration::from_secs(5);

/// Limit of the time until the router has discovered the workers of the same process.
const DISCOVERY_TIMEOUT: Duration = Duration::from_secs(10);

impl Node {
    /// Starts all components, and resolves when requests are served.
    pub async fn start(config: &Config) -> anyhow::Result<Self> {
        // The port first: it fails most often, and nothing has been loaded yet.
        let listener = listen(&config.listen).await?;
        let address = listener.local_addr()?;
        if !address.ip().is_loopback() && !config.frontend.needs_key() {
            tracing::warn!(%address, "{}", banner::OPEN_TO_ALL);
        }
        let checked = config.clone();
        tokio::task::spawn_blocking(move || preflight(&checked))
            .await
            .context("checking the configuration failed")??;
        let registry = Registry::new();
        metrics::register(&registry)?;
        let planes =
            Planes { discovery: Arc::new(LocalDiscovery::default()), events: Arc::new(LocalEvents::default()) };
        let router = Router::new(
            router_id(),
            Arc::clone(&planes.discovery),
            Arc::clone(&planes.events),
            config.router.clone(),
            &registry,
        )?;
        panics::register(&registry)?;
        log_writer::register(&registry)?;
        let upstream_metrics = upstream::Metrics::new(&registry)?;
        let health = Arc::new(Health::default());
        let aliases = Arc::new(Aliases::default());
        let engine = Arc::new(Watched { router: Arc::clone(&router), health: Arc::clone(&health) });
        let engine = Arc::new(Aliased::new(engine, Arc::clone(&aliases)));
        let mut settings = config.frontend.clone();
        settings.max_connections = max_connections(settings.max_connections, machine::open_files());
        let server = Server::new(&settings, &registry)?;
        let loaded = config.clone();
        let loaded = tokio::task::spawn_blocking(move || tokenizers::load(&loaded)).await;
        let tokenizers = Arc::new(Tokenizers::new(loaded.context("loading the tokenizers failed")??, &registry)?);
        let app = frontend::router_with_tokenizers(engine, Arc::clone(&tokenizers), registry.clone(), settings)?;
        // From here on an early return closes the HTTP server.
        let close_on_drop = CloseOnDrop(Shutdown::default());
        let server_task = tokio::spawn({
            let (server, shutdown) = (server.clone(), close_on_drop.0.clone());
            async move { server.serve(listener, app, shutdown).await }
        });

        let mut node = Self {
            banner: Banner {
                address,
                has_tls: config.frontend.tls_cert_file.is_some(),
                needs_key: config.frontend.needs_key(),
                serves: Serves::Upstreams(Vec::new()),
            },
            registry,
            close_on_drop,
            server,
            server_task,
            router: Arc::clone(&router),
            native: None,
            upstreams: None,
            audit: Arc::new(CacheAudit { router, workers: Vec::new(), stores: Vec::new() }),
            shutdown_timeout: config.shutdown_timeout.0,
            shutdown_delay: config.frontend.shutdown_delay.0,
            deadline: None,
        };
        if config.upstreams.is_empty() {
            node.start_native(config, planes, &health).await?;
        } else {
            let upstreams = Upstreams::new(planes, system_lookup(), aliases, Arc::clone(&tokenizers), upstream_metrics);
            node.start_upstreams(config, upstreams).await?;
        }
        Ok(node)
    }

    async fn start_native(&mut self, config: &Config, planes: Planes, health: &Health) -> anyhow::Result<()> {
        let native = Native::start(config, planes, health, &self.registry).await?;
        until_discovered(&self.router).await?;
        let (router, stores) = (Arc::clone(&self.router), native.stores.digests());
        self.audit = Arc::new(CacheAudit { router, workers: native.managers(), stores });
        let usage = CacheUsage::of(Arc::downgrade(&self.audit), native.stores.weak())?;
        self.registry.register(Box::new(usage))?;
        self.banner.serves = Serves::Native(Box::new(native.facts.clone()));
        self.native = Some(native);
        Ok(())
    }

    /// Starts the upstreams, and waits a moment for the first. With none the node starts all the same, and is not
    /// ready.
    async fn start_upstreams(&mut self, config: &Config, upstreams: Upstreams) -> anyhow::Result<()> {
        upstreams.apply(Upstreams::check(&config.upstreams, config.frontend.has_tenants())?);
        upstreams.set_aliases(config.aliases.clone());
        upstreams.until_known(Instant::now() + UPSTREAM_TIMEOUT).await;
        let facts = config.upstreams.iter().map(|upstream| {
            let url = upstream.url.to_string();
            let Known { servers, models } = upstreams.known(&url);
            UpstreamFacts { url, servers, models }
        });
        self.banner.serves = Serves::Upstreams(facts.collect());
        self.upstreams = Some(Arc::new(upstreams));
        Ok(())
    }

    /// The banner that `serve` prints.
    pub fn banner(&self) -> &Banner {
        &self.banner
    }

    /// The router of the node.
    pub fn router(&self) -> &Arc<Router> {
        &self.router
    }

    /// The servers behind the node, if it is a gateway.
    pub fn upstreams(&self) -> Option<&Arc<Upstreams>> {
        self.upstreams.as_ref()
    }

    /// The audit of stored against indexed blocks.
    pub fn audit(&self) -> &Arc<CacheAudit> {
        &self.audit
    }

    /// The metrics of the node.
    pub fn registry(&self) -> &Registry {
        &self.registry
    }

    /// The address of the OpenAI-compatible API.
    pub fn address(&self) -> SocketAddr {
        self.banner.address
    }

    /// Resolves when the HTTP server has failed, with the reason. A worker that fails is deregistered; the others
    /// continue.
    pub async fn failed(&mut self) -> anyhow::Error {
        match (&mut self.server_task).await {
            Ok(Ok(())) => anyhow!("the HTTP server stopped"),
            Ok(Err(error)) => anyhow::Error::from(error).context("the HTTP server failed"),
            Err(panic) => anyhow::Error::from(panic).context("the HTTP server failed"),
        }
    }

    /// The HTTP server, with the limits of the frontend.
    pub fn server(&self) -> &Server {
        &self.server
    }

    /// Refuses new requests, and waits `frontend.shutdown_delay` (within the shutdown timeout) so that load balancers
    /// notice.
    pub async fn announce_shutdown(&mut self) {
        let now = Instant::now();
        self.deadline = Some(now + self.shutdown_timeout);
        self.close_on_drop.0.announce();
        sleep(self.shutdown_delay.min(self.shutdown_timeout.mul_f64(REQUEST_SHARE))).await;
    }

    /// Accepts no more connections, waits for running requests, and writes blocks, each within its share of the
    /// shutdown timeout.
    pub async fn shutdown(self) {
        let deadline = self.deadline.unwrap_or_else(|| Instant::now() + self.shutdown_timeout);
        let for_blocks = self.shutdown_timeout.mul_f64(1.0 - REQUEST_SHARE);
        self.close_on_drop.0.close(deadline.saturating_duration_since(Instant::now()).saturating_sub(for_blocks));
        // The server has its own deadline, and logs when it is exceeded.
        if !self.server_task.is_finished() {
            let _ = self.server_task.await;
        }
        let stores = match self.native {
            Some(native) => Some(native.drain(deadline).await),
            None => None,
        };
        if let Some(upstreams) = self.upstreams {
            upstreams.stop().await;
        }
        drop(self.audit);
        self.router.stop().await;
        if let Some(stores) = stores {
            stores.close(deadline).await;
        }
    }
}

/// The limit of connections: at most half of the limit of open `files`, since tiers and object stores need files too.
fn max_connections(wanted: usize, files: Option<u64>) -> usize {
    let fit = files.map_or(usize::MAX, |files| usize::try_from(files / 2).unwrap_or(usize::MAX).max(1));
    if fit < wanted {
        tracing::warn!(
            max_connections = fit,
            configured = wanted,
            "the limit of open files allows fewer connections than configured"
        );
    }
    fit.min(wanted)
}

/// Opens a port. The error says what to change.
pub(crate) async fn listen(at: &Listen) -> anyhow::Result<TcpListener> {
    match TcpListener::bind((at.host.as_str(), at.port)).await {
        Ok(listener) => Ok(listener),
        Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
            let other = Listen { port: at.port.checked_add(1).unwrap_or(8000), ..at.clone() };
            bail!("{at} is in use by another program; stop it, or listen elsewhere: --listen {other}")
        }
        Err(error) => {
            Err(error).with_context(|| format!("cannot listen on {at}; choose another address: --listen ADDR:PORT"))
        }
    }
}

/// An id of the router of this process, different after each start.
fn router_id() -> RouterId {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    RouterId(since.as_nanos() as u64 ^ u64::from(std::process::id()) << 48)
}

/// Waits until the router has discovered a worker that decodes.
async fn until_discovered(router: &Router) -> anyhow::Result<()> {
    let deadline = Instant::now() + DISCOVERY_TIMEOUT;
    loop {
        match router.readiness() {
            Readiness::Ready => return Ok(()),
            Readiness::NotReady(why) if Instant::now() > deadline => bail!("the router is not ready: {why}"),
            Readiness::NotReady(_) => sleep(Duration::from_millis(2)).await,
        }
    }
}
