//! Choosing the next token: penalties, bias, bans, temperature, cuts, and a draw that is a function of seed and
//! position.
//!
//! ```text
//!   logits ─▶ penalties ─▶ bias, bans ─▶ temperature ─▶ min-p ─▶ top-k ─▶ top-p ─▶ draw
//!      └──▶ log-probabilities: the model's own, before all of it
//! ```
//!
//! Ties go to the lower id. A full sort is avoided: a vocabulary of 150,000 costs a few passes.

#![expect(clippy::float_cmp, reason = "a penalty that is off is exactly so")]
#![expect(clippy::inline_always, reason = "compiled anew for each instruction set, by being inlined into `call_wide`")]

use super::simd::{LANES, exp, wide};
use crate::engine::{Logprobs, Sampling};
use kvbm::splitmix::splitmix64;
use std::cmp::Ordering;
use std::collections::BTreeMap;

/// Chooses the tokens of one sequence.
pub(crate) struct Sampler {
    sampling: Sampling,
    seed: u64,
    /// How often each token was generated; prompt tokens have an entry of 0 when repetition is penalised.
    counts: BTreeMap<u32, u32>,
}

/// A token that may be chosen, with its logit, later its weight.
#[derive(Clone, Copy, Debug)]
struct Candidate {
    id: u32,
    value: f32,
}

impl Candidate {
    /// Larger values first, then the lower id.
    #[expect(clippy::trivially_copy_pass_by_ref, reason = "as sorting asks")]
    fn order(a: &Self, b: &Self) -> Ordering {
        b.value.total_cmp(&a.value).then(a.id.cmp(&b.id))
    }
}

impl Sampler {
    /// The sampler of a request with this prompt. `seed` applies when `sampling.seed` is `None`.
    pub(crate) fn new(sampling: &Sampling, seed: u64, prompt: &[u32]) -> Self {
        let mut counts = BTreeMap::new();
        if sampling.repetition_penalty != 1.0 {
            counts.extend(prompt.iter().map(|token| (*token, 0)));
        }
        Self { sampling: sampling.clone(), seed: sampling.seed.unwrap_or(seed), counts }
    }

    /// Chooses the token at `position` and counts it as generated. A token of `banned` is chosen only if there is no
    /// other. `logits` is overwritten.
    pub(crate) fn next(&mut self, logits: &mut [f32], position: usize, banned: &[u32]) -> (u32, Option<Logprobs>) {
        let raw = self.sampling.logprobs.map(|_| logits.to_vec());
        self.adjust(logits, banned);
        let likeliest = argmax(logits);
        let best = logits[likeliest as usize];
        // Without a finite maximum there is no distribution: all tokens are banned.
        let token = if self.sampling.temperature > 0.0 && best.is_finite() {
            self.draw(logits, best, uniform(self.seed, position))
        } else {
            likeliest
        };
        self.count(&[token]);
        let logprobs = raw.map(|raw| logprobs(&raw, token, self.sampling.logprobs.unwrap_or(0)));
        (token, logprobs)
    }

    /// Counts tokens that were generated before.
    pub(crate) fn count(&mut self, generated: &[u32]) {
        if self.penalises() {
            for token in generated {
                *self.counts.entry(*token).or_default() += 1;
            }
        }
    }

    fn penalises(&self) -> bool {
        let Sampling { frequency_penalty, presence_penalty, repetition_penalty, .. } = self.sampling;
        frequency_penalty != 0.0 || presence_penalty != 0.0 || repetition_penalty != 1.0
    }

    /// Applies penalties, bias and bans in place.
    fn adjust(&self, logits: &mut [f32], banned: &[u32]) {
        let Sampling { frequency_penalty, presence_penalty, repetition_penalty, logit_bias, .. } = &self.sampling;
        for (token, count) in &self.counts {
            let Some(logit) = logits.get_mut(*token as usize) else { continue };
            *logit = if *logit > 0.0 { *logit / repetition_penalty } else { *logit * repetition_penalty };
            if *count > 0 {
                *logit -= frequency_penalty * *count as f32 + presence_penalty;
            }
        }
        for (token, bias) in logit_bias {
            if let Some(logit) = logits.get_mut(*token as usize) {
                *logit += bias;
            }
        }
        for token in banned {
            if let Some(logit) = logits.get_mut(*token as usize) {
                *logit = f32::NEG_INFINITY;
            }
        }
    }

    /// Draws at `point` of `0 .. 1` along the distribution. `best` is the largest logit.
    fn draw(&self, logits: &mut [f32], best: f32, point: f64) -> u32 {
        let Sampling { temperature, top_p, top_k, min_p, .. } = self.sampling;
        // Weights relative to the likeliest token: the largest is 1, and `min_p` is a threshold on them.
        wide!(weigh(logits, best, temperature));
        let top_k = top_k.filter(|k| *k > 0).map_or(usize::MAX, |k| k as usize);
        if top_k >= logits.len() && top_p >= 1.0 {
            let kept = || logits.iter().enumerate().filter(|(_, weight)| **weight >= min_p);
            return candidate_at(kept().map(|(id, weight)| Candidate { id: id as u32, value: *weight }), point);
        }
        let mut kept: Vec<Candidate> = (0..)
            .zip(logits.iter())
            .filter(|(_, weight)| **weight > 0.0 && **weight >= min_p)
            .map(|(id, weight)| Candidate { id, value: *weight })
            .collect();
        if top_k < kept.len() {
            kept.select_nth_unstable_by(top_k - 1, Candidate::order);
            kept.truncate(top_k);
        }
        cut_at_share(&mut kept, f64::from(top_p));
        candidate_at(kept.iter().copied(), point)
    }
}

/// From logits to weights relative to the best one's.
#[inline(always)]
fn weigh(logits: &mut [f32], best: f32, temperature: f32) {
    for logit in logits {
        *logit = exp((*logit - best) / temperature);
    }
}

/// Sum of `e^(logit - max)`.
#[inline(always)]
fn exp_sum(logits: &[f32], max: f32) -> f64 {
    let mut sums = [0.0; LANES];
    let chunks = logits.chunks_exact(LANES);
    let rest = chunks.remainder();
    for chunk in chunks {
        for (sum, logit) in sums.iter_mut().zip(chunk) {
            *sum += f64::from(exp(logit - max));
        }
    }
    sums.iter().sum::<f64>() + rest.iter().map(|logit| f64::from(exp(logit - max))).sum::<f64>()
}

/// Keeps the likeliest candidates that together have `share` of the weight, likeliest first; one at least.
fn cut_at_share(candidates: &mut Vec<Candidate>, share: f64) {
    let target = share * candidates.iter().map(|c| f64::from(c.value)).sum::<f64>();
    // A few hundred tokens mostly have nearly all of the probability: sort those, and more only if needed.
    let mut sorted = 0;
    let mut weight = 0.0;
    while sorted < candidates.len() {
        let next = (sorted * 8).clamp(256, candidates.len().max(256)).min(candidates.len());
        if next < candidates.len() {
            candidates[sorted..].select_nth_unstable_by(next - sorted, Candidate::order);
        }
        candidates[sorted..next].sort_unstable_by(Candidate::order);
        for (i, candidate) in candidates[sorted..next].iter().enumerate() {
            weight += f64::from(candidate.value);
            if weight >= target {
                candidates.truncate(sorted + i + 1);
                return;
            }
        }
        sorted = next;
    }
}

/// The candidate at `point` of `0 .. 1` when all are laid out on a line by weight.
fn candidate_at(candidates: impl Iterator<Item = Candidate> + Clone, point: f64) -> u32 {
    let total: f64 = candidates.clone().map(|c| f64::from(c.value)).sum();
    let mut left = point * total;
    let mut last = 0;
    for candidate in candidates.filter(|c| c.value > 0.0) {
        left -= f64::from(candidate.value);
        last = candidate.id;
        if left < 0.0 {
            break;
        }
    }
    // Rounding may leave a remainder at the end: it belongs to the last candidate.
    last
}

/// Whether no logit is NaN or infinite.
pub(in crate::llama) fn are_finite(logits: &[f32]) -> bool {
    wide!(largest_magnitude(logits)) < f32::INFINITY.to_bits()
}

/// The largest of the bits without the sign, which order as the magnitudes do, NaN above infinity.
#[inline(always)]
fn largest_magnitude(logits: &[f32]) -> u32 {
    logits.iter().fold(0, |largest, logit| largest.max(logit.abs().to_bits()))
}

/// The token with the largest logit; 0 when there is none.
fn argmax(logits: &[f32]) -> u32 {
    let mut best = Candidate { id: 0, value: f32::NEG_INFINITY };
    for (id, &value) in (0..).zip(logits) {
        if value > best.value {
            best = Candidate { id, value };
        }
    }
    best.id
}

/// A number in `0 .. 1` that depends only on seed and position (`SplitMix64`, twice).
fn uniform(seed: u64, position: usize) -> f64 {
    (splitmix64(splitmix64(seed) ^ position as u64) >> 11) as f64 / (1u64 << 53) as f64
}

/// Natural log-probabilities of the chosen token and of the `n` likeliest tokens.
pub(in crate::llama) fn logprobs(logits: &[f32], chosen: u32, n: u8) -> Logprobs {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let log_sum = wide!(exp_sum(logits, max)).ln();
    let of = |logit: f32| (f64::from(logit) - f64::from(max) - log_sum) as f32;
    let n = usize::from(n);
    let mut top: Vec<Candidate> = Vec::with_capacity(n + 1);
    for (id, &value) in (0..).zip(logits) {
        if top.len() < n || top.last().is_some_and(|last| value > last.value) {
            let candidate = Candidate { id, value };
            let place = top.partition_point(|other| Candidate::order(other, &candidate).is_lt());
            top.insert(place, candidate);
            top.truncate(n);
        }
    }
    let rank = 1 + logits.iter().filter(|logit| **logit > logits[chosen as usize]).count() as u32;
    Logprobs { chosen: of(logits[chosen as usize]), rank, top: top.iter().map(|c| (c.id, of(c.value))).collect() }
}

#[cfg(test)]
mod tests;
