//! The workers by model: a snapshot that readers take whole and the feed replaces (read-copy-update).

use super::endpoints::{self, Endpoints};
use super::estimated_cache::EstimatedCache;
use super::event_accuracy::CacheView;
use super::health::{Check, Health, HealthSignal};
use super::transition::{Cause, Transition};
use crate::index::HolderId;
use crate::load::{LoadStats, ModelStats, SnapshotCache, Timestamp, WorkerLoad};
use kvbm::Epoch;
use parking_lot::{Mutex, MutexGuard, RwLock};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Display;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use worker::engine::{EndpointKind, Engine, ModelCard, Request, Work};
use worker::plane::{Instance, Load, Role, WorkerId};

/// A worker from one start to its next. A request that one run of it did not serve may be sent to the next.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct WorkerRun {
    pub(crate) worker: WorkerId,
    epoch: Epoch,
}

/// A worker during one epoch (one life of its process).
pub(crate) struct Worker {
    /// Its own description, from discovery.
    pub(crate) instance: Arc<Instance>,
    /// Its id as text, for metrics and responses.
    pub(crate) name: Arc<str>,
    /// The engine that serves its requests.
    pub(crate) engine: Arc<dyn Engine>,
    /// Whether decisions use its KV events or an estimate of its cache.
    pub(crate) cache_view: CacheView,
    /// Index slot of that view.
    pub(crate) slot: HolderId,
    /// Index slot of its KV events, whether decisions use them or not.
    pub(crate) announced: HolderId,
    /// Index slot of the estimate of its cache, if prompts whose tokens are unknown are looked up there.
    pub(crate) texts: Option<HolderId>,
    /// Accuracy of its events, and the estimate of its cache.
    pub(crate) estimated_cache: Arc<EstimatedCache>,
    /// Its load.
    pub(crate) load: Arc<WorkerLoad>,
    /// Cancelled when its lease ends.
    pub(crate) lease_ended: CancellationToken,
    health: Mutex<Health>,
    /// Time of its last output, in nanoseconds since `first_seen`.
    last_output: AtomicU64,
    /// Sequences that it decodes at a time (`max_num_seqs`); 0 when unknown.
    batch: AtomicU64,
    /// Whether it has measured its prefill speed.
    measured: AtomicBool,
    first_seen: Instant,
}

impl Worker {
    /// A worker. `previous`: the same worker and epoch, joined earlier; its requests are still running.
    pub(crate) fn new(
        instance: Arc<Instance>,
        engine: Arc<dyn Engine>,
        slot: HolderId,
        previous: Option<&Self>,
    ) -> Self {
        let cache_view = previous.map_or(CacheView::Events, |worker| worker.cache_view);
        let new_load = || if instance.model.is_relayed { WorkerLoad::of_server() } else { WorkerLoad::default() };
        let load = previous.map_or_else(|| Arc::new(new_load()), |worker| worker.load.clone());
        Self {
            name: instance.id.to_string().into(),
            instance,
            engine,
            cache_view,
            slot: previous.filter(|_| cache_view != CacheView::Events).map_or(slot, |worker| worker.slot),
            announced: slot,
            texts: previous.and_then(|worker| worker.texts),
            estimated_cache: previous.map(|worker| worker.estimated_cache.clone()).unwrap_or_default(),
            load,
            lease_ended: previous.map(|worker| worker.lease_ended.clone()).unwrap_or_default(),
            health: Mutex::new(previous.map(Self::health).unwrap_or_default()),
            last_output: AtomicU64::new(previous.map_or(0, |worker| worker.last_output.load(Ordering::Relaxed))),
            batch: AtomicU64::new(previous.map_or(0, Self::batch)),
            measured: AtomicBool::new(previous.is_some_and(Self::measured)),
            first_seen: previous.map_or_else(Instant::now, |worker| worker.first_seen),
        }
    }

    /// Whether a worker with this card gets prompts whose tokens are not those of its events, so that its cache is
    /// estimated from their texts beside its events.
    pub(crate) fn has_texts(card: &ModelCard) -> bool {
        card.is_relayed && card.has_exact_blocks
    }

    /// Whether a worker with this card publishes KV events: a server says so when it is added, and every worker of ours
    /// does.
    pub(crate) fn publishes_events(card: &ModelCard) -> bool {
        !card.is_relayed || card.has_exact_blocks
    }

    /// The same worker, of which prompts of unknown tokens are looked up at this slot.
    pub(crate) fn with_texts(self, slot: Option<HolderId>) -> Self {
        Self { texts: slot, ..self }
    }

    /// The same worker with another cache view, which has `slot` in the index.
    pub(crate) fn with_cache_view(&self, cache_view: CacheView, slot: HolderId) -> Self {
        Self { cache_view, slot, ..Self::new(self.instance.clone(), self.engine.clone(), self.announced, Some(self)) }
    }

    pub(crate) fn id(&self) -> WorkerId {
        self.instance.id
    }

    /// Its id, and where it is if that is not this process, for an operator.
    pub(crate) fn described(&self) -> String {
        match self.engine.address() {
            Some(address) => format!("worker {} ({address})", self.name),
            None => format!("worker {}", self.name),
        }
    }

    pub(crate) fn run(&self) -> WorkerRun {
        WorkerRun { worker: self.instance.id, epoch: self.instance.epoch }
    }

    /// Whether it may have the endpoint of a request.
    pub(crate) fn has_endpoint(&self, request: &Request) -> bool {
        endpoints::has(self.engine.only(), endpoints::kind(request))
    }

    /// Whether it has the role to decode. Prefill workers decode only when no other worker is left.
    pub(crate) fn decodes(&self) -> bool {
        self.instance.role != Role::Prefill
    }

    /// Records that a request has failed, and why, for the log.
    pub(crate) fn note(&self, signal: HealthSignal, error: &dyn Display) {
        self.noted(signal, error, Instant::now());
    }

    fn noted(&self, signal: HealthSignal, error: &dyn Display, now: Instant) {
        if let Some(transition) = self.change(|health| health.note(signal, now)) {
            transition.log(self.id(), &*self.engine, 1, Cause::Request, error);
        }
    }

    /// Records a first output.
    pub(crate) fn succeeded(&self, now: Instant) {
        self.touch(now);
        self.noted(HealthSignal::Healthy, &"", now);
    }

    /// Records an output.
    pub(crate) fn touch(&self, now: Instant) {
        let since = now.saturating_duration_since(self.first_seen);
        self.last_output.store(since.as_nanos() as u64, Ordering::Relaxed);
    }

    /// Whether it has returned an output since then.
    pub(crate) fn active_since(&self, then: Instant) -> bool {
        self.first_seen + Duration::from_nanos(self.last_output.load(Ordering::Relaxed)) > then
    }

    /// Records the values of a report that the admission queue reads.
    pub(crate) fn reported(&self, load: &Load) {
        self.batch.store(load.sequences_max.into(), Ordering::Relaxed);
        self.measured.store(load.prefill_tokens_per_second.is_some(), Ordering::Relaxed);
    }

    /// Whether a new request waits neither for queued prompts nor for blocks.
    pub(crate) fn is_free(&self, now: Instant) -> bool {
        let LoadStats { prompts, active_blocks, total_blocks, .. } = self.load.stats(now);
        prompts == 0 && (total_blocks == 0 || active_blocks <= total_blocks)
    }

    /// Sequences that it decodes at a time (`max_num_seqs`); 0 when unknown.
    pub(crate) fn batch(&self) -> u64 {
        self.batch.load(Ordering::Relaxed)
    }

    /// Whether it has measured its prefill speed.
    pub(crate) fn measured(&self) -> bool {
        self.measured.load(Ordering::Relaxed)
    }

    /// Whether a health check is due: its breaker has been open long enough, or it had no check for `idle` and either
    /// was idle as long or awaits a trial.
    pub(crate) fn wants_probe(&self, idle: Duration, now: Instant) -> bool {
        let health = self.health();
        if health.is_open() {
            return health.wants_probe(now, now);
        }
        let is_due = |since| health.wants_probe(since, now) && (!health.is_closed() || self.is_idle_since(since, now));
        now.checked_sub(idle).is_some_and(is_due)
    }

    /// When the health check that is due became due; `None` if none is. Those that were due first come first.
    pub(crate) fn probe_due(&self, idle: Duration, now: Instant) -> Option<Instant> {
        let due = || self.health().probe_due(idle).unwrap_or(self.first_seen + idle);
        self.wants_probe(idle, now).then(due)
    }

    /// Whether its health checks fail, or have not been answered since its requests failed.
    pub(crate) fn fails_health_checks(&self) -> bool {
        self.health().is_open()
    }

    /// Whether a health check of its server is one of this worker too: its breaker has been open long enough, it awaits
    /// a trial, or it was idle for `idle`.
    pub(crate) fn shares_probe(&self, idle: Duration, now: Instant) -> bool {
        let health = self.health();
        if health.is_open() {
            return health.wants_probe(now, now);
        }
        !health.is_closed() || now.checked_sub(idle).is_some_and(|since| self.is_idle_since(since, now))
    }

    fn is_idle_since(&self, since: Instant, now: Instant) -> bool {
        let has_requests = || {
            if self.instance.model.is_relayed {
                // A server also reports requests of other gateways. They do not show this one that it answers.
                return self.load.reservations() > 0;
            }
            let LoadStats { sequences, prompts, .. } = self.load.stats(now);
            sequences > 0 || prompts > 0
        };
        self.first_seen <= since && !self.active_since(since) && !has_requests()
    }

    /// Records the start of a health check.
    pub(crate) fn probe(&self, now: Instant) {
        self.change(|health| health.probe(now));
    }

    /// Records the result of a health check. Returns what it has changed.
    pub(crate) fn probed(&self, signal: HealthSignal) -> Option<Transition> {
        let now = Instant::now();
        let check = if self.engine.server().is_some() { Check::Answers } else { Check::Computes };
        self.change(|health| health.probed(check, signal, now))
    }

    /// Records that a request is sent to it.
    pub(crate) fn request_sent(&self, now: Instant) {
        // Only a breaker that is not closed has a trial.
        if self.is_failing() {
            self.change(|health| health.request_sent(now));
        }
    }

    /// Whether its requests or health checks have failed, and no request has shown yet that it works again.
    pub(crate) fn is_failing(&self) -> bool {
        !self.health().is_closed()
    }

    /// Whether they have failed for seconds.
    pub(crate) fn is_down(&self) -> bool {
        self.health().is_down()
    }

    /// Whether it is to be passed over while others are available.
    pub(crate) fn is_ejected(&self, now: impl Into<Timestamp>) -> bool {
        self.load.is_ejected(now)
    }

    fn health(&self) -> Health {
        *self.health.lock()
    }

    fn change(&self, change: impl FnOnce(&mut Health)) -> Option<Transition> {
        let mut health = self.health.lock();
        let was_closed = health.is_closed();
        change(&mut health);
        // Decisions read the published load instead of taking this lock.
        self.load.eject_until(health.ejected_until().map(Timestamp::from));
        match (was_closed, health.is_closed()) {
            (true, false) => Some(Transition::Opened),
            (false, true) => Some(Transition::Closed),
            (true, true) | (false, false) => None,
        }
    }
}

/// Whether the tokens of a prompt are those that its worker will compute.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum PromptTokens {
    /// They are.
    Known,
    /// They are estimated from its text, so they match no block in the events of a worker with tokens of its own.
    Estimated,
}

/// The workers of one model. All of them take the requests that the router gets, or all of them are servers of other
/// programs, to which the client's requests are relayed: a request of one kind cannot be sent to the other.
#[derive(Default)]
pub(crate) struct ModelPool {
    entries: Vec<WorkerEntry>,
    /// Whether they are servers of other programs.
    is_relayed: bool,
    /// The distinct hash schemes of their blocks, one card each; nearly always one.
    schemes: Vec<Arc<ModelCard>>,
    /// The longest context of any of them, in tokens.
    context: usize,
    /// Whether any of them has the role to prefill.
    has_prefill_workers: bool,
    /// Their endpoints, and those of cordoned workers, which are away for a time.
    endpoints: Endpoints,
    /// Snapshots of their load for decisions.
    snapshots: Mutex<SnapshotCache>,
    /// What is learned of the model.
    stats: Arc<ModelStats>,
}

/// A worker, with copies of the fields that every decision reads.
pub(crate) struct WorkerEntry {
    pub(crate) id: WorkerId,
    pub(crate) worker: Arc<Worker>,
    pub(crate) load: Arc<WorkerLoad>,
    slot: HolderId,
    /// The slot for prompts of unknown tokens.
    texts: HolderId,
    /// Index of its hash scheme in [`ModelPool::schemes`].
    pub(crate) scheme: u32,
    pub(crate) role: Role,
    pub(crate) context: usize,
    only: Option<EndpointKind>,
}

impl WorkerEntry {
    /// Index slot of the worker's cache, as a prompt of these tokens sees it.
    #[inline]
    pub(crate) fn slot(&self, tokens: PromptTokens) -> HolderId {
        match tokens {
            PromptTokens::Known => self.slot,
            PromptTokens::Estimated => self.texts,
        }
    }

    /// Whether the worker may have endpoints of this kind.
    #[inline]
    pub(crate) fn has_endpoint(&self, kind: Option<EndpointKind>) -> bool {
        endpoints::has(self.only, kind)
    }

    /// How the cached prefix of a prompt is known, if not from the worker's events; for explanations.
    pub(crate) fn remark(&self, tokens: PromptTokens) -> Option<&'static str> {
        let by_text = tokens == PromptTokens::Estimated && self.worker.texts.is_some();
        let text = by_text.then_some("estimated: the tokens of the prompt are unknown; compared by its text");
        self.worker.cache_view.remark().or(text)
    }
}

impl ModelPool {
    pub(crate) fn entries(&self) -> &[WorkerEntry] {
        &self.entries
    }

    /// Whether they can serve a request, as far as that depends on its kind.
    pub(crate) fn takes(&self, request: &Request) -> bool {
        self.is_relayed == matches!(request.work, Work::Relay(_))
    }

    /// One card for each hash scheme.
    pub(crate) fn schemes(&self) -> &[Arc<ModelCard>] {
        &self.schemes
    }

    /// The longest prompt plus output that any of them takes, in tokens.
    pub(crate) fn context(&self) -> usize {
        self.context
    }

    /// Whether any of them prefills for others.
    pub(crate) fn has_prefill_workers(&self) -> bool {
        self.has_prefill_workers
    }

    /// The endpoints of the workers.
    pub(crate) fn endpoints(&self) -> &Endpoints {
        &self.endpoints
    }

    /// What is learned of the model.
    pub(crate) fn stats(&self) -> &Arc<ModelStats> {
        &self.stats
    }

    /// Refreshes the load snapshots and locks them for one decision.
    pub(crate) fn snapshots(&self, now: Timestamp) -> MutexGuard<'_, SnapshotCache> {
        // A refresh does not panic half-way.
        let mut snapshots = self.snapshots.lock();
        snapshots.refresh(self.entries.iter().map(|entry| &*entry.load), now);
        snapshots
    }

    /// Counts a prompt that another router has placed.
    pub(crate) fn prompt_placed_elsewhere(&self, now: Timestamp) {
        self.snapshots.lock().prompt_arrived(now);
    }

    /// Adds a worker. A `cordoned` one counts for models and context but gets no entry: no decision can choose it.
    fn take(&mut self, worker: &Arc<Worker>, cordoned: bool) {
        let Instance { model: card, role, .. } = &*worker.instance;
        let same = |scheme: &Arc<ModelCard>| scheme.identity == card.identity && scheme.block_size == card.block_size;
        let scheme = self.schemes.iter().position(same).unwrap_or_else(|| {
            self.schemes.push(card.clone());
            self.schemes.len() - 1
        });
        self.context = self.context.max(card.context);
        let only = worker.engine.only();
        self.endpoints.add(only);
        if cordoned {
            return;
        }
        let (id, slot, scheme) = (worker.id(), worker.slot, scheme as u32);
        let texts = worker.texts.unwrap_or(slot);
        self.has_prefill_workers |= *role == Role::Prefill;
        let (worker, load) = (worker.clone(), worker.load.clone());
        load.learn_for(&self.stats);
        let (role, context) = (*role, card.context);
        self.entries.push(WorkerEntry { id, worker, load, slot, texts, scheme, role, context, only });
    }
}

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
const EXPECTED_BACK: Duration = Duration::from_mins(10);

/// Absent models that are remembered: more than any deployment serves. Of more, those that left first are forgotten.
const MAX_ABSENT: usize = 1024;

impl FleetSnapshot {
    /// The workers of one model.
    pub(crate) fn pool(&self, model: &str) -> Option<&ModelPool> {
        self.models.get(model)
    }

    /// One model card per model.
    pub(crate) fn cards(&self) -> Vec<Arc<ModelCard>> {
        self.models.values().filter_map(|pool| pool.schemes.first().cloned()).collect()
    }

    /// The models of servers that get no requests, see [`is_unused`](Self::is_unused).
    pub(crate) fn unused_models(&self) -> BTreeSet<String> {
        let unused = self.workers().filter(|worker| self.is_unused(worker));
        unused.map(|worker| worker.instance.model.id.clone()).collect()
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
        (since < EXPECTED_BACK)
            .then(|| format!("the model `{model}` has no worker now; the last one left {seconds} s ago"))
    }

    /// The models that `previous` had and `models` has not, with the time when their last worker left.
    fn absent_after(previous: &Self, models: &BTreeMap<String, ModelPool>) -> BTreeMap<String, Instant> {
        let now = Instant::now();
        let earlier = previous.absent.iter().map(|(model, since)| (model.clone(), *since));
        let left = previous.models.keys().map(|model| (model.clone(), now));
        let is_absent = |(model, since): &(String, Instant)| {
            now.duration_since(*since) < EXPECTED_BACK && !models.contains_key(model)
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
        card.is_relayed && self.pool(&card.id).is_some_and(|pool| !pool.is_relayed)
    }

    /// `previous` has what was learned of each model so far.
    fn of(workers: BTreeMap<WorkerId, Arc<Worker>>, cordoned: BTreeSet<WorkerId>, previous: &Self) -> Self {
        let mut models = BTreeMap::<String, ModelPool>::new();
        let (servers, own): (Vec<_>, Vec<_>) = workers.iter().partition(|(_, worker)| worker.instance.model.is_relayed);
        for (id, worker) in own.into_iter().chain(servers) {
            let (model, is_relayed) = (&worker.instance.model.id, worker.instance.model.is_relayed);
            let same_kind = || previous.pool(model).filter(|pool| pool.is_relayed == is_relayed);
            let stats = || same_kind().map(|pool| pool.stats.clone()).unwrap_or_default();
            let pool = || ModelPool { stats: stats(), is_relayed, ..ModelPool::default() };
            let pool = models.entry(model.clone()).or_insert_with(pool);
            if pool.is_relayed == is_relayed {
                pool.take(worker, cordoned.contains(id));
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
            previous.engine.left();
        }
        *snapshot = Arc::new(FleetSnapshot::of(workers, snapshot.cordoned.clone(), &snapshot));
    }

    /// Cordons a worker, or ends its cordon. Returns `false` if the worker has not joined.
    pub(crate) fn cordon(&self, id: WorkerId, cordoned: bool) -> bool {
        let mut snapshot = self.snapshot.write();
        let (workers, mut all) = (snapshot.workers.clone(), snapshot.cordoned.clone());
        let there = workers.contains_key(&id);
        if if cordoned { there && all.insert(id) } else { all.remove(&id) } {
            *snapshot = Arc::new(FleetSnapshot::of(workers, all, &snapshot));
        }
        there
    }
}
