//! Prefills whose blocks are kept for a decode worker.
//!
//! Blocks are held while the decode worker may still fetch them: until the stream of the prefill is dropped. They are
//! released before that, and then can be evicted, when their lease ends, or when another request of this worker needs
//! the memory: a decode worker without room must not stop prefill.

use super::output::OutputSender;
use crate::handoff::HandoffProgress;
use crate::metrics::{EngineMetrics, HandoffEnd};
use kvbm::CachedBlocks;
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{Instant, sleep};

/// Blocks of complete prefills.
#[derive(Default)]
pub(super) struct HeldHandoffs(VecDeque<HeldHandoff>);

struct HeldHandoff {
    blocks: Arc<Mutex<Option<CachedBlocks>>>,
    since: Instant,
}

impl HeldHandoffs {
    /// Keeps blocks until the stream of their prefill is dropped, or their lease ends.
    pub(super) fn hold(
        &mut self,
        output: OutputSender,
        progress: HandoffProgress,
        blocks: CachedBlocks,
        lease: Duration,
        metrics: EngineMetrics,
    ) {
        self.0.retain(|held| held.blocks.lock().is_some());
        let blocks = Arc::new(Mutex::new(Some(blocks)));
        self.0.push_back(HeldHandoff { blocks: Arc::clone(&blocks), since: Instant::now() });
        tokio::spawn(async move {
            // Followers may still read that the prefill is complete.
            let _progress = progress;
            let (end, is_closed) = tokio::select! {
                biased;
                () = output.closed() => (HandoffEnd::Released, true),
                () = sleep(lease) => (HandoffEnd::Expired, false),
            };
            if blocks.lock().take().is_some() {
                metrics.handoff_ended(end);
            }
            if !is_closed {
                output.closed().await;
            }
        });
    }

    /// Lets the blocks of the prefill that has been complete for longest be evicted, if that is at least `age` ago.
    pub(super) fn reclaim(&mut self, age: Duration, metrics: &EngineMetrics) -> bool {
        while let Some(oldest) = self.0.front() {
            if oldest.blocks.lock().is_some() && oldest.since.elapsed() < age {
                return false;
            }
            let oldest = self.0.pop_front().and_then(|oldest| oldest.blocks.lock().take());
            if oldest.is_some() {
                metrics.handoff_ended(HandoffEnd::Reclaimed);
                return true;
            }
        }
        false
    }
}
