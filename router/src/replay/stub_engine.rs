//! A placeholder for the engine of a simulated worker: the live fleet needs an engine for each worker.

use futures::future::BoxFuture;
use std::sync::Arc;
use worker::engine::{self, ModelCard, OutputStream, Readiness, Request};

/// An engine that the simulation never calls.
pub(crate) struct StubEngine;

impl StubEngine {
    /// A model card with this `shared_id` and block size.
    pub(crate) fn card(model: &str, block_size: usize) -> Arc<ModelCard> {
        Arc::new(ModelCard::new(model, usize::MAX, block_size))
    }
}

impl engine::Engine for StubEngine {
    fn generate(&self, _: Request) -> BoxFuture<'_, Result<OutputStream, engine::Error>> {
        Box::pin(std::future::ready(Err(engine::Error::Unavailable("simulated".to_owned()))))
    }

    fn models(&self) -> Vec<Arc<ModelCard>> {
        Vec::new()
    }

    fn readiness(&self) -> Readiness {
        Readiness::NotReady("simulated".to_owned())
    }
}
