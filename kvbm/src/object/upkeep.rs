//! Collecting now and then, beside serving.
//!
//! Of many processes that look after one store, about one collects in each interval: each waits a random time around it,
//! and passes when somebody else began less than three quarters of it ago. Nothing rests on that; any number of collectors
//! may be at work. Look here in vain for counting and logging: who starts it hears of every turn.

use super::ObjectTier;
use super::collector::{Collector, Report};
use super::compact::Compaction;
use super::gc::Policy;
use super::layout::Writer;
use super::pace::Chance;
use crate::Clock;
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
    /// Collects until it is dropped; `told` hears of every turn.
    pub async fn run(self, collector: Collector, clock: Clock, told: impl Fn(&Outcome)) {
        let mut chance = Chance::new(Writer::new().seed());
        // A process that never lives for an interval takes its turn all the same.
        let mut pause = self.every.mul_f64(chance.draw());
        loop {
            sleep(pause).await;
            told(&self.turn(&collector, &clock).await);
            pause = self.every.mul_f64(0.75 + chance.draw() / 2.0);
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

    pub(super) async fn turn(&self, collector: &Collector, clock: &Clock) -> Outcome {
        let start = Instant::now();
        let collected = async {
            // Before it looks: what was written meanwhile is not older than it seems.
            let Some(now) = collector.turn(self.every.mul_f64(0.75), clock.now()).await? else { return Ok(None) };
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
