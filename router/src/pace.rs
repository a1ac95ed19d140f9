//! How a worker keeps pace, in seconds: its measurements and its queue, ready for costs to be worked out of.
//!
//! Worked out once when a worker's books change, not once per decision. A constant stands in only for what nobody in the
//! fleet has measured.

use crate::load::{Speeds, Standing};
use kvbm::Level;

/// A worker, as far as costs go.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) struct Pace {
    /// Seconds per prompt token.
    pub(crate) token: f64,
    /// Seconds until the prompts that are there are computed.
    pub(crate) queue: f64,
    /// Seconds that a sequence adds to a step.
    pub(crate) step: f64,
    /// Bytes of a block.
    block_bytes: f64,
    /// G1 blocks that nobody uses; without end while nobody says how many there are.
    pub(crate) free_blocks: u64,
    /// G1 blocks in use by requests, or promised to them.
    pub(crate) active_blocks: u32,
    /// Requests that wait there for their first token.
    pub(crate) prompts: u32,
    /// Sequences that decode, or will.
    pub(crate) sequences: u32,
    /// Seconds until the first block and bytes per second after it, by level.
    levels: [(f64, f64); Level::ALL.len()],
    /// Seconds from a hand-over's readiness to the first token, the transfer apart.
    pub(crate) resume: f64,
    /// Seconds that a request stays.
    pub(crate) residence: f64,
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
    /// Seconds until the first block and bytes per second after it: G1, G2, G3, a pod's folder, G4, a peer. Half of what
    /// memory, a single SSD, flash behind a network, an object store and a 25 Gbit network usually give.
    pub(super) const ONBOARD: [(f64, f64); 6] =
        [(0.0, f64::INFINITY), (0.000_1, 5e9), (0.001, 1e9), (0.003, 1e9), (0.03, 0.5e9), (0.001, 1.5e9)];
    /// Two hops and a turn in another batch.
    pub(super) const RESUME: f64 = 0.01;
    /// A few hundred tokens of output.
    pub(crate) const RESIDENCE: f64 = 10.0;
}

impl Pace {
    pub(crate) fn of(standing: &Standing) -> Self {
        let Standing { waiting_tokens, prompts, sequences, active_blocks, total_blocks, speeds } = standing;
        let token = prefill_speed(speeds).recip();
        let free = u64::from(total_blocks.saturating_sub(*active_blocks));
        Self {
            token,
            queue: f64::from(*waiting_tokens) * token,
            step: speeds.step.or(stand_in::STEP),
            block_bytes: speeds.block_bytes.or(stand_in::BLOCK_BYTES),
            free_blocks: if *total_blocks == 0 { u64::MAX } else { free },
            active_blocks: *active_blocks,
            prompts: *prompts,
            sequences: *sequences,
            levels: Level::ALL.map(|level| speeds.from(level).unwrap_or(stand_in::ONBOARD[level as usize])),
            resume: speeds.resume.or(stand_in::RESUME),
            residence: speeds.residence.or(stand_in::RESIDENCE),
        }
    }

    /// Seconds that so many blocks take to come from a level.
    #[inline]
    pub(crate) fn transfer(&self, level: Level, blocks: u64) -> f64 {
        if blocks == 0 {
            return 0.0;
        }
        let (latency, bytes_per_second) = self.levels[level as usize];
        latency + blocks as f64 * self.block_bytes / bytes_per_second
    }
}

/// Prompt tokens per second.
pub(crate) fn prefill_speed(Speeds { prefill, .. }: &Speeds) -> f64 {
    prefill.or(stand_in::PREFILL)
}
