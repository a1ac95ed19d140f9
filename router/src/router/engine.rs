//! The router as an `Engine`.

use crate::dispatch;
use crate::fleet::Worker;
use crate::router::Router;
use futures::future::BoxFuture;
use std::sync::Arc;
use tokio::time::Instant;
use worker::engine::{self, Engine, ModelCard, OutputStream, Readiness, Request};

/// Workers that the reason of a router without a worker names: a line, also of a large fleet.
const MAX_NAMED: usize = 10;

impl Router {
    /// Whether requests can be served. `absent`: the reason when no worker that decodes is registered.
    pub fn readiness_or(&self, absent: &str) -> Readiness {
        if let Some(reason) = self.core.failure.get() {
            return Readiness::NotReady(format!("router failed: {reason}"));
        }
        let fleet = self.core.fleet.snapshot();
        let decoding: Vec<_> = fleet.workers().filter(|member| member.decodes()).collect();
        if decoding.is_empty() {
            Readiness::NotReady(absent.to_owned())
        } else if decoding.iter().all(|member| fleet.is_cordoned(member.id())) {
            Readiness::NotReady("every worker that decodes is cordoned".to_owned())
        } else if decoding.iter().all(|member| member.is_down()) {
            let reason = "every worker that decodes fails its requests and health checks";
            Readiness::NotReady(format!("{reason}: {}", listed(&decoding)))
        } else {
            Readiness::Ready
        }
    }
}

/// The first of these workers, and how many others there are.
fn listed(workers: &[&Arc<Worker>]) -> String {
    let (named, others) = workers.split_at(workers.len().min(MAX_NAMED));
    let named: Vec<String> = named.iter().map(|worker| worker.described()).collect();
    match others.len() {
        0 => named.join(", "),
        more => format!("{}, and {more} more", named.join(", ")),
    }
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

    fn absence(&self, model: &str) -> Option<String> {
        self.core.fleet.snapshot().absence(model)
    }

    fn degraded(&self) -> Vec<String> {
        let fleet = self.core.fleet.snapshot();
        let failing = fleet.workers().filter(|member| member.is_failing());
        let failing = failing.map(|member| format!("{} fails its requests or health checks", member.described()));
        let failed_requests = self.core.failed_requests.problems(Instant::now());
        let fleet_problems = failing.chain(failed_requests).chain(fleet.cordoned_models()).chain(fleet.absences());
        fleet_problems.chain(self.core.recorder.problem()).collect()
    }

    fn is_available(&self, model: &str) -> bool {
        self.core.fleet.snapshot().is_available(model, Instant::now())
    }

    fn readiness(&self) -> Readiness {
        self.readiness_or("no worker that decodes is registered now")
    }
}
