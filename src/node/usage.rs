//! How full the KV cache is, per tier and worker, read when the metrics are scraped.

use super::rests::Rests;
use kvbm::{Tier, Usage};
use prometheus::core::{Collector, Desc};
use prometheus::proto::MetricFamily;
use prometheus::{GaugeVec, IntGaugeVec, Opts};
use std::sync::Weak;

/// The label of tiers that no single worker owns.
const SHARED: &str = "shared";

/// Usage and capacity of every tier. The workers and tiers may be dropped while the registry stays.
pub(super) struct CacheUsage {
    rests: Weak<Rests>,
    shared: Vec<Weak<dyn Tier>>,
    used: IntGaugeVec,
    capacity: IntGaugeVec,
    ratio: GaugeVec,
    active: GaugeVec,
}

impl CacheUsage {
    pub(super) fn of(rests: Weak<Rests>, shared: Vec<Weak<dyn Tier>>) -> Result<Self, prometheus::Error> {
        let name = |name: &str, help: &str| Opts::new(format!("blockyard_kv_cache_{name}"), help);
        let labels = &["worker", "tier"];
        Ok(Self {
            rests,
            shared,
            used: IntGaugeVec::new(name("used_bytes", "Bytes that blocks take in the tier."), labels)?,
            capacity: IntGaugeVec::new(
                name("capacity_bytes", "Bytes that the tier may take; absent without a budget."),
                labels,
            )?,
            ratio: GaugeVec::new(
                name("usage_ratio", "Used share of the tier, 0 to 1; cached blocks count, so a warm tier is near 1."),
                labels,
            )?,
            active: GaugeVec::new(
                name("active_ratio", "Share of G1 that requests in progress hold and that cannot be evicted, 0 to 1."),
                &["worker"],
            )?,
        })
    }

    fn set(&self, worker: &str, tier: &str, Usage { bytes, capacity, .. }: Usage) {
        let labels = &[worker, tier];
        self.used.with_label_values(labels).set(bytes as i64);
        if let Some(capacity) = capacity {
            self.capacity.with_label_values(labels).set(capacity as i64);
            self.ratio.with_label_values(labels).set(bytes as f64 / capacity.max(1) as f64);
        }
    }
}

impl Collector for CacheUsage {
    fn desc(&self) -> Vec<&Desc> {
        [self.used.desc(), self.capacity.desc(), self.ratio.desc(), self.active.desc()].concat()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        for (id, manager) in self.rests.upgrade().iter().flat_map(|rests| &rests.workers) {
            let worker = id.to_string();
            for (level, usage) in manager.usage() {
                self.set(&worker, level.name(), usage);
            }
            let free = manager.available() as f64 / manager.capacity().max(1) as f64;
            self.active.with_label_values(&[&worker]).set(1.0 - free);
        }
        for tier in self.shared.iter().filter_map(Weak::upgrade) {
            self.set(SHARED, tier.level().name(), tier.usage());
        }
        [self.used.collect(), self.capacity.collect(), self.ratio.collect(), self.active.collect()].concat()
    }
}
