//! Engines that compute nothing, at consecutive ports: `engine FIRST_PORT COUNT [FIRST_EVENT_PORT]`.
//!
//! `POST /interval?us=20000` of any of them sets the time between two tokens of all.

use anyhow::{Context, Result};
use bench::gateway::engine::Engine;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use tokio::net::TcpListener;
use tokio::task::JoinSet;

#[tokio::main]
async fn main() -> Result<()> {
    let numbers = std::env::args().skip(1).map(|argument| argument.parse::<u16>());
    let numbers = numbers.collect::<Result<Vec<_>, _>>().context("expected numbers")?;
    let (first, count, events) = match numbers[..] {
        [first, count] => (first, count, None),
        [first, count, events] => (first, count, Some(events)),
        _ => anyhow::bail!("expected: engine FIRST_PORT COUNT [FIRST_EVENT_PORT]"),
    };
    let interval = Arc::new(AtomicU64::new(0));
    let mut engines = JoinSet::new();
    for number in 0..count {
        let listener = TcpListener::bind(("127.0.0.1", first + number)).await?;
        let events = events.map(|events| events + number);
        engines.spawn(Arc::new(Engine::new(Arc::clone(&interval), events).await?).serve(listener));
    }
    engines.join_next().await.context("no engine")??
}
