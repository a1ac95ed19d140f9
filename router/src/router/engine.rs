//! The router as an `Engine`.

use crate::dispatch;
use crate::router::Router;
use futures::future::BoxFuture;
use std::sync::Arc;
use worker::engine::{self, Engine, ModelCard, OutputStream, Readiness, Request};

impl Router {
    /// Whether requests can be served. `absent`: the reason when no worker that decodes has joined.
    pub fn readiness_or(&self, absent: &str) -> Readiness {
        if let Some(reason) = self.core.failure.get() {
            return Readiness::NotReady(format!("router failed: {reason}"));
        }
        let roster = self.core.fleet.snapshot();
        let mut decoding = roster.workers().filter(|member| member.decodes()).peekable();
        if decoding.peek().is_none() {
            Readiness::NotReady(absent.to_owned())
        } else if roster.workers().filter(|member| member.decodes()).all(|member| roster.is_cordoned(member.id())) {
            Readiness::NotReady("every worker that decodes is cordoned".to_owned())
        } else if decoding.all(|member| member.is_down()) {
            Readiness::NotReady("every worker that decodes fails its requests and health checks".to_owned())
        } else {
            Readiness::Ready
        }
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
        let roster = self.core.fleet.snapshot();
        let failing = roster.workers().filter(|member| member.is_failing());
        failing.map(|member| format!("worker {} fails its requests or health checks", member.name)).collect()
    }

    fn readiness(&self) -> Readiness {
        self.readiness_or("no worker that decodes has joined")
    }
}
