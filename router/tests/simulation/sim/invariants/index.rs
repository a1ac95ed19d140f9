//! Compares the routers' index with what workers and store hold, whenever one of these is at rest, in the middle of a
//! simulation.

use super::{indexed_digests, key};
use crate::sim::cluster::{Cluster, STORE};
use kvbm::{Level, SetDigest};
use router::index::Holder;
use std::collections::BTreeMap;
use std::time::Duration;
use tokio::time::Instant;

/// A worker or the store is at rest when it has had no request and no event for this long: many times what an event
/// takes to the index of a router, on a network without faults.
const AT_REST: Duration = Duration::from_millis(500);
/// A worker removes expired blocks without a request, and announces it a moment later. So a difference counts once it
/// has lasted for this long after the last event.
const ANNOUNCED: Duration = Duration::from_secs(1);
/// Time from the end of a fault until routers have repaired what they missed: a digest every ten seconds shows it, and
/// a resync is repeated after up to five.
const REPAIR: Duration = Duration::from_secs(30);
/// Time from the start of a simulation until all routers have snapshots of all workers.
const START: Duration = Duration::from_secs(5);

/// Since when each worker and the store are at rest.
#[derive(Default)]
pub(super) struct IndexWatch(BTreeMap<Holder, Rest>);

struct Rest {
    /// Number of the last event.
    event: u64,
    since: Instant,
    is_compared: bool,
}

impl IndexWatch {
    /// Compares the index with each source that is at rest, once for each rest.
    pub(super) fn check(&mut self, cluster: &Cluster) {
        if cluster.world.now() < START || !cluster.world.is_undisturbed_for(REPAIR) {
            self.0.clear();
            return;
        }
        let workers: Vec<(Holder, u64, bool)> = cluster
            .workers
            .lock()
            .iter()
            .map(|(id, process)| (Holder::Worker(*id), *process.log.latest().borrow(), process.engine.requests() == 0))
            .collect();
        let store = cluster.store.iter().map(|store| (Holder::Store(STORE), store.latest(), true));
        let due: Vec<Holder> = workers
            .into_iter()
            .chain(store)
            .filter(|(holder, event, is_idle)| self.is_due(*holder, *event, *is_idle))
            .map(|(holder, ..)| holder)
            .collect();
        for holder in due {
            let difference = difference(cluster, holder);
            let Some(rest) = self.0.get_mut(&holder) else { continue };
            rest.is_compared = difference.is_none() || rest.since.elapsed() >= ANNOUNCED;
            if let Some(difference) = difference.filter(|_| rest.is_compared) {
                cluster.world.violated(format_args!("{difference}, at rest"));
            }
        }
    }

    /// Whether a source is at rest and was not compared since it is.
    fn is_due(&mut self, holder: Holder, event: u64, is_idle: bool) -> bool {
        let now = Instant::now();
        let rest = self.0.entry(holder).or_insert(Rest { event, since: now, is_compared: false });
        if rest.event != event || !is_idle {
            *rest = Rest { event, since: now, is_compared: false };
        }
        !rest.is_compared && now - rest.since >= AT_REST
    }
}

/// Compares the index of every router with what a worker or the store holds.
fn difference(cluster: &Cluster, holder: Holder) -> Option<String> {
    let world = &cluster.world;
    let held: Vec<(Level, SetDigest)> = if let Holder::Worker(id) = holder {
        cluster.workers.lock().get(&id).map(|process| process.manager.set_digest()).unwrap_or_default()
    } else {
        cluster.store.iter().map(|store| (Level::G4, store.set_digest())).collect()
    };
    world.log(format_args!("{holder:?} is at rest and compared with the index"));
    for (number, process) in &*cluster.routers.lock() {
        let indexed = indexed_digests(&process.router);
        for (level, digest) in &held {
            let at = key(holder, *level);
            let known = indexed.get(&at).copied().unwrap_or_default();
            if known != *digest {
                return Some(format!("r{number}: index of {at} has {known:?}, not {digest:?}"));
            }
        }
    }
    None
}
