//! Policies by name, and policies composed in the configuration of filters, scores and a pick.
//!
//! Not here: how the pick is made (`select`).

use super::cost::Cost;
use super::prompt::Prompt;
use crate::config::Problem;
use crate::index::WorkerOverlap;
use crate::load::{LoadStats, ServiceEstimate};
use serde::de::value::MapAccessDeserializer;
use serde::de::{self, Deserialize, Deserializer, MapAccess, Visitor};
use serde::ser::{Serialize, Serializer};
use std::fmt;
use units::HumanDuration;

/// Choice of the worker for a request.
#[derive(Clone, PartialEq, Debug, Default)]
pub enum Policy {
    /// The lowest estimated cost in seconds: queue, uncached tokens, loads from tiers, decode load.
    #[default]
    Kv,
    /// One worker after the other.
    RoundRobin,
    /// The worker with the shortest queue; the cache does not count.
    LeastLoaded,
    /// A worker chosen at random.
    Random,
    /// The less loaded of two workers chosen at random.
    PowerOfTwo,
    /// The same worker for the same session, unless it is overloaded; as `kv` for requests without a session.
    Session,
    /// A table of filters, scores and a pick.
    Composed(Composition),
}

/// Filters, scores and a pick.
#[derive(Clone, PartialEq, Debug, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Composition {
    /// Filters of the candidates, applied in order. A filter that no candidate passes is skipped.
    #[serde(default)]
    pub filter: Vec<Filter>,
    /// Terms of the score, added up. The lowest sum is the best.
    pub score: Vec<Score>,
    /// Choice among the scored workers.
    #[serde(default)]
    pub pick: Pick,
}

/// A condition that a candidate must meet.
#[derive(Clone, Copy, PartialEq, Debug, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Filter {
    /// Workers with free blocks for prompt and answer.
    Fits,
    /// Workers that hold a part of the prompt.
    Cached,
    /// Workers whose queue takes less time.
    QueueBelow(HumanDuration),
    /// Workers with fewer sequences.
    SequencesBelow(u64),
}

/// A term and its weight.
#[derive(Clone, Copy, PartialEq, Debug, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Score {
    /// The term.
    pub term: Term,
    /// Its weight. Default 1.
    #[serde(default = "one")]
    pub weight: f64,
}

/// A term of the score: seconds, as in the explain header, except the last two.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Term {
    /// Compute time that the cached part of the prompt saves; it lowers the sum.
    Overlap,
    /// Computing earlier prompts.
    Queue,
    /// Waiting until enough blocks are free.
    MemoryWait,
    /// Waiting for a place in the batch.
    BatchWait,
    /// Computing the tokens that are not cached.
    Prefill,
    /// Onboarding cached blocks from slower tiers.
    Onboard,
    /// Waiting behind earlier requests to the same tiers.
    TierQueue,
    /// Transferring blocks from the prefill worker.
    KvTransfer,
    /// Longer steps because of the sequences on the worker.
    Decode,
    /// Longer steps of these sequences because of the request.
    DecodeSlowdown,
    /// Delay of decoding sequences while the prompt is computed.
    DecodeStall,
    /// Delay of later prompts on the same worker.
    QueueExternality,
    /// Delay by prompts of the other workers of the same device, and of these prompts by this one.
    SharedDevice,
    /// Recomputing or reloading blocks of other requests.
    Eviction,
    /// Number of sequences that decode on the worker.
    Sequences,
    /// Share of the worker's blocks in use, 0 to 1.
    Memory,
}

/// Choice among the scored workers.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Pick {
    /// The lowest score; of equal ones, the least recently chosen worker.
    #[default]
    Best,
    /// Random, weighted by exp(−(score − lowest) / (mean − lowest)).
    Weighted,
    /// The lower score of two workers chosen at random.
    PowerOfTwo,
}

const fn one() -> f64 {
    1.0
}

impl Policy {
    /// All policies that have a name.
    pub const ALL: [Self; 6] =
        [Self::Kv, Self::RoundRobin, Self::LeastLoaded, Self::Random, Self::PowerOfTwo, Self::Session];

    /// All names, as metrics show them.
    pub(crate) const NAMES: [&'static str; 7] =
        ["kv", "round-robin", "least-loaded", "random", "power-of-two", "session", "composed"];

    /// The name in configuration, metrics and explanations.
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Kv => "kv",
            Self::RoundRobin => "round-robin",
            Self::LeastLoaded => "least-loaded",
            Self::Random => "random",
            Self::PowerOfTwo => "power-of-two",
            Self::Session => "session",
            Self::Composed(_) => "composed",
        }
    }

    /// Problems of the configuration, with keys below `key`.
    pub(crate) fn check(&self, key: &str) -> Vec<Problem> {
        let Self::Composed(Composition { filter, score, .. }) = self else { return Vec::new() };
        let (filters, scores) = (format!("{key}.filter"), format!("{key}.score"));
        let mut problems = Vec::new();
        if score.is_empty() {
            problems.push(Problem::new(&scores, "expected at least one term, like { term = \"queue\" }"));
        }
        if filter.len() > FILTERS_MAX {
            problems.push(Problem::new(&filters, format!("expected at most {FILTERS_MAX}")));
        }
        if let Some(Score { term, .. }) = score.iter().find(|score| !WEIGHTS.contains(&score.weight)) {
            let (least, most) = (WEIGHTS.start(), WEIGHTS.end());
            problems.push(Problem::new(
                &scores,
                format!("the weight of {term:?} is not a number between {least} and {most}"),
            ));
        }
        let impossible = |filter: &Filter| match filter {
            Filter::QueueBelow(time) => time.0.is_zero(),
            Filter::SequencesBelow(sequences) => *sequences == 0,
            Filter::Fits | Filter::Cached => false,
        };
        if filter.iter().any(impossible) {
            problems.push(Problem::new(
                &filters,
                "`queue_below` expects a duration above 0, like \"2s\", and `sequences_below` a number above 0",
            ));
        }
        problems
    }
}

/// Range of weights: beyond it every other term of a sum vanishes. A weight below 0 reverses a term.
const WEIGHTS: std::ops::RangeInclusive<f64> = -1e6..=1e6;

/// Maximum number of filters: the bits of [`Candidate::passes`](super::select::Candidate::passes).
const FILTERS_MAX: usize = 32;

/// The inputs of a composition for one worker.
pub(crate) struct Features<'a> {
    pub(crate) cost: Cost,
    pub(crate) prompt: Prompt,
    pub(crate) held: WorkerOverlap,
    pub(crate) estimate: &'a ServiceEstimate,
    pub(crate) stats: &'a LoadStats,
}

impl Composition {
    /// The score: the sum of the weighted terms. Lower is better.
    pub(crate) fn score(&self, features: &Features<'_>) -> f64 {
        self.scores(features).map(|(_, score)| score).sum()
    }

    /// The weighted terms of the score.
    pub(crate) fn scores(&self, features: &Features<'_>) -> impl Iterator<Item = (Term, f64)> {
        self.score.iter().map(|Score { term, weight }| (*term, weight * features.term(*term)))
    }

    /// A bit for each filter that the worker passes.
    pub(crate) fn passes(&self, features: &Features<'_>) -> u32 {
        self.filter
            .iter()
            .enumerate()
            .filter(|(_, filter)| features.pass(filter))
            .fold(0, |bits, (at, _)| bits | 1 << at)
    }
}

impl Features<'_> {
    fn term(&self, term: Term) -> f64 {
        let Self { cost, prompt, held, estimate, stats } = self;
        match term {
            Term::Overlap => {
                let saved = prompt.tokens.saturating_sub(prompt.uncached(*held));
                -(saved as f64) * estimate.seconds_per_token
            }
            Term::Queue => cost.queue,
            Term::MemoryWait => cost.memory_wait,
            Term::BatchWait => cost.batch_wait,
            Term::Prefill => cost.prefill,
            Term::Onboard => cost.onboard,
            Term::TierQueue => cost.tier_queue,
            Term::KvTransfer => cost.kv_transfer,
            Term::Decode => cost.decode,
            Term::DecodeSlowdown => cost.decode_slowdown,
            Term::DecodeStall => cost.decode_stall,
            Term::QueueExternality => cost.queue_externality,
            Term::SharedDevice => cost.shared_device,
            Term::Eviction => cost.eviction,
            Term::Sequences => stats.sequences.into(),
            Term::Memory => f64::from(stats.active_blocks) / f64::from(stats.total_blocks.max(1)),
        }
    }

    fn pass(&self, filter: &Filter) -> bool {
        match filter {
            Filter::Fits => self.cost.memory_wait <= 0.0,
            Filter::Cached => self.held.total() > 0,
            Filter::QueueBelow(time) => self.cost.queue < time.as_secs_f64(),
            Filter::SequencesBelow(count) => u64::from(self.stats.sequences) < *count,
        }
    }
}

impl Serialize for Policy {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Composed(composition) => composition.serialize(serializer),
            named => serializer.serialize_str(named.name()),
        }
    }
}

impl<'de> Deserialize<'de> for Policy {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct NameOrTable;

        impl<'de> Visitor<'de> for NameOrTable {
            type Value = Policy;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("the name of a policy, or a table of `filter`, `score` and `pick`")
            }

            fn visit_str<E: de::Error>(self, name: &str) -> Result<Policy, E> {
                let found = Policy::ALL.into_iter().find(|policy| policy.name() == name);
                // The last name is not accepted here: a composition is a table.
                found.ok_or_else(|| E::unknown_variant(name, &Policy::NAMES[..Policy::ALL.len()]))
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Policy, A::Error> {
                Composition::deserialize(MapAccessDeserializer::new(map)).map(Policy::Composed)
            }
        }

        deserializer.deserialize_any(NameOrTable)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load::{Measured, Speeds};

    #[derive(serde::Serialize, serde::Deserialize)]
    struct File {
        policy: Policy,
    }

    fn read(text: &str) -> Result<Policy, String> {
        toml::from_str::<File>(text).map(|file| file.policy).map_err(|error| error.to_string())
    }

    #[test]
    fn names_in_the_configuration_are_the_names_in_metrics() {
        for (policy, name) in Policy::ALL.into_iter().zip(Policy::NAMES) {
            assert_eq!(policy.name(), name);
            assert_eq!(read(&format!("policy = '{name}'")).unwrap(), policy);
        }
    }

    #[test]
    fn a_composition_is_read_and_written_and_unknown_names_fail() {
        let text = "policy = { filter = ['fits', { queue_below = '500ms' }], \
            score = [{ term = 'overlap', weight = 2.0 }, { term = 'queue' }], pick = 'weighted' }";
        let policy = read(text).unwrap();
        let Policy::Composed(Composition { filter, score, pick }) = &policy else { panic!("{policy:?}") };
        assert_eq!(
            (filter.as_slice(), *pick),
            (&[Filter::Fits, Filter::QueueBelow(HumanDuration::millis(500))][..], Pick::Weighted)
        );
        assert_eq!(score[1], Score { term: Term::Queue, weight: 1.0 });
        assert_eq!(read(&toml::to_string(&File { policy: policy.clone() }).unwrap()).unwrap(), policy);
        for (wrong, known) in [
            ("policy = 'robin'", "round-robin"),
            ("policy = { score = [{ term = 'ovrlap' }] }", "overlap"),
            ("policy = { filter = ['fit'], score = [] }", "fits"),
            ("policy = { score = [], pick = 'bst' }", "best"),
            ("policy = { scores = [] }", "score"),
        ] {
            let error = read(wrong).unwrap_err();
            assert!(error.contains(known), "`{known}` is not in: {error}");
        }
        let empty = read("policy = { score = [] }").unwrap();
        assert_eq!(empty.check("router.policy")[0].key, "router.policy.score");
    }

    #[test]
    fn scores_are_seconds_and_an_overlap_counts_in_favour() {
        let (cost, prompt) = (
            Cost { queue: 0.5, ..Cost::default() },
            Prompt { tokens: 100, block_size: 10, blocks: 12, output_tokens: 20.0 },
        );
        let speeds = Speeds { prefill: Measured::of(100.0), ..Speeds::default() };
        let stats = LoadStats { sequences: 3, active_blocks: 25, total_blocks: 100, speeds, ..LoadStats::default() };
        let features = Features {
            cost,
            prompt,
            held: WorkerOverlap::of([4, 0, 0, 0, 0]),
            estimate: &ServiceEstimate::of(&stats),
            stats: &stats,
        };
        let policy = read(
            "policy = { filter = ['cached', { sequences_below = 3 }, { queue_below = '600ms' }], \
            score = [{ term = 'overlap', weight = 2.0 }, { term = 'queue' }, { term = 'memory', weight = 4 }] }",
        );
        let Ok(Policy::Composed(composition)) = policy else { panic!("{policy:?}") };
        assert!((composition.score(&features) - (-2.0 * 0.4 + 0.5 + 1.0)).abs() < 1e-9);
        assert_eq!(composition.passes(&features), 0b101);
    }
}
