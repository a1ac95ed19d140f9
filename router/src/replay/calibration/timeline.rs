//! What one worker did, over time: who decoded, over how much context, and which prompts were computed.

use crate::trace::Line;
use kvbm::Level;

/// What a stretch of steps amounts to, in the order of a profile's figures: steps, and over them the sums of sequences that decode,
/// of their context, of prompt tokens, and of pairs of a prompt token and one before it.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub(super) struct Sums(pub(super) [f64; Self::LEN]);

/// A prompt, or several that were done at the same time.
pub(super) struct Prompt {
    /// From when it could be computed.
    pub(super) from: f64,
    /// To the first token.
    pub(super) until: f64,
    /// Tokens that were computed, and pairs.
    pub(super) tokens: f64,
    pub(super) pairs: f64,
    /// Whether there was another before it, for which it had to wait.
    pub(super) waited: bool,
    /// Tokens that came from below device memory.
    pub(super) below: Vec<(Level, u64)>,
}

/// The prompts of one worker, one after the other.
pub(super) struct Prompts(Vec<Prompt>);

/// What happens at a moment: what changes from then on.
#[derive(Clone, Copy, Default)]
struct Turn {
    at: f64,
    /// Sequences that decode, their context, and by how much that grows in a second.
    sequences: f64,
    context: f64,
    growth: f64,
    /// Prompt tokens and pairs computed in a second.
    tokens: f64,
    pairs: f64,
}

/// The integrals over time of all that, up to each moment at which something changes.
pub(super) struct Course(Vec<(f64, [f64; 4])>);

/// Prompts whose first tokens come closer to each other than this came of one step.
const AT_ONCE_S: f64 = 0.000_2;

impl Sums {
    pub(super) const LEN: usize = 5;
    pub(super) const STEPS: usize = 0;
    pub(super) const SEQUENCES: usize = 1;
    pub(super) const TOKENS: usize = 3;
    pub(super) const PAIRS: usize = 4;

    /// What it takes with these figures.
    pub(super) fn seconds(&self, figures: &[f64]) -> f64 {
        self.0.iter().zip(figures).map(|(sum, figure)| sum * figure).sum()
    }
}

/// When a request had its first token, and its last, in seconds.
pub(super) fn span(line: &Line) -> (f64, f64) {
    let arrived = line.timestamp / 1e3;
    (arrived + line.first_token_s, arrived + line.last_token_s)
}

impl Prompts {
    /// They are computed in the order in which their first tokens came.
    pub(super) fn of(lines: &[&Line]) -> Self {
        let mut lines: Vec<&Line> = lines.to_vec();
        lines.sort_by(|one, other| span(one).0.total_cmp(&span(other).0));
        let mut all: Vec<Prompt> = Vec::new();
        for line in lines {
            let (until, sent) = (span(line).0, line.timestamp / 1e3 + line.dispatched_s);
            let found: u64 = line.cached_tokens.values().sum();
            let tokens = line.input_length.saturating_sub(found).max(1) as f64;
            let pairs = tokens * (found as f64 + tokens / 2.0);
            let below: Vec<(Level, u64)> = line
                .cached_tokens
                .iter()
                .filter(|(level, tokens)| **level != Level::G1 && **tokens > 0)
                .map(|(l, t)| (*l, *t))
                .collect();
            if let Some(last) = all.last_mut().filter(|last| until - last.until < AT_ONCE_S) {
                last.tokens += tokens;
                last.pairs += pairs;
                last.below.extend(below);
                continue;
            }
            let before = all.last().map_or(f64::NEG_INFINITY, |last| last.until);
            let from = sent.max(before).min(until);
            all.push(Prompt { from, until, tokens, pairs, waited: sent < before, below });
        }
        Self(all)
    }

    pub(super) fn all(&self) -> impl Iterator<Item = &Prompt> {
        self.0.iter()
    }
}

impl Course {
    pub(super) fn of(lines: &[&Line], prompts: &Prompts) -> Self {
        let mut turns = Vec::with_capacity(2 * (lines.len() + prompts.0.len()));
        for line in lines {
            let (first, last) = span(line);
            let growth = (line.output_length - 1) as f64 / (last - first).max(f64::MIN_POSITIVE);
            let growth = if growth.is_finite() { growth } else { 0.0 };
            let (before, after) = (line.input_length as f64, (line.input_length + line.output_length - 1) as f64);
            turns.push(Turn { at: first, sequences: 1.0, context: before, growth, ..Turn::default() });
            turns.push(Turn { at: last, sequences: -1.0, context: -after, growth: -growth, ..Turn::default() });
        }
        for prompt in prompts.all() {
            let seconds = (prompt.until - prompt.from).max(1e-6);
            let (tokens, pairs) = (prompt.tokens / seconds, prompt.pairs / seconds);
            turns.push(Turn { at: prompt.from, tokens, pairs, ..Turn::default() });
            turns.push(Turn { at: prompt.from + seconds, tokens: -tokens, pairs: -pairs, ..Turn::default() });
        }
        turns.sort_by(|one, other| one.at.total_cmp(&other.at));
        let (mut now, mut sums, mut course) = (Turn::default(), [0.0; 4], Vec::with_capacity(turns.len()));
        for turn in turns {
            let seconds = if course.is_empty() { 0.0 } else { turn.at - now.at };
            sums[0] += now.sequences * seconds;
            sums[1] += (now.context + now.growth * seconds / 2.0) * seconds;
            sums[2] += now.tokens * seconds;
            sums[3] += now.pairs * seconds;
            course.push((turn.at, sums));
            now = Turn {
                at: turn.at,
                sequences: now.sequences + turn.sequences,
                context: now.context + now.growth * seconds + turn.context,
                growth: now.growth + turn.growth,
                tokens: now.tokens + turn.tokens,
                pairs: now.pairs + turn.pairs,
            };
        }
        Self(course)
    }

    /// What was done between two moments, in so many steps as `steps` says for the sequences that decoded, on average.
    pub(super) fn between(&self, from: f64, until: f64, steps: impl FnOnce(f64) -> f64) -> Sums {
        let (before, after) = (self.upto(from), self.upto(until));
        let [sequences, context, tokens, pairs] = std::array::from_fn(|at| (after[at] - before[at]).max(0.0));
        let seconds = (until - from).max(f64::MIN_POSITIVE);
        let mean = |sum: f64| if seconds > 1e-9 { sum / seconds } else { 0.0 };
        let steps = steps(mean(sequences));
        Sums([steps, mean(sequences) * steps, mean(context) * steps, tokens, pairs])
    }

    /// The integrals up to a moment, in a straight line between those at which something changed.
    fn upto(&self, at: f64) -> [f64; 4] {
        let next = self.0.partition_point(|(moment, _)| *moment < at);
        let Some((later, after)) = self.0.get(next) else { return self.0.last().map_or([0.0; 4], |(_, sums)| *sums) };
        let Some((earlier, before)) = next.checked_sub(1).map(|before| self.0[before]) else { return [0.0; 4] };
        let share = if later > &earlier { (at - earlier) / (later - earlier) } else { 1.0 };
        std::array::from_fn(|sum| before[sum] + (after[sum] - before[sum]) * share)
    }
}
