//! The background tasks of the router, and their supervision.

use crate::control::{Feed, copier, prober, rebalance, replicas};
use crate::dispatch::admit;
use crate::state::Core;
use futures::FutureExt;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use worker::plane::{Discovery, Events, RouterId};

/// Starts all tasks. They run until `cancel` is cancelled.
pub(super) fn spawn(
    id: RouterId,
    core: &Arc<Core>,
    cancel: &CancellationToken,
    discovery: Arc<dyn Discovery>,
    events: Arc<dyn Events>,
) -> TaskTracker {
    let tasks = TaskTracker::new();
    let Core { index, fleet, admission, metrics, inflight, copies, outbox, .. } = &**core;
    let (index, fleet, admission) = (|| index.clone(), || fleet.clone(), || admission.clone());
    // Until a router with a lower id is seen.
    let is_leader = Arc::new(AtomicBool::new(true));
    let feed = Feed::new(index(), fleet(), admission(), (**metrics).clone(), events.clone()).run(discovery);
    let replication = replicas::run(
        events.clone(),
        id,
        fleet(),
        inflight.clone(),
        outbox.clone(),
        metrics.replicas.clone(),
        is_leader.clone(),
    );
    let planning = rebalance::run(core.clone(), events, id, is_leader);
    let probing = prober::run(id, fleet(), admission(), metrics.health_checks.clone());
    let copying = copier::run(copies.clone(), metrics.prefix_copies.clone());
    tasks.spawn(supervise("feed", core.clone(), cancel.clone(), feed));
    tasks.spawn(supervise("replication", core.clone(), cancel.clone(), replication));
    tasks.spawn(supervise("planner", core.clone(), cancel.clone(), planning));
    tasks.spawn(supervise("admission", core.clone(), cancel.clone(), admit::run(core.clone())));
    tasks.spawn(supervise("prober", core.clone(), cancel.clone(), probing));
    tasks.spawn(supervise("copier", core.clone(), cancel.clone(), copying));
    tasks.close();
    tasks
}

/// Runs a task without which the router cannot work. If it ends by itself, the router is not ready any more.
async fn supervise(
    name: &'static str,
    core: Arc<Core>,
    cancel: CancellationToken,
    part: impl Future<Output = ()> + Send,
) {
    let Some(outcome) = cancel.run_until_cancelled(AssertUnwindSafe(part).catch_unwind()).await else { return };
    let reason = if outcome.is_ok() { "a control plane stream ended" } else { "a task panicked" };
    tracing::error!(component = name, reason, "router component failed; the router is no longer ready");
    // The first failure is kept.
    let _ = core.failure.set(reason);
    // Otherwise queued requests would never be resolved.
    core.admission.close();
}
