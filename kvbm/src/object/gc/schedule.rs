//! Collecting now and then, beside serving.
//!
//! Of many processes that look after one store, about one collects in each interval: each waits a random time around it,
//! and passes when somebody else began less than three quarters of it ago. While little room is left in a store with a capacity,
//! the interval is seconds. Nothing rests on that; any number of collectors may be at work. Look here in vain for counting and logging: who starts it hears of every turn.

use super::Policy;
use super::collector::{Collector, Report};
use super::compact::Compaction;
use crate::block::Clock;
use crate::object::ObjectTier;
use crate::object::client::retry::Chance;
use crate::object::format::layout::Writer;
use std::io;
use std::sync::Weak;
use std::time::Duration;
use tokio::time::{Instant, sleep};

/// What may stay in a store, and how often somebody looks.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Upkeep {
    /// What may stay.
    pub policy: Policy,
    /// How often, over all who look after the store.
    pub every: Duration,
}

/// From one turn to the next while little room is left: as long as it takes at least until what was named may be deleted.
const SOON: Duration = Duration::from_secs(15);
/// The same where there is nothing to do again and again.
const LATER: Duration = Duration::from_mins(4);
/// After so many of the shortest intervals without a turn a process takes one, whatever the others do.
const ALONE: u32 = 4;
/// Such turns take at most one part in so many of the time.
const EFFORT: u32 = 10;

/// When the next turn comes while little room is left.
struct Waiting {
    /// Not before.
    soonest: Instant,
    /// To look whether there is anything to name.
    look: Instant,
    /// To delete what was named.
    due: Option<Instant>,
}

impl Waiting {
    fn is_over(&self) -> bool {
        let now = Instant::now();
        now >= self.soonest && (now >= self.look || self.due.is_some_and(|due| now >= due))
    }
}

/// What came of one turn.
#[derive(Debug)]
pub enum Outcome {
    /// This one looked through the store.
    Collected {
        /// What it found and did.
        report: Report,
        /// How long that took.
        took: Duration,
    },
    /// Another process did, lately.
    Passed,
    /// The store did not let it; the next turn comes.
    Failed(io::Error),
}

impl Upkeep {
    /// Collects until it is dropped; `told` hears of every turn. Beside the turns of the interval there are others while
    /// little room is left in a store with a capacity: soon, to name what goes, and once what was named may be deleted.
    pub async fn run(self, collector: Collector, clock: Clock, told: impl Fn(&Outcome)) {
        let mut chance = Chance::new(Writer::new().seed());
        // A process that never lives for an interval takes its turn all the same.
        let mut regular = Instant::now() + self.every.mul_f64(chance.draw());
        let step = SOON.min(self.every);
        // Doubles with every turn that finds nothing to do.
        let mut pause = step;
        let mut wait = Waiting { soonest: Instant::now(), look: Instant::now(), due: None };
        let mut collected = Instant::now();
        loop {
            sleep(step.mul_f64(0.75 + chance.draw() / 2.0).min(regular.saturating_duration_since(Instant::now())))
                .await;
            let is_regular = Instant::now() >= regular;
            if !(is_regular || wait.is_over() && collector.is_near_capacity()) {
                continue;
            }
            // Only this process deletes early what it wrote: however often others collect, it does now and then.
            let gap = match (is_regular, collected.elapsed() > step * ALONE) {
                (true, _) => self.every,
                (false, false) => step,
                (false, true) => Duration::ZERO,
            };
            let outcome = self.turn(&collector, &clock, gap.mul_f64(0.75)).await;
            told(&outcome);
            let now = Instant::now();
            if is_regular {
                regular = now + self.every.mul_f64(0.75 + chance.draw() / 2.0);
            }
            match &outcome {
                Outcome::Collected { report, took } => {
                    let idle = report.condemned.is_empty() && report.deleted.objects == 0;
                    pause = if idle { (pause * 2).min(LATER).min(self.every) } else { step };
                    let soonest = now + step.max(*took * EFFORT);
                    collected = now;
                    wait = Waiting { soonest, look: now + pause, due: report.next.map(|next| now + next) };
                }
                Outcome::Passed => wait.soonest = now + step,
                Outcome::Failed(_) => wait.soonest = now + step * 4,
            }
        }
    }

    /// Packs small objects into large ones about as often, until the tier is gone; `told` hears of every turn.
    pub async fn compact(every: Duration, tier: Weak<ObjectTier>, told: impl Fn(io::Result<Compaction>)) {
        let mut chance = Chance::new(Writer::new().seed());
        loop {
            // Not all at the same time: what a process left that ended is anybody's.
            sleep(every.mul_f64(0.75 + chance.draw() / 2.0)).await;
            let Some(tier) = tier.upgrade() else { return };
            told(tier.compact(every * 2).await);
        }
    }

    /// Collects, unless another process began to within so long.
    pub(in crate::object) async fn turn(&self, collector: &Collector, clock: &Clock, gap: Duration) -> Outcome {
        let start = Instant::now();
        let collected = async {
            // Before it looks: what was written meanwhile is not older than it seems.
            let Some(now) = collector.turn(gap, clock.now()).await? else { return Ok(None) };
            let survey = collector.survey(|_, _| ()).await?;
            Ok(Some(collector.collect(&survey, &self.policy, now).await?))
        };
        match collected.await {
            Ok(Some(report)) => Outcome::Collected { report, took: start.elapsed() },
            Ok(None) => Outcome::Passed,
            Err(error) => Outcome::Failed(error),
        }
    }
}
