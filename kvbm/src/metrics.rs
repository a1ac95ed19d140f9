//! The counters of the tiers: hits, misses, transfers per direction, and blocks that were lost, per tier.
//!
//! One value serves every block manager of a process, and the counts of the managers add up. Labels are bounded: `tier`
//! is a [`Level`], `direction` is `offload` or `onboard`. Not here: how many blocks and bytes a tier holds; the process
//! that opens the tiers reads that from [`Usage`](crate::tier::Usage).

use crate::block::Level;
use prometheus::{HistogramOpts, HistogramVec, IntCounter, IntCounterVec, Opts, Registry};
use std::time::Duration;

/// Every metric of this crate. Clones share the counters.
#[derive(Clone, Debug)]
pub struct Metrics {
    transfer_bytes: IntCounterVec,
    transfer_seconds: HistogramVec,
    corrupt: IntCounterVec,
    shredded: IntCounterVec,
    undecryptable: IntCounterVec,
    offload_dropped: IntCounterVec,
    deadline_misses: IntCounterVec,
    hits: IntCounterVec,
    misses: IntCounterVec,
    expired: IntCounterVec,
    rejected_pins: IntCounterVec,
}

/// The counters that the pool of a tier in memory updates.
#[derive(Clone, Debug)]
pub(crate) struct MemoryMetrics {
    pub(crate) expired: IntCounter,
    pub(crate) rejected_pins: IntCounter,
}

/// The direction in which blocks move.
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
    /// Histogram buckets in seconds, by factors of four: from a copy in memory (tens of microseconds) to the longest
    /// time that an onboarding waits (seconds).
    const SECONDS: [f64; 9] = [0.000_1, 0.000_4, 0.001_6, 0.006_4, 0.025_6, 0.102_4, 0.409_6, 1.638_4, 6.553_6];

    /// Registers the metrics. Call it once per registry.
    pub fn new(registry: &Registry) -> Result<Self, prometheus::Error> {
        let counter = |name: &str, help: &str, labels: &[&str]| -> Result<IntCounterVec, prometheus::Error> {
            let counter = IntCounterVec::new(Opts::new(format!("blockyard_tier_{name}"), help), labels)?;
            registry.register(Box::new(counter.clone()))?;
            Ok(counter)
        };
        let seconds = HistogramOpts::new(
            "blockyard_tier_transfer_seconds",
            "Duration of the transfer of one batch of blocks to or from the tier, in seconds.",
        );
        let transfer_seconds = HistogramVec::new(seconds.buckets(Self::SECONDS.to_vec()), &["tier", "direction"])?;
        registry.register(Box::new(transfer_seconds.clone()))?;
        Ok(Self {
            transfer_seconds,
            transfer_bytes: counter(
                "transfer_bytes_total",
                "Bytes of blocks that moved to the tier (offload) or from it (onboard).",
                &["tier", "direction"],
            )?,
            corrupt: counter(
                "corrupt_blocks_total",
                "Blocks that the tier returned and that failed verification. They were discarded and recomputed.",
                &["tier"],
            )?,
            shredded: counter(
                "shredded_blocks_total",
                "Blocks that the tier returned and whose data key has been deleted. They count as misses.",
                &["tier"],
            )?,
            undecryptable: counter(
                "undecryptable_blocks_total",
                "Blocks that the tier returned and that this process has no key for. They count as misses, and are \
                 computed and stored again.",
                &["tier"],
            )?,
            offload_dropped: counter(
                "offload_dropped_blocks_total",
                "Blocks that were not offloaded to the tier: its queue was full, it failed, or they were evicted \
                 first.",
                &["tier"],
            )?,
            deadline_misses: counter(
                "onboard_deadline_misses_total",
                "Onboardings that stopped early because recomputing became faster than waiting for the tier.",
                &["tier"],
            )?,
            hits: counter(
                "hit_blocks_total",
                "Blocks that a request needed and that were found in the tier.",
                &["tier"],
            )?,
            misses: counter(
                "miss_blocks_total",
                "Blocks that were requested from the tier and that it did not have, or did not deliver in time.",
                &["tier"],
            )?,
            expired: counter(
                "expired_blocks_total",
                "Blocks that the tier removed because their retention period was over.",
                &["tier"],
            )?,
            rejected_pins: counter(
                "rejected_pins_total",
                "Blocks that were not pinned, or no longer, because the pinned share of the tier was used up.",
                &["tier"],
            )?,
        })
    }

    pub(crate) fn memory(&self, level: Level) -> MemoryMetrics {
        let labels = &[level.name()];
        MemoryMetrics {
            expired: self.expired.with_label_values(labels),
            rejected_pins: self.rejected_pins.with_label_values(labels),
        }
    }

    /// Creates the series of a tier that alerts compute increases of. An increase from no series is not seen.
    pub(crate) fn start_series(&self, level: Level) {
        for counter in [&self.corrupt, &self.undecryptable, &self.offload_dropped] {
            counter.with_label_values(&[level.name()]);
        }
    }

    /// Counts blocks of a tier that expired.
    pub(crate) fn expired(&self, level: Level, blocks: usize) {
        self.expired.with_label_values(&[level.name()]).inc_by(blocks as u64);
    }

    pub(crate) fn moved(&self, level: Level, direction: Direction, bytes: u64, time: Duration) {
        let labels = &[level.name(), direction.name()];
        self.transfer_bytes.with_label_values(labels).inc_by(bytes);
        self.transfer_seconds.with_label_values(labels).observe(time.as_secs_f64());
    }

    pub(crate) fn corrupt(&self, level: Level) {
        self.corrupt.with_label_values(&[level.name()]).inc();
    }

    pub(crate) fn shredded(&self, level: Level) {
        self.shredded.with_label_values(&[level.name()]).inc();
    }

    pub(crate) fn undecryptable(&self, level: Level, blocks: usize) {
        self.undecryptable.with_label_values(&[level.name()]).inc_by(blocks as u64);
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
