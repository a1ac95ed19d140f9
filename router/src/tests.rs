//! The whole router over local planes and fake engines, on a paused clock.

mod disaggregation;
mod conversations;
mod cordon;
mod events;
mod retries;
pub(crate) mod harness;
mod placement;
mod trace_file;
mod replicas;
mod observability;
mod worker_health;
mod event_accuracy;

use crate::settings::Settings;
use harness::{BLOCK, Yard};
use worker::engine::{Error, Request};

fn defaults() -> Yard {
    Yard::new(Settings::default())
}

fn failed() -> Error {
    Error::Failed("on purpose".to_owned())
}

/// Prompt blocks that the router expects to be cached.
async fn believed(yard: &Yard, request: &Request) -> u64 {
    yard.explain(request.clone()).await["cached_tokens"].as_u64().unwrap() / BLOCK as u64
}
