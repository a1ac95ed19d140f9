//! The offload workers of a manager, and which of them a block is queued for.

use super::fair_queue::OffloadRequest;
use super::worker::{OffloadQueue, OffloadWorker};
use crate::block::Level;
use crate::manager::shared::Core;
use crate::pool::{BlockRef, CachedBlocks};
use crate::tier::Quotas;
use std::sync::Arc;

/// One worker per tier, in the order of `core.tiers`. Dropping it drops queued offloads.
pub(in crate::manager) struct OffloadWorkers {
    core: Arc<Core>,
    workers: Vec<OffloadWorker>,
}

impl OffloadWorkers {
    pub(in crate::manager) fn new(core: Arc<Core>) -> Self {
        let first_below = usize::from(core.host.is_some());
        let to_tier = |tier| OffloadWorker::to_tier(core.clone(), tier);
        let below: Vec<OffloadWorker> = (first_below..core.tiers.len()).map(to_tier).collect();
        let queues = || below.iter().map(|worker| worker.queue().clone()).collect();
        let to_host = core.host.is_some().then(|| OffloadWorker::to_host(core.clone(), queues()));
        let workers = to_host.into_iter().chain(below).collect();
        Self { core, workers }
    }

    /// Sets the weights of domains in all queues.
    pub(in crate::manager) fn set_weights(&self, quotas: &Quotas) {
        self.workers.iter().for_each(|worker| worker.queue().set_weights(quotas));
    }

    /// Queues blocks that may be stored. `which`: selects blocks by position.
    pub(in crate::manager) fn push(&self, blocks: &CachedBlocks, which: impl Fn(usize) -> bool) {
        let attrs = blocks.attrs();
        let wanted = |at: &usize| which(*at) && attrs[*at].retention.store;
        let stored = blocks.iter().enumerate().filter(|(at, _)| wanted(at));
        let request = |(at, block): (usize, &BlockRef)| OffloadRequest { hash: block.hash(), domain: attrs[at].domain };
        self.push_requests(&stored.map(request).collect::<Vec<_>>());
    }

    /// Queues for G2, whose worker queues for the tiers below; without a G2 for every tier.
    pub(in crate::manager) fn push_requests(&self, requests: &[OffloadRequest]) {
        if self.core.is_poisoned() {
            return;
        }
        let first = if self.core.host.is_some() { 1 } else { self.workers.len() };
        let queues = self.workers.iter().take(first).map(OffloadWorker::queue);
        queues.for_each(|queue: &OffloadQueue| queue.push(&self.core, requests));
    }

    /// Resolves when every block queued for the tiers of this level is stored there, or has failed.
    pub(in crate::manager) async fn flush_level(&self, level: Level) {
        let (host, below) = self.workers.split_at(usize::from(self.core.host.is_some()));
        // G2's worker queues its blocks for the workers below it.
        for worker in host {
            worker.queue().flush().await;
        }
        let below = below.iter().map(OffloadWorker::queue).filter(|queue| queue.level() == level);
        futures::future::join_all(below.map(OffloadQueue::flush)).await;
    }

    /// Resolves when every block queued for offloading is stored in every tier, or has failed.
    pub(in crate::manager) async fn flush(&self) {
        let (host, below) = self.workers.split_at(usize::from(self.core.host.is_some()));
        // G2's worker queues its blocks for the workers below it.
        for stage in [host, below] {
            futures::future::join_all(stage.iter().map(|worker| worker.queue().flush())).await;
        }
    }
}
