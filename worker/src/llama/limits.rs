//! The limits of a running engine, which can change while it serves requests.
//!
//! They are read between two steps of the scheduler, and when a request arrives. No request that is running or queued
//! fails when a limit is lowered: the batch and the queue shrink as requests finish. Of the paused requests, whose
//! output is not read, the longest paused ones fail when there are more than the new limit of the queue.

use super::settings::Settings;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use tokio::sync::Notify;

/// The limits of the batch and of the queue of one engine.
#[derive(Debug)]
pub struct Limits {
    max_prefill_chunk_tokens: AtomicUsize,
    max_num_seqs: AtomicUsize,
    max_queued_requests: AtomicUsize,
    /// Wakes the scheduler, so that the load report has the new size of the batch also while the engine is idle.
    changed: Arc<Notify>,
}

impl Limits {
    /// The limits of `settings`. `changed` wakes the scheduler.
    pub(super) fn new(settings: &Settings, changed: Arc<Notify>) -> Arc<Self> {
        Arc::new(Self {
            max_prefill_chunk_tokens: settings.max_prefill_chunk_tokens.into(),
            max_num_seqs: settings.max_num_seqs.into(),
            max_queued_requests: settings.max_queued_requests.into(),
            changed,
        })
    }

    /// Sets the limits to those of `settings`. Its other fields are not used.
    pub fn set(&self, settings: &Settings) {
        self.max_prefill_chunk_tokens.store(settings.max_prefill_chunk_tokens, Relaxed);
        self.max_num_seqs.store(settings.max_num_seqs, Relaxed);
        self.max_queued_requests.store(settings.max_queued_requests, Relaxed);
        self.changed.notify_one();
    }

    /// Prompt tokens computed in one step.
    pub fn max_prefill_chunk_tokens(&self) -> usize {
        self.max_prefill_chunk_tokens.load(Relaxed)
    }

    /// Sequences in one batch.
    pub fn max_num_seqs(&self) -> usize {
        self.max_num_seqs.load(Relaxed)
    }

    /// Requests accepted beyond those in the batch.
    pub fn max_queued_requests(&self) -> usize {
        self.max_queued_requests.load(Relaxed)
    }
}
