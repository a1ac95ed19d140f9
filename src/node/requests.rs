//! What the shared stores were asked, what of it was asked again, and what they lost; read when somebody looks.

use kvbm::ObjectTier;
use kvbm::Tier;
use prometheus::core::{Collector, Desc};
use prometheus::proto::MetricFamily;
use prometheus::{IntCounterVec, IntGaugeVec, Opts};
use std::sync::Weak;

/// The requests of the tiers that other processes share. They may go while the registry stays.
pub(super) struct Requests {
    tiers: Vec<Weak<ObjectTier>>,
    up: IntGaugeVec,
    sent: IntCounterVec,
    lost: IntCounterVec,
    unsound: IntCounterVec,
    unreadable: IntGaugeVec,
}

impl Requests {
    pub(super) fn of(tiers: Vec<Weak<ObjectTier>>) -> Result<Self, prometheus::Error> {
        let requests = Opts::new(
            "blockyard_store_requests_total",
            "Requests to the shared store: all that were sent; of these, those made again after a failure (retried), those \
             made because a read took too long (hedged), and those of the latter that were answered first (hedge_won).",
        );
        let up = Opts::new("blockyard_store_up", "1 while the shared store answers, 0 while it does not.");
        let lost = Opts::new(
            "blockyard_store_objects_lost_total",
            "Objects that turned out to be gone or cut; their blocks were recomputed.",
        );
        let unsound = Opts::new(
            "blockyard_store_manifests_unsound_total",
            "Manifests that were not what they were, or that another version wrote; what they name was recomputed.",
        );
        let unreadable = Opts::new(
            "blockyard_store_manifests_unreadable",
            "Manifests that the shared store lists and does not hand out, such as those in cold storage. They are skipped, and \
             tried again after pauses of up to an hour.",
        );
        Ok(Self {
            tiers,
            up: IntGaugeVec::new(up, &["tier"])?,
            sent: IntCounterVec::new(requests, &["tier", "kind"])?,
            lost: IntCounterVec::new(lost, &["tier"])?,
            unsound: IntCounterVec::new(unsound, &["tier"])?,
            unreadable: IntGaugeVec::new(unreadable, &["tier"])?,
        })
    }
}

impl Collector for Requests {
    fn desc(&self) -> Vec<&Desc> {
        [self.up.desc(), self.sent.desc(), self.lost.desc(), self.unsound.desc(), self.unreadable.desc()].concat()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        for tier in self.tiers.iter().filter_map(Weak::upgrade) {
            let (counts, level) = (tier.counts(), tier.level().name());
            self.up.with_label_values(&[level]).set(tier.is_up().into());
            self.unreadable.with_label_values(&[level]).set(tier.unreadable_manifests() as i64);
            let kinds = [
                ("sent", counts.requests),
                ("retried", counts.retries),
                ("hedged", counts.hedges),
                ("hedge_won", counts.hedges_won),
            ];
            let kinds = kinds.map(|(kind, count)| (self.sent.with_label_values(&[level, kind]), count));
            let lost = (self.lost.with_label_values(&[level]), tier.lost_objects());
            let unsound = (self.unsound.with_label_values(&[level]), tier.unsound_manifests());
            for (counter, count) in kinds.into_iter().chain([lost, unsound]) {
                counter.inc_by(count.saturating_sub(counter.get()));
            }
        }
        [self.up.collect(), self.sent.collect(), self.lost.collect(), self.unsound.collect(), self.unreadable.collect()]
            .concat()
    }
}
