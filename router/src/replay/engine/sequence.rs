//! A request on an engine, and the blocks that it needs.

use super::super::pool::Pool;
use super::super::trace::{BLOCK_TOKENS, RequestSpec};
use super::{BlockChange, Effects};
use crate::admission::Stage;
use kvbm::Level;

#[derive(Clone)]
pub(super) struct Sequence {
    pub(super) request: u32,
    pub(super) stage: Stage,
    /// The worker that computed the prompt, if not this one.
    pub(super) prefill_worker: Option<usize>,
    /// Prompt tokens that are computed or were found in a cache.
    pub(super) computed_tokens: u64,
    /// Leading blocks that are registered in the pool and referenced by this sequence.
    pub(super) registered: usize,
    /// Allocated blocks that are not shared: prompt blocks not computed yet, and output.
    pub(super) private_blocks: u64,
    pub(super) generated_tokens: u64,
    /// Time at which onboarding ends.
    pub(super) ready_ns: u64,
    /// Blocks that are being onboarded until `ready_ns`. They follow the registered ones.
    pub(super) onboarding: usize,
}

impl Sequence {
    /// Blocks that this stage of the request needs, including output.
    pub(super) fn blocks(&self, spec: &RequestSpec) -> u64 {
        if self.stage == Stage::Prefill { spec.blocks.len() as u64 } else { blocks_needed(spec) }
    }

    /// Whether this stage of the request is complete.
    pub(super) fn is_finished(&self, spec: &RequestSpec) -> bool {
        if self.stage == Stage::Prefill {
            self.computed_tokens == spec.input_tokens
        } else {
            self.generated_tokens >= spec.output_tokens
        }
    }

    /// Registers the next block, which was computed or onboarded.
    pub(super) fn register(&mut self, blocks: &[u32], pool: &mut Pool, effects: &mut Effects) {
        let parent = self.registered.checked_sub(1).map(|at| blocks[at]);
        let block = blocks[self.registered];
        if pool.register(block, parent) {
            effects.changes.push(BlockChange { level: Level::G1, block, stored: true });
        }
        self.registered += 1;
        self.private_blocks -= 1;
    }
}

/// Blocks that a request needs, including output.
pub(super) fn blocks_needed(spec: &RequestSpec) -> u64 {
    // Output does not continue in the prompt's last block, even when that is partly filled, because the trace
    // identifies it.
    spec.blocks.len() as u64 + spec.output_tokens.div_ceil(BLOCK_TOKENS)
}
