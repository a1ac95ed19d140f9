//! Duration of computing a prompt as a function of its uncached tokens, of the tokens before each of them, and of the
//! batch that decodes beside it; fitted to the prompts of all workers of a model.
//!
//! `u` tokens after `c` cached ones compute for `per_token · u + per_pair · u (c + u / 2)` seconds: the matrices, and
//! attention over all tokens before. An engine computes them in steps, of a limited number of tokens each, in which the
//! batch decodes, too. So a prompt also takes `first_steps + per_token_steps · u` times what a decode step of that
//! batch takes. A speed in tokens per second, as a worker reports it, holds for the prompts and the batch of the last
//! steps only: it differs several times with both.
//!
//! **Measuring.** A worker computes prompts in the order of their arrival. So a prompt takes the time from when it was
//! sent, or from when the prompt before it was done if that is later, to its first token. Prompts that are done
//! together count as one.

use super::least_squares::LeastSquares;
use std::time::Duration;
use tokio::time::Instant;

/// The coefficients. None is negative.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) struct PrefillTime {
    /// Seconds for each uncached token.
    pub(crate) per_token: f64,
    /// Seconds for each pair of an uncached token and a token before it.
    pub(crate) per_pair: f64,
    /// Steps of the batch for each uncached token.
    pub(crate) per_token_steps: f64,
    /// Steps of the batch for a prompt of any length: the rest of the one that runs when it arrives, and its last.
    pub(crate) first_steps: f64,
}

/// What was measured so far.
#[derive(Debug, Default)]
pub(super) struct PrefillTimeFit {
    fit: LeastSquares<4>,
    /// Decayed sums: number of prompts, and their work.
    prompts: f64,
    work: PrefillWork,
}

/// Work of one or several prompts.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub(super) struct PrefillWork {
    tokens: f64,
    pairs: f64,
}

/// The prompts of one worker that were done last, and since when it computed them.
#[derive(Clone, Copy, Debug)]
pub(super) struct PrefillGroup {
    began: Instant,
    ended: Instant,
    /// Number of prompts.
    prompts: f64,
    work: PrefillWork,
    /// Seconds of a decode step of the batch beside them.
    step: f64,
}

/// Units of the features, so that they are of similar size.
const TOKENS_UNIT: f64 = 1024.0;
const PAIRS_UNIT: f64 = TOKENS_UNIT * TOKENS_UNIT;
/// First tokens that are not further apart come from the same step.
const SAME_STEP: Duration = Duration::from_millis(1);
/// Measurements from which on the fit is used; until then the speed that a worker reports is better.
const MIN_MEASUREMENTS: u64 = 16;
/// Measured times are limited to this multiple of what is expected: a wait for memory is not computing.
const MAX_RATIO: f64 = 4.0;
/// Weight that earlier prompts keep in the mean at each new group: about the last 500 count, as of the lengths of
/// outputs.
const KEEP: f64 = 1.0 - 1.0 / 512.0;

impl PrefillTime {
    /// Seconds that `uncached` tokens after `cached` ones compute, without the steps of a batch.
    #[inline]
    pub(crate) fn compute(&self, uncached: f64, cached: f64) -> f64 {
        uncached * (self.per_token + self.per_pair * (cached + uncached / 2.0))
    }
}

impl PrefillWork {
    pub(super) fn of(uncached: u64, cached: u64) -> Self {
        let (tokens, cached) = (uncached as f64, cached as f64);
        Self { tokens, pairs: tokens * (cached + tokens / 2.0) }
    }
}

impl PrefillGroup {
    /// Adds a prompt that was sent and is now done. `step`: seconds of a decode step of the batch. Returns the group
    /// before it, if that is complete.
    pub(super) fn add(
        before: &mut Option<Self>,
        work: PrefillWork,
        step: f64,
        sent: Instant,
        now: Instant,
    ) -> Option<Self> {
        if let Some(group) = before.as_mut().filter(|group| now.saturating_duration_since(group.ended) <= SAME_STEP) {
            group.work.tokens += work.tokens;
            group.work.pairs += work.pairs;
            group.prompts += 1.0;
            group.began = group.began.min(sent);
            return None;
        }
        let began = before.as_ref().map_or(sent, |group| group.ended.max(sent));
        before.replace(Self { began, ended: now, prompts: 1.0, work, step })
    }

    fn seconds(&self) -> f64 {
        self.ended.saturating_duration_since(self.began).as_secs_f64()
    }
}

impl PrefillTimeFit {
    /// Adds the time of a group of prompts. Returns it relative to the expected time, once there is one.
    pub(super) fn add(&mut self, group: &PrefillGroup) -> Option<f64> {
        let PrefillGroup { prompts, work: PrefillWork { tokens, pairs }, step, .. } = *group;
        self.prompts = self.prompts * KEEP + prompts;
        self.work = PrefillWork { tokens: self.work.tokens * KEEP + tokens, pairs: self.work.pairs * KEEP + pairs };
        let features = [step, tokens / TOKENS_UNIT * step, tokens / TOKENS_UNIT, pairs / PAIRS_UNIT];
        let expected = self
            .fit
            .coefficients()
            .map(|found| found.iter().zip(features).map(|(found, feature)| found * feature).sum());
        let expected = expected.filter(|expected: &f64| *expected > 0.0 && self.fit.measurements() >= MIN_MEASUREMENTS);
        let seconds = expected.map_or(group.seconds(), |expected| group.seconds().min(MAX_RATIO * expected));
        self.fit.add(features, seconds);
        expected.map(|expected| seconds / expected)
    }

    /// The coefficients; `None` before enough measurements, or when the number of tokens explains nothing. Beside a
    /// batch that does not change, steps and computing cannot be separated: the tokens may count in steps only.
    pub(super) fn prefill_time(&self) -> Option<PrefillTime> {
        let [first_steps, per_token_steps, per_token, per_pair] =
            self.fit.coefficients().filter(|_| self.fit.measurements() >= MIN_MEASUREMENTS)?;
        let time = PrefillTime {
            per_token: per_token / TOKENS_UNIT,
            per_pair: per_pair / PAIRS_UNIT,
            per_token_steps: per_token_steps / TOKENS_UNIT,
            first_steps,
        };
        (time.per_token + time.per_pair + time.per_token_steps > 0.0).then_some(time)
    }

    /// Mean seconds that a prompt computes, without the steps of a batch; 0 before enough measurements.
    pub(super) fn mean_compute(&self) -> f64 {
        let Some(time) = self.prefill_time() else { return 0.0 };
        (time.per_token * self.work.tokens + time.per_pair * self.work.pairs) / self.prompts.max(1.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PER_TOKEN: f64 = 3.6e-5;
    const PER_PAIR: f64 = 1.8e-9;
    const STEP: f64 = 0.02;

    /// Steps are limited to 2,048 tokens.
    const PER_TOKEN_STEPS: f64 = 1.0 / 2048.0;

    /// Computes prompts one after the other, without a pause if `is_busy`, beside batches of different sizes.
    fn fitted(is_busy: bool) -> PrefillTimeFit {
        let start = Instant::now();
        let (mut fit, mut last, mut now) = (PrefillTimeFit::default(), None, start);
        for nth in 0..400_u64 {
            let (uncached, cached) = (64 + nth * 7919 % 8000, nth * 104_729 % 30_000);
            let work = PrefillWork::of(uncached, cached);
            // On a busy worker all prompts are there from the beginning.
            let sent = if is_busy { start } else { now };
            let step = 0.007 + (nth * 31 % 17) as f64 * 0.002;
            let steps = 1.0 + work.tokens * PER_TOKEN_STEPS;
            now += Duration::from_secs_f64(steps * step + work.tokens * PER_TOKEN + work.pairs * PER_PAIR);
            if let Some(group) = PrefillGroup::add(&mut last, work, step, sent, now) {
                fit.add(&group);
            }
            if !is_busy {
                now += Duration::from_secs(1);
            }
        }
        fit
    }

    #[test]
    fn coefficients_are_found_on_idle_and_on_busy_workers() {
        assert_eq!(PrefillTimeFit::default().prefill_time(), None);
        for is_busy in [false, true] {
            let time = fitted(is_busy).prefill_time().unwrap();
            assert!((time.per_token / PER_TOKEN - 1.0).abs() < 0.05, "{time:?}");
            assert!((time.per_pair / PER_PAIR - 1.0).abs() < 0.05, "{time:?}");
            assert!((time.per_token_steps / PER_TOKEN_STEPS - 1.0).abs() < 0.1, "{time:?}");
            assert!((time.first_steps - 1.0).abs() < 0.1, "{time:?}");
        }
    }

    #[test]
    fn the_mean_time_of_prompts_is_learned() {
        assert!(PrefillTimeFit::default().mean_compute() <= 0.0);
        // The last prompt of `fitted` is not complete.
        let (mut seconds, mut prompts) = (0.0, 0.0);
        for nth in 0..399 {
            let work = PrefillWork::of(64 + nth * 7919 % 8000, nth * 104_729 % 30_000);
            seconds = seconds * KEEP + work.tokens * PER_TOKEN + work.pairs * PER_PAIR;
            prompts = prompts * KEEP + 1.0;
        }
        let (found, expected) = (fitted(false).mean_compute(), seconds / prompts);
        assert!((found / expected - 1.0).abs() < 0.05, "{found} {expected}");
    }

    #[test]
    fn a_batch_that_does_not_change_tells_no_steps_from_computing() {
        // Like the first measurements of a real engine: milliseconds, uncached tokens.
        const MEASURED: [(f64, f64); 24] = [
            (37.0, 209.0),
            (27.1, 54.0),
            (24.4, 47.0),
            (27.9, 38.0),
            (39.1, 55.0),
            (38.7, 337.0),
            (27.7, 52.0),
            (31.8, 148.0),
            (27.8, 37.0),
            (31.3, 146.0),
            (33.0, 58.0),
            (42.2, 143.0),
            (37.1, 118.0),
            (33.1, 166.0),
            (31.1, 138.0),
            (28.8, 144.0),
            (30.2, 129.0),
            (28.0, 43.0),
            (36.6, 331.0),
            (30.9, 144.0),
            (33.4, 243.0),
            (28.8, 39.0),
            (38.0, 325.0),
            (27.2, 46.0),
        ];
        let (mut fit, mut last, mut now) = (PrefillTimeFit::default(), None, Instant::now());
        for (milliseconds, tokens) in MEASURED {
            let sent = now;
            now += Duration::from_secs_f64(milliseconds / 1e3);
            let work = PrefillWork::of(tokens as u64, 0);
            if let Some(group) = PrefillGroup::add(&mut last, work, 0.011, sent, now) {
                fit.add(&group);
            }
            now += Duration::from_secs(1);
        }
        let time = fit.prefill_time().expect("the tokens explain the time, by steps or without");
        let seconds = |tokens| time.compute(tokens, 0.0) + (time.first_steps + time.per_token_steps * tokens) * 0.011;
        assert!((seconds(300.0) / 0.037 - 1.0).abs() < 0.15 && (seconds(50.0) / 0.028 - 1.0).abs() < 0.15, "{time:?}");
    }

    #[test]
    fn prompts_of_one_step_count_once_and_waits_are_limited() {
        let (mut fit, now) = (fitted(false), Instant::now());
        let (work, mut last) = (PrefillWork::of(1000, 0), None);
        let done = now + Duration::from_millis(100);
        assert!(PrefillGroup::add(&mut last, work, STEP, now, done).is_none());
        assert!(PrefillGroup::add(&mut last, work, STEP, now, done).is_none());
        let group = PrefillGroup::add(&mut last, work, STEP, done, done + Duration::from_mins(1)).unwrap();
        assert!((group.work.tokens - 2000.0).abs() < 1e-9 && (group.seconds() - 0.1).abs() < 1e-9);
        assert!((group.prompts - 2.0).abs() < 1e-9);
        assert!(fit.add(&group).is_some_and(|ratio| ratio < 1.5));
        assert_eq!(fit.add(&last.unwrap()), Some(MAX_RATIO));
    }
}
