//! What the shared store was asked, what of it was asked again, and what it lost; read when somebody looks.

use kvbm::ObjectTier;
use prometheus::core::{Collector, Desc};
use prometheus::proto::MetricFamily;
use prometheus::{IntCounter, IntCounterVec, IntGauge, Opts};
use std::sync::Weak;

/// The requests of the G4 tier. It may go while the registry stays.
pub(super) struct Requests {
    tier: Weak<ObjectTier>,
    up: IntGauge,
    sent: IntCounterVec,
    lost: IntCounter,
}

impl Requests {
    pub(super) fn of(tier: Weak<ObjectTier>) -> Result<Self, prometheus::Error> {
        let requests = Opts::new(
            "blockyard_store_requests_total",
            "Requests to the shared store: all that were sent; of these, those made again after a failure (retried), those \
             made because a read took too long (hedged), and those of the latter that were answered first (hedge_won).",
        );
        Ok(Self {
            tier,
            up: IntGauge::new("blockyard_store_up", "1 while the shared store answers, 0 while it does not.")?,
            sent: IntCounterVec::new(requests, &["kind"])?,
            lost: IntCounter::new(
                "blockyard_store_objects_lost_total",
                "Objects that turned out to be gone or cut; their blocks were recomputed.",
            )?,
        })
    }
}

impl Collector for Requests {
    fn desc(&self) -> Vec<&Desc> {
        [self.up.desc(), self.sent.desc(), self.lost.desc()].concat()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        if let Some(tier) = self.tier.upgrade() {
            let counts = tier.counts();
            self.up.set(tier.is_up().into());
            let kinds = [
                ("sent", counts.requests),
                ("retried", counts.retries),
                ("hedged", counts.hedges),
                ("hedge_won", counts.hedges_won),
            ];
            for (kind, count) in kinds {
                let counter = self.sent.with_label_values(&[kind]);
                counter.inc_by(count.saturating_sub(counter.get()));
            }
            self.lost.inc_by(tier.lost_objects().saturating_sub(self.lost.get()));
        }
        [self.up.collect(), self.sent.collect(), self.lost.collect()].concat()
    }
}
