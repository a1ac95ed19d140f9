//! The metrics of the tiers in object stores (G3.5 and G4), read when the metrics are scraped.

use kvbm::ObjectTier;
use kvbm::Tier;
use prometheus::core::{Collector, Desc};
use prometheus::proto::MetricFamily;
use prometheus::{IntCounterVec, IntGaugeVec, Opts};
use std::sync::Weak;

/// Requests, lost objects and manifests of each object-store tier. The tiers may be dropped while the registry stays.
pub(super) struct StoreMetrics {
    tiers: Vec<Weak<ObjectTier>>,
    up: IntGaugeVec,
    writable: IntGaugeVec,
    sent: IntCounterVec,
    lost: IntCounterVec,
    corrupt_manifests: IntCounterVec,
    unreadable: IntGaugeVec,
}

impl StoreMetrics {
    pub(super) fn of(tiers: Vec<Weak<ObjectTier>>) -> Result<Self, prometheus::Error> {
        let requests = Opts::new(
            "blockyard_tier_store_requests_total",
            "Requests to the store of the tier, by kind: sent counts all of them; of these, retried counts repetitions \
             after a failure, hedged counts second requests for a slow read, and hedge_won counts hedged requests that \
             were answered first.",
        );
        let up = Opts::new("blockyard_tier_store_up", "1 while the store of the tier answers, 0 while it does not.");
        let writable = Opts::new(
            "blockyard_tier_store_writable",
            "1 while blocks are written to the store of the tier, 0 after a write failed and until one succeeds, and \
             while the store does not answer.",
        );
        let lost = Opts::new(
            "blockyard_tier_lost_objects_total",
            "Objects that were missing or truncated when they were read. Their blocks were recomputed.",
        );
        let corrupt_manifests = Opts::new(
            "blockyard_tier_corrupt_manifests_total",
            "Manifests that failed verification or have another version's format. The blocks that they list were \
             recomputed.",
        );
        let unreadable = Opts::new(
            "blockyard_tier_unreadable_manifests",
            "Manifests that the store lists and that cannot be read, for example objects in cold storage. They are \
             skipped, and read again after pauses of up to an hour.",
        );
        Ok(Self {
            tiers,
            up: IntGaugeVec::new(up, &["tier"])?,
            writable: IntGaugeVec::new(writable, &["tier"])?,
            sent: IntCounterVec::new(requests, &["tier", "kind"])?,
            lost: IntCounterVec::new(lost, &["tier"])?,
            corrupt_manifests: IntCounterVec::new(corrupt_manifests, &["tier"])?,
            unreadable: IntGaugeVec::new(unreadable, &["tier"])?,
        })
    }
}

impl Collector for StoreMetrics {
    fn desc(&self) -> Vec<&Desc> {
        [
            self.up.desc(),
            self.writable.desc(),
            self.sent.desc(),
            self.lost.desc(),
            self.corrupt_manifests.desc(),
            self.unreadable.desc(),
        ]
        .concat()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        for tier in self.tiers.iter().filter_map(Weak::upgrade) {
            let (counts, level) = (tier.request_counts(), tier.level().name());
            let (is_up, writes) = (tier.is_available(), tier.write_failure().is_none());
            self.up.with_label_values(&[level]).set(is_up.into());
            self.writable.with_label_values(&[level]).set((is_up && writes).into());
            self.unreadable.with_label_values(&[level]).set(tier.unreadable_manifests() as i64);
            let kinds = [
                ("sent", counts.requests),
                ("retried", counts.retries),
                ("hedged", counts.hedges),
                ("hedge_won", counts.hedges_won),
            ];
            let kinds = kinds.map(|(kind, count)| (self.sent.with_label_values(&[level, kind]), count));
            let lost = (self.lost.with_label_values(&[level]), tier.missing_objects());
            let corrupt = (self.corrupt_manifests.with_label_values(&[level]), tier.corrupt_manifests());
            for (counter, count) in kinds.into_iter().chain([lost, corrupt]) {
                counter.inc_by(count.saturating_sub(counter.get()));
            }
        }
        [
            self.up.collect(),
            self.writable.collect(),
            self.sent.collect(),
            self.lost.collect(),
            self.corrupt_manifests.collect(),
            self.unreadable.collect(),
        ]
        .concat()
    }
}
