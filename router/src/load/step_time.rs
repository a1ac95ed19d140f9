//! Duration of a decode step as a function of what is in the batch, fitted to the reports of all workers of a model.
//!
//! A step of `n` sequences with `c` tokens of context takes `base + per_sequence · n + per_context_token · c`: reading
//! the weights, scheduling each sequence, reading the KV cache. A single worker rarely varies enough to tell the three
//! apart, all workers together do.

use super::least_squares::LeastSquares;

/// The three coefficients, in seconds. None is negative.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) struct StepTime {
    /// A step without sequences.
    pub(crate) base: f64,
    /// What each sequence adds.
    pub(crate) per_sequence: f64,
    /// What each token of context adds.
    pub(crate) per_context_token: f64,
}

/// What was measured so far.
#[derive(Debug, Default)]
pub(super) struct StepTimeFit(LeastSquares<3>);

/// Tokens per unit of context, so that the features of the fit are of similar size.
const CONTEXT_UNIT: f64 = 1024.0;

impl Default for StepTime {
    /// Values for a step that no worker has measured: between a small model on two cores and a large one on an
    /// accelerator.
    fn default() -> Self {
        Self { base: 0.01, per_sequence: 0.001, per_context_token: 0.0 }
    }
}

impl StepTime {
    /// Seconds of a step.
    #[inline]
    pub(crate) fn seconds(&self, sequences: f64, context_tokens: f64) -> f64 {
        self.base + self.per_sequence * sequences + self.per_context_token * context_tokens
    }
}

impl StepTimeFit {
    /// Adds a measured step.
    pub(super) fn add(&mut self, sequences: f64, context_tokens: f64, seconds: f64) {
        self.0.add([1.0, sequences, context_tokens / CONTEXT_UNIT], seconds);
    }

    /// The coefficients; `None` before any measurement.
    pub(super) fn step_time(&self) -> Option<StepTime> {
        self.0.coefficients().map(|[base, per_sequence, per_unit]| StepTime {
            base,
            per_sequence,
            per_context_token: per_unit / CONTEXT_UNIT,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_coefficients_of_a_worker_are_found() {
        let mut fit = StepTimeFit::default();
        assert_eq!(fit.step_time(), None);
        for nth in 0..500 {
            let (n, c) = (f64::from(nth % 17), f64::from(nth * 7919 % 200_000));
            fit.add(n, c, 0.007 + 2e-5 * n + 5e-8 * c);
        }
        let step = fit.step_time().unwrap();
        assert!((step.base - 0.007).abs() < 2e-4 && (step.per_context_token - 5e-8).abs() < 2e-9, "{step:?}");
        assert!(step.per_sequence < 5e-5, "{step:?}");
    }
}
