//! Whether a worker keeps the target of the time between tokens with one more sequence.
//!
//! With `n` sequences of `c` tokens of context a worker takes, for each token of a sequence,
//!
//! ```text
//!   step(n, c)  +  n · T / L
//! ```
//! The first term is the decode step. The second is the time in which the sequences stand still: while the worker is
//! busy, each sequence that ends, after `L` tokens, is replaced by one whose prompt computes for `T` seconds.
//!
//! Pure: measurements in, a comparison out.

use super::demand::Demand;
use super::stats::LoadStats;
use super::step_time::StepTime;

/// The target of the time between tokens, and what that time follows from.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) struct ItlTarget {
    /// Predicted seconds between tokens that a worker may reach.
    limit: f64,
    /// Duration of a decode step on an average worker.
    step: StepTime,
    /// `T / L`: seconds that the prompt of a sequence computes, for each output token of a sequence.
    stall: f64,
}

/// Part of the target up to which workers are filled. The prediction is a mean, and requests differ from it: in the
/// number of prompts that are computed while they run, and in the contexts beside them. With 60 sequences the former
/// has a standard deviation of 13 %, of a term that is a fifth of the whole, so a tenth covers three of them. It costs
/// less than a tenth of the throughput, because a step has a part that does not depend on the number of sequences.
const TARGET_SHARE: f64 = 0.9;

impl ItlTarget {
    /// `prompt_seconds`: mean time that a prompt computes; `output_tokens`: mean length of an output.
    pub(crate) fn new(seconds: f64, step: StepTime, prompt_seconds: f64, output_tokens: f64) -> Self {
        Self { limit: seconds * TARGET_SHARE, step, stall: prompt_seconds / output_tokens.max(1.0) }
    }

    /// The same for sequences whose prompts are computed elsewhere.
    pub(crate) fn without_prompts(self) -> Self {
        Self { stall: 0.0, ..self }
    }

    /// Whether a worker misses the target with one more sequence. `context_tokens`: of that sequence; `None`: the mean
    /// of the others. `batch`: maximum number of sequences in a batch, 0 when unknown; `not_sent`: reservations on the
    /// worker that do not count. The first sequence never misses it: no worker would serve it sooner.
    pub(crate) fn is_missed(
        &self,
        stats: &LoadStats,
        batch: u64,
        not_sent: Demand,
        context_tokens: Option<f64>,
    ) -> bool {
        let sequences = u64::from(stats.sequences).saturating_sub(not_sent.sequences) as f64;
        if sequences < 1.0 {
            return false;
        }
        let others = u64::from(stats.context_tokens).saturating_sub(not_sent.context_tokens) as f64;
        let (all, context) = (sequences + 1.0, others + context_tokens.unwrap_or(others / sequences));
        // More sequences than the batch takes wait for a place in it.
        let decoding = if batch > 0 { all.min(batch as f64) } else { all };
        let step = self.step.seconds(decoding, context * decoding / all) * stats.step_pace.or(1.0);
        step + decoding * self.stall * stats.prefill_pace.or(1.0) > self.limit
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load::Measured;

    /// Steps of 10 ms, 0.1 ms more for each sequence and 0.1 ms for each thousand tokens of context.
    const STEP: StepTime = StepTime { base: 0.01, per_sequence: 1e-4, per_context_token: 1e-7 };

    fn stats(sequences: u32) -> LoadStats {
        LoadStats { sequences, context_tokens: sequences * 1000, ..LoadStats::default() }
    }

    /// The largest number of sequences that a worker gets.
    fn most(target: ItlTarget, batch: u64, pace: f64) -> u32 {
        let with_pace = |sequences| LoadStats { step_pace: Measured::of(pace), ..stats(sequences) };
        (0..1000).take_while(|n| !target.is_missed(&with_pace(*n), batch, Demand::default(), None)).count() as u32
    }

    #[test]
    fn a_worker_is_filled_until_its_tokens_take_nine_tenths_of_the_target() {
        // 10 ms and 0.2 ms for each sequence: 18 ms with forty of them.
        let target = |prompt_seconds| ItlTarget::new(0.020_001, STEP, prompt_seconds, 100.0);
        assert_eq!(most(target(0.0), 0, 1.0), 40);
        assert_eq!(most(target(0.02), 0, 1.0), 20, "with 0.2 ms more for the prompt of each sequence");
        assert_eq!(most(target(0.02).without_prompts(), 0, 1.0), 40);
        assert_eq!(most(target(0.0), 0, 1.2), 25, "a slower worker");
        assert_eq!(most(target(0.0), 40, 1.0), 1000, "those beyond the batch wait");
    }

    #[test]
    fn one_sequence_runs_whatever_the_target_is() {
        assert_eq!(most(ItlTarget::new(0.001, STEP, 0.0, 100.0), 0, 1.0), 1);
    }

    #[test]
    fn a_long_context_counts_and_requests_that_were_not_sent_do_not() {
        let target = ItlTarget::new(0.020_001, STEP, 0.0, 100.0);
        let missed = |stats: LoadStats, not_sent, context| target.is_missed(&stats, 0, not_sent, context);
        assert!(missed(stats(40), Demand::default(), None));
        assert!(missed(stats(30), Demand::default(), Some(30_000.0)) && !missed(stats(30), Demand::default(), None));
        let not_sent = Demand { sequences: 1, context_tokens: 1000, ..Demand::default() };
        assert!(!missed(stats(40), not_sent, None));
    }
}
