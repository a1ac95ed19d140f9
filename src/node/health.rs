//! The front door's view of a node: the router, and what does not work although requests are served.

use crate::panics;
use futures::future::BoxFuture;
use kvbm::DiskTier;
use router::Router;
use std::sync::{Arc, OnceLock, Weak};
use worker::engine::{Engine, Error, ModelCard, OutputStream, Readiness, Request};

/// What does not work although requests are served.
#[derive(Default)]
pub(super) struct Health {
    /// Once it is open.
    disk: OnceLock<Weak<DiskTier>>,
}

impl Health {
    pub(super) fn watch_disk(&self, disk: Weak<DiskTier>) {
        // There is one per node.
        let _ = self.disk.set(disk);
    }

    fn degraded(&self) -> Vec<String> {
        let panics = panics::counts().into_iter();
        let panics =
            panics.map(|(component, count)| format!("{component}: {count} panics since the start; the log has them"));
        let disk = self.disk.get().and_then(Weak::upgrade);
        let paths = disk.iter().flat_map(|disk| disk.paths()).filter_map(|path| {
            let failure = path.failure?;
            Some(format!("tiers.g3: {} is down: {failure}", path.folder.display()))
        });
        paths.chain(panics).collect()
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
