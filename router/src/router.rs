//! The router itself: composition of its parts, and the `Engine` that others see.

use crate::admission::{self, Admission};
use crate::balance::{self, Traffic};
use crate::decide::Scratch;
use crate::dispatch;
use crate::feed::Feed;
use crate::fleet::Fleet;
use crate::index::Index;
use crate::metrics::Metrics;
use crate::probe;
use crate::promise::Promises;
use crate::replica::{self, Herald};
use crate::settings::{Rules, Settings};
use futures::FutureExt;
use futures::future::BoxFuture;
use std::fmt;
use std::panic::AssertUnwindSafe;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock};
use tokio_util::sync::{CancellationToken, DropGuard};
use tokio_util::task::TaskTracker;
use worker::engine::{self, Engine, ModelCard, OutputStream, Readiness, Request};
use worker::plane::{Discovery, Events, RouterId};

/// Many engines behaving as one.
pub struct Router {
    pub(crate) core: Arc<Core>,
    tasks: TaskTracker,
    /// Ends the tasks when the router is dropped.
    life: DropGuard,
}

/// What the parts of the router share.
pub(crate) struct Core {
    /// What requests are placed by; a decision keeps what it began with.
    rules: RwLock<Arc<Rules>>,
    pub(crate) fleet: Fleet,
    pub(crate) index: Index,
    pub(crate) promises: Arc<Promises>,
    pub(crate) metrics: Metrics,
    /// Tells other routers what is booked here.
    pub(crate) herald: Arc<Herald>,
    /// Whether this router is the one, of all that serve the same workers, that plans for them.
    pub(crate) leading: AtomicBool,
    pub(crate) traffic: Traffic,
    pub(crate) admission: Arc<Admission>,
    /// Decisions take turns, so that each sees the bookings of those before it.
    pub(crate) deciding: Mutex<Scratch>,
    /// Set when a part of the router died: it serves no more, and says so.
    dead: OnceLock<&'static str>,
}

/// The router could not be made.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A value in `[router]` is impossible.
    #[error("{0}")]
    Settings(String),
    /// A metric could not be registered.
    #[error("metrics: {0}")]
    Metrics(#[from] prometheus::Error),
}

impl Router {
    /// A router over whoever `discovery` shows, kept up to date by `events`. `id` must be its own: routers over the same
    /// workers tell each other what they book. Must be made inside a tokio runtime, on which it spawns its tasks; they end
    /// when the router is dropped.
    pub fn new(
        id: RouterId,
        discovery: Arc<dyn Discovery>,
        events: Arc<dyn Events>,
        settings: Settings,
        registry: &prometheus::Registry,
    ) -> Result<Arc<Self>, Error> {
        let core = Arc::new(Core::new(settings, registry)?);
        let (cancel, tasks) = (CancellationToken::new(), TaskTracker::new());
        let feed = Feed::new(core.clone(), events.clone()).run(discovery);
        tasks.spawn(vital("feed", core.clone(), cancel.clone(), feed));
        let others = replica::attend(core.clone(), events.clone(), id);
        tasks.spawn(vital("talk with other routers", core.clone(), cancel.clone(), others));
        let planning = balance::keep(core.clone(), events, id);
        tasks.spawn(vital("planner", core.clone(), cancel.clone(), planning));
        tasks.spawn(vital("door", core.clone(), cancel.clone(), admission::keep(core.clone())));
        tasks.spawn(vital("prober", core.clone(), cancel.clone(), probe::run(core.clone())));
        tasks.close();
        Ok(Arc::new(Self { core, tasks, life: cancel.drop_guard() }))
    }

    /// Places requests, and plans, by other settings from now on. When they are wrong, nothing changes, and the error says what is.
    pub fn retune(&self, settings: Settings) -> Result<(), Error> {
        let rules = Arc::new(Rules::new(settings).map_err(Error::Settings)?);
        self.core.index.set_budget(rules.settings.index_bytes as usize);
        *self.core.rules.write().unwrap_or_else(PoisonError::into_inner) = rules;
        Ok(())
    }

    /// Ends the router's tasks and waits for them. Streams that were started go on.
    pub async fn stop(&self) {
        self.life.token().cancel();
        self.tasks.wait().await;
    }
}

impl Core {
    pub(crate) fn new(settings: Settings, registry: &prometheus::Registry) -> Result<Self, Error> {
        let rules = Rules::new(settings).map_err(Error::Settings)?;
        let metrics = Metrics::new(registry)?;
        Ok(Self {
            fleet: Fleet::default(),
            index: Index::with_budget(rules.settings.index_bytes as usize),
            rules: RwLock::new(Arc::new(rules)),
            promises: Arc::default(),
            admission: Admission::new(&metrics),
            metrics,
            herald: Herald::new(),
            leading: AtomicBool::new(true),
            traffic: Traffic::default(),
            deciding: Mutex::default(),
            dead: OnceLock::new(),
        })
    }

    /// What requests are placed by from now on.
    pub(crate) fn rules(&self) -> Arc<Rules> {
        self.rules.read().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// Runs what the router cannot live without: however it ends by itself, the router is blind from then on, and says so.
async fn vital(name: &'static str, core: Arc<Core>, cancel: CancellationToken, part: impl Future<Output = ()> + Send) {
    let Some(outcome) = cancel.run_until_cancelled(AssertUnwindSafe(part).catch_unwind()).await else { return };
    let why = if outcome.is_ok() { "a plane ended" } else { "a part of it panicked" };
    tracing::error!(part = name, why, "router is dead");
    // The first reason stands.
    let _ = core.dead.set(why);
}

impl Engine for Router {
    fn generate(&self, request: Request) -> BoxFuture<'_, Result<OutputStream, engine::Error>> {
        if let Some(why) = self.core.dead.get() {
            return Box::pin(std::future::ready(Err(engine::Error::Unavailable(format!("router failed: {why}")))));
        }
        Box::pin(dispatch::serve(&self.core, request))
    }

    fn models(&self) -> Vec<Arc<ModelCard>> {
        self.core.fleet.roster().cards()
    }

    fn readiness(&self) -> Readiness {
        if let Some(why) = self.core.dead.get() {
            return Readiness::NotReady(format!("router failed: {why}"));
        }
        if self.core.fleet.roster().members().any(|member| member.decodes()) {
            Readiness::Ready
        } else {
            Readiness::NotReady("no worker that decodes has joined".to_owned())
        }
    }
}

impl fmt::Debug for Router {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let workers = self.core.fleet.roster().members().count();
        f.debug_struct("Router")
            .field("workers", &workers)
            .field("settings", &self.core.rules().settings)
            .finish_non_exhaustive()
    }
}
