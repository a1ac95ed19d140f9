//! Sources of loads: tiers with their measured speed.

use super::throughput::TierThroughput;
use crate::block::Level;
use crate::tier::Tier;
use parking_lot::Mutex;
use std::sync::{Arc, Weak};
use std::time::Duration;

/// A tier to load from, and its measurements.
#[derive(Clone)]
pub(super) struct Source {
    pub(super) tier: Arc<dyn Tier>,
    pub(super) throughput: Arc<TierThroughput>,
}

/// The sources of one manager: its own tiers, and other tiers that it was asked to load from.
pub(super) struct Sources {
    own: Vec<Source>,
    /// Measurements of tiers that do not belong to this manager but were loaded from, while they live.
    external: Mutex<Vec<ExternalTier>>,
}

type ExternalTier = (Weak<dyn Tier>, Arc<TierThroughput>);

/// The measured onboarding speed of a tier.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Speed {
    /// The tier.
    pub level: Level,
    /// Time until the first block.
    pub latency: Duration,
    /// Throughput after the first block, verification and writing included.
    pub bytes_per_second: f64,
    /// Number of blocks that loads wait for now; a new load is served after them.
    pub queued: u64,
}

impl Sources {
    pub(super) fn new(tiers: &[Arc<dyn Tier>]) -> Self {
        let source = |tier: &Arc<dyn Tier>| Source { tier: tier.clone(), throughput: Arc::default() };
        Self { own: tiers.iter().map(source).collect(), external: Mutex::default() }
    }

    /// The manager's own tiers, fastest first.
    pub(super) fn own(&self) -> &[Source] {
        &self.own
    }

    /// A tier that may belong to another manager, with the measurements of earlier loads from it.
    pub(super) fn of_tier(&self, tier: &Arc<dyn Tier>) -> Source {
        Source { tier: tier.clone(), throughput: self.throughput(tier) }
    }

    fn throughput(&self, tier: &Arc<dyn Tier>) -> Arc<TierThroughput> {
        if let Some(source) = self.own.iter().find(|source| Arc::ptr_eq(&source.tier, tier)) {
            return source.throughput.clone();
        }
        let mut external = self.external.lock();
        external.retain(|(known, _)| known.strong_count() > 0);
        if let Some((_, throughput)) = external.iter().find(|(known, _)| known.ptr_eq(&Arc::downgrade(tier))) {
            return throughput.clone();
        }
        let throughput = Arc::default();
        external.push((Arc::downgrade(tier), Arc::clone(&throughput)));
        throughput
    }

    /// The measured speed of each tier for blocks of `block_bytes`, fastest level first, without tiers that were never
    /// loaded from.
    pub(super) fn speeds(&self, block_bytes: usize) -> Vec<Speed> {
        let external = self.external.lock();
        let of_others = external.iter().map(|(tier, throughput)| {
            let level = tier.upgrade().map(|tier| tier.level());
            (level, throughput)
        });
        let own = self.own.iter().map(|source| (Some(source.tier.level()), &source.throughput));
        let speed = |(level, throughput): (Option<Level>, &Arc<TierThroughput>)| {
            let (latency, per_block) = throughput.latest()?;
            // So far each load had one block, which took the latency.
            let per_block = if per_block > 0.0 { per_block } else { latency };
            let (latency, queued) = (Duration::from_secs_f64(latency), throughput.queued());
            let speed = |level| Speed { level, latency, bytes_per_second: block_bytes as f64 / per_block, queued };
            level.filter(|_| per_block > 0.0).map(speed)
        };
        let mut speeds: Vec<Speed> = own.chain(of_others).filter_map(speed).collect();
        speeds.sort_by_key(|speed| speed.level);
        speeds.dedup_by_key(|speed| speed.level);
        speeds
    }
}
