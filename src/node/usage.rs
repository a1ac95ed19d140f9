//! Blocks, bytes and capacity of each tier, per worker, read when the metrics are scraped.

use super::cache_audit::CacheAudit;
use kvbm::{Tier, Usage};
use prometheus::core::{Collector, Desc};
use prometheus::proto::MetricFamily;
use prometheus::{GaugeVec, IntGaugeVec, Opts};
use std::sync::Weak;

/// The value of the label `worker` for tiers that all workers of the process share.
const SHARED: &str = "shared";

/// The usage of every tier. Workers and tiers may be dropped while the registry stays.
pub(super) struct CacheUsage {
    audit: Weak<CacheAudit>,
    shared: Vec<Weak<dyn Tier>>,
    blocks: IntGaugeVec,
    used: IntGaugeVec,
    capacity: IntGaugeVec,
    ratio: GaugeVec,
    active: GaugeVec,
}

impl CacheUsage {
    pub(super) fn of(audit: Weak<CacheAudit>, shared: Vec<Weak<dyn Tier>>) -> Result<Self, prometheus::Error> {
        let name = |name: &str, help: &str| Opts::new(format!("blockyard_tier_{name}"), help);
        let labels = &["worker", "tier"];
        Ok(Self {
            audit,
            shared,
            blocks: IntGaugeVec::new(
                name("blocks", "Blocks in the tier. In G1, blocks that are being filled count."),
                labels,
            )?,
            used: IntGaugeVec::new(name("used_bytes", "Bytes that the blocks in the tier take."), labels)?,
            capacity: IntGaugeVec::new(
                name("capacity_bytes", "Capacity of the tier in bytes. Absent if the configuration sets no limit."),
                labels,
            )?,
            ratio: GaugeVec::new(
                name(
                    "usage_ratio",
                    "Used share of the capacity, 0 to 1. Cached blocks count, so a warm tier is near 1.",
                ),
                labels,
            )?,
            active: GaugeVec::new(
                name("active_ratio", "Share of G1 that requests in progress hold and that cannot be evicted, 0 to 1."),
                &["worker"],
            )?,
        })
    }

    fn set(&self, worker: &str, tier: &str, Usage { blocks, bytes, capacity }: Usage) {
        let labels = &[worker, tier];
        self.blocks.with_label_values(labels).set(blocks as i64);
        self.used.with_label_values(labels).set(bytes as i64);
        if let Some(capacity) = capacity {
            self.capacity.with_label_values(labels).set(capacity as i64);
            self.ratio.with_label_values(labels).set(bytes as f64 / capacity.max(1) as f64);
        }
    }
}

impl Collector for CacheUsage {
    fn desc(&self) -> Vec<&Desc> {
        let gauges = [&self.blocks, &self.used, &self.capacity].into_iter().flat_map(Collector::desc);
        gauges.chain(self.ratio.desc()).chain(self.active.desc()).collect()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        for (id, manager) in self.audit.upgrade().iter().flat_map(|audit| &audit.workers) {
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
        let gauges = [&self.blocks, &self.used, &self.capacity].into_iter().flat_map(Collector::collect);
        gauges.chain(self.ratio.collect()).chain(self.active.collect()).collect()
    }
}
