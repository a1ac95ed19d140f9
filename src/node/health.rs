//! The front door's view of a node: the router, and what does not work although requests are served.

use crate::process::panics;
use futures::future::BoxFuture;
use kvbm::{DiskTier, ObjectTier, Tier};
use router::Router;
use std::sync::{Arc, OnceLock, Weak};
use worker::engine::{Engine, Error, ModelCard, OutputStream, Readiness, Request};

/// What does not work although requests are served.
#[derive(Default)]
pub(super) struct Health {
    /// Once it is open.
    disk: OnceLock<Weak<DiskTier>>,
    /// The tiers that other processes share.
    shared: OnceLock<Vec<Weak<ObjectTier>>>,
}

impl Health {
    pub(super) fn watch_disk(&self, disk: Weak<DiskTier>) {
        // There is one per node.
        let _ = self.disk.set(disk);
    }

    pub(super) fn watch_shared(&self, tiers: Vec<Weak<ObjectTier>>) {
        let _ = self.shared.set(tiers);
    }

    fn degraded(&self) -> Vec<String> {
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
            .filter(|tier| !tier.is_up())
            .map(|tier| format!("tiers.{}: the store does not answer", tier.level().name()));
        paths.chain(shared).chain(panics).collect()
    }
}

/// The router, with what is known of the node below it.
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

    fn readiness(&self) -> Readiness {
        self.router.readiness()
    }

    fn degraded(&self) -> Vec<String> {
        self.health.degraded()
    }
}
