//! The state that a manager shares with its background tasks and its peers.

use crate::block::{Clock, Corrupt, DomainId, Level, SequenceHash};
use crate::metrics::Metrics;
use crate::pool::{BlockPool, DeviceBlocks, HostTier};
use crate::tier::Tier;
use spans::{LogLimit, Tracer};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

/// The tiers of one engine.
pub(super) struct Core {
    pub(super) device: Arc<dyn DeviceBlocks>,
    pub(super) pool: BlockPool,
    pub(super) host: Option<HostTier>,
    /// Fastest first, G2 included.
    pub(super) tiers: Vec<Arc<dyn Tier>>,
    pub(super) metrics: Metrics,
    pub(super) clock: Clock,
    pub(super) poisoned: AtomicBool,
    /// Limits log lines about corrupt blocks.
    pub(super) corrupt_log: LogLimit,
    /// Limits log lines about tiers that do not answer.
    pub(super) unresponsive_log: LogLimit,
    /// Unset: nothing is traced.
    pub(super) tracer: OnceLock<Tracer>,
}

impl Core {
    pub(super) fn is_poisoned(&self) -> bool {
        self.poisoned.load(Ordering::Relaxed)
    }

    /// A task panicked; see the head of the room.
    pub(super) fn poison(&self, task: &str) {
        self.poisoned.store(true, Ordering::Relaxed);
        tracing::error!(task, "a transfer task panicked; tiers below G1 are disabled");
    }

    /// Deletes a block that a tier returned and that failed verification.
    pub(super) fn discard_corrupt(&self, tier: &Arc<dyn Tier>, hash: SequenceHash, why: Corrupt) {
        self.count_corrupt(tier.level(), hash, why);
        tier.discard(self.device.fingerprint(), hash);
    }

    /// Removes a block from G1 whose bytes have changed. Requests that hold it go on with it.
    pub(super) fn discard_corrupt_in_device(&self, hash: SequenceHash) {
        self.count_corrupt(Level::G1, hash, Corrupt::Checksum);
        self.pool.discard(hash);
    }

    fn count_corrupt(&self, level: Level, hash: SequenceHash, why: Corrupt) {
        if let Some(others) = self.corrupt_log.admit() {
            tracing::warn!(tier = %level, block = %hash, reason = %why, suppressed = others, "corrupt block deleted");
        } else {
            tracing::debug!(tier = %level, block = %hash, reason = %why, "corrupt block deleted");
        }
        self.metrics.corrupt(level);
    }

    pub(super) fn purge(&self, domain: DomainId) -> usize {
        // G1 first: G2 is filled from it.
        self.pool.purge(domain) + self.host.as_ref().map_or(0, |host| host.purge(domain))
    }
}
