//! What is counted: blocks, bytes and latency per tier and direction, what failed, what was dropped.
//!
//! One value serves every manager of a process: gauges of memory move by differences, so the managers' blocks add up. What
//! rests in tiers that managers share is told by whoever opened those. Labels are bounded: `tier` is a [`Level`],
//! `direction` is one of two words.

use crate::Level;
use prometheus::{HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts, Registry};
use std::time::Duration;

/// Every metric of this crate. Cloning shares them.
#[derive(Clone, Debug)]
pub struct Metrics {
    blocks: IntGaugeVec,
    transfer_bytes: IntCounterVec,
    transfer_seconds: HistogramVec,
    quarantined: IntCounterVec,
    shredded: IntCounterVec,
    offload_dropped: IntCounterVec,
    deadline_misses: IntCounterVec,
    hits: IntCounterVec,
    misses: IntCounterVec,
    expired: IntCounterVec,
    pins_refused: IntCounterVec,
}

/// What a tier of memory counts by itself.
#[derive(Clone, Debug)]
pub(crate) struct MemoryMetrics {
    pub(crate) blocks: IntGauge,
    pub(crate) expired: IntCounter,
    pub(crate) pins_refused: IntCounter,
}

/// Which way blocks move.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Direction {
    /// Away from the device.
    Offload,
    /// Towards the device.
    Onboard,
}

impl Direction {
    const fn name(self) -> &'static str {
        match self {
            Self::Offload => "offload",
            Self::Onboard => "onboard",
        }
    }
}

impl Metrics {
    /// From a copy in memory (tens of microseconds) to the longest that an onboarding waits (seconds), by factors of four.
    const SECONDS: [f64; 9] = [0.000_1, 0.000_4, 0.001_6, 0.006_4, 0.025_6, 0.102_4, 0.409_6, 1.638_4, 6.553_6];

    /// Makes the metrics known to `registry`, once per process.
    pub fn new(registry: &Registry) -> Result<Self, prometheus::Error> {
        let counter = |name: &str, help: &str, labels: &[&str]| -> Result<IntCounterVec, prometheus::Error> {
            let counter = IntCounterVec::new(Opts::new(format!("blockyard_kvbm_{name}"), help), labels)?;
            registry.register(Box::new(counter.clone()))?;
            Ok(counter)
        };
        let blocks = IntGaugeVec::new(
            Opts::new(
                "blockyard_kvbm_blocks",
                "Blocks in the tier, one of memory (blockyard_store_blocks: those in tiers that workers share).",
            ),
            &["tier"],
        )?;
        registry.register(Box::new(blocks.clone()))?;
        let seconds = HistogramOpts::new(
            "blockyard_kvbm_transfer_seconds",
            "Time of one batch of blocks between the device's side and the tier, in seconds.",
        );
        let transfer_seconds = HistogramVec::new(seconds.buckets(Self::SECONDS.to_vec()), &["tier", "direction"])?;
        registry.register(Box::new(transfer_seconds.clone()))?;
        Ok(Self {
            blocks,
            transfer_seconds,
            transfer_bytes: counter(
                "transfer_bytes_total",
                "Bytes of blocks moved to (offload) or from (onboard) the tier.",
                &["tier", "direction"],
            )?,
            quarantined: counter(
                "blocks_quarantined_total",
                "Blocks that the tier returned and that were not what they said; they were discarded and recomputed.",
                &["tier"],
            )?,
            shredded: counter(
                "blocks_shredded_total",
                "Blocks that the tier returned and whose data key is gone: misses.",
                &["tier"],
            )?,
            offload_dropped: counter(
                "offload_dropped_blocks_total",
                "Blocks not offloaded to the tier: its queue was full, it failed, or they were evicted before their turn.",
                &["tier"],
            )?,
            deadline_misses: counter(
                "onboard_deadline_misses_total",
                "Onboardings cut short because recomputing had become faster than waiting for the tier.",
                &["tier"],
            )?,
            hits: counter("hit_blocks_total", "Blocks wanted and found in the tier.", &["tier"])?,
            misses: counter(
                "miss_blocks_total",
                "Blocks that the tier was asked for and did not have, or did not deliver in time.",
                &["tier"],
            )?,
            expired: counter(
                "blocks_expired_total",
                "Blocks of the tier that were found to be older than their request allowed: misses.",
                &["tier"],
            )?,
            pins_refused: counter(
                "pins_refused_total",
                "Blocks not pinned, or no longer, because pins had taken all of the tier that they may.",
                &["tier"],
            )?,
        })
    }

    pub(crate) fn memory(&self, level: Level) -> MemoryMetrics {
        let labels = &[level.name()];
        MemoryMetrics {
            blocks: self.blocks(level),
            expired: self.expired.with_label_values(labels),
            pins_refused: self.pins_refused.with_label_values(labels),
        }
    }

    /// Counts blocks of a tier that expired.
    pub(crate) fn expired(&self, level: Level, blocks: usize) {
        self.expired.with_label_values(&[level.name()]).inc_by(blocks as u64);
    }

    pub(crate) fn blocks(&self, level: Level) -> IntGauge {
        self.blocks.with_label_values(&[level.name()])
    }

    pub(crate) fn moved(&self, level: Level, direction: Direction, bytes: u64, time: Duration) {
        let labels = &[level.name(), direction.name()];
        self.transfer_bytes.with_label_values(labels).inc_by(bytes);
        self.transfer_seconds.with_label_values(labels).observe(time.as_secs_f64());
    }

    pub(crate) fn quarantined(&self, level: Level) {
        self.quarantined.with_label_values(&[level.name()]).inc();
    }

    pub(crate) fn shredded(&self, level: Level) {
        self.shredded.with_label_values(&[level.name()]).inc();
    }

    pub(crate) fn offload_dropped(&self, level: Level, blocks: usize) {
        self.offload_dropped.with_label_values(&[level.name()]).inc_by(blocks as u64);
    }

    pub(crate) fn deadline_missed(&self, level: Level) {
        self.deadline_misses.with_label_values(&[level.name()]).inc();
    }

    pub(crate) fn hit(&self, level: Level, blocks: usize) {
        self.hits.with_label_values(&[level.name()]).inc_by(blocks as u64);
    }

    pub(crate) fn missed(&self, level: Level, blocks: usize) {
        self.misses.with_label_values(&[level.name()]).inc_by(blocks as u64);
    }
}
