//! Prompts as blocks of a trace. Two prompts share a block only if all tokens up to its end are the same.

use crate::replay::trace::BLOCK_TOKENS;

/// Hands out numbers of blocks.
#[derive(Default)]
pub(super) struct Blocks {
    next: u32,
}

/// The tokens of a prompt. A clone shares all of them, and what is appended to it is its own.
#[derive(Clone, Default)]
pub(super) struct Prompt {
    /// Full blocks.
    full: Vec<u32>,
    tokens: u64,
}

impl Blocks {
    fn take(&mut self) -> u32 {
        self.next += 1;
        self.next
    }

    /// A prompt of this many tokens that shares nothing with others yet.
    pub(super) fn prompt(&mut self, tokens: u64) -> Prompt {
        let mut prompt = Prompt::default();
        prompt.append(tokens, self);
        prompt
    }
}

impl Prompt {
    pub(super) fn tokens(&self) -> u64 {
        self.tokens
    }

    /// Appends tokens that no other prompt has.
    pub(super) fn append(&mut self, tokens: u64, blocks: &mut Blocks) {
        self.tokens += tokens;
        self.full.resize_with((self.tokens / BLOCK_TOKENS) as usize, || blocks.take());
    }

    /// The same, on a copy.
    pub(super) fn with(&self, tokens: u64, blocks: &mut Blocks) -> Self {
        let mut prompt = self.clone();
        prompt.append(tokens, blocks);
        prompt
    }

    /// All blocks. A last block that is not full is the prompt's own, because nothing can continue it.
    pub(super) fn blocks(&self, blocks: &mut Blocks) -> Vec<u32> {
        let partial = (!self.tokens.is_multiple_of(BLOCK_TOKENS)).then(|| blocks.take());
        self.full.iter().copied().chain(partial).collect()
    }
}
