//! The engine that the frontend sees: the router, plus the failed components that `/ready` lists while requests are
//! served.

use crate::process::panics;
use futures::future::BoxFuture;
use kvbm::{DiskTier, ObjectTier, Tier};
use router::Router;
use std::sync::{Arc, OnceLock, Weak};
use worker::engine::{Engine, Error, ModelCard, OutputStream, Readiness, Request};

/// Components that can fail while requests are still served.
#[derive(Default)]
pub(super) struct Health {
    /// Set once G3 is open.
    disk: OnceLock<Weak<DiskTier>>,
    /// G3.5 and G4, set once they are open.
    shared: OnceLock<Vec<Weak<ObjectTier>>>,
}

impl Health {
    pub(super) fn watch_disk(&self, disk: Weak<DiskTier>) {
        // Set once: a node has one G3.
        let _ = self.disk.set(disk);
    }

    pub(super) fn watch_shared(&self, tiers: Vec<Weak<ObjectTier>>) {
        let _ = self.shared.set(tiers);
    }

    pub(super) fn degraded(&self) -> Vec<String> {
        let panics = panics::counts().into_iter();
        let panics = panics
            .map(|(component, count)| format!("{component}: {count} panics since the start; the log has the details"));
        let disk = self.disk.get().and_then(Weak::upgrade);
        let paths = disk.iter().flat_map(|disk| disk.paths()).filter_map(|path| {
            let failure = path.failure?;
            Some(format!("tiers.g3: {} is down: {failure}", path.folder.display()))
        });
        let shared = self.shared.get().into_iter().flatten().filter_map(Weak::upgrade);
        let shared = shared
            .filter(|tier| !tier.is_available())
            .map(|tier| format!("tiers.{}: the store does not answer", tier.level().name()));
        paths.chain(shared).chain(panics).collect()
    }
}

/// The router, with the health of the node.
pub(super) struct Watched {
    pub(super) router: Arc<Router>,
    pub(super) health: Arc<Health>,
}

impl Engine for Watched {
    fn generate(&self, request: Request) -> BoxFuture<'_, Result<OutputStream, Error>> {
        self.router.generate(request)
    }

    fn models(&self) -> Vec<Arc<ModelCard>> {
        self.router.models()
    }

    fn absence(&self, model: &str) -> Option<String> {
        self.router.absence(model)
    }

    fn readiness(&self) -> Readiness {
        self.router.readiness()
    }

    fn degraded(&self) -> Vec<String> {
        self.health.degraded()
    }
}
