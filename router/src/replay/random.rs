//! Random numbers from a seed: of the distributions that workloads are made of, and for ties.

use super::trace::unit_interval;
use crate::hash::splitmix64;

/// A sequence of random numbers (`SplitMix64`).
pub(super) struct Random(u64);

impl Random {
    pub(super) fn new(seed: u64) -> Self {
        Self(splitmix64(seed))
    }

    /// A number in [0, 1).
    pub(super) fn unit(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(1);
        unit_interval(splitmix64(self.0))
    }

    /// Whether an event of this probability happens.
    pub(super) fn happens(&mut self, probability: f64) -> bool {
        self.unit() < probability
    }

    /// A number in `range`, all equally likely.
    pub(super) fn among(&mut self, range: std::ops::Range<u64>) -> u64 {
        range.start + (self.unit() * (range.end - range.start) as f64) as u64
    }

    /// The time to the next event of a Poisson process.
    pub(super) fn exponential(&mut self, mean: f64) -> f64 {
        -(1.0 - self.unit()).ln() * mean
    }

    /// A number of at least 1 with a geometric distribution.
    pub(super) fn geometric(&mut self, mean: f64) -> u64 {
        let failure = 1.0 - 1.0 / mean;
        1 + ((1.0 - self.unit()).ln() / failure.ln()) as u64
    }

    /// A length with a log-normal distribution, limited to `range`. `sigma`: standard deviation of its logarithm.
    /// Lengths of prompts and outputs have such long tails.
    pub(super) fn log_normal(&mut self, mean: f64, sigma: f64, range: std::ops::RangeInclusive<u64>) -> u64 {
        // Box-Muller.
        let radius = (-2.0 * (1.0 - self.unit()).ln()).sqrt();
        let normal = radius * (std::f64::consts::TAU * self.unit()).cos();
        let length = (mean.ln() - sigma * sigma / 2.0 + sigma * normal).exp();
        (length as u64).clamp(*range.start(), *range.end())
    }

    /// A number below `count`; number n has a probability proportional to 1 / (n + 1) (Zipf's law).
    pub(super) fn zipf(&mut self, count: usize) -> usize {
        let all: f64 = (1..=count).map(|rank| 1.0 / rank as f64).sum();
        let mut left = self.unit() * all;
        for at in 0..count {
            left -= 1.0 / (at + 1) as f64;
            if left < 0.0 {
                return at;
            }
        }
        count - 1
    }
}
