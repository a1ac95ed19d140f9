//! Garbage collection of G3.5 and G4: the policy from the configuration, the schedule, and the metrics.

use super::quotas;
use crate::config::{Config, SharedFlash};
use kvbm::object::gc::{Policy, headroom};
use kvbm::object::{Compaction, GcOutcome, GcReport, GcScheduler, ObjectTotals, StoreLocation};
use kvbm::{Clock, Level, ObjectTier, Tier};
use prometheus::{IntCounterVec, Opts, Registry};
use std::sync::Arc;
use std::time::Duration;
use tokio_util::task::AbortOnDropHandle;

/// The policy of G4, for `serve` and for `cache gc`.
pub(crate) fn policy(config: &Config) -> anyhow::Result<Policy> {
    let capacity = config.tiers.g4.capacity.map(|size| size.0);
    let max_age = config.tiers.g4.max_age.map(|age| age.0);
    let grace = config.tiers.g4.gc_grace.0;
    let quotas = quotas::stored(config, Level::G4)?;
    Ok(Policy { capacity, headroom: capacity.map_or(0, headroom), max_age, quotas, grace })
}

/// The schedule of garbage collection in G4; `None` if the configuration sets neither a limit nor a quota.
pub(super) fn gc_scheduler(config: &Config) -> anyhow::Result<Option<GcScheduler>> {
    let policy = policy(config)?;
    let bounded = policy.capacity.is_some() || policy.max_age.is_some() || !policy.quotas.is_empty();
    Ok(bounded.then_some(GcScheduler { policy, interval: config.tiers.g4.gc_interval.0 }))
}

/// The policy of G3.5. Its grace time is short: the folder has little space, and all its readers are on one host.
pub(crate) fn g3_5_policy(config: &Config, flash: &SharedFlash) -> anyhow::Result<Policy> {
    let capacity = Some(flash.capacity.0);
    let max_age = flash.max_age.map(|age| age.0);
    let quotas = quotas::stored(config, Level::G3_5)?;
    Ok(Policy { capacity, headroom: headroom(flash.capacity.0), max_age, quotas, grace: G3_5_GRACE })
}

/// From marking to deleting an object in G3.5. Readers poll the marks every few seconds; two minutes also cover a
/// process that was stopped for a while.
const G3_5_GRACE: Duration = Duration::from_mins(2);

/// Interval of garbage collection in G3.5: listing a folder is cheap, and a burst of writes fills it within minutes.
const G3_5_INTERVAL: Duration = Duration::from_mins(1);

/// The schedule of garbage collection in G3.5.
pub(super) fn g3_5_gc_scheduler(config: &Config, flash: &SharedFlash) -> anyhow::Result<GcScheduler> {
    Ok(GcScheduler { policy: g3_5_policy(config, flash)?, interval: G3_5_INTERVAL })
}

/// The metrics of garbage collection and compaction.
#[derive(Clone)]
pub(super) struct GcMetrics {
    runs: IntCounterVec,
    objects: IntCounterVec,
    bytes: IntCounterVec,
    compacted: IntCounterVec,
}

impl GcMetrics {
    pub(super) fn new(registry: &Registry) -> Result<Self, prometheus::Error> {
        let counter = |name: &str, help: &str, labels: &[&str]| -> Result<IntCounterVec, prometheus::Error> {
            let counter = IntCounterVec::new(Opts::new(format!("blockyard_tier_{name}"), help), labels)?;
            registry.register(Box::new(counter.clone()))?;
            Ok(counter)
        };
        let help = "Garbage collection runs of this process over the store of a tier, by outcome: completed, skipped \
                    (another process completed a run within the interval) or failed.";
        Ok(Self {
            runs: counter("gc_runs_total", help, &["tier", "outcome"])?,
            objects: counter(
                "gc_objects_total",
                "Objects that garbage collection by this process marked for deletion (marked), and deleted (deleted).",
                &["tier", "state"],
            )?,
            bytes: counter(
                "gc_bytes_total",
                "Bytes of the objects that garbage collection by this process marked and deleted.",
                &["tier", "state"],
            )?,
            compacted: counter(
                "compacted_objects_total",
                "Small objects whose blocks this process rewrote into large objects.",
                &["tier"],
            )?,
        })
    }

    /// Collects garbage in the store of a tier until the returned handle is dropped.
    pub(super) fn start(
        &self,
        tier: &ObjectTier,
        location: &StoreLocation,
        scheduler: GcScheduler,
    ) -> AbortOnDropHandle<()> {
        let (metrics, level, location) = (self.clone(), tier.level(), location.clone());
        let report = move |outcome: &GcOutcome| metrics.record(level, &location, outcome);
        AbortOnDropHandle::new(tokio::spawn(scheduler.run(tier.collector(), Clock::system(), report)))
    }

    /// Compacts small objects of a tier at `interval`, until the returned handle or the tier is dropped.
    pub(super) fn compact(&self, tier: &Arc<ObjectTier>, interval: Duration) -> AbortOnDropHandle<()> {
        let (level, compacted) = (tier.level(), self.compacted.clone());
        let report = move |done: std::io::Result<Compaction>| match done {
            Ok(Compaction { objects: 0, .. }) => {}
            Ok(Compaction { objects, blocks }) => {
                compacted.with_label_values(&[level.name()]).inc_by(objects);
                tracing::info!(tier = %level, objects, blocks, "small objects compacted");
            }
            Err(error) => tracing::warn!(tier = %level, %error, "cannot compact small objects"),
        };
        AbortOnDropHandle::new(tokio::spawn(GcScheduler::compact(interval, Arc::downgrade(tier), report)))
    }

    fn record(&self, level: Level, store: &StoreLocation, outcome: &GcOutcome) {
        let count_run = |outcome| self.runs.with_label_values(&[level.name(), outcome]).inc();
        match outcome {
            GcOutcome::Collected { report, took } => {
                count_run("completed");
                let marked = marked(report);
                for (state, amount) in [("marked", marked), ("deleted", report.deleted)] {
                    self.objects.with_label_values(&[level.name(), state]).inc_by(amount.objects);
                    self.bytes.with_label_values(&[level.name(), state]).inc_by(amount.bytes);
                }
                tracing::info!(
                    tier = %level, %store, objects = report.objects, bytes = report.bytes,
                    marked_objects = marked.objects, marked_bytes = marked.bytes,
                    deleted_objects = report.deleted.objects, deleted_bytes = report.deleted.bytes,
                    unreadable_manifests = report.unreadable_manifests, duration_s = took.as_secs_f64(),
                    "garbage collection finished"
                );
            }
            GcOutcome::Skipped => count_run("skipped"),
            GcOutcome::Failed(error) => {
                count_run("failed");
                tracing::warn!(tier = %level, %store, %error, "garbage collection failed; retrying later");
            }
        }
    }
}

/// Objects and bytes that a run marked, for all reasons.
fn marked(report: &GcReport) -> ObjectTotals {
    report.marked.values().fold(ObjectTotals::default(), |all, some| ObjectTotals {
        objects: all.objects + some.objects,
        bytes: all.bytes + some.bytes,
    })
}
