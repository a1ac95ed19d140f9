//! The workers of one model: their entries for decisions, and what they have in common.

use super::endpoints::{self, Endpoints};
use super::event_accuracy::{CacheView, EstimateReason};
use super::worker_state::Worker;
use crate::index::HolderId;
use crate::load::{ItlTarget, ModelStats, SnapshotCache, Timestamp, WorkerLoad};
use kvbm::Domain;
use parking_lot::{Mutex, MutexGuard};
use std::sync::{Arc, LazyLock};
use worker::engine::{EndpointKind, ModelCard, Request, Work};
use worker::plane::{Instance, Role, WorkerId};

/// The domain of requests without a tenant and a salt. Kept, because its key is derived by hashing, and every request
/// is compared with it.
static SHARED_DOMAIN: LazyLock<Domain> = LazyLock::new(Domain::shared);

/// Whether the tokens of a prompt are those that its worker will compute.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum PromptTokens {
    /// They are the tokens that the worker will compute.
    Known,
    /// They are estimated from the text of the prompt. They match no block in the events of a worker that uses another
    /// tokenizer.
    Estimated,
}

/// The workers of one model. All of them take the requests that the router gets, or all of them are servers of other
/// programs, to which the client's requests are relayed: a request of one kind cannot be sent to the other.
#[derive(Default)]
pub(crate) struct ModelPool {
    entries: Vec<WorkerEntry>,
    /// Those of them whose events have stopped.
    stopped_events: Vec<StoppedEvents>,
    /// Whether they are servers of other programs.
    is_relayed: bool,
    /// The distinct hash schemes of their blocks, one card each; nearly always one.
    schemes: Vec<Arc<ModelCard>>,
    /// The card that clients see, see [`card`](Self::card).
    card: Option<Arc<ModelCard>>,
    /// The longest context of any of them, in tokens.
    context: usize,
    /// The shortest context of an entry, in tokens; `None` without entries.
    min_context: Option<usize>,
    /// Whether any of them has the role to prefill.
    has_prefill_workers: bool,
    /// Their endpoints, and those of cordoned workers, which are away for a time.
    endpoints: Endpoints,
    /// The cordoned workers.
    cordoned: Vec<Arc<Worker>>,
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
    text_slot: HolderId,
    /// Index of its hash scheme in [`ModelPool::schemes`].
    pub(crate) scheme: u32,
    /// The first bytes of the fingerprint of its blocks; `None` if it is unknown.
    fingerprint: Option<u64>,
    pub(crate) role: Role,
    pub(crate) context: usize,
    only: Option<EndpointKind>,
}

/// A worker whose KV events have stopped: decisions use its last events and the estimate of its cache, whichever have
/// more of a prompt.
pub(crate) struct StoppedEvents {
    /// Index of its hash scheme in [`ModelPool::schemes`].
    pub(crate) scheme: u32,
    /// Index slot of its estimate.
    pub(crate) estimate: HolderId,
    /// Index slot of its events.
    pub(crate) events: HolderId,
}

/// What a request needs that only some of the workers have.
#[derive(Clone, Copy, Default)]
pub(crate) struct Needs<'a> {
    /// The kind of its endpoint.
    endpoint: Option<EndpointKind>,
    /// The request, if a worker must not refuse it.
    refused_by_some: Option<&'a Request>,
    /// The server that has an object which the request names.
    server: Option<u64>,
}

impl Needs<'_> {
    /// Whether every worker has what a request needs.
    pub(crate) fn is_met_by_all(&self) -> bool {
        self.endpoint.is_none() && self.refused_by_some.is_none() && self.server.is_none()
    }

    /// The server that alone can answer the request.
    pub(crate) fn server(&self) -> Option<u64> {
        self.server
    }
}

impl WorkerEntry {
    /// Index slot of the worker's cache, as a prompt of these tokens sees it.
    #[inline]
    pub(crate) fn slot(&self, tokens: PromptTokens) -> HolderId {
        match tokens {
            PromptTokens::Known => self.slot,
            PromptTokens::Estimated => self.text_slot,
        }
    }

    /// Whether blocks can be transferred between the workers: they have the same hash scheme and fingerprint. Without a
    /// fingerprint they are verified where they arrive.
    #[inline]
    pub(crate) fn can_transfer_blocks(&self, other: &Self) -> bool {
        self.scheme == other.scheme && self.fingerprint.zip(other.fingerprint).is_none_or(|(own, others)| own == others)
    }

    /// Whether the worker has what a request needs.
    #[inline]
    pub(crate) fn meets(&self, needs: &Needs<'_>) -> bool {
        endpoints::has(self.only, needs.endpoint)
            && needs.refused_by_some.is_none_or(|request| !self.worker.engine.refuses(request))
            && needs.server.is_none_or(|server| self.worker.is_of(server))
    }

    /// How the cached prefix of a prompt is known, if not from the worker's events; for explanations.
    pub(crate) fn remark(&self, tokens: PromptTokens) -> Option<&'static str> {
        let by_text = tokens == PromptTokens::Estimated && self.worker.text_slot.is_some();
        let text = by_text.then_some("estimated: the tokens of the prompt are unknown; compared by its text");
        self.worker.cache_view.remark().or(text)
    }
}

impl ModelPool {
    /// A pool without workers. `stats`: what was learned of the model so far.
    pub(super) fn new(is_relayed: bool, stats: Arc<ModelStats>) -> Self {
        Self { is_relayed, stats, ..Self::default() }
    }

    /// Whether its workers are servers of other programs.
    pub(super) fn is_relayed(&self) -> bool {
        self.is_relayed
    }

    /// Whether workers of the deployment have different weights. Servers of other programs do not say which they have.
    pub(super) fn has_different_weights(&self) -> bool {
        !self.is_relayed && self.schemes.windows(2).any(|cards| cards[0].identity != cards[1].identity)
    }

    pub(crate) fn entries(&self) -> &[WorkerEntry] {
        &self.entries
    }

    /// The workers whose events have stopped.
    pub(crate) fn stopped_events(&self) -> &[StoppedEvents] {
        &self.stopped_events
    }

    /// Whether they can serve a request, as far as that depends on its kind.
    pub(crate) fn takes(&self, request: &Request) -> bool {
        self.is_relayed == matches!(request.work, Work::Relay(_))
    }

    /// One card for each hash scheme.
    pub(crate) fn schemes(&self) -> &[Arc<ModelCard>] {
        &self.schemes
    }

    /// The card that clients see: of workers, the first with the longest context, because a prompt is sent where it
    /// fits. Servers of other programs check the lengths themselves; theirs is the first.
    pub(crate) fn card(&self) -> Option<&Arc<ModelCard>> {
        self.card.as_ref()
    }

    /// The longest prompt plus output that any of them takes, in tokens.
    pub(crate) fn context(&self) -> usize {
        self.context
    }

    /// The shortest context of an entry, in tokens.
    pub(crate) fn min_context(&self) -> usize {
        self.min_context.unwrap_or(0)
    }

    /// Whether any of them prefills for others.
    pub(crate) fn has_prefill_workers(&self) -> bool {
        self.has_prefill_workers
    }

    /// What a request needs that only some of the workers have. What none has is not needed, so that one of them
    /// answers with the error.
    pub(crate) fn needs<'a>(&self, request: &'a Request) -> Needs<'a> {
        let endpoint = self.endpoints.required(request);
        // Other requests than those with a tenant or a salt, and those for the rest of a stream, are not refused.
        let is_rest = matches!(&request.work, Work::Relay(http) if http.continues.is_some());
        let may_be_refused = self.is_relayed && (is_rest || request.domain != *SHARED_DOMAIN);
        let workers = || self.entries.iter().map(|entry| &entry.worker).chain(&self.cordoned);
        // A cordoned server has its objects still. Of one that has left, another one says that there is no such object.
        let server = request.attributes.server.filter(|server| workers().any(|worker| worker.is_of(*server)));
        let is_refused_by_some = may_be_refused && {
            workers().any(|worker| worker.engine.refuses(request)) && workers().any(|worker| worker.takes(request))
        };
        Needs { endpoint, refused_by_some: is_refused_by_some.then_some(request), server }
    }

    /// What is learned of the model.
    pub(crate) fn stats(&self) -> &Arc<ModelStats> {
        &self.stats
    }

    /// A target of the time between tokens, with what predicts that time; `None` until decode steps were measured.
    pub(crate) fn itl_target(&self, seconds: f64) -> Option<ItlTarget> {
        let target = self.stats.itl_target(seconds)?;
        // Where there are prefill workers, they compute the long prompts. The steps that servers of other programs
        // report are measured between the tokens of their streams, so they contain the delays by prompts.
        let is_step_only = self.has_prefill_workers || self.is_relayed;
        Some(if is_step_only { target.without_prompts() } else { target })
    }

    /// Refreshes the load snapshots and locks them for one decision.
    pub(crate) fn snapshots(&self, now: Timestamp) -> MutexGuard<'_, SnapshotCache> {
        // A refresh does not panic half-way.
        let mut snapshots = self.snapshots.lock();
        snapshots.refresh(self.entries.len(), |at| &self.entries[at].load, now);
        snapshots
    }

    /// Counts a prompt that another router has placed.
    pub(crate) fn prompt_placed_elsewhere(&self, now: Timestamp) {
        self.snapshots.lock().prompt_arrived(now);
        self.stats.prompt_placed_elsewhere(now);
    }

    /// Adds a worker. A `cordoned` one counts for models and context but gets no entry: no decision can choose it.
    pub(super) fn add(&mut self, worker: &Arc<Worker>, cordoned: bool) {
        let Instance { model: card, role, kv_cache, .. } = &*worker.instance;
        let same = |scheme: &Arc<ModelCard>| scheme.identity == card.identity && scheme.block_size == card.block_size;
        let scheme = self.schemes.iter().position(same).unwrap_or_else(|| {
            self.schemes.push(card.clone());
            self.schemes.len() - 1
        });
        let is_longest = card.context > self.context && !self.is_relayed;
        if self.card.is_none() || is_longest {
            self.card = Some(card.clone());
        }
        self.context = self.context.max(card.context);
        let only = worker.engine.only_endpoint_kind();
        self.endpoints.add(only);
        if cordoned {
            self.cordoned.push(worker.clone());
            return;
        }
        let (id, slot, scheme) = (worker.id(), worker.slot, scheme as u32);
        let text_slot = worker.text_slot.unwrap_or(slot);
        if worker.cache_view == CacheView::Estimated(EstimateReason::StoppedEvents) {
            self.stopped_events.push(StoppedEvents { scheme, estimate: slot, events: worker.events_slot });
        }
        self.has_prefill_workers |= *role == Role::Prefill;
        let (worker, load) = (worker.clone(), worker.load.clone());
        load.set_model_stats(&self.stats, kv_cache.and_then(|cache| cache.device));
        let fingerprint = kv_cache.map(|cache| {
            let [a, b, c, d, e, f, g, h, ..] = *cache.fingerprint.as_bytes();
            u64::from_le_bytes([a, b, c, d, e, f, g, h])
        });
        let (role, context) = (*role, card.context);
        self.min_context = Some(self.min_context.map_or(context, |min| min.min(context)));
        self.entries.push(WorkerEntry { id, worker, load, slot, text_slot, scheme, fingerprint, role, context, only });
    }
}
