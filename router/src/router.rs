//! The router itself: composition of its parts, and the `Engine` that others see.
//!
//! Owns the background tasks, and what an operator may do: cordon a worker, and read what the index holds of each source.
//! A task that ends leaves the router not ready. Not here: any decision, and the state that the parts share.

mod cordon;

pub use cordon::{NoSuchWorker, WorkerStatus};

use crate::control::{Feed, prober, rebalance, replicas};
use crate::dispatch::{self, admit};
use crate::index::{Digest, LEVELS};
use crate::settings::Settings;
use crate::state::{Core, Error};
use futures::FutureExt;
use futures::future::BoxFuture;
use kvbm::Level;
use std::collections::BTreeSet;
use std::fmt;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use tokio_util::sync::{CancellationToken, DropGuard};
use tokio_util::task::TaskTracker;
use worker::engine::{self, Engine, ModelCard, OutputStream, Readiness, Request};
use worker::plane::{Discovery, Events, RouterId, Source};

/// Many engines behaving as one.
pub struct Router {
    pub(crate) core: Arc<Core>,
    tasks: TaskTracker,
    /// Ends the tasks when the router is dropped.
    life: DropGuard,
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
        let core = Arc::new(Core::new(id, settings, registry)?);
        let (cancel, tasks) = (CancellationToken::new(), TaskTracker::new());
        let feed = Feed::new(core.clone(), events.clone()).run(discovery);
        tasks.spawn(vital("feed", core.clone(), cancel.clone(), feed));
        let others = replicas::attend(core.clone(), events.clone(), id);
        tasks.spawn(vital("talk with other routers", core.clone(), cancel.clone(), others));
        let planning = rebalance::keep(core.clone(), events, id);
        tasks.spawn(vital("planner", core.clone(), cancel.clone(), planning));
        tasks.spawn(vital("door", core.clone(), cancel.clone(), admit::run(core.clone())));
        tasks.spawn(vital("prober", core.clone(), cancel.clone(), prober::run(core.clone())));
        tasks.close();
        Ok(Arc::new(Self { core, tasks, life: cancel.drop_guard() }))
    }

    /// Places requests, and plans, by other settings from now on. When they are wrong, nothing changes, and the error says what is.
    pub fn retune(&self, settings: Settings) -> Result<(), Error> {
        self.core.retune(settings)
    }

    /// Ends the router's tasks and waits for them. Streams that were started go on; who waits to be let in is turned away.
    pub async fn stop(&self) {
        self.life.token().cancel();
        self.tasks.wait().await;
        self.core.admission.close();
    }

    /// Each worker, and each store that one of them reaches, with what it is believed to hold at each level where that is
    /// anything.
    pub fn believed(&self) -> Vec<(Source, Level, Digest)> {
        let roster = self.core.fleet.roster();
        let workers = roster.members().map(|member| Source::Worker(member.id()));
        let stores: BTreeSet<_> = roster.members().flat_map(|member| member.instance.stores.iter().copied()).collect();
        let sources = workers.chain(stores.into_iter().map(Source::Store));
        let each = |source| LEVELS.into_iter().map(move |level| (source, level));
        let seen = |(source, level)| Some((source, level, self.core.index.digest(source, level)?));
        sources.flat_map(each).filter_map(seen).filter(|(.., digest)| digest.blocks > 0).collect()
    }
}

/// Runs what the router cannot live without: however it ends by itself, the router is blind from then on, and says so.
async fn vital(name: &'static str, core: Arc<Core>, cancel: CancellationToken, part: impl Future<Output = ()> + Send) {
    let Some(outcome) = cancel.run_until_cancelled(AssertUnwindSafe(part).catch_unwind()).await else { return };
    let why = if outcome.is_ok() { "a control plane stream ended" } else { "a task panicked" };
    tracing::error!(component = name, reason = why, "router component failed; the router is no longer ready");
    // The first reason stands.
    let _ = core.dead.set(why);
    // Who waits at its door waits in vain.
    core.admission.close();
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
        let roster = self.core.fleet.roster();
        let mut decoding = roster.members().filter(|member| member.decodes()).peekable();
        if decoding.peek().is_none() {
            Readiness::NotReady("no worker that decodes has joined".to_owned())
        } else if decoding.all(|member| roster.is_cordoned(member.id())) {
            Readiness::NotReady("every worker that decodes is cordoned".to_owned())
        } else {
            Readiness::Ready
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
