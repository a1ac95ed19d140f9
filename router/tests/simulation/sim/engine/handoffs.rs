//! Blocks of complete prefills, kept for decode workers until the stream of the prefill is dropped.

use super::sequence::Prefilled;
use kvbm::CachedBlocks;
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// Time for a decode worker to load the blocks before requests of this worker may take their memory: two workers whose
/// memory holds blocks for each other would wait for each other.
const RECLAIM_DELAY: Duration = Duration::from_secs(1);

#[derive(Default)]
pub(super) struct HeldHandoffs(VecDeque<Held>);

struct Held {
    /// `None`: released.
    blocks: Arc<Mutex<Option<CachedBlocks>>>,
    since: Instant,
}

impl HeldHandoffs {
    /// Keeps blocks until the stream of their prefill is dropped, or the process is dead.
    pub(super) fn hold(&mut self, Prefilled { output, progress, blocks }: Prefilled, dead: CancellationToken) {
        self.0.retain(|held| held.blocks.lock().is_some());
        let blocks = Arc::new(Mutex::new(Some(blocks)));
        self.0.push_back(Held { blocks: blocks.clone(), since: Instant::now() });
        tokio::spawn(async move {
            // Followers may still read that the prefill is complete.
            let _progress = progress;
            dead.run_until_cancelled(output.closed()).await;
            blocks.lock().take();
        });
    }

    /// Lets the blocks of the prefill that has been complete for longest be evicted, if that is long ago.
    pub(super) fn reclaim(&mut self) -> bool {
        while let Some(oldest) = self.0.front() {
            if oldest.blocks.lock().is_some() && oldest.since.elapsed() < RECLAIM_DELAY {
                return false;
            }
            if self.0.pop_front().is_some_and(|oldest| oldest.blocks.lock().take().is_some()) {
                return true;
            }
        }
        false
    }
}
