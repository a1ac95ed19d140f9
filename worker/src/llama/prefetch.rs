//! Copies of prefixes into host memory ahead of demand: one at a time, and only while the engine has no queue.
//!
//! Not here: how blocks are loaded and verified (`kvbm`), and which prefix is copied (the router).

use super::scheduler::EngineStats;
use crate::engine::{PeerMemory, PrefetchError, Prefetched, PrefixCopy};
use crate::handoff::{PeerTicket, Peers};
use crate::metrics::{EngineMetrics, PrefetchOutcome};
use kvbm::{BlockManager, NoRoom, Tier};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Semaphore;
use tokio::time::timeout;

/// Copies prefixes for one engine.
pub(super) struct Prefetcher {
    manager: BlockManager,
    peers: Peers,
    stats: Arc<EngineStats>,
    metrics: EngineMetrics,
    /// Its one permit is held during a copy, so that copies take the bandwidth of one load.
    running: Semaphore,
}

/// Longest time of a copy, most of which is waiting: a prefix of a gigabyte takes a second or two. A worker that has a
/// queue for so long is no place for a further copy.
const TIME_LIMIT: Duration = Duration::from_secs(10);

/// Counts how a copy ended. One that is dropped before was cancelled.
struct Counted<'a> {
    metrics: &'a EngineMetrics,
    outcome: PrefetchOutcome,
}

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        self.metrics.prefetch_ended(self.outcome);
    }
}

impl Prefetcher {
    pub(super) fn new(manager: BlockManager, peers: Peers, stats: Arc<EngineStats>, metrics: EngineMetrics) -> Self {
        Self { manager, peers, stats, metrics, running: Semaphore::new(1) }
    }

    /// Copies a prefix. Dropping the future stops the copy.
    pub(super) async fn run(&self, copy: &PrefixCopy) -> Result<Prefetched, PrefetchError> {
        let mut counted = Counted { metrics: &self.metrics, outcome: PrefetchOutcome::Cancelled };
        let copied = self.copy(copy).await;
        counted.outcome = match &copied {
            Ok(Prefetched { blocks, bytes }) => {
                self.metrics.prefetched(*blocks, *bytes);
                PrefetchOutcome::Complete
            }
            Err(PrefetchError::NoMemory) => PrefetchOutcome::NoMemory,
            Err(PrefetchError::NotFound) => PrefetchOutcome::NotFound,
            Err(PrefetchError::TimedOut) => PrefetchOutcome::TimedOut,
            Err(PrefetchError::Busy | PrefetchError::Unsupported | PrefetchError::Failed(_)) => PrefetchOutcome::Busy,
        };
        copied
    }

    async fn copy(&self, copy: &PrefixCopy) -> Result<Prefetched, PrefetchError> {
        let _running = self.running.try_acquire().map_err(|_| PrefetchError::Busy)?;
        if self.has_queue() {
            return Err(PrefetchError::Busy);
        }
        let peer = copy.peer.as_ref().map(|peer| self.find(peer)).transpose()?;
        let copying = self.manager.copy_to_host(peer.as_ref(), &copy.blocks, || !self.has_queue());
        let copied = timeout(TIME_LIMIT, copying).await.map_err(|_| PrefetchError::TimedOut)?;
        let copied = copied.map_err(|error| match error {
            NoRoom::NoHostTier | NoRoom::TooLarge(_) => PrefetchError::NoMemory,
        })?;
        if copied.blocks == 0 && copied.missing > 0 {
            return Err(PrefetchError::NotFound);
        }
        Ok(Prefetched { blocks: copied.blocks as u32, bytes: copied.bytes })
    }

    fn find(&self, peer: &PeerMemory) -> Result<Arc<dyn Tier>, PrefetchError> {
        PeerTicket::decode(peer).and_then(|ticket| self.peers.memory(&ticket)).ok_or(PrefetchError::NotFound)
    }

    /// Whether requests wait, or blocks of requests arrive from another worker.
    fn has_queue(&self) -> bool {
        self.stats.waiting() > 0 || self.stats.arriving() > 0
    }
}
