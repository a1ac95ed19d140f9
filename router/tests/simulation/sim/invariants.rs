//! What must hold at any time, and what must hold once all is quiet.
//!
//! Limits, membership, and the index against the events are checked at the end of each instant: when no task can run
//! any more, before the virtual clock goes on. That is after each event of the scheduler that another process can
//! observe. Processes affect each other by messages only, each of which takes time (`network.rs`), so the states
//! between two tasks of one instant are internal to a process.

mod events;
mod index;

use super::cluster::{Cluster, STORE};
use super::network::Node;
use super::planes::{LEASE, RENEWAL};
use events::EventWatch;
use index::IndexWatch;
use kvbm::{Level, SetDigest, Tier};
use parking_lot::Mutex;
use router::index::Holder;
use router::{Outstanding, Router};
use std::collections::BTreeMap;
use std::sync::{Arc, Weak};
use std::time::Duration;
use tokio::time::{Instant, sleep};
use worker::engine::{Engine, Readiness};
use worker::plane::WorkerId;

/// Interval at which clocks are moved, and at which the index of holders that are at rest is checked.
const INTERVAL: Duration = Duration::from_millis(100);
/// Time from the last message to the last consequence: a booking of another router whose end was lost expires after a
/// minute. A digest every ten seconds shows what a router missed, and a resync is repeated after up to five.
const QUIET: Duration = Duration::from_secs(75);
/// Time after which a health check of an idle worker has ended, and how often that is waited for: another may have
/// begun.
const HEALTH_CHECK: Duration = Duration::from_secs(2);
const LOOKS: usize = 4;
/// The slowest message of a bad network.
const PROPAGATION: Duration = Duration::from_secs(2);

/// What is checked at the end of each instant.
#[derive(Default)]
pub(super) struct InstantCheck(Mutex<Option<Watched>>);

struct Watched {
    /// Weak: the runtime has the check, and the tasks of the cluster have the runtime.
    cluster: Weak<Cluster>,
    /// Since when each router has been connected to the planes.
    connected: BTreeMap<u64, Instant>,
    events: EventWatch,
}

impl InstantCheck {
    pub(super) fn start(&self, cluster: &Arc<Cluster>) {
        *self.0.lock() = Some(Watched {
            cluster: Arc::downgrade(cluster),
            connected: BTreeMap::new(),
            events: EventWatch::default(),
        });
    }

    /// Called when no task can run. No lock of the simulation is held then, because none is held across an await.
    pub(super) fn run(&self) {
        let mut watched = self.0.lock();
        let Some(Watched { cluster, connected, events }) = &mut *watched else { return };
        if let Some(cluster) = cluster.upgrade().filter(|cluster| cluster.world.keeps_violations()) {
            check_limits(&cluster);
            check_membership(&cluster, connected);
            check_readiness(&cluster);
            events.check(&cluster);
        }
    }
}

/// Moves the clocks of all workers, forever, and compares the index of holders that are at rest.
pub(super) async fn watch(cluster: Arc<Cluster>) {
    let mut index = IndexWatch::default();
    loop {
        sleep(INTERVAL).await;
        cluster.set_clocks();
        index.check(&cluster);
    }
}

fn check_limits(cluster: &Cluster) {
    let world = &cluster.world;
    for (id, process) in &*cluster.workers.lock() {
        let shape = &cluster.scenario.workers[id.0 as usize];
        // Requests that were checked at the same time may pass the limit together, one for each router.
        let most = shape.speed.max_queued_requests + shape.speed.max_num_seqs + cluster.scenario.requests as usize;
        if process.engine.requests() > most {
            world.violated(format_args!("{id} has {} requests, more than {most}", process.engine.requests()));
        }
        for (level, usage) in process.manager.usage() {
            if usage.capacity.is_some_and(|capacity| usage.bytes > capacity) {
                world.violated(format_args!("{id}: {level} exceeds its capacity: {usage:?}"));
            }
        }
    }
    if let Some(usage) = cluster.store.as_ref().map(|store| store.usage())
        && usage.capacity.is_some_and(|capacity| usage.blocks > capacity)
    {
        world.violated(format_args!("the store exceeds its capacity: {usage:?}"));
    }
}

/// No task of a router has panicked or ended.
fn check_readiness(cluster: &Cluster) {
    let world = &cluster.world;
    for (number, process) in &*cluster.routers.lock() {
        if let Readiness::NotReady(why) = process.router.readiness()
            && why.starts_with("router failed")
        {
            world.violated(format_args!("r{number}: {why}"));
        }
    }
}

/// A router that is connected sees no worker that has been dead for longer than its lease.
fn check_membership(cluster: &Cluster, connected: &mut BTreeMap<u64, Instant>) {
    let (world, now) = (&cluster.world, Instant::now());
    let (workers, displaced, ended) = (cluster.workers.lock(), cluster.displaced.lock(), cluster.ended.lock());
    // The last renewal arrives as late as that, and so does the message that the lease has ended.
    let is_overdue = |since: Instant| now - since > LEASE + RENEWAL * 2 + PROPAGATION * 2;
    let runs = |id: &WorkerId| workers.contains_key(id) || displaced.contains(id);
    let overdue = ended.iter().filter(|(id, (_, at))| is_overdue(*at) && !runs(id));
    let overdue: BTreeMap<String, (u64, Instant)> = overdue.map(|(id, ended)| (id.to_string(), *ended)).collect();
    for (number, process) in &*cluster.routers.lock() {
        if !world.network.reaches(Node::Router(*number), Node::Broker) {
            connected.remove(number);
            continue;
        }
        let since = (*connected.entry(*number).or_insert(now)).max(process.started);
        if overdue.is_empty() || !is_overdue(since) {
            continue;
        }
        for status in process.router.workers() {
            let Some((epoch, at)) = overdue.get(&status.worker) else { continue };
            let (id, time) = (status.worker, now - *at);
            world.violated(format_args!("r{number} still sees {id} of epoch {epoch}, dead for {time:?}"));
        }
    }
}

/// Waits until all is quiet, and checks that nothing is left over and all views agree.
pub(super) async fn check_quiet(cluster: &Arc<Cluster>) {
    sleep(QUIET).await;
    let mut problems = problems(cluster);
    // Health checks of idle workers are requests too: what is left for good is there at each look.
    for _ in 0..LOOKS {
        if problems.is_empty() {
            break;
        }
        sleep(HEALTH_CHECK).await;
        problems = self::problems(cluster);
    }
    for problem in &problems {
        cluster.world.violated(format_args!("{problem}"));
    }
    cluster.world.log(format_args!("quiet: {:?}", actual_digests(cluster)));
}

fn problems(cluster: &Cluster) -> Vec<String> {
    let (actual, mut problems) = (actual_digests(cluster), Vec::new());
    let expected_workers: Vec<String> = cluster.workers.lock().keys().map(ToString::to_string).collect();
    let routers = cluster.routers.lock();
    for (number, process) in &*routers {
        let router = &process.router;
        let left = router.outstanding();
        if left != Outstanding::default() {
            problems.push(format!("r{number} keeps {left:?}"));
        }
        let workers = router.workers();
        let seen: Vec<String> = workers.iter().map(|worker| worker.worker.clone()).collect();
        if seen != expected_workers {
            problems.push(format!("r{number} sees {seen:?} instead of {expected_workers:?}"));
        }
        for worker in workers.iter().filter(|worker| worker.requests > 0) {
            problems.push(format!("r{number} counts {} requests on {}", worker.requests, worker.worker));
        }
        let indexed = indexed_digests(router);
        for (at, digest) in &actual {
            if indexed.get(at) != Some(digest) {
                problems.push(format!("r{number}: index of {at} has {:?}, not {digest:?}", indexed.get(at)));
            }
        }
        for at in indexed.keys().filter(|at| !actual.contains_key(*at)) {
            problems.push(format!("r{number}: index has blocks of {at}, which has none"));
        }
        let replicas = gauge(&process.registry, "blockyard_router_replicas");
        if replicas != routers.len() as i64 {
            problems.push(format!("r{number} counts {replicas} of {} routers", routers.len()));
        }
    }
    for (id, process) in &*cluster.workers.lock() {
        let (available, capacity) = (process.manager.available(), process.manager.capacity());
        // A pinned block and those before it are not evictable.
        if available != capacity && process.manager.pinned() == 0 {
            problems.push(format!("{id}: {available} of {capacity} slots are free or evictable"));
        }
        let handoffs = cluster.world.memories.lock().get(id).map_or(0, |memory| memory.handoffs.open_handoffs());
        if handoffs > 0 {
            problems.push(format!("{id} keeps {handoffs} hand-overs"));
        }
        if process.engine.requests() > 0 {
            problems.push(format!("{id} keeps {} requests", process.engine.requests()));
        }
    }
    problems
}

/// What a router has indexed, by holder and level.
fn indexed_digests(router: &Router) -> BTreeMap<String, SetDigest> {
    // Evicted blocks are not missed: the index has a limit.
    let complete = |(holder, level, digest): (_, _, Option<_>)| Some((key(holder, level), digest?));
    router.index_digests().into_iter().filter_map(complete).collect()
}

fn key(holder: Holder, level: Level) -> String {
    match holder {
        Holder::Worker(id) => format!("{id} {level}"),
        Holder::Store(id) => format!("{id} {level}"),
        Holder::Estimate(id) => format!("estimate of {id} {level}"),
    }
}

/// What workers and store hold, by holder and level, without those that hold nothing.
fn actual_digests(cluster: &Cluster) -> BTreeMap<String, SetDigest> {
    let mut all = BTreeMap::new();
    for (id, process) in &*cluster.workers.lock() {
        for (level, digest) in process.manager.set_digest() {
            all.insert(key(Holder::Worker(*id), level), digest);
        }
    }
    if let Some(store) = &cluster.store {
        all.insert(key(Holder::Store(STORE), Level::G4), store.set_digest());
    }
    all.retain(|_, digest| digest.blocks > 0);
    all
}

fn gauge(registry: &prometheus::Registry, name: &str) -> i64 {
    let families = registry.gather();
    let family = families.iter().find(|family| family.name() == name);
    family.and_then(|family| family.get_metric().first()).map_or(0, |metric| metric.get_gauge().get_value() as i64)
}
