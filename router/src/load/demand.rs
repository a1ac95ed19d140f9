//! What requests need from a worker, and sums of it.

use super::stats::Measured;

/// What a request needs from a worker.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Demand {
    /// Prompt tokens to compute on the worker.
    pub(crate) prefill_tokens: u64,
    /// The part of `prefill_tokens` whose prefill time is estimated from measurements, and that time in microseconds.
    pub(crate) timed_tokens: u64,
    pub(crate) prefill_micros: u64,
    /// G1 blocks for prompt and output.
    pub(crate) blocks: u64,
    /// Prompts to compute on the worker: 1 until the first token.
    pub(crate) prompts: u64,
    /// Sequences: 1 for a request that decodes on the worker.
    pub(crate) sequences: u64,
    /// Tokens of context that its decode steps read: the prompt and half of the expected output.
    pub(crate) context_tokens: u64,
}

impl Demand {
    pub(crate) fn plus(mut self, other: Self) -> Self {
        self.add(other);
        self
    }

    pub(crate) fn add(&mut self, other: Self) {
        self.prefill_tokens += other.prefill_tokens;
        self.timed_tokens += other.timed_tokens;
        self.prefill_micros += other.prefill_micros;
        self.prompts += other.prompts;
        self.blocks += other.blocks;
        self.sequences += other.sequences;
        self.context_tokens += other.context_tokens;
    }

    pub(crate) fn sub(&mut self, other: Self) {
        self.prefill_tokens -= other.prefill_tokens;
        self.timed_tokens -= other.timed_tokens;
        self.prefill_micros -= other.prefill_micros;
        self.prompts -= other.prompts;
        self.blocks -= other.blocks;
        self.sequences -= other.sequences;
        self.context_tokens -= other.context_tokens;
    }

    /// What is left once the prompt is computed.
    pub(super) fn without_prompt(self) -> Self {
        Self { prefill_tokens: 0, timed_tokens: 0, prefill_micros: 0, prompts: 0, ..self }
    }

    /// Number of sequences that decode now, and tokens of their contexts. Sequences whose prompts are not computed yet
    /// do not decode.
    pub(super) fn decoding(&self) -> (f64, f64) {
        decoding(self.sequences as f64, self.prompts as f64, self.context_tokens as f64)
    }

    /// Seconds to compute this many prompt tokens, at the mean time per token of `timed_tokens`; unknown without any.
    pub(super) fn waiting_seconds(&self, tokens: u64) -> Measured {
        if self.timed_tokens == 0 {
            return Measured::NONE;
        }
        Measured::of(self.prefill_micros as f64 / 1e6 * tokens as f64 / self.timed_tokens as f64)
    }
}

/// Number of sequences without the `prompts` that are still to be computed, and their part of the context tokens.
#[inline]
pub(super) fn decoding(sequences: f64, prompts: f64, context_tokens: f64) -> (f64, f64) {
    let decoding = (sequences - prompts).max(0.0);
    (decoding, context_tokens * decoding / sequences.max(1.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_of_unknown_time_take_as_long_as_the_others() {
        let demand = Demand { prefill_tokens: 300, timed_tokens: 100, prefill_micros: 1_000_000, ..Demand::default() };
        assert_eq!(demand.waiting_seconds(300).get(), Some(3.0));
        assert_eq!(Demand { timed_tokens: 0, ..demand }.waiting_seconds(300).get(), None);
    }

    #[test]
    fn sequences_whose_prompt_is_not_computed_do_not_decode() {
        let demand = Demand { sequences: 4, prompts: 1, context_tokens: 4000, ..Demand::default() };
        assert_eq!(demand.decoding(), (3.0, 3000.0));
        assert_eq!(Demand { prompts: 9, ..demand }.decoding(), (0.0, 0.0));
    }
}
