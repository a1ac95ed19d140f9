//! A worker's profile, learned from a record of requests that real workers served.
//!
//! What a step takes is linear in a profile's figures, and so is what steps take together. Of each request two stretches of time
//! are known, and what its worker did in them:
//!
//! ```text
//!   its prompt is computed   from when the one before it had its first token, or it came, to its own first token
//!   it decodes               from its first token to its last: a step for each token
//!
//!   seconds = steps·step + sequences·sequence + context·context + tokens·token + pairs·attention
//! ```
//! Each stretch is one such equation, with sums over its steps on the right; least squares find the five figures, none of them
//! less than 0. Which prompts a step computed nobody wrote down: one after the other, as they came, is taken for granted.
//! Pure: lines in, a profile out.

mod nnls;
mod timeline;

#[cfg(test)]
mod tests;

use super::profile::{Profile, Store};
use crate::trace::Line;
use kvbm::Level;
use std::collections::BTreeMap;
use timeline::{Course, Prompts, Sums};

/// What was learned.
#[derive(Clone, PartialEq, Debug)]
pub struct Fit {
    /// The profile; values that could not be determined are those of the base profile.
    pub profile: Profile,
    /// Requests in the record.
    pub requests: usize,
    /// Workers in the record.
    pub workers: usize,
    /// Requests that were prefilled and decoded by different workers; they are not used.
    pub disaggregated: usize,
    /// Median relative error of the profile for the time in which a prompt is computed, from 0 up.
    pub prefill_median_relative_error: f64,
    /// Median relative error of the profile for the time in which an answer is decoded, from 0 up.
    pub decode_median_relative_error: f64,
    /// Keys of the profile that were taken from the base profile.
    pub from_base: Vec<&'static str>,
}

/// Nothing could be learned.
#[derive(Clone, PartialEq, Debug, thiserror::Error)]
pub enum FitError {
    /// Too few requests.
    #[error(
        "{found} requests were prefilled and decoded by the same worker; calibration needs at least {REQUESTS_MIN}"
    )]
    TooFew {
        /// So many are there.
        found: usize,
    },
    /// The requests are too much alike to tell one figure from the other.
    #[error(
        "`{figure}` cannot be determined: the {found} requests are too similar. 80 % of the prompts have {} to {} \
        tokens to compute, and 80 % of the answers are decoded in batches of {} to {} sequences. Record at least \
        {ENOUGH} requests whose prompt lengths differ by a factor of ten, half of them sent one at a time and half concurrently",
        .prompts[0], .prompts[1], .together[0], .together[1]
    )]
    TooAlike {
        /// What cannot be told.
        figure: &'static str,
        /// So many requests are there.
        found: usize,
        /// Tokens of a prompt that were computed: a tenth are shorter, a tenth are longer.
        prompts: [u64; 2],
        /// Sequences that decode at a time, likewise.
        together: [u64; 2],
    },
}

/// Fewer say nothing about five figures.
const REQUESTS_MIN: usize = 50;
/// So many, unlike each other, are.
const ENOUGH: usize = 100;
/// Prompts that were brought up from a tier, before anything is said of the tier.
const ONBOARDED_MIN: usize = 20;
/// What clocks and streams are uncertain of: shorter stretches count less.
const JITTER_S: f64 = 0.002;

/// A stretch of time on one worker, and what was done in it.
struct Stretch {
    seconds: f64,
    sums: Sums,
    kind: Kind,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// Prompts, all of them computed here.
    Prompt,
    /// A prompt that was brought up from a tier, so many tokens, and did not wait for another.
    Onboarded(Level, u64),
    /// An answer.
    Decode,
}

/// Learns how fast workers are from what they served. `base`: where the rest is taken from, and how workers batch.
pub fn fit(lines: &[Line], base: &Profile) -> Result<Fit, FitError> {
    let mut workers: BTreeMap<&str, Vec<&Line>> = BTreeMap::new();
    for line in lines.iter().filter(|line| !line.disaggregated && line.output_length > 0) {
        workers.entry(&line.worker).or_default().push(line);
    }
    let whole = workers.values().map(Vec::len).sum();
    if whole < REQUESTS_MIN {
        return Err(FitError::TooFew { found: whole });
    }
    let mut profile = base.clone();
    let mut from_base = vec!["max_num_batched_tokens"];
    from_base.extend(base.peer.map(|_| "peer"));
    memory(lines, &mut profile, &mut from_base);
    let stretches: Vec<Stretch> = workers.values().flat_map(|lines| stretches(lines, &profile)).collect();
    let learning = || stretches.iter().filter(|stretch| !matches!(stretch.kind, Kind::Onboarded(..)));
    let rows: Vec<nnls::Row<{ Sums::LEN }>> = learning()
        .map(|stretch| nnls::Row {
            factors: stretch.sums.0,
            value: stretch.seconds,
            weight: (stretch.seconds + JITTER_S).recip(),
        })
        .collect();
    let figures = nnls::solve(&rows);
    let [step_base_s, decode_sequence_s, decode_context_token_s, prefill_token_s, prefill_attention_pair_s] = figures;
    for (key, value) in [("step_base_s", step_base_s), ("prefill_token_s", prefill_token_s)] {
        if value <= 0.0 {
            let prompts = spread(&stretches, Kind::Prompt, |sums| sums.0[Sums::TOKENS]);
            let together = spread(&stretches, Kind::Decode, |sums| sums.0[Sums::SEQUENCES] / sums.0[Sums::STEPS]);
            return Err(FitError::TooAlike { figure: key, found: whole, prompts, together });
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
        match store(&stretches, levels, kv_bytes, &figures, before) {
            Some(store) => *tier = Some(store),
            None => from_base.push(key),
        }
    }
    let error = |kind: Kind| {
        let of_kind = stretches.iter().filter(|stretch| stretch.kind == kind && stretch.seconds > JITTER_S);
        let mut misses: Vec<f64> =
            of_kind.map(|stretch| (stretch.sums.seconds(&figures) / stretch.seconds - 1.0).abs()).collect();
        misses.sort_unstable_by(f64::total_cmp);
        misses.get(misses.len() / 2).copied().unwrap_or(0.0)
    };
    Ok(Fit {
        profile,
        requests: lines.len(),
        workers: workers.len(),
        disaggregated: lines.iter().filter(|line| line.disaggregated).count(),
        prefill_median_relative_error: error(Kind::Prompt),
        decode_median_relative_error: error(Kind::Decode),
        from_base,
    })
}

/// Between what most stretches of a kind lie: a tenth is below, a tenth above.
fn spread(stretches: &[Stretch], kind: Kind, of: impl Fn(&Sums) -> f64) -> [u64; 2] {
    let of_kind = stretches.iter().filter(|stretch| stretch.kind == kind);
    let mut all: Vec<f64> = of_kind.map(|stretch| of(&stretch.sums)).collect();
    all.sort_unstable_by(f64::total_cmp);
    [1, 9].map(|tenths| all.get(all.len() * tenths / 10).map_or(0, |value| value.round() as u64))
}

/// What workers said of their memory and their batches.
fn memory(lines: &[Line], profile: &mut Profile, from_base: &mut Vec<&'static str>) {
    let last = |of: fn(&Line) -> Option<f64>| lines.iter().rev().find_map(of);
    match last(|line| line.kv_bytes_per_token) {
        Some(bytes) => profile.kv_bytes_per_token = (bytes.round() as u64).max(1),
        None => from_base.push("kv_bytes_per_token"),
    }
    match last(|line| line.kv_cache_tokens.map(|tokens| tokens as f64)) {
        Some(tokens) => profile.kv_cache_bytes = tokens as u64 * profile.kv_bytes_per_token,
        None => from_base.push("kv_cache_bytes"),
    }
    match last(|line| line.max_num_seqs.map(|most| most as f64)) {
        Some(most) => {
            profile.max_num_seqs = most as usize;
            // A step has a token for each of them, and more.
            profile.max_num_batched_tokens = profile.max_num_batched_tokens.max(most as u64 + 1);
        }
        None => from_base.push("max_num_seqs"),
    }
}

/// What one worker did.
fn stretches(lines: &[&Line], profile: &Profile) -> Vec<Stretch> {
    let prompts = Prompts::of(lines);
    let course = Course::of(lines, &prompts);
    let mut stretches = Vec::new();
    for prompt in prompts.all() {
        let seconds = prompt.until - prompt.from;
        let mut sums = course.between(prompt.from, prompt.until, |sequences| {
            let left = (profile.max_num_batched_tokens as f64 - sequences).max(1.0);
            let full = (prompt.tokens / left).ceil().max(1.0);
            // Who comes while others decode waits for the end of their step first, half of it on average.
            if prompt.waited || sequences < 0.5 { full } else { full + 0.5 }
        });
        // Of all that was computed in this time, this is the prompt.
        (sums.0[Sums::TOKENS], sums.0[Sums::PAIRS]) = (prompt.tokens, prompt.pairs);
        let kind = match prompt.below[..] {
            [] => Some(Kind::Prompt),
            [(level, tokens)] if !prompt.waited => Some(Kind::Onboarded(level, tokens)),
            _ => None,
        };
        stretches.extend(kind.map(|kind| Stretch { seconds, sums, kind }));
    }
    for line in lines.iter().filter(|line| line.output_length > 1) {
        let (first, last) = timeline::span(line);
        let sums = course.between(first, last, |_| (line.output_length - 1) as f64);
        stretches.push(Stretch { seconds: last - first, sums, kind: Kind::Decode });
    }
    stretches
}

/// How long it took to bring prompts up from some tiers, beyond what computing the rest of them takes.
fn store(stretches: &[Stretch], levels: &[Level], kv_bytes: f64, figures: &[f64], before: Store) -> Option<Store> {
    let row = |stretch: &Stretch| match stretch.kind {
        Kind::Onboarded(level, tokens) if levels.contains(&level) => Some(nnls::Row {
            factors: [1.0, tokens as f64 * kv_bytes],
            value: (stretch.seconds - stretch.sums.seconds(figures)).max(0.0),
            weight: (stretch.seconds + JITTER_S).recip(),
        }),
        _ => None,
    };
    let rows: Vec<nnls::Row<2>> = stretches.iter().filter_map(row).collect();
    let [latency_s, byte_s] = nnls::solve(&rows);
    let known = rows.len() >= ONBOARDED_MIN && byte_s > 0.0;
    known.then(|| Store { latency_s, bytes_per_second: byte_s.recip(), ..before })
}
