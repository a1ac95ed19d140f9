//! Counts of one engine, and its load report.

use super::Parts;
use super::model::BLOCK_BYTES;
use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use tokio::sync::Notify;
use worker::plane::{Load, OnboardSpeed};

#[derive(Default)]
pub(super) struct Stats {
    accepted: AtomicUsize,
    batch: Mutex<Batch>,
    changed: Notify,
}

/// The batch as of the last step.
#[derive(Clone, Copy, Default)]
pub(super) struct Batch {
    pub(super) running: usize,
    pub(super) blocks: usize,
    pub(super) pending_tokens: usize,
}

/// Counts a request until it is dropped.
pub(super) struct Accepted(Arc<Stats>);

impl Stats {
    pub(super) fn accept(self: &Arc<Self>) -> Accepted {
        self.accepted.fetch_add(1, Relaxed);
        Accepted(self.clone())
    }

    /// Resolves when a request has ended since the last call: one may end before the scheduler has it.
    pub(super) async fn changed(&self) {
        self.changed.notified().await;
    }

    pub(super) fn accepted(&self) -> usize {
        self.accepted.load(Relaxed)
    }

    pub(super) fn waiting(&self) -> usize {
        self.accepted().saturating_sub(self.batch.lock().running)
    }

    pub(super) fn set_batch(&self, batch: Batch) {
        *self.batch.lock() = batch;
    }

    pub(super) fn load(&self, parts: &Parts) -> Load {
        let Batch { running, blocks, pending_tokens } = *self.batch.lock();
        let speed = |speed: kvbm::Speed| OnboardSpeed {
            level: speed.level,
            latency_seconds: speed.latency.as_secs_f64(),
            bytes_per_second: speed.bytes_per_second,
            queued_blocks: speed.queued,
        };
        Load {
            number: 0,
            waiting_tokens: pending_tokens as u64,
            running: running as u32,
            waiting: self.waiting() as u32,
            paused: 0,
            sequences_max: parts.speed.max_num_seqs as u32,
            active_blocks: blocks as u64,
            total_blocks: parts.manager.capacity() as u64,
            prefill_tokens_per_second: Some(parts.speed.prompt_token.as_secs_f64().recip()),
            decode_step_seconds: Some(parts.speed.step.as_secs_f64()),
            block_bytes: BLOCK_BYTES as u64,
            onboard: parts.manager.speeds().into_iter().map(speed).collect(),
        }
    }
}

impl Drop for Accepted {
    fn drop(&mut self) {
        self.0.accepted.fetch_sub(1, Relaxed);
        self.0.changed.notify_one();
    }
}
