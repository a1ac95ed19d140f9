//! The whole router over local planes and fake engines, on a paused clock.

mod apart;
mod conversations;
mod cordoned;
mod events;
mod failing;
pub(crate) mod fake;
mod placing;
mod recorded;
mod replicas;
mod seen;
mod trouble;
mod truth;

use crate::settings::Settings;
use fake::{BLOCK, Yard};
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
