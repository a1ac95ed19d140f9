//! Health checks of workers whose circuit breaker is open, before a client's request is sent to them, and of idle
//! workers, so that a hang is found before a client meets it.
//!
//! A probe of a worker is a request of one token: it shows that the engine computes, not only that the process runs.
//! A server of another program has a health check of its own, which costs nothing, so it is asked more often: one
//! check is for all of its models that are idle.

use crate::admission::Admission;
use crate::fleet::{Fleet, HealthSignal, Worker};
use futures::StreamExt;
use futures::future::join_all;
use futures::stream::FuturesUnordered;
use kvbm::splitmix::SplitMix64;
use prometheus::IntCounterVec;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{Instant, MissedTickBehavior};
use worker::plane::{RouterId, WorkerId};

/// What a probe checks.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Target {
    Worker(WorkerId),
    /// A server of another program, with all of its models.
    Server(u64),
}

/// Interval at which due probes are started: the shortest open time of a breaker.
const INTERVAL: Duration = Duration::from_millis(250);
/// A worker without requests for this long is probed: two tokens a minute cost nothing, and a worker that ends is found
/// by its lease.
const IDLE_TIME: Duration = Duration::from_secs(30);
/// The same of a server, whose check computes no token, and whose end shows in nothing else. Bounds: each router has
/// another time between them, so that many routers do not ask a server at the same moment.
const SERVER_IDLE_TIMES: [Duration; 2] = [Duration::from_secs(3), Duration::from_secs(5)];
/// A worker that takes longer for one token has failed.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Concurrent probes: a large idle fleet is probed a part at a time.
const MAX_CONCURRENT: usize = 16;

impl Target {
    fn of(worker: &Worker) -> Self {
        worker.engine.server().map_or(Self::Worker(worker.id()), Self::Server)
    }

    /// Time without requests after which a router probes it.
    fn idle_time(self, router: RouterId) -> Duration {
        match self {
            Self::Worker(_) => IDLE_TIME,
            Self::Server(server) => {
                let [shortest, longest] = SERVER_IDLE_TIMES;
                shortest + longest.saturating_sub(shortest).mul_f64(SplitMix64::new(router.0 ^ server).uniform())
            }
        }
    }
}

/// Probes the workers that are due, for as long as the router lives.
pub(crate) async fn run(router: RouterId, fleet: Arc<Fleet>, admission: Arc<Admission>, health_checks: IntCounterVec) {
    let mut ticks = tokio::time::interval(INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Skip);
    let (mut running, mut targets) = (FuturesUnordered::new(), BTreeSet::<Target>::new());
    loop {
        tokio::select! {
            biased;
            Some(target) = running.next() => {
                targets.remove(&target);
            }
            _ = ticks.tick() => {
                let now = Instant::now();
                let workers = fleet.snapshot();
                let idle = |worker: &Worker| Target::of(worker).idle_time(router);
                for worker in workers.workers().filter(|worker| worker.wants_probe(idle(worker), now)) {
                    if targets.len() >= MAX_CONCURRENT {
                        break;
                    }
                    let target = Target::of(worker);
                    // The probe of an idle server may take longer than the time until the next one is due.
                    if !targets.insert(target) {
                        continue;
                    }
                    let checked: Vec<Arc<Worker>> = match target {
                        Target::Worker(_) => vec![Arc::clone(worker)],
                        Target::Server(_) => {
                            let of_server = workers.workers().filter(|other| Target::of(other) == target);
                            of_server.filter(|other| other.shares_probe(idle(other), now)).cloned().collect()
                        }
                    };
                    for worker in &checked {
                        worker.probe(now);
                    }
                    let probe = probe(Arc::clone(worker), checked, &fleet, &admission, &health_checks);
                    running.push(async move {
                        probe.await;
                        target
                    });
                }
            }
        }
    }
}

/// Probes a worker, for itself or for all workers of its server.
async fn probe(
    worker: Arc<Worker>,
    checked: Vec<Arc<Worker>>,
    fleet: &Fleet,
    admission: &Admission,
    health_checks: &IntCounterVec,
) {
    let all_left = join_all(checked.iter().map(|worker| worker.lease_ended.cancelled()));
    let (signal, error) = tokio::select! {
        biased;
        // Workers that have left need no result.
        _ = all_left => return,
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
    let workers = fleet.snapshot();
    for run in checked.iter().map(|worker| worker.run()) {
        // The entry of a worker is replaced when its role or the view of its cache changes.
        if let Some(worker) = workers.get(run.worker).filter(|worker| worker.run() == run) {
            worker.probed(signal);
        }
    }
    admission.notify();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_router_has_another_interval_for_an_idle_server() {
        let times: BTreeSet<_> = (0..100).map(|id| Target::Server(7).idle_time(RouterId(id))).collect();
        let [shortest, longest] = SERVER_IDLE_TIMES;
        assert!(times.len() > 90 && times.iter().all(|time| (shortest..=longest).contains(time)), "{times:?}");
    }
}
