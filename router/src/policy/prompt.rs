//! What the cost of a placement depends on in a prompt.

use crate::index::WorkerOverlap;

/// The properties of a prompt that its cost depends on.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) struct Prompt {
    /// Length in tokens.
    pub(crate) tokens: u64,
    /// Tokens per block.
    pub(crate) block_size: u64,
    /// Blocks for the prompt and its expected output.
    pub(crate) blocks: u64,
    /// Expected output tokens of one choice.
    pub(crate) output_tokens: f64,
}

impl Prompt {
    /// Tokens that are not in `held`. At least one: the last token is always computed, for its logits.
    pub(crate) fn uncached(&self, held: WorkerOverlap) -> u64 {
        self.tokens.saturating_sub(u64::from(held.total()) * self.block_size).max(1)
    }

    /// Blocks for the output alone.
    pub(crate) fn output_blocks(&self) -> u64 {
        self.blocks.saturating_sub(self.tokens.div_ceil(self.block_size))
    }
}
