//! Service times of a worker in seconds, derived from its measurements and its queue; costs are computed from them.
//!
//! Computed once when a worker's load changes, not once per decision. Defaults replace only speeds that no worker of
//! the fleet has measured.

use super::demand::decoding;
use super::occupancy::{CapacityWait, Occupancy};
use super::output_lengths::DEFAULT_OUTPUT_TOKENS;
use super::stats::{LOWER_TIERS, LoadStats, Speeds, lower_tier};
use super::step_time::StepTime;
use kvbm::Level;

/// Service times of one worker. Fields that every decision reads come first, so that they share a cache line.
#[derive(Clone, Copy, PartialEq, Debug)]
#[repr(C)]
pub(crate) struct ServiceEstimate {
    /// Seconds until the queued prompts are computed.
    pub(crate) queue: f64,
    /// Tokens of context that a step reads now: those of the sequences whose prompts are computed.
    decoding_context: f32,
    /// Blocks that are lost for each block that a request uses; infinite when unknown.
    pub(crate) lost_share: f32,
    /// Sequences that decode now.
    decoding: u32,
    /// Blocks of a request up to which it waits neither for memory nor for a place in the batch.
    pub(crate) spare_blocks: u32,
    /// Requests that wait for their first token.
    pub(crate) prompts: u32,
    /// Sequences that decode or wait to decode.
    pub(crate) sequences: u32,
    /// Tokens of context that these sequences read in a step.
    pub(crate) context_tokens: u32,
    /// Output tokens that a sequence has still to generate, on average.
    pub(crate) rest_tokens: f32,
    /// Duration of this worker's decode steps, relative to that of an average worker with the same batch.
    step_pace: f32,
    /// Duration of prompts, in the same way.
    prefill_pace: f32,
    /// Seconds of prefill per prompt token, as the worker reports it.
    pub(crate) seconds_per_token: f64,
    /// What is left of the blocks and of the batch.
    occupancy: Occupancy,
    /// Onboarding by source tier, from G2 on.
    transfers: [TierTransfer; LOWER_TIERS],
    /// Seconds to load a block that memory has lost from a store; infinite without a store.
    reload_per_block: f64,
    /// Seconds from the end of a remote prefill to the first token that do not depend on the transfer.
    pub(crate) handoff_overhead: f64,
    /// Seconds of the transfer that come after the end of the prefill, per estimated second of all of it.
    pub(crate) handoff_transfer: f64,
    /// Mean seconds from placement to end of a request.
    pub(crate) mean_duration: f64,
}

/// Onboarding from one tier, in seconds.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
struct TierTransfer {
    /// Until the first block, with an empty queue.
    latency: f64,
    seconds_per_block: f64,
    /// Until the queued blocks of other requests are onboarded.
    backlog: f64,
}

/// Values for speeds that no worker has measured: between a small model on two cores and a large one on an accelerator,
/// where a factor of ten either way still ranks a cached prefix before an uncached one.
pub(crate) mod defaults {
    /// Prompt tokens per second.
    pub(super) const PREFILL: f64 = 5_000.0;
    /// Bytes of the KV cache of a token: that of a model of some billion parameters. A block of 16 tokens has 1 MiB.
    pub(super) const TOKEN_BYTES: f64 = 65_536.0;
    /// Seconds until the first block and bytes per second after it: G2, G3, G3.5, G4, a peer. Half of what memory, a
    /// single SSD, flash behind a network, an object store and a 25 Gbit network usually give.
    pub(super) const ONBOARD: [(f64, f64); super::LOWER_TIERS] =
        [(0.000_1, 5e9), (0.001, 1e9), (0.003, 1e9), (0.03, 0.5e9), (0.001, 1.5e9)];
    /// Seconds of a hand-off: two network hops and a step of another batch.
    pub(super) const HANDOFF_OVERHEAD: f64 = 0.01;
    /// All of the transfer comes after the end of the prefill, until a hand-over was measured.
    pub(super) const HANDOFF_TRANSFER: f64 = 1.0;
    /// Seconds of a request: a few hundred output tokens.
    pub(crate) const MEAN_DURATION: f64 = 10.0;
}

impl ServiceEstimate {
    pub(crate) fn of(stats: &LoadStats) -> Self {
        let LoadStats { waiting_tokens, prompts, sequences, total_blocks, queued, speeds, .. } = stats;
        let seconds_per_token = prefill_speed(speeds).recip();
        let block_bytes = speeds.block_bytes.or(f64::from(stats.tokens_per_block()) * defaults::TOKEN_BYTES);
        let transfer = |at: usize| {
            let level = Level::ALL[at + 1];
            let (latency, bandwidth) = speeds.from(level).unwrap_or(defaults::ONBOARD[at]);
            let seconds_per_block = block_bytes / bandwidth;
            TierTransfer { latency, seconds_per_block, backlog: f64::from(queued[at]) * seconds_per_block }
        };
        let mean_duration = speeds.mean_duration.or(defaults::MEAN_DURATION);
        let (occupancy, spare_blocks) =
            Occupancy::of((stats.peak_blocks(), *total_blocks), (*sequences, stats.sequences_max), mean_duration);
        let (decoding, decoding_context) =
            decoding((*sequences).into(), (*prompts).into(), stats.context_tokens.into());
        Self {
            seconds_per_token,
            queue: stats.waiting_seconds.or(f64::from(*waiting_tokens) * seconds_per_token),
            decoding_context: decoding_context as f32,
            lost_share: stats.lost_share.or(f64::INFINITY) as f32,
            decoding: decoding as u32,
            spare_blocks,
            occupancy,
            prompts: *prompts,
            sequences: *sequences,
            context_tokens: stats.context_tokens,
            rest_tokens: stats.rest_tokens.or(DEFAULT_OUTPUT_TOKENS) as f32,
            step_pace: stats.step_pace.or(1.0) as f32,
            prefill_pace: stats.prefill_pace.or(1.0) as f32,
            transfers: std::array::from_fn(transfer),
            reload_per_block: reload_per_block(stats, block_bytes),
            handoff_overhead: speeds.handoff_overhead.or(defaults::HANDOFF_OVERHEAD),
            handoff_transfer: speeds.handoff_transfer.or(defaults::HANDOFF_TRANSFER),
            mean_duration,
        }
    }

    /// Whether all times that a cost adds are numbers of at least 0. What a worker reports is not checked.
    pub(super) fn is_regular(&self) -> bool {
        let paces = [self.step_pace, self.prefill_pace, self.rest_tokens, self.decoding_context].map(f64::from);
        let times = [self.queue, self.seconds_per_token, self.reload_per_block, self.mean_duration];
        let transfers = self.transfers.iter().flat_map(|tier| [tier.latency, tier.seconds_per_block, tier.backlog]);
        transfers.chain(times).chain(paces).all(|time| time >= 0.0)
    }

    /// Duration of this worker's decode steps, relative to that of an average worker with the same batch.
    #[inline]
    pub(crate) fn step_pace(&self) -> f64 {
        self.step_pace.into()
    }

    /// Seconds that a prompt computes of which this many tokens are not cached, without the steps of the batch.
    /// `average`: on an average worker, once it was measured.
    #[inline]
    pub(crate) fn compute(&self, average: Option<f64>, uncached: f64) -> f64 {
        match average {
            Some(average) => average * f64::from(self.prefill_pace),
            None => uncached * self.seconds_per_token,
        }
    }

    /// Seconds of a step of the sequences that decode here now. `average`: on an average worker.
    #[inline]
    pub(crate) fn step(&self, average: &StepTime) -> f64 {
        average.seconds(self.decoding.into(), self.decoding_context.into()) * self.step_pace()
    }

    /// Whether a request of `blocks` blocks waits neither for memory nor for a place in the batch.
    #[expect(clippy::inline_always, reason = "a thousand times per decision")]
    #[inline(always)]
    pub(crate) fn has_room(&self, blocks: u64) -> bool {
        u64::from(self.spare_blocks) > blocks
    }

    /// Waits for memory and for a place in the batch, of a request of `blocks` blocks of which `cached` are in G1.
    #[expect(clippy::inline_always, reason = "a thousand times per decision, and nearly always neither limit is near")]
    #[inline(always)]
    pub(crate) fn capacity_wait(&self, blocks: u64, cached: u32) -> CapacityWait {
        if self.has_room(blocks) {
            return CapacityWait::default();
        }
        self.occupancy.wait(blocks.saturating_sub(cached.into()))
    }

    /// Seconds to onboard a number of blocks from a tier with an empty queue.
    #[inline]
    pub(crate) fn transfer(&self, level: Level, blocks: u32) -> f64 {
        match lower_tier(level) {
            Some(at) if blocks > 0 => {
                self.transfers[at].latency + f64::from(blocks) * self.transfers[at].seconds_per_block
            }
            _ => 0.0,
        }
    }

    /// Seconds that later requests lose because the memory will not hold what it would hold without a request of
    /// `blocks` blocks, which take `compute` seconds to compute; compared with a worker that loses `least` of each
    /// block.
    #[inline]
    pub(crate) fn eviction(&self, blocks: u64, compute: f64, least: f32) -> f64 {
        let more = self.lost_share - least;
        // An unknown share counts as the least one: not a number, or infinite.
        if more > 0.0 && more.is_finite() { f64::from(more) * self.reload(blocks, compute) } else { 0.0 }
    }

    /// Seconds to have `blocks` again that memory has lost, which take `compute` seconds to compute.
    pub(crate) fn reload(&self, blocks: u64, compute: f64) -> f64 {
        compute.min(blocks as f64 * self.reload_per_block)
    }

    /// Seconds until the blocks that are queued at a tier are onboarded.
    #[inline]
    pub(crate) fn backlog(&self, level: Level) -> f64 {
        lower_tier(level).map_or(0.0, |at| self.transfers[at].backlog)
    }
}

/// Seconds to load a block from the fastest of the stores that were measured; infinite without a store.
fn reload_per_block(stats: &LoadStats, block_bytes: f64) -> f64 {
    if !stats.has_store {
        return f64::INFINITY;
    }
    let stores = [Level::G3, Level::G3_5, Level::G4];
    let measured = stores.iter().filter_map(|level| stats.speeds.from(*level)).map(|(_, bandwidth)| bandwidth);
    let fastest = measured.fold(0.0, f64::max);
    let (_, assumed) = defaults::ONBOARD[1];
    block_bytes / if fastest > 0.0 { fastest } else { assumed }
}

/// Seconds until the first block, and bytes per second after it, that are assumed of a tier below G1 whose speed no
/// worker has measured.
pub(crate) fn assumed_speed(level: Level) -> Option<(f64, f64)> {
    lower_tier(level).map(|at| defaults::ONBOARD[at])
}

/// Prompt tokens per second.
pub(crate) fn prefill_speed(Speeds { prefill, .. }: &Speeds) -> f64 {
    prefill.or(defaults::PREFILL)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load::stats::Measured;

    #[test]
    fn memory_has_a_price_before_young_sequences_have_grown() {
        // A hundred sequences with 10 of 1,600 blocks each; a block has 16 tokens.
        let load = |rest_tokens| LoadStats {
            sequences: 100,
            active_blocks: 1000,
            total_blocks: 1600,
            rest_tokens: Measured::of(rest_tokens),
            ..LoadStats::default()
        };
        let wait = |rest_tokens| ServiceEstimate::of(&load(rest_tokens)).capacity_wait(50, 0).memory;
        assert_eq!(load(160.0).peak_blocks(), 1000, "each ends, on average, after 10 blocks more");
        assert!(wait(160.0) < 1e-6, "{}", wait(160.0));
        // Each takes 40 blocks more: exp(-3/4) of 4,000 are in use at the peak.
        assert_eq!(load(640.0).peak_blocks(), 1889);
        assert!(wait(640.0) > 0.5, "{}", wait(640.0));
    }

    #[test]
    fn a_block_whose_bytes_are_unknown_costs_by_its_tokens() {
        let seconds_of_tokens = |tokens: u32, block_tokens: u32| {
            let estimate = ServiceEstimate::of(&LoadStats { block_tokens, ..LoadStats::default() });
            estimate.transfer(Level::G2, tokens / block_tokens) - defaults::ONBOARD[0].0
        };
        let expected = seconds_of_tokens(4096, 16);
        for block_tokens in [1, 64, 128] {
            let seconds = seconds_of_tokens(4096, block_tokens);
            assert!((seconds / expected - 1.0).abs() < 1e-6, "{seconds} s with blocks of {block_tokens} tokens");
        }
        let speeds = Speeds { block_bytes: Measured::of(1000.0), ..Speeds::default() };
        let of = |block_tokens| ServiceEstimate::of(&LoadStats { block_tokens, speeds, ..LoadStats::default() });
        assert_eq!(of(1), of(128), "measured bytes count");
    }
}
