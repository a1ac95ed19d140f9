//! The state that a manager shares with its background tasks and its peers.

use crate::block::{Clock, Corrupt, DomainId, SequenceHash};
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
        if let Some(others) = self.corrupt_log.admit() {
            tracing::warn!(
                tier = %tier.level(), block = %hash, reason = %why, suppressed = others,
                "corrupt block deleted"
            );
        } else {
            tracing::debug!(tier = %tier.level(), block = %hash, reason = %why, "corrupt block deleted");
        }
        self.metrics.corrupt(tier.level());
        tier.discard(self.device.fingerprint(), hash);
    }

    pub(super) fn purge(&self, domain: DomainId) -> usize {
        // G1 first: G2 is filled from it.
        self.pool.purge(domain) + self.host.as_ref().map_or(0, |host| host.purge(domain))
    }
}
