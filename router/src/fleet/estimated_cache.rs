//! Accuracy of a worker's KV events, and the estimate of its cache that replaces inaccurate events.
//!
//! The blocks of the worker's events stay in the index, used or not. The estimate is a holder of its own in the index,
//! [`Holder::Estimate`], and its slot is what decisions read then.
//!
//! The events of some workers are accurate, but the router cannot compute the tokens of every prompt sent to them. Such
//! a worker has an estimate beside its events, for the prompts whose tokens are unknown: no event matches those.

use super::assumed_cache::{AssumedCache, DEFAULT_BLOCKS};
use super::event_accuracy::{CacheView, EstimateReason, EventAccuracy};
use crate::index::{Holder, Index};
use kvbm::{BlockEvent, Level, Run, SequenceHash};
use parking_lot::{Mutex, MutexGuard};
use tokio::time::Instant;
use worker::plane::WorkerId;

/// What is known of a worker's cache during one epoch beside its events.
#[derive(Default)]
pub(crate) struct EstimatedCache(Mutex<State>);

#[derive(Default)]
struct State {
    accuracy: EventAccuracy,
    assumed: AssumedCache,
}

impl EstimatedCache {
    /// Whether the worker has published no event yet.
    pub(crate) fn has_no_event(&self) -> bool {
        self.lock().accuracy.has_no_event()
    }

    /// The worker is known to publish no events.
    pub(crate) fn expect_no_events(&self) {
        self.lock().accuracy = EventAccuracy::without_events();
    }

    /// A prompt placed at `placed` was computed, including blocks that the worker's events did not contain.
    pub(crate) fn blocks_computed(&self, placed: Instant, now: Instant) {
        self.lock().accuracy.blocks_computed(placed, now);
    }

    /// Adds the blocks of a prompt sent to the worker, which has `capacity` blocks; 0 when unknown.
    pub(crate) fn prompt_sent(
        &self,
        index: &Index,
        worker: WorkerId,
        hashes: &[SequenceHash],
        capacity: usize,
        now: Instant,
    ) {
        // Held to the end, so that the index applies changes in the order in which they were made.
        let mut state = self.lock();
        let capacity = if capacity == 0 { DEFAULT_BLOCKS } else { capacity };
        // The index ignores these until the estimate has joined.
        let holder = Holder::Estimate(worker);
        let removed = state.assumed.insert(hashes, capacity, now, |range| {
            let parent = range.start.checked_sub(1).map(|before| hashes[before]);
            let blocks = hashes[range].to_vec();
            index.apply(holder, &BlockEvent::Stored { level: Level::G1, parent, blocks });
        });
        forget(index, holder, removed);
    }

    /// Records cached tokens of a prompt: `in_events` as the events say, `reported` as the worker says.
    pub(crate) fn hits_reported(&self, in_events: u64, reported: u64, block_size: u64) {
        self.lock().accuracy.hits_reported(in_events, reported, block_size);
    }

    /// Records an event of the worker, or a snapshot that contains new ones.
    pub(crate) fn event_arrived(&self) {
        self.lock().accuracy.event_arrived(Instant::now());
    }

    /// The new cache view, if it changes. Also expires old blocks of the estimate. `has_text_slot`: the estimate is
    /// needed beside accurate events.
    pub(crate) fn evaluate(&self, index: &Index, worker: WorkerId, has_text_slot: bool) -> Option<CacheView> {
        let (mut state, now) = (self.lock(), Instant::now());
        let removed = state.assumed.expire(now);
        forget(index, Holder::Estimate(worker), removed);
        let cache_view = state.accuracy.evaluate(now);
        if cache_view == Some(CacheView::Events) && !has_text_slot {
            state.assumed = AssumedCache::default();
        }
        cache_view
    }

    /// Writes the whole estimate to the index.
    pub(crate) fn publish_estimate(&self, index: &Index, worker: WorkerId) {
        let run = |hash| Run { level: Level::G1, parent: None, blocks: vec![hash] };
        let runs: Vec<Run> = self.lock().assumed.blocks().map(run).collect();
        index.replace(Holder::Estimate(worker), &runs);
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing panics half-way under this lock.
        self.0.lock()
    }
}

/// The stores that the estimate of a worker contains. Where the worker's own events are inaccurate, those of its stores
/// may be the cause.
pub(crate) fn reachable_stores<T>(cache_view: CacheView, stores: &[T]) -> &[T] {
    let are_right =
        matches!(cache_view, CacheView::Estimated(EstimateReason::NoEvents | EstimateReason::StoppedEvents));
    if are_right { stores } else { &[] }
}

fn forget(index: &Index, holder: Holder, blocks: Vec<SequenceHash>) {
    if !blocks.is_empty() {
        index.apply(holder, &BlockEvent::Removed { level: Level::G1, blocks });
    }
}
