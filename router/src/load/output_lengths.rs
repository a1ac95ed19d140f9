//! Lengths of outputs, learned from requests that have ended, by model and tenant.
//!
//! An output that a client cancelled, or that failed, is a censored observation: its whole length is unknown, and above
//! what was generated. Its weight is divided among the longer lengths as these are distributed, which is the
//! redistribution to the right of Efron (1967) and gives the Kaplan-Meier estimate. Without it, outputs that clients
//! cancel would make the distribution too short, the long ones most.
//!
//! A length distribution is a histogram with logarithmic buckets and exponentially decaying weights. From it follow the
//! expected length of a new output, and the expected rest of an output of which a part is generated. `max_tokens` of
//! the request bounds both.

use std::collections::BTreeMap;
use std::sync::{Arc, LazyLock};

/// Distributions of one model: of all requests, and of single tenants.
#[derive(Debug, Default)]
pub(crate) struct OutputLengths {
    all: Distribution,
    tenants: BTreeMap<Arc<str>, Distribution>,
    /// Number of outputs recorded so far.
    recorded: u64,
}

/// A decaying histogram, and the table made from it last.
#[derive(Debug)]
struct Distribution {
    counts: [f64; BUCKETS],
    sums: [f64; BUCKETS],
    /// Outputs recorded since the table was made.
    new_outputs: u32,
    table: Arc<LengthTable>,
    /// Number of complete outputs recorded so far.
    outputs: u64,
    /// Value of [`OutputLengths::recorded`] when the last of them was recorded.
    last_recorded: u64,
}

/// Expected lengths, as of one time.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct LengthTable {
    counts: [f64; BUCKETS],
    /// By bucket: number and sum of the outputs in it or in a higher one.
    tail_counts: [f64; BUCKETS + 1],
    tail_sums: [f64; BUCKETS + 1],
}

/// How an output has ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum OutputEnd {
    /// With its last token. This includes an output that reached the `max_tokens` of its request: the next one of that
    /// client will have the same limit.
    Complete,
    /// Before its last token: cancelled by the client, or failed.
    Censored,
}

/// Expected output of one request.
#[derive(Clone, Debug)]
pub(crate) struct ExpectedOutput {
    table: Arc<LengthTable>,
    /// Limit of the request, in tokens.
    max: f64,
}

/// Buckets per factor of two. Lengths differ by more than the width of a bucket within any workload.
const PER_OCTAVE: usize = 2;
/// The last bucket begins at 128 Ki tokens, the longest contexts of today.
const BUCKETS: usize = 17 * PER_OCTAVE + 1;
/// Weight that older outputs keep at each new one: about the last 500 count. Fewer would make the mean of a
/// distribution with a standard deviation of its mean vary by more than 5 %.
const KEEP: f64 = 1.0 - 1.0 / 512.0;
/// Expected output tokens before any output has ended: most answers have a few hundred.
pub(crate) const DEFAULT_OUTPUT_TOKENS: f64 = 256.0;
/// Weight of that expectation, in outputs.
const PRIOR_OUTPUTS: f64 = 4.0;
/// A tenant has a distribution of its own after this many outputs; until then that of the model is better.
const MIN_TENANT_OUTPUTS: u64 = 16;
/// Tenants with a distribution, per model: about half a megabyte. The one that was idle longest makes room.
const MAX_TENANTS: usize = 256;
/// Outputs after which a table is made again: an eighth of the outputs so far, and at most this.
const MAX_NEW_OUTPUTS: u32 = 32;

impl OutputLengths {
    /// Records the output of a request that has ended: its length, or what was generated of it.
    pub(crate) fn record(&mut self, tenant: &Arc<str>, tokens: u64, end: OutputEnd) {
        self.recorded += 1;
        self.all.record(tokens, end, self.recorded);
        if !self.tenants.contains_key(tenant) {
            if self.tenants.len() >= MAX_TENANTS
                && let Some(idle) =
                    self.tenants.iter().min_by_key(|(_, known)| known.last_recorded).map(|(name, _)| name.clone())
            {
                self.tenants.remove(&idle);
            }
            self.tenants.insert(tenant.clone(), Distribution::default());
        }
        if let Some(known) = self.tenants.get_mut(tenant) {
            known.record(tokens, end, self.recorded);
        }
    }

    /// Expected lengths of a tenant's outputs.
    pub(crate) fn of(&self, tenant: &str) -> &Arc<LengthTable> {
        let known = self.tenants.get(tenant).filter(|known| known.outputs >= MIN_TENANT_OUTPUTS);
        &known.unwrap_or(&self.all).table
    }

    /// Whether any output was recorded.
    pub(crate) fn is_learned(&self) -> bool {
        self.recorded > 0
    }

    /// Expected lengths of all outputs of the model.
    pub(crate) fn all(&self) -> &Arc<LengthTable> {
        &self.all.table
    }
}

impl Default for Distribution {
    /// An exponential distribution with the default mean.
    fn default() -> Self {
        let beyond = |bucket: usize| (-(lower(bucket) - lower(0)) / DEFAULT_OUTPUT_TOKENS).exp();
        let counts: [f64; BUCKETS] = std::array::from_fn(|bucket| {
            let above = if bucket + 1 < BUCKETS { beyond(bucket + 1) } else { 0.0 };
            PRIOR_OUTPUTS * (beyond(bucket) - above)
        });
        let middle = |bucket: usize| lower(bucket).midpoint(lower(bucket + 1));
        let sums = std::array::from_fn(|bucket| counts[bucket] * middle(bucket));
        let table = Arc::new(LengthTable::of(&counts, &sums));
        Self { counts, sums, new_outputs: 0, table, outputs: 0, last_recorded: 0 }
    }
}

impl Distribution {
    fn record(&mut self, tokens: u64, end: OutputEnd, recorded: u64) {
        for (count, sum) in self.counts.iter_mut().zip(&mut self.sums) {
            *count *= KEEP;
            *sum *= KEEP;
        }
        let tokens = tokens.max(1) as f64;
        match end {
            OutputEnd::Complete => self.add(tokens),
            OutputEnd::Censored => self.add_longer(tokens),
        }
        self.outputs += u64::from(end == OutputEnd::Complete);
        self.last_recorded = recorded;
        self.new_outputs += 1;
        if self.new_outputs >= MAX_NEW_OUTPUTS || u64::from(self.new_outputs) * 8 >= self.outputs {
            self.new_outputs = 0;
            self.table = Arc::new(LengthTable::of(&self.counts, &self.sums));
        }
    }

    fn add(&mut self, tokens: f64) {
        let bucket = bucket(tokens);
        self.counts[bucket] += 1.0;
        self.sums[bucket] += tokens;
    }

    /// Adds an output with more than this many tokens: one in all, divided among the longer lengths.
    fn add_longer(&mut self, tokens: f64) {
        let at = bucket(tokens);
        let (from, to) = (lower(at), lower(at + 1));
        // Lengths are taken as uniform within a bucket.
        let here = self.counts[at] * ((to - tokens) / (to - from)).clamp(0.0, 1.0);
        let longer = here + self.counts[at + 1..].iter().sum::<f64>();
        if longer < MIN_COUNT {
            // Longer than nearly all others, of which [`LengthTable::rest`] expects a half more.
            return self.add(tokens * 1.5);
        }
        let share = longer.recip();
        for bucket in at + 1..BUCKETS {
            self.counts[bucket] *= 1.0 + share;
            self.sums[bucket] *= 1.0 + share;
        }
        self.counts[at] += here * share;
        self.sums[at] += here * share * tokens.midpoint(to);
    }
}

impl ExpectedOutput {
    pub(crate) fn new(table: Arc<LengthTable>, max_tokens: Option<u32>) -> Self {
        Self { table, max: max_tokens.map_or(f64::INFINITY, f64::from) }
    }

    /// Expected number of tokens.
    pub(crate) fn tokens(&self) -> f64 {
        self.table.mean(self.max)
    }

    /// The number of tokens that a share `quantile` of such outputs does not exceed. Costs are sums over all outputs,
    /// so they use means. Quantiles tell an operator how far single outputs are from these.
    pub(crate) fn quantile(&self, quantile: f64) -> f64 {
        self.table.quantile(quantile).min(self.max)
    }

    /// Expected number of tokens after the first `generated`.
    pub(crate) fn rest(&self, generated: f64) -> f64 {
        self.table.rest(generated, self.max)
    }
}

impl Default for ExpectedOutput {
    /// Of a request of which nothing is known.
    fn default() -> Self {
        static DEFAULT: LazyLock<Arc<LengthTable>> = LazyLock::new(|| Distribution::default().table);
        Self::new(DEFAULT.clone(), None)
    }
}

impl LengthTable {
    fn of(counts: &[f64; BUCKETS], sums: &[f64; BUCKETS]) -> Self {
        let tail = |of: &[f64; BUCKETS]| {
            let mut tail = [0.0; BUCKETS + 1];
            for bucket in (0..BUCKETS).rev() {
                tail[bucket] = tail[bucket + 1] + of[bucket];
            }
            tail
        };
        Self { counts: *counts, tail_counts: tail(counts), tail_sums: tail(sums) }
    }

    /// Expected length of a new output of at most `max` tokens.
    pub(crate) fn mean(&self, max: f64) -> f64 {
        self.rest(0.0, max)
    }

    /// Expected rest of an output of at most `max` tokens, of which `generated` are generated: the mean residual life
    /// of the distribution.
    pub(crate) fn rest(&self, generated: f64, max: f64) -> f64 {
        let within = (max - generated).max(0.0);
        let bucket = bucket(generated.max(1.0));
        let (from, to) = (lower(bucket).min(generated), lower(bucket + 1));
        // Lengths are taken as uniform within a bucket.
        let longer = self.counts[bucket] * ((to - generated) / (to - from)).clamp(0.0, 1.0);
        let count = longer + self.tail_counts[bucket + 1];
        if count < MIN_COUNT {
            // Longer than nearly all others: the longer such an output is, the longer its rest.
            return (generated / 2.0).clamp(1.0, within.max(1.0));
        }
        let sum =
            longer * (to - generated) / 2.0 + self.tail_sums[bucket + 1] - self.tail_counts[bucket + 1] * generated;
        let beyond = if max < to { 0.0 } else { self.excess(max) };
        ((sum - beyond) / count).clamp(1.0, within.max(1.0))
    }

    /// The length that a share `quantile` of the outputs does not exceed.
    fn quantile(&self, quantile: f64) -> f64 {
        let beyond = self.tail_counts[0] * (1.0 - quantile);
        let at = (0..BUCKETS).find(|bucket| self.tail_counts[bucket + 1] <= beyond).unwrap_or(BUCKETS - 1);
        // Lengths are taken as uniform within a bucket.
        let share = (self.tail_counts[at] - beyond) / self.counts[at].max(f64::MIN_POSITIVE);
        lower(at) + (lower(at + 1) - lower(at)) * share.clamp(0.0, 1.0)
    }

    /// Sum of what the outputs have beyond `max` tokens.
    fn excess(&self, max: f64) -> f64 {
        let bucket = bucket(max);
        let to = lower(bucket + 1);
        let longer = self.counts[bucket] * ((to - max) / (to - lower(bucket))).clamp(0.0, 1.0);
        longer * (to - max).max(0.0) / 2.0 + (self.tail_sums[bucket + 1] - self.tail_counts[bucket + 1] * max).max(0.0)
    }
}

/// Fewer outputs than this say nothing of a mean.
const MIN_COUNT: f64 = 0.5;

/// The shortest length of a bucket.
fn lower(bucket: usize) -> f64 {
    // Every placement asks for a dozen of them.
    static LOWER: LazyLock<[f64; BUCKETS + 1]> =
        LazyLock::new(|| std::array::from_fn(|bucket| 2f64.powf(bucket as f64 / PER_OCTAVE as f64)));
    LOWER[bucket]
}

fn bucket(tokens: f64) -> usize {
    ((tokens.max(1.0).log2() * PER_OCTAVE as f64) as usize).min(BUCKETS - 1)
}

#[cfg(test)]
mod tests {
    use super::OutputEnd::{Censored, Complete};
    use super::*;

    fn near(value: f64, expected: f64, share: f64) -> bool {
        (value - expected).abs() <= expected * share
    }

    fn recorded(tenant: &str, lengths: impl Iterator<Item = u64>) -> OutputLengths {
        let mut outputs = OutputLengths::default();
        lengths.for_each(|tokens| outputs.record(&tenant.into(), tokens, Complete));
        outputs
    }

    #[test]
    fn without_outputs_the_default_is_expected() {
        let table = OutputLengths::default().all().clone();
        assert!(near(table.mean(f64::INFINITY), DEFAULT_OUTPUT_TOKENS, 0.1), "{}", table.mean(f64::INFINITY));
        assert!(near(table.rest(300.0, f64::INFINITY), DEFAULT_OUTPUT_TOKENS, 0.25), "an exponential has no memory");
    }

    #[test]
    fn lengths_are_learned_and_bounded_by_the_request() {
        // Nine of ten have 100 tokens, one has 1,000.
        let outputs = recorded("a", (0..2000).map(|nth| if nth % 10 == 0 { 1000 } else { 100 }));
        let table = outputs.of("a");
        assert!(near(table.mean(f64::INFINITY), 190.0, 0.1), "{}", table.mean(f64::INFINITY));
        assert!(near(table.mean(500.0), 140.0, 0.1), "{}", table.mean(500.0));
        assert!(table.mean(10.0) <= 10.0);
        let quantiles = |max| [0.5, 0.95].map(|share| ExpectedOutput::new(table.clone(), max).quantile(share));
        let [half, most] = quantiles(None);
        assert!((90.0..130.0).contains(&half) && (724.0..1025.0).contains(&most), "{half} {most}");
        assert!((quantiles(Some(500))[1] - 500.0).abs() < 1e-9, "at most the request's limit");
    }

    #[test]
    fn the_rest_depends_on_what_is_generated() {
        let outputs = recorded("a", (0..2000).map(|nth| if nth % 10 == 0 { 1000 } else { 100 }));
        let table = outputs.of("a");
        assert!(near(table.rest(200.0, f64::INFINITY), 800.0, 0.05), "only the long ones are left");
        assert!(table.rest(50.0, f64::INFINITY) < 160.0);
        assert!((table.rest(200.0, 250.0) - 50.0).abs() < 1e-9, "at most the request's limit");
        assert!(table.rest(100_000.0, f64::INFINITY) > 10_000.0, "longer than all others");
    }

    #[test]
    fn tenants_differ_and_their_number_is_bounded() {
        let mut outputs = recorded("short", std::iter::repeat_n(10, 600));
        (0..600).for_each(|_| outputs.record(&"long".into(), 2000, Complete));
        outputs.record(&"new".into(), 10, Complete);
        let mean = |name| outputs.of(name).mean(f64::INFINITY);
        assert!(mean("short") < 20.0 && mean("long") > 1500.0, "{} {}", mean("short"), mean("long"));
        assert_eq!(outputs.of("new"), outputs.all(), "too few outputs");
        (0..2 * MAX_TENANTS).for_each(|nth| outputs.record(&nth.to_string().into(), 1, Complete));
        assert_eq!(outputs.tenants.len(), MAX_TENANTS);
    }

    #[test]
    fn old_outputs_are_forgotten() {
        let mut outputs = recorded("a", std::iter::repeat_n(1000, 2000));
        (0..2000).for_each(|_| outputs.record(&"a".into(), 50, Complete));
        assert!(outputs.of("a").mean(f64::INFINITY) < 100.0);
    }

    #[test]
    fn cancelled_outputs_do_not_make_the_lengths_shorter() {
        let mut outputs = OutputLengths::default();
        let mut record = |tokens, end| outputs.record(&"a".into(), tokens, end);
        // Half of the outputs would have 1,000 tokens and the others 50; clients cancel every second one of the long
        // ones after 100.
        for _ in 0..1000 {
            record(1000, Complete);
            record(100, Censored);
            record(50, Complete);
            record(50, Complete);
        }
        let table = outputs.of("a");
        assert!(near(table.mean(f64::INFINITY), 525.0, 0.1), "{}", table.mean(f64::INFINITY));
        assert!(near(table.rest(200.0, f64::INFINITY), 800.0, 0.1), "{}", table.rest(200.0, f64::INFINITY));
    }

    #[test]
    fn an_output_cancelled_beyond_all_others_makes_the_lengths_longer() {
        let mut outputs = recorded("a", std::iter::repeat_n(10, 2000));
        (0..100).for_each(|_| outputs.record(&"a".into(), 5000, Censored));
        let table = outputs.of("a");
        assert!(table.rest(1000.0, f64::INFINITY) > 4000.0, "{}", table.rest(1000.0, f64::INFINITY));
        let mut new = OutputLengths::default();
        (0..100).for_each(|_| new.record(&"a".into(), 1, Censored));
        assert_eq!(new.of("a"), new.all(), "a tenant without a complete output has no distribution of its own");
        assert!(near(new.all().mean(f64::INFINITY), DEFAULT_OUTPUT_TOKENS, 0.15), "{}", new.all().mean(f64::INFINITY));
    }
}
