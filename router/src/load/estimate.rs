//! How a worker keeps pace, in seconds: its measurements and its queue, ready for costs to be worked out of.
//!
//! Worked out once when a worker's books change, not once per decision. A constant stands in only for what nobody in the
//! fleet has measured.

use super::stats::{ONBOARDED, Speeds, Standing, below};
use kvbm::Level;

/// A worker, as far as costs go. What is asked of everybody comes first, so that it lies together.
#[derive(Clone, Copy, PartialEq, Debug)]
#[repr(C)]
pub(crate) struct Pace {
    /// Seconds per prompt token.
    pub(crate) token: f64,
    /// Seconds until the prompts that are there are computed.
    pub(crate) queue: f64,
    /// Seconds that the sequences there add to a step.
    pub(crate) batch: f64,
    /// G1 blocks that nobody uses; without end while nobody says how many there are.
    pub(crate) free_blocks: u32,
    /// G1 blocks in use by requests, or promised to them.
    pub(crate) active_blocks: u32,
    /// Requests that wait there for their first token.
    pub(crate) prompts: u32,
    /// Sequences that decode, or will.
    pub(crate) sequences: u32,
    /// By level, from G2 on.
    lanes: [Lane; ONBOARDED],
    /// Seconds from a hand-over's readiness to the first token, the transfer apart.
    pub(crate) resume: f64,
    /// Seconds that a request stays.
    pub(crate) residence: f64,
}

/// How blocks come up from a level, in seconds.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
struct Lane {
    /// Until the first block, when nobody else asks.
    latency: f64,
    /// Of each block.
    block: f64,
    /// Until what others wait for is there.
    backlog: f64,
}

/// Stand-ins for what nobody has measured. They lie in the middle between a small model on two cores and a large one on an
/// accelerator, where a factor of ten either way still ranks a cached prefix before an uncached one.
pub(crate) mod stand_in {
    /// Tokens per second.
    pub(super) const PREFILL: f64 = 5_000.0;
    /// Seconds that a sequence adds to a step.
    pub(super) const STEP: f64 = 0.001;
    /// 16 tokens of a model of some billion parameters.
    pub(super) const BLOCK_BYTES: f64 = 1_048_576.0;
    /// Seconds until the first block and bytes per second after it: G2, G3, a pod's folder, G4, a peer. Half of what
    /// memory, a single SSD, flash behind a network, an object store and a 25 Gbit network usually give.
    pub(super) const ONBOARD: [(f64, f64); super::ONBOARDED] =
        [(0.000_1, 5e9), (0.001, 1e9), (0.003, 1e9), (0.03, 0.5e9), (0.001, 1.5e9)];
    /// Two hops and a turn in another batch.
    pub(super) const RESUME: f64 = 0.01;
    /// A few hundred tokens of output.
    pub(crate) const RESIDENCE: f64 = 10.0;
}

impl Pace {
    pub(crate) fn of(standing: &Standing) -> Self {
        let Standing { waiting_tokens, prompts, sequences, active_blocks, total_blocks, queued, speeds } = standing;
        let token = prefill_speed(speeds).recip();
        let block_bytes = speeds.block_bytes.or(stand_in::BLOCK_BYTES);
        let lane = |at: usize| {
            let level = Level::ALL[at + 1];
            let (latency, bandwidth) = speeds.from(level).unwrap_or(stand_in::ONBOARD[at]);
            let block = block_bytes / bandwidth;
            Lane { latency, block, backlog: f64::from(queued[at]) * block }
        };
        Self {
            token,
            queue: f64::from(*waiting_tokens) * token,
            batch: speeds.step.or(stand_in::STEP) * f64::from(*sequences),
            free_blocks: if *total_blocks == 0 { u32::MAX } else { total_blocks.saturating_sub(*active_blocks) },
            active_blocks: *active_blocks,
            prompts: *prompts,
            sequences: *sequences,
            lanes: std::array::from_fn(lane),
            resume: speeds.resume.or(stand_in::RESUME),
            residence: speeds.residence.or(stand_in::RESIDENCE),
        }
    }

    /// Seconds that so many blocks take to come from a level, when nobody else asks for any.
    #[inline]
    pub(crate) fn transfer(&self, level: Level, blocks: u64) -> f64 {
        match below(level) {
            Some(at) if blocks > 0 => self.lanes[at].latency + blocks as f64 * self.lanes[at].block,
            _ => 0.0,
        }
    }

    /// Seconds until what others wait for from a level is there.
    #[inline]
    pub(crate) fn backlog(&self, level: Level) -> f64 {
        below(level).map_or(0.0, |at| self.lanes[at].backlog)
    }
}

/// Prompt tokens per second.
pub(crate) fn prefill_speed(Speeds { prefill, .. }: &Speeds) -> f64 {
    prefill.or(stand_in::PREFILL)
}
