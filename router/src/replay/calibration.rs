//! Calibration: estimates a worker's profile from a trace of served requests.
//!
//! The duration of a step is linear in the coefficients of a profile, and so is the duration of several steps. A trace
//! shows two intervals of each request, and what its worker computed in them:
//!
//! ```text
//!   prefill   from its dispatch, or the first token of the prompt before it, to its own first token
//!   decode    from its first token to its last one: a step per token
//!
//!   seconds = steps·step + sequences·sequence + context·context + tokens·token + pairs·attention
//! ```
//! Each interval gives one such equation, with sums over its steps. Non-negative least squares determine the five
//! coefficients. A trace does not show which prompts a step computed: prompts are assumed to run one after the other,
//! in the order of their first tokens. Pure: lines in, a profile out.

mod nnls;
mod timeline;

#[cfg(test)]
mod tests;

use super::profile::{Profile, Store};
use crate::telemetry::Line;
use kvbm::Level;
use std::collections::BTreeMap;
use timeline::{Prompts, Sums, Timeline};

/// The result of a calibration.
#[derive(Clone, PartialEq, Debug)]
pub struct Calibration {
    /// The profile; values that could not be determined are those of the base profile.
    pub profile: Profile,
    /// Number of requests in the trace.
    pub requests: usize,
    /// Number of workers in the trace.
    pub workers: usize,
    /// Number of requests that were prefilled and decoded by different workers; they are not used.
    pub disaggregated: usize,
    /// Median relative error of the profile for the time of prefill, from 0 up.
    pub prefill_median_relative_error: f64,
    /// Median relative error of the profile for the time of decoding, from 0 up.
    pub decode_median_relative_error: f64,
    /// Keys of the profile that were taken from the base profile.
    pub from_base: Vec<&'static str>,
}

/// Why a profile cannot be estimated.
#[derive(Clone, PartialEq, Debug, thiserror::Error)]
pub enum CalibrationError {
    /// The trace has too few requests.
    #[error(
        "too few requests were prefilled and decoded by the same worker ({found}); calibration needs at least \
         {MIN_REQUESTS}"
    )]
    TooFew {
        /// Usable requests.
        found: usize,
    },
    /// The requests are too similar to determine a coefficient.
    #[error(
        "`{coefficient}` cannot be determined: the {found} requests are too similar. 80 % of the prompts have {} to {} \
        tokens to compute, and 80 % of the answers are decoded in batches of {} to {} sequences. Record at least \
        {RECOMMENDED_REQUESTS} requests whose prompt lengths differ by a factor of ten, half of them \
        sent one at a time and half concurrently",
        .prompts[0], .prompts[1], .batch_sizes[0], .batch_sizes[1]
    )]
    TooSimilar {
        /// Key of the coefficient in a profile.
        coefficient: &'static str,
        /// Usable requests.
        found: usize,
        /// First and last decile of the number of prompt tokens that were computed.
        prompts: [u64; 2],
        /// First and last decile of the number of sequences in a decode batch.
        batch_sizes: [u64; 2],
    },
}

/// Fewer requests do not determine five coefficients.
const MIN_REQUESTS: usize = 50;
/// Enough when the requests differ.
const RECOMMENDED_REQUESTS: usize = 100;
/// Fewer onboarded prompts do not determine the speed of a tier.
const MIN_ONBOARDED_PROMPTS: usize = 20;
/// Accuracy of timestamps, in seconds: shorter intervals have less weight.
const JITTER_S: f64 = 0.002;

/// A time interval on one worker, and what was computed in it.
struct Interval {
    seconds: f64,
    sums: Sums,
    kind: IntervalKind,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum IntervalKind {
    /// Prefill, without onboarding.
    Prompt,
    /// Prefill of one prompt after onboarding this many tokens from a tier, without waiting for another prompt.
    Onboarded(Level, u64),
    /// Decoding of one request.
    Decode,
}

/// Estimates the profile of the workers that served `lines`. `base` provides the values that the trace does not
/// determine, and the batch limits.
pub fn calibrate(lines: &[Line], base: &Profile) -> Result<Calibration, CalibrationError> {
    let mut workers: BTreeMap<&str, Vec<&Line>> = BTreeMap::new();
    for line in lines.iter().filter(|line| !line.disaggregated && line.output_length > 0) {
        workers.entry(&line.worker).or_default().push(line);
    }
    let whole = workers.values().map(Vec::len).sum();
    if whole < MIN_REQUESTS {
        return Err(CalibrationError::TooFew { found: whole });
    }
    let mut profile = base.clone();
    let mut from_base = vec!["max_num_batched_tokens"];
    from_base.extend(base.peer.map(|_| "peer"));
    read_capacities(lines, &mut profile, &mut from_base);
    let intervals: Vec<Interval> = workers.values().flat_map(|lines| intervals(lines, &profile)).collect();
    let usable = || intervals.iter().filter(|interval| !matches!(interval.kind, IntervalKind::Onboarded(..)));
    let rows: Vec<nnls::Equation<{ Sums::LEN }>> = usable()
        .map(|interval| nnls::Equation {
            factors: interval.sums.0,
            value: interval.seconds,
            weight: (interval.seconds + JITTER_S).recip(),
        })
        .collect();
    let coefficients = nnls::solve(&rows);
    let [step_base_s, decode_sequence_s, decode_context_token_s, prefill_token_s, prefill_attention_pair_s] =
        coefficients;
    for (key, value) in [("step_base_s", step_base_s), ("prefill_token_s", prefill_token_s)] {
        if value <= 0.0 {
            let prompts = decile_range(&intervals, IntervalKind::Prompt, |sums| sums.0[Sums::TOKENS]);
            let batch_sizes =
                decile_range(&intervals, IntervalKind::Decode, |sums| sums.0[Sums::SEQUENCES] / sums.0[Sums::STEPS]);
            return Err(CalibrationError::TooSimilar { coefficient: key, found: whole, prompts, batch_sizes });
        }
    }
    profile = Profile {
        step_base_s,
        decode_sequence_s,
        decode_context_token_s,
        prefill_token_s,
        prefill_attention_pair_s,
        ..profile
    };
    let tiers = [
        ("host", &[Level::G2, Level::G3][..], base.host, &mut profile.host),
        ("shared", &[Level::G3_5, Level::G4][..], base.shared, &mut profile.shared),
    ];
    let kv_bytes = profile.kv_bytes_per_token as f64;
    for (key, levels, before, tier) in tiers {
        let Some(before) = before else { continue };
        match calibrate_store(&intervals, levels, kv_bytes, &coefficients, before) {
            Some(store) => *tier = Some(store),
            None => from_base.push(key),
        }
    }
    let error = |kind: IntervalKind| {
        let of_kind = intervals.iter().filter(|interval| interval.kind == kind && interval.seconds > JITTER_S);
        let mut errors: Vec<f64> =
            of_kind.map(|interval| (interval.sums.seconds(&coefficients) / interval.seconds - 1.0).abs()).collect();
        errors.sort_unstable_by(f64::total_cmp);
        errors.get(errors.len() / 2).copied().unwrap_or(0.0)
    };
    Ok(Calibration {
        profile,
        requests: lines.len(),
        workers: workers.len(),
        disaggregated: lines.iter().filter(|line| line.disaggregated).count(),
        prefill_median_relative_error: error(IntervalKind::Prompt),
        decode_median_relative_error: error(IntervalKind::Decode),
        from_base,
    })
}

/// First and last decile of a quantity over the intervals of one kind.
fn decile_range(intervals: &[Interval], kind: IntervalKind, of: impl Fn(&Sums) -> f64) -> [u64; 2] {
    let of_kind = intervals.iter().filter(|interval| interval.kind == kind);
    let mut all: Vec<f64> = of_kind.map(|interval| of(&interval.sums)).collect();
    all.sort_unstable_by(f64::total_cmp);
    [1, 9].map(|tenths| all.get(all.len() * tenths / 10).map_or(0, |value| value.round() as u64))
}

/// Reads the memory and batch limits that workers reported.
fn read_capacities(lines: &[Line], profile: &mut Profile, from_base: &mut Vec<&'static str>) {
    let last = |of: fn(&Line) -> Option<f64>| lines.iter().rev().find_map(of);
    match last(|line| line.kv_bytes_per_token) {
        Some(bytes) => profile.kv_bytes_per_token = (bytes.round() as u64).max(1),
        None => from_base.push("kv_bytes_per_token"),
    }
    match last(|line| line.kv_cache_tokens.map(|tokens| tokens as f64)) {
        Some(tokens) => profile.kv_cache_bytes = tokens as u64 * profile.kv_bytes_per_token,
        None => from_base.push("kv_cache_bytes"),
    }
    match last(|line| line.max_num_seqs.map(|count| count as f64)) {
        Some(count) => {
            profile.max_num_seqs = count as usize;
            // A step has at least one token per sequence, and one for prefill.
            profile.max_num_batched_tokens = profile.max_num_batched_tokens.max(count as u64 + 1);
        }
        None => from_base.push("max_num_seqs"),
    }
}

/// The intervals of one worker.
fn intervals(lines: &[&Line], profile: &Profile) -> Vec<Interval> {
    let prompts = Prompts::of(lines);
    let timeline = Timeline::of(lines, &prompts);
    let mut intervals = Vec::new();
    for prompt in prompts.all() {
        let seconds = prompt.until - prompt.from;
        let mut sums = timeline.between(prompt.from, prompt.until, |sequences| {
            let left = (profile.max_num_batched_tokens as f64 - sequences).max(1.0);
            let full = (prompt.tokens / left).ceil().max(1.0);
            // A prompt that arrives during decoding waits for half a step on average.
            if prompt.waited || sequences < 0.5 { full } else { full + 0.5 }
        });
        // Replaces the integrals by the exact values, since only this prompt was computed.
        (sums.0[Sums::TOKENS], sums.0[Sums::PAIRS]) = (prompt.tokens, prompt.pairs);
        let kind = match prompt.onboarded[..] {
            [] => Some(IntervalKind::Prompt),
            [(level, tokens)] if !prompt.waited => Some(IntervalKind::Onboarded(level, tokens)),
            _ => None,
        };
        intervals.extend(kind.map(|kind| Interval { seconds, sums, kind }));
    }
    for line in lines.iter().filter(|line| line.output_length > 1) {
        let (first, last) = timeline::token_span(line);
        let sums = timeline.between(first, last, |_| (line.output_length - 1) as f64);
        intervals.push(Interval { seconds: last - first, sums, kind: IntervalKind::Decode });
    }
    intervals
}

/// Estimates latency and bandwidth of onboarding from the time that prefill of the remaining tokens does not explain.
fn calibrate_store(
    intervals: &[Interval],
    levels: &[Level],
    kv_bytes: f64,
    coefficients: &[f64],
    before: Store,
) -> Option<Store> {
    let row = |interval: &Interval| match interval.kind {
        IntervalKind::Onboarded(level, tokens) if levels.contains(&level) => Some(nnls::Equation {
            factors: [1.0, tokens as f64 * kv_bytes],
            value: (interval.seconds - interval.sums.seconds(coefficients)).max(0.0),
            weight: (interval.seconds + JITTER_S).recip(),
        }),
        _ => None,
    };
    let rows: Vec<nnls::Equation<2>> = intervals.iter().filter_map(row).collect();
    let [latency_s, byte_s] = nnls::solve(&rows);
    let known = rows.len() >= MIN_ONBOARDED_PROMPTS && byte_s > 0.0;
    known.then(|| Store { latency_s, bytes_per_second: byte_s.recip(), ..before })
}
