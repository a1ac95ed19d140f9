//! The inputs of a decision: cached prefix and load of each worker of a model.
//!
//! They are read once, before workers are scored; later changes of the load count for the next decision.

use crate::booking::InflightPrefixes;
use crate::fleet::{ModelPool, Needs, PromptTokens, WorkerEntry, WorkerRun};
use crate::hash::HashCache;
use crate::index::{HolderId, Index, Overlap, WorkerOverlap};
use crate::load::{
    LeastTimes, OtherWorkers, PrefillTime, PromptArrivals, SnapshotCache, StepTime, WorkerSequences, WorkerSnapshot,
};
use kvbm::{ChainKey, Domain, SequenceHash};
use parking_lot::MutexGuard;
use std::cell::RefCell;
use tokio::time::Instant;
use worker::engine::ModelCard;

/// Whether a worker is a candidate.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Eligibility {
    /// A candidate.
    Eligible,
    /// A candidate only when no eligible worker is left: it answers health checks, or is only overloaded, or its
    /// context is shorter than the prompt and the longest output.
    TemporarilyEjected,
    /// A candidate only when neither is left.
    Ejected,
    /// Never a candidate: the prompt exceeds its context, the request failed on it before, or it lacks what the request
    /// needs.
    Excluded,
}

/// The workers of a model, as one prompt sees them.
pub(crate) struct FleetView<'a> {
    pool: &'a ModelPool,
    overlaps: &'a Overlaps,
    tokens: usize,
    /// Length of the prompt and the longest output.
    whole_tokens: usize,
    needs: Needs<'a>,
    excluded: &'a [WorkerRun],
    snapshots: MutexGuard<'a, SnapshotCache>,
}

impl<'a> FleetView<'a> {
    /// Refreshes and locks the load snapshots. `tokens`: length of the prompt; `excluded`: workers that were tried
    /// before.
    pub(crate) fn new(
        pool: &'a ModelPool,
        overlaps: &'a Overlaps,
        tokens: usize,
        needs: Needs<'a>,
        excluded: &'a [WorkerRun],
        now: Instant,
    ) -> Self {
        let whole_tokens = tokens;
        Self { pool, overlaps, tokens, whole_tokens, needs, excluded, snapshots: pool.snapshots(now.into()) }
    }

    /// Prefers workers whose context has room for this many tokens: the prompt and the longest output.
    #[must_use]
    pub(crate) fn preferring_context(self, whole_tokens: usize) -> Self {
        Self { whole_tokens, ..self }
    }

    pub(crate) fn pool(&self) -> &'a ModelPool {
        self.pool
    }

    /// Load snapshots, in the order of the pool's entries.
    #[inline]
    pub(crate) fn snapshots(&self) -> &[WorkerSnapshot] {
        self.snapshots.all()
    }

    /// What the other workers of the device of a worker compute, by index of the worker's entry; `None` if it shares
    /// the device with no other.
    #[inline]
    pub(crate) fn others_on_device(&self, at: usize) -> Option<OtherWorkers> {
        self.snapshots.others_on_device(at)
    }

    /// Number of the last choice among those for the model; 0 if no worker shares its device with another.
    pub(crate) fn last_choice(&self) -> u64 {
        self.snapshots.last_choice()
    }

    /// Sequences of all workers of the pool.
    pub(crate) fn sequences(&self) -> WorkerSequences {
        self.snapshots.sequences()
    }

    /// The distinct cached prefixes of the prompt under one hash scheme.
    pub(crate) fn distinct_overlaps(&self, scheme: usize) -> &[WorkerOverlap] {
        self.overlaps.distinct_overlaps(scheme)
    }

    /// Index of a worker's cached prefix in [`Self::distinct_overlaps`].
    #[inline]
    pub(crate) fn overlap_index(&self, entry: &WorkerEntry) -> usize {
        self.overlaps.overlap_index(entry)
    }

    /// Whether the tokens of the prompt are known.
    pub(crate) fn prompt_tokens(&self) -> PromptTokens {
        self.overlaps.tokens
    }

    /// Whether the request was tried on a worker since that has started.
    #[inline]
    fn was_tried(&self, entry: &WorkerEntry) -> bool {
        !self.excluded.is_empty() && self.excluded.contains(&entry.worker.run())
    }

    /// Whether a worker is a candidate.
    #[inline]
    pub(crate) fn eligibility(&self, entry: &WorkerEntry, snapshot: &WorkerSnapshot) -> Eligibility {
        // The length of a prompt that only one server can answer is left to that server.
        let is_too_long = self.tokens >= entry.context && self.needs.server().is_none();
        if is_too_long || self.was_tried(entry) || !entry.meets(&self.needs) {
            Eligibility::Excluded
        } else if !self.snapshots.is_passed_over(snapshot) {
            if self.whole_tokens > entry.context && self.needs.server().is_none() {
                return Eligibility::TemporarilyEjected;
            }
            Eligibility::Eligible
        } else if snapshot.temporarily_ejected && !self.snapshots.is_unusually_silent(snapshot) {
            Eligibility::TemporarilyEjected
        } else {
            Eligibility::Ejected
        }
    }

    /// Whether a worker is passed over while others are available.
    pub(crate) fn is_passed_over(&self, snapshot: &WorkerSnapshot) -> bool {
        self.snapshots.is_passed_over(snapshot)
    }

    /// Whether all workers are candidates.
    pub(crate) fn are_all_eligible(&self) -> bool {
        let pool = self.pool;
        let is_refused_by_none = self.excluded.is_empty() && self.needs.is_met_by_all();
        let fits_all = self.tokens < pool.min_context() && self.whole_tokens <= pool.min_context();
        fits_all && is_refused_by_none && !self.snapshots.is_any_passed_over()
    }

    /// Lower bounds of the service times, in the order of the pool's entries.
    #[inline]
    pub(crate) fn least_times(&self) -> &[LeastTimes] {
        self.snapshots.least_times()
    }

    /// Duration of a decode step on an average worker.
    pub(crate) fn step_time(&self) -> StepTime {
        self.pool.stats().step_time()
    }

    /// Duration of computing a prompt on an average worker, once it was measured.
    pub(crate) fn prefill_time(&self) -> Option<PrefillTime> {
        self.pool.stats().prefill_time()
    }

    /// Blocks that are lost for each one that is used, on the worker that loses least.
    pub(crate) fn least_lost_share(&self) -> f32 {
        self.snapshots.least_lost_share()
    }

    /// Prompts that arrive.
    pub(crate) fn arrivals(&self) -> PromptArrivals {
        self.snapshots.arrivals()
    }
}

/// Block hashes of a prompt and the cached prefixes found in the index, for each hash scheme of the model's workers.
pub(crate) struct Overlaps {
    tokens: PromptTokens,
    schemes: Vec<HashScheme>,
}

/// Block hashes and cached prefixes under one hash scheme: an identity and a block size.
struct HashScheme {
    block_size: usize,
    hashes: Vec<SequenceHash>,
    overlap: Overlap,
}

thread_local! {
    /// Result buffers for reuse by the next lookups of this thread.
    static SPARE: RefCell<Vec<Overlap>> = const { RefCell::new(Vec::new()) };
    /// The root of the last prompt's hashes, with the domain and the model that it belongs to.
    static LAST_ROOT: RefCell<Option<(Domain, Box<str>, ChainKey)>> = const { RefCell::new(None) };
}

/// Buffers kept per thread: for decisions with several hash schemes, or nested ones.
const MAX_SPARE: usize = 4;

impl HashScheme {
    fn new(block_size: usize, hashes: Vec<SequenceHash>, index: &Index) -> Self {
        let mut overlap = SPARE.with_borrow_mut(Vec::pop).unwrap_or_default();
        index.overlap_into(&hashes, &mut overlap);
        Self { block_size, hashes, overlap }
    }
}

impl Drop for HashScheme {
    fn drop(&mut self) {
        let overlap = std::mem::take(&mut self.overlap);
        SPARE.with_borrow_mut(|spare| {
            if spare.len() < MAX_SPARE {
                spare.push(overlap);
            }
        });
    }
}

impl Overlaps {
    /// Hashes a prompt's blocks and looks them up in the index. `known`: whether `tokens` are those of the workers.
    pub(crate) fn of(
        tokens: &[u32],
        known: PromptTokens,
        domain: &Domain,
        pool: &ModelPool,
        hash_cache: &HashCache,
        index: &Index,
    ) -> Self {
        let scheme = |card: &std::sync::Arc<ModelCard>| {
            let full = cacheable(tokens.len() as u64, card.block_size as u64) as usize;
            let cached = &tokens[..full * card.block_size];
            let hashes = hash_cache.hashes(root(domain, &card.identity), cached, card.block_size);
            HashScheme::new(card.block_size, hashes, index)
        };
        let mut schemes: Vec<HashScheme> = pool.schemes().iter().map(scheme).collect();
        for worker in pool.stopped_events() {
            if let Some(scheme) = schemes.get_mut(worker.scheme as usize) {
                scheme.overlap.raise(worker.estimate, worker.events);
            }
        }
        Self { tokens: known, schemes }
    }

    /// The overlaps under a single hash scheme.
    pub(crate) fn only(block_size: usize, hashes: Vec<SequenceHash>, index: &Index) -> Self {
        Self { tokens: PromptTokens::Known, schemes: vec![HashScheme::new(block_size, hashes, index)] }
    }

    /// Adds prefixes that running requests will have cached.
    pub(crate) fn extend(&mut self, inflight: &InflightPrefixes) {
        self.schemes
            .iter_mut()
            .for_each(|scheme| inflight.extend(&mut scheme.overlap, &scheme.hashes, scheme.block_size));
    }

    /// Block hashes of the prompt under one hash scheme.
    pub(crate) fn hashes(&self, scheme: u32) -> &[SequenceHash] {
        self.schemes.get(scheme as usize).map_or(&[], |scheme| &scheme.hashes)
    }

    /// The distinct cached prefixes of the prompt under one hash scheme.
    pub(crate) fn distinct_overlaps(&self, scheme: usize) -> &[WorkerOverlap] {
        self.schemes.get(scheme).map_or(&[], |scheme| scheme.overlap.distinct())
    }

    /// Index slot of a worker's cache, as the prompt sees it.
    #[inline]
    pub(crate) fn slot(&self, entry: &WorkerEntry) -> HolderId {
        entry.slot(self.tokens)
    }

    /// Index of a worker's cached prefix in [`Self::distinct_overlaps`].
    #[inline]
    pub(crate) fn overlap_index(&self, entry: &WorkerEntry) -> usize {
        let slot = self.slot(entry);
        self.schemes.get(entry.scheme as usize).map_or(0, |scheme| scheme.overlap.distinct_index(slot))
    }

    /// Cached prefix of the prompt at a slot.
    #[inline]
    pub(crate) fn held(&self, scheme: u32, slot: HolderId) -> WorkerOverlap {
        self.schemes.get(scheme as usize).map_or_else(WorkerOverlap::default, |scheme| scheme.overlap.at(slot))
    }
}

/// Where the hashes of a model's prompts begin. Most prompts have the domain and the model of the one before, and the
/// root takes as long as the hashes of two blocks.
fn root(domain: &Domain, model: &str) -> ChainKey {
    LAST_ROOT.with_borrow_mut(|last| match last {
        Some((of_domain, of_model, root)) if of_domain == domain && **of_model == *model => *root,
        _ => {
            let root = ChainKey::root(domain, model, None);
            *last = Some((domain.clone(), model.into(), root));
            root
        }
    })
}

/// Full blocks of a prompt that can come from a cache: the last token is always computed, for its logits.
pub(crate) fn cacheable(tokens: u64, block_size: u64) -> u64 {
    tokens.saturating_sub(1) / block_size
}
