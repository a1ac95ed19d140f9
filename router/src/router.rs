//! The router: composition of its parts, and the `Engine` that other crates see.
//!
//! Owns the background tasks and the operations of an administrator: cordon a worker, read digests of the index. When
//! a task ends, the router is not ready any more. Not here: decisions, and the state that the parts share.

mod cordon;

pub use cordon::{NoSuchWorker, WorkerStatus};

use crate::control::{Feed, prober, rebalance, replicas};
use crate::dispatch::{self, admit};
use crate::index::{Holder, LEVELS};
use crate::settings::Settings;
use crate::state::{Core, Error};
use futures::FutureExt;
use futures::future::BoxFuture;
use kvbm::{Level, SetDigest};
use std::collections::BTreeSet;
use std::fmt;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use tokio_util::sync::{CancellationToken, DropGuard};
use tokio_util::task::TaskTracker;
use worker::engine::{self, Engine, ModelCard, OutputStream, Readiness, Request};
use worker::plane::{Discovery, Events, RouterId};

/// Many engines behaving as one.
pub struct Router {
    pub(crate) core: Arc<Core>,
    tasks: TaskTracker,
    /// Cancels the tasks when the router is dropped.
    cancel: DropGuard,
}

impl Router {
    /// A router over the workers that `discovery` shows, kept up to date by `events`. `id` must be unique: routers
    /// over the same workers send each other their reservations. Must be called inside a tokio runtime, on which it
    /// spawns its tasks; they end when the router is dropped.
    pub fn new(
        id: RouterId,
        discovery: Arc<dyn Discovery>,
        events: Arc<dyn Events>,
        settings: Settings,
        registry: &prometheus::Registry,
    ) -> Result<Arc<Self>, Error> {
        let core = Arc::new(Core::new(id, settings, registry)?);
        let (cancel, tasks) = (CancellationToken::new(), TaskTracker::new());
        let Core { index, fleet, admission, metrics, inflight, outbox, .. } = &*core;
        let (index, fleet, admission) = (|| index.clone(), || fleet.clone(), || admission.clone());
        let feed = Feed::new(index(), fleet(), admission(), metrics.clone(), events.clone()).run(discovery);
        tasks.spawn(supervise("feed", core.clone(), cancel.clone(), feed));
        // Until a router with a lower id is seen.
        let is_leader = Arc::new(AtomicBool::new(true));
        let replication = replicas::run(
            events.clone(),
            id,
            fleet(),
            inflight.clone(),
            outbox.clone(),
            metrics.replicas.clone(),
            is_leader.clone(),
        );
        tasks.spawn(supervise("replication", core.clone(), cancel.clone(), replication));
        let planning = rebalance::run(core.clone(), events, id, is_leader);
        tasks.spawn(supervise("planner", core.clone(), cancel.clone(), planning));
        tasks.spawn(supervise("admission", core.clone(), cancel.clone(), admit::run(core.clone())));
        let probing = prober::run(fleet(), admission(), metrics.health_checks.clone());
        tasks.spawn(supervise("prober", core.clone(), cancel.clone(), probing));
        tasks.close();
        Ok(Arc::new(Self { core, tasks, cancel: cancel.drop_guard() }))
    }

    /// Replaces the settings. Invalid settings change nothing and are an error.
    pub fn update_settings(&self, settings: Settings) -> Result<(), Error> {
        self.core.update_settings(settings)
    }

    /// Ends the router's tasks and waits for them. Streams that were started go on; queued requests are rejected.
    pub async fn stop(&self) {
        self.cancel.token().cancel();
        self.tasks.wait().await;
        self.core.admission.close();
    }

    /// Digest of the index, for each worker and each store that a worker reaches, at each level with indexed blocks.
    /// `None` for a holder of which the index evicted blocks.
    pub fn index_digests(&self) -> Vec<(Holder, Level, Option<SetDigest>)> {
        let roster = self.core.fleet.snapshot();
        let workers = roster.workers().map(|member| Holder::Worker(member.id()));
        let stores: BTreeSet<_> = roster.workers().flat_map(|member| member.instance.stores.iter().copied()).collect();
        let holders = workers.chain(stores.into_iter().map(Holder::Store));
        let each = |holder| LEVELS.into_iter().map(move |level| (holder, level));
        let indexed = |(holder, level)| {
            let digest = self.core.index.digest(holder, level).filter(|digest| digest.blocks > 0)?;
            Some((holder, level, self.core.index.is_complete(holder).then_some(digest)))
        };
        holders.flat_map(each).filter_map(indexed).collect()
    }
}

/// Runs a task without which the router cannot work. If it ends by itself, the router is not ready any more.
async fn supervise(
    name: &'static str,
    core: Arc<Core>,
    cancel: CancellationToken,
    part: impl Future<Output = ()> + Send,
) {
    let Some(outcome) = cancel.run_until_cancelled(AssertUnwindSafe(part).catch_unwind()).await else { return };
    let reason = if outcome.is_ok() { "a control plane stream ended" } else { "a task panicked" };
    tracing::error!(component = name, reason, "router component failed; the router is no longer ready");
    // The first failure is kept.
    let _ = core.failure.set(reason);
    // Queued requests would wait in vain.
    core.admission.close();
}

impl Engine for Router {
    fn generate(&self, request: Request) -> BoxFuture<'_, Result<OutputStream, engine::Error>> {
        if let Some(reason) = self.core.failure.get() {
            return Box::pin(std::future::ready(Err(engine::Error::Unavailable(format!("router failed: {reason}")))));
        }
        Box::pin(dispatch::serve(&self.core, request))
    }

    fn models(&self) -> Vec<Arc<ModelCard>> {
        self.core.fleet.snapshot().cards()
    }

    fn readiness(&self) -> Readiness {
        if let Some(reason) = self.core.failure.get() {
            return Readiness::NotReady(format!("router failed: {reason}"));
        }
        let roster = self.core.fleet.snapshot();
        let mut decoding = roster.workers().filter(|member| member.decodes()).peekable();
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
        let workers = self.core.fleet.snapshot().workers().count();
        f.debug_struct("Router")
            .field("workers", &workers)
            .field("settings", &self.core.settings().settings)
            .finish_non_exhaustive()
    }
}
