//! One process: which roles it has, and how they are put together.
//!
//! ```text
//!   front door ─▶ router ─▶ worker … worker      each an Engine
//!                   ▲          │  one Runtime: weights, compute threads
//!                   │          ▼
//!                planes ◀── G1 ⇄ G2 per worker ⇄ G3 of the process ⇄ a pod's folder ⇄ G4 of all
//! ```
//! The door opens before anything is loaded: probes get answers from the first second on, and whoever asks for a completion
//! too early is told to come again.

pub mod sizes;

pub(crate) mod transforms;
mod health;
mod model;
mod preflight;
mod quotas;
mod store_metrics;
mod cache_audit;
pub(crate) mod stores;
pub(crate) mod gc;
mod usage;
mod workers;

pub(crate) use transforms::Transforms;
pub use preflight::{Refused, preflight};
pub use cache_audit::{CacheAudit, TierAudit};
pub(crate) use stores::access;

use crate::node::banner::Banner;
use crate::config::{Config, Listen};
use crate::process::machine::{self, Machine};
use crate::process::panics;
use crate::process;
use anyhow::{Context, anyhow, bail};
use frontend::{Server, Shutdown};
use futures::future::join_all;
use health::{Health, Watched};
use kvbm::permissions;
use prometheus::Registry;
use router::Router;
use sizes::{Needs, Sizes};
use std::ffi::OsStr;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use stores::Stores;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, timeout_at};
use tokio_util::task::AbortOnDropHandle;
use usage::CacheUsage;
use worker::engine::{Engine, Readiness};
use worker::plane::RouterId;
use worker::plane::local::{Bus, Roster};
use worker::serve::Planes;
use workers::{Member, Shared};

/// Every role in one process. Dropping it ends it at once; [`Node::shutdown`] ends it well.
#[must_use = "dropping a node ends it"]
pub struct Node {
    banner: Banner,
    registry: Registry,
    closing: Closing,
    server: Server,
    door: JoinHandle<io::Result<()>>,
    router: Arc<Router>,
    members: Vec<Member>,
    stores: Stores,
    audit: Arc<CacheAudit>,
    drain: Duration,
    shutdown_delay: Duration,
    /// When blocks must be written, once the shutdown was announced.
    deadline: Option<Instant>,
    /// Looks for shredded domains.
    _shreds: Option<AbortOnDropHandle<()>>,
}

/// Closes the front door when dropped.
struct Closing(Shutdown);

impl Drop for Closing {
    fn drop(&mut self) {
        self.0.close(Duration::ZERO);
    }
}

/// Of the time to drain, what requests get; blocks that are still being written get the rest.
const FOR_REQUESTS: f64 = 0.8;

/// How long the router may take to see the workers, which are in the same process.
const JOIN_MAX: Duration = Duration::from_secs(10);

impl Node {
    /// Starts every role, and resolves when requests are served.
    pub async fn start(config: &Config) -> anyhow::Result<Self> {
        // The port first: it is what goes wrong most, and nothing has been loaded yet.
        let listener = listen(&config.listen).await?;
        let address = listener.local_addr()?;
        let checked = config.clone();
        tokio::task::spawn_blocking(move || preflight(&checked))
            .await
            .context("checking the configuration failed")??;
        permissions::named_dir(&config.data_dir, is_ours)
            .with_context(|| format!("cannot create the data folder {}", config.data_dir.display()))?;
        let machine = Machine::survey();
        let threads = config.threads.on(machine.threads);
        let registry = Registry::new();
        process::register(&registry)?;
        let planes = Planes { discovery: Arc::new(Roster::default()), events: Arc::new(Bus::default()) };
        let router = Router::new(
            identity(),
            Arc::clone(&planes.discovery),
            Arc::clone(&planes.events),
            config.router.clone(),
            &registry,
        )?;
        panics::register(&registry)?;
        let health = Arc::new(Health::default());
        let engine = Watched { router: Arc::clone(&router), health: Arc::clone(&health) };
        let mut settings = config.frontend.clone();
        settings.max_connections = max_connections(settings.max_connections, machine::open_files());
        let server = Server::new(&settings, &registry)?;
        let app = frontend::router(Arc::new(engine), registry.clone(), settings)?;
        // From here on an early end closes the door.
        let closing = Closing(Shutdown::default());
        let door = tokio::spawn({
            let (server, shutdown) = (server.clone(), closing.0.clone());
            async move { server.serve(listener, app, shutdown).await }
        });

        let runtime = model::open(&config.model, &config.data_dir, threads, &machine).await?;
        frontend::check_model(runtime.card());
        let needs = Needs::of(&runtime.shape());
        let disks = sizes::disks(&config.tiers, &config.data_dir, machine::space);
        let sizes = Sizes::settle(&config.tiers, config.workers.count(), needs, &machine, &disks)?;
        let domains = frontend::Domains::open(&config.frontend)?;
        let domain = config.frontend.tenant_header.is_some().then_some(|tenant: &str| domains.of(tenant));
        let shares = quotas::shares(&config.tiers.quotas, quotas::Room::of(config, &sizes), domain)?;
        let blocks = kvbm::Metrics::new(&registry)?;
        let transforms = Transforms::open(config, &blocks).await?;
        let stores = Stores::open(config, &disks, &shares, &planes, &transforms, needs.block, &registry).await?;
        stores.observe(&registry)?;
        stores.watch(&health);
        let shared = Shared::new(Arc::clone(&runtime), sizes, planes, &stores, config.engine, blocks, &registry)?;
        let shared = shared.with_shares(shares);
        let mut members = Vec::new();
        for (number, phase) in config.workers.phases().enumerate() {
            members.push(shared.start(number as u64 + 1, phase).await?);
        }
        seen(&router).await?;
        let workers = members.iter().map(Member::blocks).collect();
        let shreds = transforms.follow_shreds(members.iter().map(Member::blocks).map(|(_, blocks)| blocks));
        let audit = Arc::new(CacheAudit { router: Arc::clone(&router), workers, stores: stores.counts() });
        registry.register(Box::new(CacheUsage::of(Arc::downgrade(&audit), stores.weak())?))?;
        let banner = Banner {
            model: Arc::clone(runtime.card()),
            address,
            phases: config.workers.phases().collect(),
            threads,
            sizes,
            disks: disks.into_iter().map(|disk| disk.folder).collect(),
            data_dir: config.data_dir.clone(),
            pod: config.tiers.g3_5.clone(),
            shared: config.tiers.g4.url.clone(),
        };
        let (drain, shutdown_delay) = (config.shutdown_timeout.0, config.frontend.shutdown_delay.0);
        let deadline = None;
        Ok(Self {
            banner,
            registry,
            closing,
            server,
            door,
            router,
            members,
            stores,
            audit,
            drain,
            shutdown_delay,
            deadline,
            _shreds: shreds,
        })
    }

    /// What there is to say about the node.
    pub fn banner(&self) -> &Banner {
        &self.banner
    }

    /// Who places requests.
    pub fn router(&self) -> &Arc<Router> {
        &self.router
    }

    /// What audit where, and what is believed to.
    pub fn audit(&self) -> &Arc<CacheAudit> {
        &self.audit
    }

    /// What is measured.
    pub fn registry(&self) -> &Registry {
        &self.registry
    }

    /// Where the front door listens.
    pub fn address(&self) -> SocketAddr {
        self.banner.address
    }

    /// Resolves when the node can serve no more, with the reason. A worker that dies leaves; the others go on.
    pub async fn failed(&mut self) -> anyhow::Error {
        match (&mut self.door).await {
            Ok(Ok(())) => anyhow!("the HTTP server stopped"),
            Ok(Err(error)) => anyhow::Error::from(error).context("the HTTP server failed"),
            Err(panic) => anyhow::Error::from(panic).context("the HTTP server failed"),
        }
    }

    /// Serves HTTP with the limits of the front door.
    pub fn server(&self) -> &Server {
        &self.server
    }

    /// Refuses new requests and waits until load balancers have noticed: `frontend.shutdown_delay`, within the time to drain.
    pub async fn announce_shutdown(&mut self) {
        let now = Instant::now();
        self.deadline = Some(now + self.drain);
        self.closing.0.announce();
        sleep(self.shutdown_delay.min(self.drain.mul_f64(FOR_REQUESTS))).await;
    }

    /// Accepts nothing more, lets requests finish and blocks come to rest, each within its part of the time to drain.
    pub async fn shutdown(self) {
        let deadline = self.deadline.unwrap_or_else(|| Instant::now() + self.drain);
        let for_blocks = self.drain.mul_f64(1.0 - FOR_REQUESTS);
        self.closing.0.close(deadline.saturating_duration_since(Instant::now()).saturating_sub(for_blocks));
        // The door keeps its own deadline, and says so in the log.
        if !self.door.is_finished() {
            let _ = self.door.await;
        }
        let (serving, managers): (Vec<_>, Vec<_>) = self.members.into_iter().map(Member::into_parts).unzip();
        let finished = async {
            join_all(serving.into_iter().map(worker::serve::Worker::drain)).await;
            join_all(managers.iter().map(kvbm::BlockManager::flush)).await;
        };
        if timeout_at(deadline, finished).await.is_err() {
            tracing::warn!("blocks were still being written after the shutdown timeout; they will be recomputed");
        }
        drop((managers, self.audit));
        self.router.stop().await;
        self.stores.close(deadline).await;
    }
}

/// How many connections there may be, where the process may have `files` open: half of them, since tiers and the shared store
/// need theirs.
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

/// Whether an entry of the data folder belongs to the program.
fn is_ours(name: &OsStr) -> bool {
    [sizes::G3_FOLDER, transforms::SHELF, "models"].iter().any(|ours| name == *ours)
}

/// Opens a port, or says what to do about it.
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

/// A name for this life of this process's router that no other router has.
fn identity() -> RouterId {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    RouterId(since.as_nanos() as u64 ^ u64::from(std::process::id()) << 48)
}

/// Waits until the router has seen a worker that decodes.
async fn seen(router: &Router) -> anyhow::Result<()> {
    let late = Instant::now() + JOIN_MAX;
    loop {
        match router.readiness() {
            Readiness::Ready => return Ok(()),
            Readiness::NotReady(why) if Instant::now() > late => bail!("the router is not ready: {why}"),
            Readiness::NotReady(_) => sleep(Duration::from_millis(2)).await,
        }
    }
}
