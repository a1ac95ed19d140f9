//! Keeping shared stores within the bounds that the configuration sets: what may stay, who looks, and what is told of it.

use super::quotas;
use crate::config::{Config, SharedFlash};
use kvbm::object::gc::{Policy, headroom};
use kvbm::object::{Amount, Compaction, Location, Outcome, Report, Upkeep};
use kvbm::{Clock, Level, ObjectTier, Tier};
use prometheus::{IntCounterVec, Opts, Registry};
use std::sync::Arc;
use std::time::Duration;
use tokio_util::task::AbortOnDropHandle;

/// What may stay in the shared store: the same for `serve` and for whoever collects by hand.
pub(crate) fn policy(config: &Config) -> anyhow::Result<Policy> {
    let (budget, age_max) = (config.tiers.g4.capacity, config.tiers.g4.max_age);
    let (budget, age_max) = (budget.map(|size| size.0), age_max.map(|span| span.0));
    let (grace, shares) = (config.tiers.g4.gc_grace.0, quotas::stored(config, Level::G4)?);
    Ok(Policy { budget, headroom: budget.map_or(0, headroom), age_max, shares, grace })
}

/// How the shared store is looked after; `None` when nobody set it a bound.
pub(super) fn upkeep(config: &Config) -> anyhow::Result<Option<Upkeep>> {
    let policy = policy(config)?;
    let bounded = policy.budget.is_some() || policy.age_max.is_some() || !policy.shares.is_empty();
    Ok(bounded.then_some(Upkeep { policy, every: config.tiers.g4.gc_interval.0 }))
}

/// What may stay in a pod's folder. What goes is deleted soon: nobody else has the room, and everybody is near.
pub(crate) fn pod_policy(config: &Config, pod: &SharedFlash) -> anyhow::Result<Policy> {
    let (budget, age_max) = (Some(pod.capacity.0), pod.max_age.map(|span| span.0));
    let shares = quotas::stored(config, Level::Pod)?;
    Ok(Policy { budget, headroom: headroom(pod.capacity.0), age_max, shares, grace: POD_GRACE })
}

/// More than a process may sleep through what is said of deletions.
const POD_GRACE: Duration = Duration::from_mins(2);

/// Looking through a folder costs no money, and a flood fills it in minutes.
const POD_EVERY: Duration = Duration::from_mins(1);

/// How a pod's folder is looked after.
pub(super) fn pod_upkeep(config: &Config, pod: &SharedFlash) -> anyhow::Result<Upkeep> {
    Ok(Upkeep { policy: pod_policy(config, pod)?, every: POD_EVERY })
}

/// The metrics of garbage collection and compaction.
#[derive(Clone)]
pub(super) struct GcMetrics {
    turns: IntCounterVec,
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
            turns: counter("gc_runs_total", help, &["tier", "outcome"])?,
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

    /// Looks after the store of a tier until the answer is dropped.
    pub(super) fn start(&self, tier: &ObjectTier, location: &Location, upkeep: Upkeep) -> AbortOnDropHandle<()> {
        let (metrics, level, location) = (self.clone(), tier.level(), location.clone());
        let told = move |outcome: &Outcome| metrics.told(level, &location, outcome);
        AbortOnDropHandle::new(tokio::spawn(upkeep.run(tier.collector(), Clock::system(), told)))
    }

    /// Packs small objects into large ones about as often as somebody collects, until the answer or the tier is dropped.
    pub(super) fn compact(&self, tier: &Arc<ObjectTier>, every: Duration) -> AbortOnDropHandle<()> {
        let (level, compacted) = (tier.level(), self.compacted.clone());
        let told = move |done: std::io::Result<Compaction>| match done {
            Ok(Compaction { objects: 0, .. }) => {}
            Ok(Compaction { objects, blocks }) => {
                compacted.with_label_values(&[level.name()]).inc_by(objects);
                tracing::info!(tier = %level, objects, blocks, "small objects compacted");
            }
            Err(error) => tracing::warn!(tier = %level, %error, "cannot compact small objects"),
        };
        AbortOnDropHandle::new(tokio::spawn(Upkeep::compact(every, Arc::downgrade(tier), told)))
    }

    fn told(&self, level: Level, store: &Location, outcome: &Outcome) {
        let turn = |outcome| self.turns.with_label_values(&[level.name(), outcome]).inc();
        match outcome {
            Outcome::Collected { report, took } => {
                turn("completed");
                let goes = condemned(report);
                for (state, amount) in [("marked", goes), ("deleted", report.deleted)] {
                    self.objects.with_label_values(&[level.name(), state]).inc_by(amount.objects);
                    self.bytes.with_label_values(&[level.name(), state]).inc_by(amount.bytes);
                }
                tracing::info!(
                    tier = %level, %store, objects = report.objects, bytes = report.bytes,
                    marked_objects = goes.objects, marked_bytes = goes.bytes,
                    deleted_objects = report.deleted.objects, deleted_bytes = report.deleted.bytes,
                    unreadable_manifests = report.unreadable, duration_s = took.as_secs_f64(),
                    "garbage collection finished"
                );
            }
            Outcome::Passed => turn("skipped"),
            Outcome::Failed(error) => {
                turn("failed");
                tracing::warn!(tier = %level, %store, %error, "garbage collection failed; retrying later");
            }
        }
    }
}

/// All that was named as going, whatever the reason.
fn condemned(report: &Report) -> Amount {
    report.condemned.values().fold(Amount::default(), |all, some| Amount {
        objects: all.objects + some.objects,
        bytes: all.bytes + some.bytes,
    })
}
