//! Health checks of workers whose circuit breaker is open, before a client's request is sent to them, and of idle
//! workers, so that a hang is found before a client meets it.
//!
//! A probe is a request of one token: it shows that the engine computes, not only that the process runs.

use crate::admission::Admission;
use crate::fleet::{Fleet, HealthSignal, Worker};
use futures::StreamExt;
use futures::stream::FuturesUnordered;
use prometheus::IntCounterVec;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{Instant, MissedTickBehavior};

/// Interval at which due probes are started: the shortest open time of a breaker.
const INTERVAL: Duration = Duration::from_millis(250);
/// A worker without requests for this long is probed: two tokens a minute cost nothing.
const IDLE_TIME: Duration = Duration::from_secs(30);
/// A worker that takes longer for one token has failed.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Concurrent probes: a large idle fleet is probed a part at a time.
const MAX_CONCURRENT: usize = 16;

/// Probes the workers that are due, for as long as the router lives.
pub(crate) async fn run(fleet: Arc<Fleet>, admission: Arc<Admission>, health_checks: IntCounterVec) {
    let mut ticks = tokio::time::interval(INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Skip);
    let mut running = FuturesUnordered::new();
    loop {
        tokio::select! {
            biased;
            Some(()) = running.next() => {}
            _ = ticks.tick() => {
                let now = Instant::now();
                let workers = fleet.snapshot();
                let due = workers.workers().filter(|worker| worker.wants_probe(IDLE_TIME, now));
                for worker in due.take(MAX_CONCURRENT.saturating_sub(running.len())) {
                    worker.probe(now);
                    running.push(probe(worker.clone(), &admission, &health_checks));
                }
            }
        }
    }
}

async fn probe(worker: Arc<Worker>, admission: &Admission, health_checks: &IntCounterVec) {
    let (signal, error) = tokio::select! {
        biased;
        // A worker that has left needs no result.
        () = worker.lease_ended.cancelled() => return,
        answer = tokio::time::timeout(TIMEOUT, worker.engine.probe()) => match answer {
            Ok(Ok(())) => (HealthSignal::Healthy, None),
            Ok(Err(error)) => (HealthSignal::of(&error), Some(error.to_string())),
            Err(_) => (HealthSignal::Hung, Some(format!("no answer within {} s", TIMEOUT.as_secs()))),
        },
    };
    let failed = matches!(signal, HealthSignal::Fault | HealthSignal::Hung);
    if failed {
        let (address, error) = (worker.engine.address(), error.as_deref());
        tracing::warn!(worker = %worker.id(), address = address.as_deref(), error, "health check of the worker failed");
    }
    health_checks.with_label_values(&[if failed { "failed" } else { "ok" }]).inc();
    worker.probed(signal);
    admission.notify();
}
