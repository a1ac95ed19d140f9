//! The router: composition of its parts, and the `Engine` that other crates see.
//!
//! Owns the background tasks and the operations of an administrator: cordon a worker, read digests of the index. When
//! a task ends, the router is not ready any more. Not here: decisions, and the state that the parts share.

mod cordon;
mod digests;
mod engine;
mod outstanding;
mod tasks;

pub use cordon::{NoSuchWorker, WorkerStatus};
pub use digests::IndexedEvents;
pub use outstanding::Outstanding;

use crate::policy::planner::PlanStatus;
use crate::state::{Core, Error, Settings};
use std::fmt;
use std::sync::Arc;
use tokio_util::sync::{CancellationToken, DropGuard};
use tokio_util::task::TaskTracker;
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
        let cancel = CancellationToken::new();
        let tasks = tasks::spawn(id, &core, &cancel, discovery, events);
        Ok(Arc::new(Self { core, tasks, cancel: cancel.drop_guard() }))
    }

    /// The planner's last plan for each model; none before enough is measured, and with `router.planner.mode = "off"`.
    pub fn plans(&self) -> Vec<PlanStatus> {
        self.core.plans.lock().values().cloned().collect()
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
