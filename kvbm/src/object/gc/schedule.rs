//! Runs garbage collection and compaction periodically beside serving.
//!
//! Of all processes that share a store, about one runs per interval: each waits a random time around the interval, and
//! skips its run if another process started one less than three quarters of the interval ago. While a store with a
//! capacity is nearly full, extra runs follow within seconds. Correctness does not depend on this; any number of
//! collectors may run. Not here: metrics and logs, which the caller makes from the reported outcomes.

use super::collector::{Collector, GcReport};
use super::compact::Compaction;
use super::policy::Policy;
use crate::block::Clock;
use crate::object::format::layout::InstanceId;
use crate::object::tier::ObjectTier;
use crate::table::splitmix::SplitMix64;
use std::io;
use std::sync::Weak;
use std::time::Duration;
use tokio::time::{Instant, sleep};

/// The policy of a store, and how often it is applied.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct GcScheduler {
    /// What may stay.
    pub policy: Policy,
    /// Time between two runs, over all processes that share the store.
    pub interval: Duration,
}

/// Time between two extra runs. Marked objects may be deleted after this time at the earliest.
const MIN_INTERVAL: Duration = Duration::from_secs(15);
/// The longest time between two extra runs that found nothing to do.
const MAX_PAUSE: Duration = Duration::from_mins(4);
/// After this many minimum intervals without a run, a process makes one whatever the others do.
const MAX_SKIPPED_INTERVALS: u32 = 4;
/// The time between extra runs is at least this many times the duration of a run.
const MIN_INTERVAL_FACTOR: u32 = 10;

/// When the next extra run is due.
struct ExtraRun {
    /// Never before this time.
    not_before: Instant,
    /// To look for objects to mark.
    scan_at: Instant,
    /// To delete marked objects.
    delete_at: Option<Instant>,
}

impl ExtraRun {
    fn is_due(&self) -> bool {
        let now = Instant::now();
        now >= self.not_before && (now >= self.scan_at || self.delete_at.is_some_and(|delete_at| now >= delete_at))
    }
}

/// Outcome of one run.
#[derive(Debug)]
pub enum GcOutcome {
    /// The run was made.
    Collected {
        /// What it found and did.
        report: GcReport,
        /// Duration of the run.
        took: Duration,
    },
    /// Skipped: another process started a run within the interval.
    Skipped,
    /// The run failed; a later one follows.
    Failed(io::Error),
}

impl GcScheduler {
    /// Runs until it is dropped, and calls `report_run` after each run. Extra runs are made while a store with a
    /// capacity is nearly full: soon, to mark objects, and when marked objects may be deleted.
    pub async fn run(self, collector: Collector, clock: Clock, report_run: impl Fn(&GcOutcome)) {
        let mut rng = SplitMix64::new(InstanceId::new().seed());
        // The first run comes within one interval, so that a process with a shorter lifetime takes part too.
        let mut regular_at = Instant::now() + self.interval.mul_f64(rng.uniform());
        let step = MIN_INTERVAL.min(self.interval);
        // Doubles with every extra run that finds nothing to do.
        let mut pause = step;
        let mut extra = ExtraRun { not_before: Instant::now(), scan_at: Instant::now(), delete_at: None };
        let mut last_run = Instant::now();
        loop {
            sleep(step.mul_f64(0.75 + rng.uniform() / 2.0).min(regular_at.saturating_duration_since(Instant::now())))
                .await;
            let is_regular = Instant::now() >= regular_at;
            if !(is_regular || extra.is_due() && collector.is_near_capacity()) {
                continue;
            }
            // Only this process deletes its own objects early, so it runs now and then however often others do.
            let gap = match (is_regular, last_run.elapsed() > step * MAX_SKIPPED_INTERVALS) {
                (true, _) => self.interval,
                (false, false) => step,
                (false, true) => Duration::ZERO,
            };
            let outcome = self.run_once(&collector, &clock, gap.mul_f64(0.75)).await;
            report_run(&outcome);
            let now = Instant::now();
            if is_regular {
                regular_at = now + self.interval.mul_f64(0.75 + rng.uniform() / 2.0);
            }
            match &outcome {
                GcOutcome::Collected { report, took } => {
                    let is_idle = report.marked.is_empty() && report.deleted.objects == 0;
                    pause = if is_idle { (pause * 2).min(MAX_PAUSE).min(self.interval) } else { step };
                    let not_before = now + step.max(*took * MIN_INTERVAL_FACTOR);
                    last_run = now;
                    extra = ExtraRun {
                        not_before,
                        scan_at: now + pause,
                        delete_at: report.next_deletion.map(|next| now + next),
                    };
                }
                GcOutcome::Skipped => extra.not_before = now + step,
                GcOutcome::Failed(_) => extra.not_before = now + step * 4,
            }
        }
    }

    /// Compacts small objects about once per interval until the tier is dropped, and calls `report_run` after each
    /// time.
    pub async fn compact(interval: Duration, tier: Weak<ObjectTier>, report_run: impl Fn(io::Result<Compaction>)) {
        let mut rng = SplitMix64::new(InstanceId::new().seed());
        loop {
            // At random times, because any process may compact the objects of a writer that has ended.
            sleep(interval.mul_f64(0.75 + rng.uniform() / 2.0)).await;
            let Some(tier) = tier.upgrade() else { return };
            report_run(tier.compact(interval * 2).await);
        }
    }

    /// Makes a run, unless another process started one within `gap`.
    pub(in crate::object) async fn run_once(&self, collector: &Collector, clock: &Clock, gap: Duration) -> GcOutcome {
        let start = Instant::now();
        let run = async {
            // The date is taken before the scan, so that objects written during the scan do not seem older than they
            // are.
            let Some(now) = collector.try_start(gap, clock.now()).await? else { return Ok(None) };
            let inventory = collector.scan(|_, _| ()).await?;
            Ok(Some(collector.collect(&inventory, &self.policy, now).await?))
        };
        match run.await {
            Ok(Some(report)) => GcOutcome::Collected { report, took: start.elapsed() },
            Ok(None) => GcOutcome::Skipped,
            Err(error) => GcOutcome::Failed(error),
        }
    }
}
