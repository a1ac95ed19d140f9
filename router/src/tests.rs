//! Tests of the whole router: local planes, fake engines, paused clock.

mod conversations;
mod cordon;
mod disaggregation;
mod endpoints;
mod event_accuracy;
mod events;
pub(crate) mod harness;
mod kinds;
mod observability;
mod placement;
mod prefetch;
mod relayed_streams;
mod replicas;
mod retries;
mod trace_file;
mod worker_health;

use crate::state::Settings;
use harness::{BLOCK, Harness};
use worker::engine::{Error, Request};

fn defaults() -> Harness {
    Harness::new(Settings::default())
}

fn failed() -> Error {
    Error::Failed("on purpose".to_owned())
}

/// Number of prompt blocks that the router expects to be cached on the chosen worker.
async fn cached_blocks(harness: &Harness, request: &Request) -> u64 {
    harness.explain(request.clone()).await["cached_tokens"].as_u64().unwrap() / BLOCK as u64
}
