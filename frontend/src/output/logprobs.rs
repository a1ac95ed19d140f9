//! Log-probabilities of tokens, as answers show them.

use worker::engine::Logprobs;

/// Less likely than anything that is shown, in OpenAI's words; JSON has no infinity.
const UNLIKELY: f32 = -9999.0;

/// A token's log-probability and its rivals'.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct TokenLogprobs {
    pub(crate) token: u32,
    pub(crate) logprob: f32,
    pub(crate) top: Vec<(u32, f32)>,
    /// Where the token's text begins in the choice's text.
    pub(crate) at: Position,
}

/// A place in a text.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub(crate) struct Position {
    pub(crate) bytes: usize,
    pub(crate) chars: usize,
}

impl TokenLogprobs {
    /// Of a token whose text begins at `at`.
    pub(crate) fn new(token: u32, of: Logprobs, at: Position) -> Self {
        let top = of.top.into_iter().map(|(rival, logprob)| (rival, shown(logprob))).collect();
        Self { token, logprob: shown(of.chosen), top, at }
    }
}

/// The decimal that stands for a number in JSON: as a wider float it would be written with digits that the number in single
/// precision does not have, and clients that compare the two would find them different.
pub(crate) fn decimal(number: f32) -> f64 {
    number.to_string().parse().unwrap_or(f64::from(number))
}

/// A log-probability as answers show it.
pub(crate) fn shown(logprob: f32) -> f32 {
    logprob.max(UNLIKELY)
}
