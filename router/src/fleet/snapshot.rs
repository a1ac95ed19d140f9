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
    models: BTreeMap<String, ModelPool>,
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
        self.models.get(model)
    }

    /// The workers of each model, by its name.
    pub(crate) fn pools(&self) -> impl Iterator<Item = (&str, &ModelPool)> {
        self.models.iter().map(|(model, pool)| (&**model, pool))
    }

    /// One model card per model.
    pub(crate) fn cards(&self) -> Vec<Arc<ModelCard>> {
        self.models.values().filter_map(|pool| pool.card().cloned()).collect()
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

    /// The models that `previous` had and `models` has not, with the time when their last worker left.
    fn absent_after(previous: &Self, models: &BTreeMap<String, ModelPool>) -> BTreeMap<String, Instant> {
        let now = Instant::now();
        let earlier = previous.absent.iter().map(|(model, since)| (model.clone(), *since));
        let left = previous.models.keys().map(|model| (model.clone(), now));
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

    /// `previous` has what was learned of each model so far.
    fn of(workers: BTreeMap<WorkerId, Arc<Worker>>, cordoned: BTreeSet<WorkerId>, previous: &Self) -> Self {
        let mut models = BTreeMap::<String, ModelPool>::new();
        let (servers, own): (Vec<_>, Vec<_>) = workers.iter().partition(|(_, worker)| worker.instance.model.is_relayed);
        for (id, worker) in own.into_iter().chain(servers) {
            let (model, is_relayed) = (&worker.instance.model.id, worker.instance.model.is_relayed);
            let same_kind = || previous.pool(model).filter(|pool| pool.is_relayed() == is_relayed);
            let stats = || same_kind().map(|pool| pool.stats().clone()).unwrap_or_default();
            let new_pool = || ModelPool::new(is_relayed, stats());
            let pool = models.entry(model.clone()).or_insert_with(new_pool);
            if pool.is_relayed() == is_relayed {
                pool.add(worker, cordoned.contains(id));
            }
        }
        let absent = Self::absent_after(previous, &models);
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
        self.change(|workers| workers.insert(worker.id(), worker));
    }

    /// Adds many workers at once.
    pub(crate) fn join_all(&self, joining: impl Iterator<Item = Arc<Worker>>) {
        self.change(|workers| {
            workers.extend(joining.map(|worker| (worker.id(), worker)));
            None
        });
    }

    /// Removes a worker: its lease has ended.
    pub(crate) fn leave(&self, id: WorkerId) {
        self.change(|workers| workers.remove(&id));
    }

    /// Records that a worker was chosen.
    pub(crate) fn choose(&self, worker: &Worker) {
        let now = self.choices.fetch_add(1, Ordering::Relaxed) + 1;
        worker.load.choose(now);
    }

    /// Number of choices so far.
    pub(crate) fn choices(&self) -> u64 {
        self.choices.load(Ordering::Relaxed)
    }

    fn change(&self, change: impl FnOnce(&mut BTreeMap<WorkerId, Arc<Worker>>) -> Option<Arc<Worker>>) {
        let mut snapshot = self.snapshot.write();
        let mut workers = snapshot.workers.clone();
        if let Some(previous) = change(&mut workers)
            && workers.get(&previous.id()).is_none_or(|now| now.instance.epoch != previous.instance.epoch)
        {
            previous.lease_ended.cancel();
            previous.engine.check_process();
        }
        *snapshot = Arc::new(FleetSnapshot::of(workers, snapshot.cordoned.clone(), &snapshot));
    }

    /// Cordons a worker, or ends its cordon. Returns `false` if the worker has not joined.
    pub(crate) fn cordon(&self, id: WorkerId, cordoned: bool) -> bool {
        let mut snapshot = self.snapshot.write();
        let (workers, mut all) = (snapshot.workers.clone(), snapshot.cordoned.clone());
        let there = workers.contains_key(&id);
        let changes = if cordoned { there && all.insert(id) } else { all.remove(&id) };
        if changes {
            *snapshot = Arc::new(FleetSnapshot::of(workers, all, &snapshot));
        }
        there
    }
}
