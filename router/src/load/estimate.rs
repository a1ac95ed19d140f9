//! Service times of a worker in seconds, derived from its measurements and its queue; costs are computed from them.
//!
//! Computed once when a worker's load changes, not once per decision. Defaults replace only speeds that no worker of
//! the fleet has measured.

use super::stats::{LOWER_TIERS, LoadStats, Speeds, lower_tier};
use kvbm::Level;

/// Service times of one worker. Fields that every decision reads come first, so that they share a cache line.
#[derive(Clone, Copy, PartialEq, Debug)]
#[repr(C)]
pub(crate) struct ServiceEstimate {
    /// Seconds of prefill per prompt token.
    pub(crate) token: f64,
    /// Seconds until the queued prompts are computed.
    pub(crate) queue: f64,
    /// Seconds that the decoding sequences add to a step.
    pub(crate) batch: f64,
    /// G1 blocks that are not in use; `u32::MAX` when the total is unknown.
    pub(crate) free_blocks: u32,
    /// G1 blocks in use or booked by requests.
    pub(crate) active_blocks: u32,
    /// Requests that wait for their first token.
    pub(crate) prompts: u32,
    /// Sequences that decode or wait to decode.
    pub(crate) sequences: u32,
    /// Onboarding by source tier, from G2 on.
    transfers: [TierTransfer; LOWER_TIERS],
    /// Seconds from the end of a remote prefill to the first token, without the transfer.
    pub(crate) handoff_overhead: f64,
    /// Mean seconds from placement to end of a request.
    pub(crate) mean_duration: f64,
}

/// Onboarding from one tier, in seconds.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
struct TierTransfer {
    /// Until the first block, with an empty queue.
    latency: f64,
    /// Per block.
    block: f64,
    /// Until the queued blocks of other requests are onboarded.
    backlog: f64,
}

/// Values for speeds that no worker has measured: between a small model on two cores and a large one on an accelerator,
/// where a factor of ten either way still ranks a cached prefix before an uncached one.
pub(crate) mod defaults {
    /// Prompt tokens per second.
    pub(super) const PREFILL: f64 = 5_000.0;
    /// Seconds that each sequence adds to a decode step.
    pub(super) const STEP: f64 = 0.001;
    /// Bytes of a block: 16 tokens of a model of some billion parameters.
    pub(super) const BLOCK_BYTES: f64 = 1_048_576.0;
    /// Seconds until the first block and bytes per second after it: G2, G3, G3.5, G4, a peer. Half of what memory, a
    /// single SSD, flash behind a network, an object store and a 25 Gbit network usually give.
    pub(super) const ONBOARD: [(f64, f64); super::LOWER_TIERS] =
        [(0.000_1, 5e9), (0.001, 1e9), (0.003, 1e9), (0.03, 0.5e9), (0.001, 1.5e9)];
    /// Seconds of a hand-off: two network hops and a step of another batch.
    pub(super) const HANDOFF_OVERHEAD: f64 = 0.01;
    /// Seconds of a request: a few hundred output tokens.
    pub(crate) const MEAN_DURATION: f64 = 10.0;
}

impl ServiceEstimate {
    pub(crate) fn of(stats: &LoadStats) -> Self {
        let LoadStats { waiting_tokens, prompts, sequences, active_blocks, total_blocks, queued, speeds } = stats;
        let token = prefill_speed(speeds).recip();
        let block_bytes = speeds.block_bytes.or(defaults::BLOCK_BYTES);
        let transfer = |at: usize| {
            let level = Level::ALL[at + 1];
            let (latency, bandwidth) = speeds.from(level).unwrap_or(defaults::ONBOARD[at]);
            let block = block_bytes / bandwidth;
            TierTransfer { latency, block, backlog: f64::from(queued[at]) * block }
        };
        Self {
            token,
            queue: f64::from(*waiting_tokens) * token,
            batch: speeds.step.or(defaults::STEP) * f64::from(*sequences),
            free_blocks: if *total_blocks == 0 { u32::MAX } else { total_blocks.saturating_sub(*active_blocks) },
            active_blocks: *active_blocks,
            prompts: *prompts,
            sequences: *sequences,
            transfers: std::array::from_fn(transfer),
            handoff_overhead: speeds.handoff_overhead.or(defaults::HANDOFF_OVERHEAD),
            mean_duration: speeds.mean_duration.or(defaults::MEAN_DURATION),
        }
    }

    /// Seconds to onboard a number of blocks from a tier with an empty queue.
    #[inline]
    pub(crate) fn transfer(&self, level: Level, blocks: u64) -> f64 {
        match lower_tier(level) {
            Some(at) if blocks > 0 => self.transfers[at].latency + blocks as f64 * self.transfers[at].block,
            _ => 0.0,
        }
    }

    /// Seconds until the blocks that are queued at a tier are onboarded.
    #[inline]
    pub(crate) fn backlog(&self, level: Level) -> f64 {
        lower_tier(level).map_or(0.0, |at| self.transfers[at].backlog)
    }
}

/// Prompt tokens per second.
pub(crate) fn prefill_speed(Speeds { prefill, .. }: &Speeds) -> f64 {
    prefill.or(defaults::PREFILL)
}
