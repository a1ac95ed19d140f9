//! Health checks of workers whose circuit breaker is open, before a client's request is sent to them, and of idle
//! workers, so that a hang is found before a client meets it.
//!
//! A probe of a worker is a request of one token: it shows that the engine computes, not only that the process runs.
//! A server of another program has a health check of its own, which costs nothing, so it is asked more often: one
//! check is for all of its models that are idle. A worker whose load reports have stopped is asked as often: while the
//! event plane is away, its lease does not show that it has ended or is frozen.
//!
//! **No worker keeps another one from its checks.** Those that are longest overdue come first, and those that fail have
//! a limit of their own, because each of their checks may take its full time. In a fleet that is larger than the rate
//! of checks, all intervals become longer alike.

use crate::admission::Admission;
use crate::fleet::{Cause, Fleet, FleetSnapshot, HealthSignal, Transition, Worker, WorkerRun};
use futures::StreamExt;
use futures::future::join_all;
use futures::stream::FuturesUnordered;
use kvbm::splitmix::SplitMix64;
use prometheus::IntCounterVec;
use std::collections::BTreeMap;
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
/// The same of a server, whose check computes no token, and of a worker that has stopped to report its load: the end of
/// both shows in nothing else while the planes are away. Bounds: each router has another time between them, so that
/// many routers do not ask a server or a worker at the same moment.
const SHORT_IDLE_TIMES: [Duration; 2] = [Duration::from_secs(3), Duration::from_secs(5)];
/// A worker that takes longer for one token has failed.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Concurrent probes of workers, and of workers that fail: each takes a token of a GPU, so a large idle fleet is probed
/// a part at a time.
const MAX_WORKERS: [usize; 2] = [16, 16];
/// The same of servers. A check takes one or two connections, and an answer milliseconds: the places are for servers
/// that have just begun to hang. Those that are known to hang take one for 10 of 18 s; if they are more, they wait.
const MAX_SERVERS: [usize; 2] = [512, 128];
/// Probes that are started per tick: at most 512 in a second, so that 10,000 servers are each checked every 20 s.
const MAX_STARTS: usize = 128;

impl Target {
    fn of(worker: &Worker) -> Self {
        worker.engine.probed_server().map_or(Self::Worker(worker.id()), Self::Server)
    }

    /// Time without requests after which a router probes it. `is_silent`: a worker has stopped to report its load.
    fn idle_time(self, router: RouterId, is_silent: bool) -> Duration {
        let number = match self {
            Self::Worker(_) if !is_silent => return IDLE_TIME,
            Self::Worker(WorkerId(number)) | Self::Server(number) => number,
        };
        let [shortest, longest] = SHORT_IDLE_TIMES;
        shortest + longest.saturating_sub(shortest).mul_f64(SplitMix64::new(router.0 ^ number).uniform())
    }
}

/// The running probes.
#[derive(Default)]
struct Running {
    /// The targets that are being probed, each with the class that its probe counts in.
    targets: BTreeMap<Target, ProbeClass>,
    taken: BTreeMap<ProbeClass, usize>,
}

/// A class of probes, which has a limit of concurrent probes of its own.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
struct ProbeClass {
    is_server: bool,
    is_failing: bool,
}

impl ProbeClass {
    fn max(self) -> usize {
        let [working, failing] = if self.is_server { MAX_SERVERS } else { MAX_WORKERS };
        if self.is_failing { failing } else { working }
    }
}

impl Running {
    /// Counts the probe of a target. Returns `false` if its class is at its maximum, or if the target is being probed:
    /// the probe of an idle server may take longer than the time until the next one is due.
    fn start(&mut self, target: Target, is_failing: bool) -> bool {
        let class = ProbeClass { is_server: matches!(target, Target::Server(_)), is_failing };
        let taken = self.taken.entry(class).or_default();
        if *taken >= class.max() || self.targets.contains_key(&target) {
            return false;
        }
        *taken += 1;
        self.targets.insert(target, class);
        true
    }

    fn end(&mut self, target: Target) {
        let Some(class) = self.targets.remove(&target) else { return };
        if let Some(taken) = self.taken.get_mut(&class) {
            *taken -= 1;
        }
    }
}

/// Probes the workers that are due, for as long as the router lives.
pub(crate) async fn run(router: RouterId, fleet: Arc<Fleet>, admission: Arc<Admission>, health_checks: IntCounterVec) {
    let mut ticks = tokio::time::interval(INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Skip);
    let (mut probes, mut running) = (FuturesUnordered::new(), Running::default());
    loop {
        tokio::select! {
            biased;
            Some(target) = probes.next() => running.end(target),
            _ = ticks.tick() => {
                let now = Instant::now();
                for (target, checked) in start_due(&fleet.snapshot(), router, &mut running, now) {
                    let probe = probe(checked, &fleet, &admission, &health_checks);
                    probes.push(async move {
                        probe.await;
                        target
                    });
                }
            }
        }
    }
}

/// Records the start of the probes that are due and whose class is below its maximum. Returns the workers that each of
/// them checks.
fn start_due(
    workers: &FleetSnapshot,
    router: RouterId,
    running: &mut Running,
    now: Instant,
) -> BTreeMap<Target, Vec<Arc<Worker>>> {
    let idle = |worker: &Worker| Target::of(worker).idle_time(router, worker.load.is_silent(now));
    let mut due: Vec<(Instant, &Arc<Worker>)> =
        workers.workers().filter_map(|worker| Some((worker.probe_due(idle(worker), now)?, worker))).collect();
    due.sort_by_key(|(at, _)| *at);
    let mut started = BTreeMap::<Target, Vec<Arc<Worker>>>::new();
    for (_, worker) in due {
        if started.len() >= MAX_STARTS {
            break;
        }
        let target = Target::of(worker);
        if running.start(target, worker.fails_health_checks()) {
            let alone = matches!(target, Target::Worker(_)).then(|| Arc::clone(worker));
            started.insert(target, alone.into_iter().collect());
        }
    }
    if started.keys().any(|target| matches!(target, Target::Server(_))) {
        let of_servers = workers.workers().filter(|worker| matches!(Target::of(worker), Target::Server(_)));
        for worker in of_servers.filter(|worker| worker.shares_probe(idle(worker), now)) {
            if let Some(checked) = started.get_mut(&Target::of(worker)) {
                checked.push(Arc::clone(worker));
            }
        }
    }
    started.values().flatten().for_each(|worker| worker.probe_started(now));
    started
}

/// Probes a worker, or a server for all of its workers that are `checked`.
async fn probe(checked: Vec<Arc<Worker>>, fleet: &Fleet, admission: &Admission, health_checks: &IntCounterVec) {
    // A worker that is due shares the probe of its server.
    let Some(worker) = checked.first() else { return };
    let all_left = join_all(checked.iter().map(|worker| worker.lease_ended.cancelled()));
    let (signal, error) = tokio::select! {
        biased;
        // Workers that have left need no result.
        _ = all_left => return,
        answer = tokio::time::timeout(TIMEOUT, worker.engine.probe()) => match answer {
            Ok(Ok(())) => (HealthSignal::Healthy, None),
            Ok(Err(error)) => (HealthSignal::of(&error), Some(error.to_string())),
            Err(_) => (HealthSignal::TimedOut, Some(format!("no answer within {} s", TIMEOUT.as_secs()))),
        },
    };
    let failed = signal.is_failure();
    if failed {
        // What changes is logged below, once.
        let (address, error) = (worker.engine.address(), error.as_deref());
        tracing::debug!(worker = %worker.id(), address = address.as_deref(), error, "health check failed");
    }
    health_checks.with_label_values(&[if failed { "failed" } else { "ok" }]).inc();
    let workers = fleet.snapshot();
    // The entry of a worker is replaced when its role or the view of its cache changes.
    let present = |run: WorkerRun| workers.get(run.worker).filter(|worker| worker.run() == run);
    let changed: Vec<_> = checked
        .iter()
        .filter_map(|worker| present(worker.run()))
        .filter_map(|worker| Some((worker, worker.probe_ended(signal)?)))
        .collect();
    // One line for all workers of a server.
    for transition in [Transition::Opened, Transition::Closed] {
        let of_kind = changed.iter().filter(|(_, other)| *other == transition).map(|(worker, _)| *worker);
        let of_kind: Vec<&Arc<Worker>> = of_kind.collect();
        if let Some(first) = of_kind.first() {
            let faults: Vec<_> = of_kind.iter().map(|worker| worker.faults()).collect();
            let error = error.as_deref().unwrap_or_default();
            transition.log(first.id(), &*first.engine, &faults, Cause::HealthCheck, &error);
        }
    }
    admission.notify();
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn targets_that_fail_take_no_place_of_others() {
        let mut running = Running::default();
        let started = |running: &mut Running, from: u64, is_failing| {
            (from..from + 1000).filter(|id| running.start(Target::Server(*id), is_failing)).count()
        };
        assert_eq!(started(&mut running, 0, true), MAX_SERVERS[1]);
        assert_eq!(started(&mut running, 0, false), MAX_SERVERS[0], "each target once");
        assert!(running.start(Target::Worker(WorkerId(1)), false));
        assert!(!running.start(Target::Server(5000), true));
        running.end(Target::Server(0));
        assert!(running.start(Target::Server(5000), true));
    }

    #[test]
    fn each_router_has_another_interval_for_an_idle_server_or_silent_worker() {
        for (target, is_silent) in [(Target::Server(7), false), (Target::Worker(WorkerId(7)), true)] {
            let times: BTreeSet<_> = (0..100).map(|id| target.idle_time(RouterId(id), is_silent)).collect();
            let [shortest, longest] = SHORT_IDLE_TIMES;
            assert!(times.len() > 90 && times.iter().all(|time| (shortest..=longest).contains(time)), "{times:?}");
        }
    }
}
