//! One worker during one epoch: its engine, health, load, and the index slots of its cache.
//!
//! Not here: the workers of a model (`model_pool`), and the list of all workers (`snapshot`).

use super::endpoints;
use super::estimated_cache::EstimatedCache;
use super::event_accuracy::CacheView;
use super::health::{Check, Health, HealthSignal};
use super::transition::{Cause, Transition};
use crate::index::HolderId;
use crate::load::{LoadStats, Timestamp, WorkerLoad};
use kvbm::Epoch;
use parking_lot::Mutex;
use spans::FaultLog;
use std::fmt::Display;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use worker::engine::{Engine, ModelCard, Request};
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
    pub(crate) events_slot: HolderId,
    /// Index slot of the estimate of its cache, if prompts whose tokens are unknown are looked up there.
    pub(crate) text_slot: Option<HolderId>,
    /// Accuracy of its events, and the estimate of its cache.
    pub(crate) estimated_cache: Arc<EstimatedCache>,
    /// Its load.
    pub(crate) load: Arc<WorkerLoad>,
    /// Cancelled when its lease ends.
    pub(crate) lease_ended: CancellationToken,
    run_state: Arc<RunState>,
}

/// What all entries of one run of a worker share. An entry is replaced when the role or the view of the cache changes;
/// the outcomes of the requests that it has sent count for the next one.
struct RunState {
    health: Mutex<Health>,
    /// Limits the log lines about it.
    faults: FaultLog,
    /// Time of its last output, in nanoseconds since `first_seen`.
    last_output: AtomicU64,
    /// Time until which it is checked although it has requests, in the same unit.
    checked_until: AtomicU64,
    /// Sequences that it decodes at a time (`max_num_seqs`); 0 when unknown.
    max_num_seqs: AtomicU64,
    /// Whether it has measured its prefill speed.
    has_measured_prefill: AtomicBool,
    first_seen: Instant,
}

/// Time for which a worker is checked after a request for it: longer than the interval at which a request that is
/// overdue asks again.
const CHECKED_FOR: Duration = Duration::from_secs(3);

impl RunState {
    fn new() -> Self {
        Self {
            health: Mutex::default(),
            faults: FaultLog::default(),
            last_output: AtomicU64::new(0),
            checked_until: AtomicU64::new(0),
            max_num_seqs: AtomicU64::new(0),
            has_measured_prefill: AtomicBool::new(false),
            first_seen: Instant::now(),
        }
    }
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
        load.set_block_tokens(instance.model.block_size);
        let memory_blocks = instance.kv_cache.map_or(0, |cache| cache.blocks.max(cache.host_blocks));
        load.set_cache(memory_blocks, !instance.stores.is_empty());
        Self {
            name: instance.id.to_string().into(),
            instance,
            engine,
            cache_view,
            slot: previous.filter(|_| cache_view != CacheView::Events).map_or(slot, |worker| worker.slot),
            events_slot: slot,
            text_slot: previous.and_then(|worker| worker.text_slot),
            estimated_cache: previous.map(|worker| worker.estimated_cache.clone()).unwrap_or_default(),
            load,
            lease_ended: previous.map(|worker| worker.lease_ended.clone()).unwrap_or_default(),
            run_state: previous.map_or_else(|| Arc::new(RunState::new()), |worker| worker.run_state.clone()),
        }
    }

    /// Whether a worker with this card gets prompts whose tokens are not those of its events, so that its cache is
    /// estimated from their texts beside its events.
    pub(crate) fn needs_text_estimate(card: &ModelCard) -> bool {
        card.is_relayed && card.has_exact_blocks
    }

    /// Whether a worker with this card publishes KV events: a server says so when it is added, and every worker of ours
    /// does.
    pub(crate) fn publishes_events(card: &ModelCard) -> bool {
        !card.is_relayed || card.has_exact_blocks
    }

    /// The same worker, of which prompts of unknown tokens are looked up at this slot.
    pub(crate) fn with_text_slot(self, slot: Option<HolderId>) -> Self {
        Self { text_slot: slot, ..self }
    }

    /// The same worker with another cache view, which has `slot` in the index.
    pub(crate) fn with_cache_view(&self, cache_view: CacheView, slot: HolderId) -> Self {
        Self { cache_view, slot, ..Self::new(self.instance.clone(), self.engine.clone(), self.events_slot, Some(self)) }
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

    /// Whether it may have the endpoint of a request, does not refuse the request, and is of the server that the
    /// request needs.
    pub(crate) fn takes(&self, request: &Request) -> bool {
        endpoints::has(self.engine.only_endpoint_kind(), endpoints::kind(request))
            && !self.engine.refuses(request)
            && request.attributes.server.is_none_or(|server| self.is_of(server))
    }

    /// Whether it is an engine of this server.
    pub(crate) fn is_of(&self, server: u64) -> bool {
        self.engine.probed_server() == Some(server)
    }

    /// Whether it has the role to decode. Prefill workers decode only when no other worker is left.
    pub(crate) fn decodes(&self) -> bool {
        self.instance.role != Role::Prefill
    }

    /// Records that a request has failed, and why, for the log.
    pub(crate) fn record_failure(&self, signal: HealthSignal, error: &dyn Display) {
        self.record_outcome(signal, error, Instant::now());
    }

    fn record_outcome(&self, signal: HealthSignal, error: &dyn Display, now: Instant) {
        let transition = self.change(|health| health.record_outcome(signal, now));
        if let Some(transition) = self.to_log(transition, signal) {
            transition.log(self.id(), &*self.engine, &[self.faults()], Cause::Request, error);
        }
    }

    /// The change to log after an outcome: also that of before, if the rate limit did not admit its line.
    fn to_log(&self, transition: Option<Transition>, signal: HealthSignal) -> Option<Transition> {
        let is_unlogged = || signal.is_failure() && !self.run_state.faults.is_logged() && self.is_failing();
        transition.or_else(|| is_unlogged().then_some(Transition::Opened))
    }

    /// The limit of log lines about it.
    pub(crate) fn faults(&self) -> &FaultLog {
        &self.run_state.faults
    }

    /// Records a first output.
    pub(crate) fn succeeded(&self, now: Instant) {
        self.record_output(now);
        self.record_outcome(HealthSignal::Healthy, &"", now);
    }

    /// Records an output.
    pub(crate) fn record_output(&self, now: Instant) {
        self.run_state.last_output.store(self.nanoseconds(now), Ordering::Relaxed);
    }

    /// Time since it was seen first.
    fn nanoseconds(&self, at: Instant) -> u64 {
        at.saturating_duration_since(self.run_state.first_seen).as_nanos() as u64
    }

    /// Time of its last output, or of when it was seen first.
    pub(crate) fn last_output(&self) -> Instant {
        self.run_state.first_seen + Duration::from_nanos(self.run_state.last_output.load(Ordering::Relaxed))
    }

    /// Whether it has returned an output since then.
    pub(crate) fn active_since(&self, then: Instant) -> bool {
        self.last_output() > then
    }

    /// Records the values of a report that the admission queue reads.
    pub(crate) fn reported(&self, load: &Load) {
        self.run_state.max_num_seqs.store(load.sequences_max.into(), Ordering::Relaxed);
        self.run_state.has_measured_prefill.store(load.prefill_tokens_per_second.is_some(), Ordering::Relaxed);
    }

    /// Whether a new request waits neither for queued prompts nor for blocks.
    pub(crate) fn is_free(&self, now: Instant) -> bool {
        let LoadStats { prompts, active_blocks, total_blocks, .. } = self.load.stats(now);
        prompts == 0 && (total_blocks == 0 || active_blocks <= total_blocks)
    }

    /// Sequences that it decodes at a time (`max_num_seqs`); 0 when unknown.
    pub(crate) fn max_num_seqs(&self) -> u64 {
        self.run_state.max_num_seqs.load(Ordering::Relaxed)
    }

    /// Whether it has measured its prefill speed.
    pub(crate) fn has_measured_prefill(&self) -> bool {
        self.run_state.has_measured_prefill.load(Ordering::Relaxed)
    }

    /// Has it checked for the next seconds although it has requests, as often as if it were idle: one of them is
    /// overdue.
    pub(crate) fn request_checks(&self, now: Instant) {
        self.run_state.checked_until.store(self.nanoseconds(now + CHECKED_FOR), Ordering::Relaxed);
    }

    fn has_requested_checks(&self, now: Instant) -> bool {
        self.nanoseconds(now) < self.run_state.checked_until.load(Ordering::Relaxed)
    }

    /// Whether its last health check has failed, and there was no output since the check began.
    pub(crate) fn has_failed_check(&self) -> bool {
        self.health().failed_check().is_some_and(|began| !self.active_since(began))
    }

    /// Whether a health check is due: its breaker has been open long enough, or it had no check for `idle` and either
    /// was idle as long, awaits a trial, or has a request that is overdue.
    pub(crate) fn wants_probe(&self, idle: Duration, now: Instant) -> bool {
        let health = self.health();
        if health.is_open() {
            return health.wants_probe(now, now);
        }
        let is_checked =
            |since| !health.is_closed() || self.has_requested_checks(now) || self.is_idle_since(since, now);
        now.checked_sub(idle).is_some_and(|since| health.wants_probe(since, now) && is_checked(since))
    }

    /// When the health check that is due became due; `None` if none is. Those that were due first come first.
    pub(crate) fn probe_due(&self, idle: Duration, now: Instant) -> Option<Instant> {
        let due = || self.health().probe_due(idle).unwrap_or(self.run_state.first_seen + idle);
        self.wants_probe(idle, now).then(due)
    }

    /// Whether its health checks fail, or have not been answered since its requests failed.
    pub(crate) fn fails_health_checks(&self) -> bool {
        self.health().is_open()
    }

    /// Whether a health check of its server is one of this worker too: its breaker has been open long enough, it awaits
    /// a trial, has a request that is overdue, or was idle for `idle`.
    pub(crate) fn shares_probe(&self, idle: Duration, now: Instant) -> bool {
        let health = self.health();
        if health.is_open() {
            return health.wants_probe(now, now);
        }
        let was_idle = || now.checked_sub(idle).is_some_and(|since| self.is_idle_since(since, now));
        !health.is_closed() || self.has_requested_checks(now) || was_idle()
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
        self.run_state.first_seen <= since && !self.active_since(since) && !has_requests()
    }

    /// Records the start of a health check.
    pub(crate) fn probe_started(&self, now: Instant) {
        self.change(|health| health.probe_started(now));
    }

    /// Records the result of a health check. Returns the change to log.
    pub(crate) fn probe_ended(&self, signal: HealthSignal) -> Option<Transition> {
        let now = Instant::now();
        let check = if self.engine.probed_server().is_some() { Check::Answers } else { Check::Computes };
        let transition = self.change(|health| health.probe_ended(check, signal, now));
        self.to_log(transition, signal)
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
        *self.run_state.health.lock()
    }

    fn change(&self, change: impl FnOnce(&mut Health)) -> Option<Transition> {
        let mut health = self.run_state.health.lock();
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
