//! The speeds of an engine, learned from the times of its responses.
//!
//! **Prefill**: the time to the first output is a constant (network, scheduling, the first decode step) plus the
//! uncached tokens of the prompt times the time per token. Both are fitted by least squares over the latest prompts,
//! with weights that decay exponentially. The constant must not be negative; where the lengths of the prompts differ
//! too little to tell both apart, it counts as zero, and the engine as slower than it is.
//!
//! **Decode**: the time of a step, from the time between the first output and the end: a mean that follows shorter
//! times faster than longer ones.
//!
//! **Forgetting**: a speed that was not measured for [`MAX_AGE`] is unknown again. An engine that looked slow gets no
//! requests while others are idle, so that nothing else would correct it; it may also have been restarted.
//!
//! A single value that is far above what was learned counts as [`MAX_RATIO`] times that: a paused process must not make
//! an engine look slow for minutes.

use std::time::Duration;
use tokio::time::Instant;

/// What was learned so far.
#[derive(Clone, Copy, Default, Debug)]
pub(super) struct Speeds {
    prefill: Recent<Prefill>,
    decode_step: Recent<Option<f64>>,
}

/// A value that is forgotten when it was not changed for [`MAX_AGE`].
#[derive(Clone, Copy, Default, Debug)]
struct Recent<T> {
    value: T,
    changed: Option<Instant>,
}

#[derive(Clone, Copy, Default, Debug)]
struct Prefill {
    fit: Fit,
    prompts: u32,
}

/// Decaying sums over pairs of tokens and seconds.
#[derive(Clone, Copy, Default, Debug)]
struct Fit {
    weight: f64,
    tokens: f64,
    seconds: f64,
    tokens_squared: f64,
    tokens_seconds: f64,
}

/// A busy engine is measured many times a second. A minute without is an idle fleet, or an engine that is avoided.
const MAX_AGE: Duration = Duration::from_mins(1);
/// Fewer uncached tokens measure the constant rather than the speed of prefill.
const MIN_UNCACHED: u32 = 32;
/// Weight that the sums keep at each prompt: about the last 50 count, so that a change shows within a minute of
/// traffic.
const KEEP: f64 = 0.98;
/// The variance of the lengths of prompts, in units of the squared mean, from which on the constant is fitted.
const MIN_VARIANCE: f64 = 0.05;
/// Number of prompts after which an outlier is limited.
const SETTLED: u32 = 8;
/// The maximum of a value in units of what is expected.
const MAX_RATIO: f64 = 4.0;
/// The constant is at most this share of the time to the first output of a mean prompt, so that noise cannot make an
/// engine look infinitely fast.
const MAX_CONSTANT: f64 = 0.95;
/// Fewer steps measure the network rather than the engine.
const MIN_STEPS: u32 = 8;
/// Weight of a shorter step time: about the last ten streams count.
const FASTER_WEIGHT: f64 = 1.0 / 8.0;
/// Weight of a longer one. A client that reads slowly makes a stream look slow, but none makes it look fast.
const SLOWER_WEIGHT: f64 = 1.0 / 32.0;

impl Speeds {
    /// Records that a prompt with `uncached` tokens that no other prompt was before got its first output after
    /// `seconds`.
    pub(super) fn prefilled(&mut self, uncached: u32, seconds: f64) {
        if uncached < MIN_UNCACHED || seconds <= 0.0 {
            return;
        }
        let tokens = f64::from(uncached);
        let prefill = self.prefill.change();
        let seconds = match prefill.fit.line().filter(|_| prefill.prompts >= SETTLED) {
            Some((constant, per_token)) => seconds.min(MAX_RATIO * (constant + per_token * tokens)),
            None => seconds,
        };
        prefill.fit.add(tokens, seconds);
        prefill.prompts = prefill.prompts.saturating_add(1);
    }

    /// Records that a choice had `tokens` tokens, the last `seconds` after the first.
    pub(super) fn decoded(&mut self, tokens: u32, seconds: f64) {
        let steps = tokens.saturating_sub(1);
        if steps < MIN_STEPS || seconds <= 0.0 {
            return;
        }
        let step = seconds / f64::from(steps);
        let decode_step = self.decode_step.change();
        *decode_step = Some(match *decode_step {
            Some(old) => {
                let weight = if step < old { FASTER_WEIGHT } else { SLOWER_WEIGHT };
                old + (step.min(MAX_RATIO * old) - old) * weight
            }
            None => step,
        });
    }

    /// Prompt tokens per second; `None` until measured.
    pub(super) fn prefill_tokens_per_second(&self) -> Option<f64> {
        self.prefill.get().fit.line().map(|(_, per_token)| per_token.recip())
    }

    /// Seconds of a decode step; `None` until measured.
    pub(super) fn decode_step_seconds(&self) -> Option<f64> {
        self.decode_step.get()
    }
}

impl<T: Copy + Default> Recent<T> {
    fn get(&self) -> T {
        let is_recent = self.changed.is_some_and(|changed| changed.elapsed() <= MAX_AGE);
        if is_recent { self.value } else { T::default() }
    }

    /// The value to change, which begins anew if it was forgotten.
    fn change(&mut self) -> &mut T {
        *self = Self { value: self.get(), changed: Some(Instant::now()) };
        &mut self.value
    }
}

impl Fit {
    fn add(&mut self, tokens: f64, seconds: f64) {
        let sums =
            [&mut self.weight, &mut self.tokens, &mut self.seconds, &mut self.tokens_squared, &mut self.tokens_seconds];
        for (sum, value) in sums.into_iter().zip([1.0, tokens, seconds, tokens * tokens, tokens * seconds]) {
            *sum = *sum * KEEP + value;
        }
    }

    /// The constant and the time per token, in seconds.
    fn line(&self) -> Option<(f64, f64)> {
        if self.weight == 0.0 {
            return None;
        }
        let [tokens, seconds] = [self.tokens, self.seconds].map(|sum| sum / self.weight);
        let variance = self.tokens_squared / self.weight - tokens * tokens;
        let covariance = self.tokens_seconds / self.weight - tokens * seconds;
        // The time per token without a constant, which is an upper bound.
        let most = seconds / tokens;
        let per_token = if variance < MIN_VARIANCE * tokens * tokens { most } else { covariance / variance };
        let per_token = per_token.clamp(most * (1.0 - MAX_CONSTANT), most);
        Some((seconds - per_token * tokens, per_token))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Prompts of an engine with a constant of 20 ms and 10,000 tokens per second, with noise of up to a tenth.
    fn prompts(count: u32) -> impl Iterator<Item = (u32, f64)> {
        (0..count).map(|n: u32| {
            let random = n.wrapping_mul(2_654_435_761);
            let tokens = 100 + random % 4000;
            (tokens, (0.02 + f64::from(tokens) / 10_000.0) * (0.9 + f64::from(random >> 16 & 255) / 1275.0))
        })
    }

    fn is_near(value: Option<f64>, expected: f64, tolerance: f64) -> bool {
        value.is_some_and(|value| (value / expected - 1.0).abs() <= tolerance)
    }

    #[test]
    fn prefill_is_told_apart_from_the_constant() {
        let mut speeds = Speeds::default();
        prompts(200).for_each(|(tokens, seconds)| speeds.prefilled(tokens, seconds));
        assert!(is_near(speeds.prefill_tokens_per_second(), 10_000.0, 0.1), "{speeds:?}");
        let mut alike = Speeds::default();
        (0..200).for_each(|_| alike.prefilled(200, 0.04));
        assert!(is_near(alike.prefill_tokens_per_second(), 5000.0, 1e-9), "one length does not determine the constant");
    }

    #[test]
    fn one_stall_changes_little_and_a_slower_engine_is_noticed() {
        let mut speeds = Speeds::default();
        prompts(100).for_each(|(tokens, seconds)| speeds.prefilled(tokens, seconds));
        speeds.prefilled(2000, 600.0);
        assert!(is_near(speeds.prefill_tokens_per_second(), 10_000.0, 0.3), "{speeds:?}");
        prompts(300).for_each(|(tokens, seconds)| speeds.prefilled(tokens, 3.0 * seconds));
        assert!(is_near(speeds.prefill_tokens_per_second(), 3333.0, 0.2), "{speeds:?}");
    }

    #[test]
    fn a_falling_line_stays_within_its_bounds() {
        let mut speeds = Speeds::default();
        for n in 1..100 {
            speeds.prefilled(100 * n, 100.0 / f64::from(n));
        }
        let speed = speeds.prefill_tokens_per_second().unwrap();
        assert!(speed.is_finite() && speed > 0.0, "{speed}");
    }

    #[test]
    fn short_prompts_and_short_outputs_say_nothing() {
        let mut speeds = Speeds::default();
        speeds.prefilled(MIN_UNCACHED - 1, 1.0);
        speeds.prefilled(1000, 0.0);
        speeds.decoded(MIN_STEPS, 1.0);
        assert_eq!((speeds.prefill_tokens_per_second(), speeds.decode_step_seconds()), (None, None));
    }

    #[tokio::test(start_paused = true)]
    async fn speeds_that_are_not_measured_are_forgotten() {
        let mut speeds = Speeds::default();
        prompts(20).for_each(|(tokens, seconds)| speeds.prefilled(tokens, 10.0 * seconds));
        speeds.decoded(101, 1.0);
        tokio::time::advance(MAX_AGE).await;
        assert!(speeds.prefill_tokens_per_second().is_some() && speeds.decode_step_seconds().is_some());
        tokio::time::advance(Duration::from_millis(1)).await;
        assert_eq!((speeds.prefill_tokens_per_second(), speeds.decode_step_seconds()), (None, None));
        prompts(20).for_each(|(tokens, seconds)| speeds.prefilled(tokens, seconds));
        assert!(is_near(speeds.prefill_tokens_per_second(), 10_000.0, 0.2), "{speeds:?}");
    }

    #[test]
    fn the_step_time_follows_faster_streams_faster() {
        let mut speeds = Speeds::default();
        speeds.decoded(101, 1.0);
        assert!(is_near(speeds.decode_step_seconds(), 0.01, 1e-9));
        speeds.decoded(101, 100.0);
        assert!(is_near(speeds.decode_step_seconds(), 0.01 * (1.0 + 3.0 / 32.0), 1e-9), "{speeds:?}");
        (0..200).for_each(|_| speeds.decoded(101, 2.0));
        assert!(is_near(speeds.decode_step_seconds(), 0.02, 0.01), "{speeds:?}");
        (0..50).for_each(|_| speeds.decoded(101, 1.0));
        assert!(is_near(speeds.decode_step_seconds(), 0.01, 0.01), "{speeds:?}");
    }
}
