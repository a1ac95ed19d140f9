//! One load to be made, and what all loads of a manager share.

use super::shared::Shared;
use crate::block::{Level, SequenceHash};
use crate::manager::inflight::InflightLoads;
use crate::manager::locate::{Located, locate, located_len, tier_runs};
use crate::manager::offload::OffloadWorkers;
use crate::manager::plan::{Plan, TierSpeed, plan};
use crate::manager::shared::Core;
use crate::manager::sources::Source;
use spans::{Context, Kind};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Semaphore;
use tokio::time::Instant;

/// What all loads into one G1 share.
pub(in crate::manager) struct Onboarder {
    pub(super) core: Arc<Core>,
    /// For loaded blocks that other tiers may lack.
    pub(super) offload: Arc<OffloadWorkers>,
    pub(super) inflight: InflightLoads,
    /// Permits for blocks of G1 that may be loaded before their engine is ready, and the number of all permits.
    pub(super) prefetch_blocks: Semaphore,
    pub(super) max_prefetch_blocks: usize,
}

/// One in this many blocks of G1 may be loaded for requests that do not run yet; more could evict blocks of running
/// ones.
const PREFETCH_DIVISOR: usize = 4;

/// The cost of computing blocks, as measured by the engine, and the request's deadline.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Recompute {
    /// Seconds to compute one block; `None` while nothing was measured.
    pub seconds_per_block: Option<f64>,
    /// When the last block must be in G1, loaded or computed, for the request to meet its deadline.
    pub deadline: Option<Instant>,
}

/// The blocks to load, and the request that they are for.
pub(super) struct LoadJob {
    pub(super) onboarder: Arc<Onboarder>,
    pub(super) sources: Vec<Source>,
    pub(super) hashes: Vec<SequenceHash>,
    pub(super) recompute: Recompute,
    pub(super) shared: Arc<Shared>,
    /// The number of purges of G1 when the job was made: blocks of domains that are purged later are not registered.
    pub(super) purges: u64,
    pub(super) trace: Context,
}

impl Onboarder {
    pub(in crate::manager) fn new(core: Arc<Core>, offload: Arc<OffloadWorkers>) -> Self {
        let max_prefetch_blocks = (core.pool.capacity() / PREFETCH_DIVISOR).min(Semaphore::MAX_PERMITS);
        let prefetch_blocks = Semaphore::new(max_prefetch_blocks);
        Self { core, offload, inflight: InflightLoads::default(), prefetch_blocks, max_prefetch_blocks }
    }
}

impl LoadJob {
    /// Locates the blocks from `ready` on and plans their load, given the `speed` of each source and the free slots.
    /// `owned`: how many of these blocks have a slot already.
    pub(super) fn plan(
        &self,
        ready: usize,
        owned: usize,
        now: Instant,
        speed: impl Fn(usize) -> TierSpeed,
    ) -> (Located, Plan) {
        let located = locate(&self.onboarder.core, &self.sources, &self.hashes[ready..], now);
        let Recompute { seconds_per_block: cost, deadline } = self.recompute;
        // Blocks that no tier holds are computed in any case, after those that a tier holds.
        let beyond = (self.hashes.len() - ready - located_len(&located)) as f64 * cost.unwrap_or(0.0);
        let time_left = deadline.map(|deadline| seconds_until(deadline, now) - beyond);
        let mut plan = plan(&tier_runs(&located, speed), cost, time_left);
        let slots = self.onboarder.core.pool.available() + owned;
        plan.head = plan.head.min(slots);
        plan.tail = plan.tail.min(slots - plan.head);
        (located, plan)
    }
}

impl LoadJob {
    /// Records a span for what one tier has loaded.
    pub(super) fn trace_load(&self, level: Level, (since, took): (Instant, Duration), blocks: usize) {
        let name = if level == Level::Peer { "hand-over" } else { "onboard" };
        let mut span = self.trace.span_since(name, Kind::Internal, since);
        span.set("blockyard.tier", level.name());
        span.set("blockyard.blocks", blocks);
        span.set("blockyard.bytes", blocks * self.onboarder.core.device.block_bytes());
        span.end_at(since + took);
    }
}

/// Negative when `then` has passed.
fn seconds_until(then: Instant, now: Instant) -> f64 {
    then.saturating_duration_since(now).as_secs_f64() - now.saturating_duration_since(then).as_secs_f64()
}
