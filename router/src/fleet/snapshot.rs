//! The list of all workers, by id and by model: a snapshot that readers take whole and that is replaced as a whole
//! (read-copy-update) when a worker joins, leaves or is cordoned.

use super::model_pool::ModelPool;
use super::worker_state::{Worker, WorkerRun};
use parking_lot::RwLock;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::time::Instant;
use worker::engine::ModelCard;
use worker::plane::WorkerId;

/// All workers at one time.
#[derive(Default)]
pub(crate) struct FleetSnapshot {
    workers: BTreeMap<WorkerId, Arc<Worker>>,
    models: BTreeMap<String, Arc<ModelPool>>,
    /// Workers that get no new requests, joined or not: a worker that restarts stays cordoned.
    cordoned: BTreeSet<WorkerId>,
    /// Models without a worker, by name, with the time when their last one left.
    absent: BTreeMap<String, Instant>,
}

/// Time for which a model whose last worker left is expected back. A restart takes as long as the weights need to load:
/// up to some minutes for large models and for servers that compile kernels at their start. A client that asks for a
/// model that was removed on purpose gets 404 after this time.
const EXPECTED_BACK_WITHIN: Duration = Duration::from_mins(10);

/// Absent models that are remembered: more than any deployment serves. Of more, those that left first are forgotten.
const MAX_ABSENT: usize = 1024;

impl FleetSnapshot {
    /// The workers of one model.
    pub(crate) fn pool(&self, model: &str) -> Option<&ModelPool> {
        self.models.get(model).map(|pool| &**pool)
    }

    /// The workers of each model, by its name.
    pub(crate) fn pools(&self) -> impl Iterator<Item = (&str, &ModelPool)> {
        self.models.iter().map(|(model, pool)| (&**model, &**pool))
    }

    /// One model card per model, adapters last: clients that ask for no model, or for the first one, mean a base model.
    pub(crate) fn cards(&self) -> Vec<Arc<ModelCard>> {
        let mut cards: Vec<_> = self.models.values().filter_map(|pool| pool.card().cloned()).collect();
        cards.sort_by_key(|card| card.parent.is_some());
        cards
    }

    /// The models of servers that get no requests, see [`is_unused`](Self::is_unused).
    pub(crate) fn unused_models(&self) -> BTreeSet<String> {
        let unused = self.workers().filter(|worker| self.is_unused(worker));
        unused.map(|worker| worker.instance.model.id.clone()).collect()
    }

    /// The models whose workers have different weights.
    pub(crate) fn mixed_models(&self) -> BTreeSet<String> {
        let mixed = self.pools().filter(|(_, pool)| pool.has_different_weights());
        mixed.map(|(model, _)| model.to_owned()).collect()
    }

    /// All workers, in the order of their ids.
    pub(crate) fn workers(&self) -> impl Iterator<Item = &Arc<Worker>> {
        self.workers.values()
    }

    /// Whether this run of a worker is a member.
    pub(crate) fn has(&self, run: WorkerRun) -> bool {
        self.get(run.worker).is_some_and(|worker| worker.run() == run)
    }

    /// The other workers of the process that a worker is in: those with the same address.
    pub(crate) fn neighbours(&self, worker: &Worker) -> Vec<WorkerRun> {
        let Some(address) = worker.engine.address() else { return Vec::new() };
        let others = self.workers().filter(|other| other.id() != worker.id());
        others.filter(|other| other.engine.address().as_ref() == Some(&address)).map(|other| other.run()).collect()
    }

    pub(crate) fn get(&self, id: WorkerId) -> Option<&Arc<Worker>> {
        self.workers.get(&id)
    }

    /// Whether a worker is cordoned.
    pub(crate) fn is_cordoned(&self, id: WorkerId) -> bool {
        self.cordoned.contains(&id)
    }

    /// Why a model that is expected back is not served now; `None` for other models.
    pub(crate) fn absence(&self, model: &str) -> Option<String> {
        let since = self.absent.get(model)?.elapsed();
        let seconds = since.as_secs();
        (since < EXPECTED_BACK_WITHIN)
            .then(|| format!("the model `{model}` has no worker now; the last one left {seconds} s ago"))
    }

    /// Why each model that is expected back is not served now.
    pub(crate) fn absences(&self) -> impl Iterator<Item = String> {
        self.absent.keys().filter_map(|model| self.absence(model))
    }

    /// What is wrong with the models whose workers are all cordoned.
    pub(crate) fn cordoned_models(&self) -> impl Iterator<Item = String> {
        let cordoned = self.pools().filter(|(_, pool)| pool.entries().is_empty());
        cordoned.map(|(model, _)| format!("all workers of the model `{model}` are cordoned"))
    }

    /// Whether a model has a worker that is not cordoned and does not fail. One that is passed over because it is busy
    /// counts, and so does one that awaits the request that tries it.
    pub(crate) fn is_available(&self, model: &str, now: Instant) -> bool {
        let fails = |worker: &Worker| worker.is_failing() && worker.is_ejected(now);
        self.pool(model).is_some_and(|pool| pool.entries().iter().any(|entry| !fails(&entry.worker)))
    }

    /// The models that have had workers and have none now, with the time when the last one left. `changed`: the models
    /// that may have lost their last worker now.
    fn absent_after(
        previous: &Self,
        models: &BTreeMap<String, Arc<ModelPool>>,
        changed: &BTreeSet<String>,
    ) -> BTreeMap<String, Instant> {
        let now = Instant::now();
        let earlier = previous.absent.iter().map(|(model, since)| (model.clone(), *since));
        let left =
            changed.iter().filter(|model| previous.models.contains_key(*model)).map(|model| (model.clone(), now));
        let is_absent = |(model, since): &(String, Instant)| {
            now.duration_since(*since) < EXPECTED_BACK_WITHIN && !models.contains_key(model)
        };
        let mut absent: BTreeMap<_, _> = earlier.chain(left).filter(is_absent).collect();
        while absent.len() > MAX_ABSENT
            && let Some(first) = absent.iter().min_by_key(|(_, since)| **since).map(|(model, _)| model.clone())
        {
            absent.remove(&first);
        }
        absent
    }

    /// Whether a server of another program gets no requests, because workers of the deployment serve a model of the
    /// same name. It does not depend on which was registered first, so all routers of a deployment agree.
    pub(crate) fn is_unused(&self, worker: &Worker) -> bool {
        let card = &worker.instance.model;
        card.is_relayed && self.pool(&card.id).is_some_and(|pool| !pool.is_relayed())
    }

    /// The list after a change of the workers of some models (`changed`), or of their cordons. The other models keep
    /// their pools, and these have what was learned of the model so far.
    fn after(
        previous: &Self,
        workers: BTreeMap<WorkerId, Arc<Worker>>,
        cordoned: BTreeSet<WorkerId>,
        changed: &BTreeSet<String>,
    ) -> Self {
        let mut pools = BTreeMap::<&str, ModelPool>::new();
        let of_changed = workers.iter().filter(|(_, worker)| changed.contains(&worker.instance.model.id));
        let (servers, own): (Vec<_>, Vec<_>) = of_changed.partition(|(_, worker)| worker.instance.model.is_relayed);
        for (id, worker) in own.into_iter().chain(servers) {
            let (model, is_relayed) = (&worker.instance.model.id, worker.instance.model.is_relayed);
            let same_kind = || previous.pool(model).filter(|pool| pool.is_relayed() == is_relayed);
            let stats = || same_kind().map(|pool| pool.stats().clone()).unwrap_or_default();
            let pool = pools.entry(model).or_insert_with(|| ModelPool::new(is_relayed, stats()));
            if pool.is_relayed() == is_relayed {
                pool.add(worker, cordoned.contains(id));
            }
        }
        let mut models = previous.models.clone();
        models.retain(|model, _| !changed.contains(model));
        models.extend(pools.into_iter().map(|(model, pool)| (model.to_owned(), Arc::new(pool))));
        let absent = Self::absent_after(previous, &models, changed);
        Self { workers, models, cordoned, absent }
    }
}

/// The current snapshot of the list, and the number of choices made so far.
#[derive(Default)]
pub(crate) struct Fleet {
    snapshot: RwLock<Arc<FleetSnapshot>>,
    choices: AtomicU64,
}

impl Fleet {
    /// The current snapshot.
    pub(crate) fn snapshot(&self) -> Arc<FleetSnapshot> {
        self.snapshot.read().clone()
    }

    /// Adds a worker, or replaces the one with its id.
    pub(crate) fn join(&self, worker: Arc<Worker>) {
        self.change([worker], None);
    }

    /// Adds many workers at once.
    pub(crate) fn join_all(&self, joining: impl IntoIterator<Item = Arc<Worker>>) {
        self.change(joining, None);
    }

    /// Removes a worker: its lease has ended.
    pub(crate) fn leave(&self, id: WorkerId) {
        self.change([], Some(id));
    }

    /// Records that a worker was chosen.
    pub(crate) fn choose(&self, worker: &Worker) {
        self.choices.fetch_add(1, Ordering::Relaxed);
        worker.load.choose();
    }

    /// Number of choices so far.
    pub(crate) fn choices(&self) -> u64 {
        self.choices.load(Ordering::Relaxed)
    }

    fn change(&self, joining: impl IntoIterator<Item = Arc<Worker>>, leaving: Option<WorkerId>) {
        let mut snapshot = self.snapshot.write();
        let (mut workers, mut changed) = (snapshot.workers.clone(), BTreeSet::new());
        let mut previous: Vec<_> = leaving.and_then(|id| workers.remove(&id)).into_iter().collect();
        for worker in joining {
            changed.insert(worker.instance.model.id.clone());
            previous.extend(workers.insert(worker.id(), worker));
        }
        for previous in previous {
            changed.insert(previous.instance.model.id.clone());
            if workers.get(&previous.id()).is_none_or(|now| now.instance.epoch != previous.instance.epoch) {
                previous.lease_ended.cancel();
                previous.engine.check_process();
            }
        }
        *snapshot = Arc::new(FleetSnapshot::after(&snapshot, workers, snapshot.cordoned.clone(), &changed));
    }

    /// Cordons a worker, or ends its cordon. Returns `false` if the worker has not joined.
    pub(crate) fn cordon(&self, id: WorkerId, cordoned: bool) -> bool {
        let mut snapshot = self.snapshot.write();
        let worker = snapshot.workers.get(&id);
        let changed = worker.map(|worker| worker.instance.model.id.clone());
        let (is_there, mut all) = (changed.is_some(), snapshot.cordoned.clone());
        let changes = if cordoned { is_there && all.insert(id) } else { all.remove(&id) };
        if changes {
            let changed = changed.into_iter().collect();
            *snapshot = Arc::new(FleetSnapshot::after(&snapshot, snapshot.workers.clone(), all, &changed));
        }
        is_there
    }
}
