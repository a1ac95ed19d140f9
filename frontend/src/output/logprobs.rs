//! Log-probabilities of tokens, as responses show them.

use worker::engine::Logprobs;

/// OpenAI's value for tokens that are too unlikely to be listed. JSON has no infinity.
const MIN_LOGPROB: f32 = -9999.0;

/// The log-probability of a token, and those of the most likely tokens at its position.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct TokenLogprobs {
    pub(crate) token: u32,
    pub(crate) logprob: f32,
    pub(crate) top: Vec<(u32, f32)>,
    /// Start of the token's text in the choice's text.
    pub(crate) position: TextPosition,
}

/// A position in a text.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub(crate) struct TextPosition {
    pub(crate) bytes: usize,
    pub(crate) chars: usize,
}

impl TokenLogprobs {
    /// The log-probabilities of a token whose text begins at `position`.
    pub(crate) fn new(token: u32, scores: Logprobs, position: TextPosition) -> Self {
        let top = scores.top.into_iter().map(|(token, logprob)| (token, finite(logprob))).collect();
        Self { token, logprob: finite(scores.chosen), top, position }
    }
}

/// Converts `f32` to `f64` by way of its shortest decimal form, so that JSON shows these digits. A plain conversion
/// would show digits beyond single precision, and clients that compare values would find differences.
pub(crate) fn decimal(number: f32) -> f64 {
    number.to_string().parse().unwrap_or(f64::from(number))
}

/// A log-probability for JSON: negative infinity becomes the minimum.
pub(crate) fn finite(logprob: f32) -> f32 {
    logprob.max(MIN_LOGPROB)
}
