//! The activity of one worker over time: decoding sequences, their context, and prefill.

use crate::telemetry::Line;
use kvbm::Level;

/// Work in an interval, in the order of a profile's coefficients: steps; then, summed over the steps, decoding
/// sequences, their context tokens, prompt tokens, and pairs of a prompt token and one before it.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub(super) struct Sums(pub(super) [f64; Self::LEN]);

/// One prompt, or several that were computed in the same step. Times are seconds.
pub(super) struct Prompt {
    /// Earliest start of prefill.
    pub(super) from: f64,
    /// First token.
    pub(super) until: f64,
    /// Prompt tokens that were computed, and their attention pairs.
    pub(super) tokens: f64,
    pub(super) pairs: f64,
    /// Whether the prompt waited for the one before it.
    pub(super) waited: bool,
    /// Tokens that were onboarded, by tier.
    pub(super) onboarded: Vec<(Level, u64)>,
}

/// The prompts of one worker, in the order of their first tokens.
pub(super) struct Prompts(Vec<Prompt>);

/// A change of the worker's activity at a time; or, as a sum of changes, its activity from then on.
#[derive(Clone, Copy, Default)]
struct RateChange {
    at: f64,
    /// Decoding sequences, their context tokens, and the growth of these in tokens per second.
    sequences: f64,
    context: f64,
    growth: f64,
    /// Prompt tokens and pairs computed per second.
    tokens: f64,
    pairs: f64,
}

/// Times of all changes, with the integrals of sequences, context, tokens and pairs up to each.
pub(super) struct Timeline(Vec<(f64, [f64; 4])>);

/// Prompts whose first tokens are closer than this were computed in the same step.
const SAME_STEP_S: f64 = 0.000_2;

impl Sums {
    pub(super) const LEN: usize = 5;
    pub(super) const STEPS: usize = 0;
    pub(super) const SEQUENCES: usize = 1;
    pub(super) const TOKENS: usize = 3;
    pub(super) const PAIRS: usize = 4;

    /// Duration of this work with these coefficients.
    pub(super) fn seconds(&self, coefficients: &[f64]) -> f64 {
        self.0.iter().zip(coefficients).map(|(sum, coefficient)| sum * coefficient).sum()
    }
}

/// Times of a request's first and last token, in seconds.
pub(super) fn token_span(line: &Line) -> (f64, f64) {
    let arrived = line.timestamp / 1e3;
    (arrived + line.first_token_s, arrived + line.last_token_s)
}

impl Prompts {
    /// Orders prompts by their first tokens and merges those of the same step.
    pub(super) fn of(lines: &[&Line]) -> Self {
        let mut lines: Vec<&Line> = lines.to_vec();
        lines.sort_by(|one, other| token_span(one).0.total_cmp(&token_span(other).0));
        let mut all: Vec<Prompt> = Vec::new();
        for line in lines {
            let (until, sent) = (token_span(line).0, line.timestamp / 1e3 + line.dispatched_s);
            let found: u64 = line.cached_tokens.values().sum();
            let tokens = line.input_length.saturating_sub(found).max(1) as f64;
            let pairs = tokens * (found as f64 + tokens / 2.0);
            let onboarded: Vec<(Level, u64)> = line
                .cached_tokens
                .iter()
                .filter(|(level, tokens)| **level != Level::G1 && **tokens > 0)
                .map(|(l, t)| (*l, *t))
                .collect();
            if let Some(last) = all.last_mut().filter(|last| until - last.until < SAME_STEP_S) {
                last.tokens += tokens;
                last.pairs += pairs;
                last.onboarded.extend(onboarded);
                continue;
            }
            let before = all.last().map_or(f64::NEG_INFINITY, |last| last.until);
            let from = sent.max(before).min(until);
            all.push(Prompt { from, until, tokens, pairs, waited: sent < before, onboarded });
        }
        Self(all)
    }

    pub(super) fn all(&self) -> impl Iterator<Item = &Prompt> {
        self.0.iter()
    }
}

impl Timeline {
    pub(super) fn of(lines: &[&Line], prompts: &Prompts) -> Self {
        let mut changes = Vec::with_capacity(2 * (lines.len() + prompts.0.len()));
        for line in lines {
            let (first, last) = token_span(line);
            let growth = (line.output_length - 1) as f64 / (last - first).max(f64::MIN_POSITIVE);
            let growth = if growth.is_finite() { growth } else { 0.0 };
            let (before, after) = (line.input_length as f64, (line.input_length + line.output_length - 1) as f64);
            changes.push(RateChange { at: first, sequences: 1.0, context: before, growth, ..RateChange::default() });
            changes.push(RateChange {
                at: last,
                sequences: -1.0,
                context: -after,
                growth: -growth,
                ..RateChange::default()
            });
        }
        for prompt in prompts.all() {
            let seconds = (prompt.until - prompt.from).max(1e-6);
            let (tokens, pairs) = (prompt.tokens / seconds, prompt.pairs / seconds);
            changes.push(RateChange { at: prompt.from, tokens, pairs, ..RateChange::default() });
            changes.push(RateChange {
                at: prompt.from + seconds,
                tokens: -tokens,
                pairs: -pairs,
                ..RateChange::default()
            });
        }
        changes.sort_by(|one, other| one.at.total_cmp(&other.at));
        let (mut now, mut sums, mut timeline) = (RateChange::default(), [0.0; 4], Vec::with_capacity(changes.len()));
        for change in changes {
            let seconds = if timeline.is_empty() { 0.0 } else { change.at - now.at };
            sums[0] += now.sequences * seconds;
            sums[1] += (now.context + now.growth * seconds / 2.0) * seconds;
            sums[2] += now.tokens * seconds;
            sums[3] += now.pairs * seconds;
            timeline.push((change.at, sums));
            now = RateChange {
                at: change.at,
                sequences: now.sequences + change.sequences,
                context: now.context + now.growth * seconds + change.context,
                growth: now.growth + change.growth,
                tokens: now.tokens + change.tokens,
                pairs: now.pairs + change.pairs,
            };
        }
        Self(timeline)
    }

    /// The work between two times. `steps` returns the number of steps for the mean number of decoding sequences.
    pub(super) fn between(&self, from: f64, until: f64, steps: impl FnOnce(f64) -> f64) -> Sums {
        let (before, after) = (self.integrals_until(from), self.integrals_until(until));
        let [sequences, context, tokens, pairs] = std::array::from_fn(|at| (after[at] - before[at]).max(0.0));
        let seconds = (until - from).max(f64::MIN_POSITIVE);
        let mean = |sum: f64| if seconds > 1e-9 { sum / seconds } else { 0.0 };
        let steps = steps(mean(sequences));
        Sums([steps, mean(sequences) * steps, mean(context) * steps, tokens, pairs])
    }

    /// The integrals up to a time, interpolated linearly between changes.
    fn integrals_until(&self, at: f64) -> [f64; 4] {
        let next = self.0.partition_point(|(time, _)| *time < at);
        let Some((later, after)) = self.0.get(next) else { return self.0.last().map_or([0.0; 4], |(_, sums)| *sums) };
        let Some((earlier, before)) = next.checked_sub(1).map(|before| self.0[before]) else { return [0.0; 4] };
        let share = if later > &earlier { (at - earlier) / (later - earlier) } else { 1.0 };
        std::array::from_fn(|sum| before[sum] + (after[sum] - before[sum]) * share)
    }
}
