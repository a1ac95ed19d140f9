//! The `[router]` section of the configuration.

use crate::admission::Settings as Admission;
use crate::index::Index;
use crate::policy::{Disaggregation, Policy, Tuning, planner};
use crate::problem::Problem;
use crate::slo::Slo;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::PathBuf;
use units::ByteSize;

/// Settings of the router.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Settings {
    /// Defaults of `policy`, `disaggregation`, `decode_interference_weight` and `prefix_affinity`. Default `balanced`.
    /// The loader fills them in.
    pub preset: Preset,
    /// Choice of the worker for a request. Default `kv`: the lowest estimated time to first token.
    pub policy: Policy,
    /// Whether a long prompt is prefilled on a prefill worker. Default `auto`: when the estimated times are shorter.
    pub disaggregation: Disaggregation,
    /// Weight of the delay that a prompt causes to sequences that decode, relative to its own time to first token. 0
    /// ignores the delay. Default 1: both count the same. A larger weight keeps the time between tokens shorter.
    pub decode_interference_weight: f64,
    /// Preference for workers that hold the prefix of a prompt: a number of prompts, from 0 to 1,000,000, also
    /// fractional. That many prompts are assumed to queue behind each prompt, beyond those that do. With a larger value
    /// a request queues longer for a cached prefix instead of computing it again on another worker. Default 0: only
    /// real queues count.
    pub prefix_affinity: f64,
    /// Seed of random choices (`random`, `power-of-two`, and ties). Default 0. Each router replica mixes its own id in,
    /// so that replicas choose differently.
    pub seed: u64,
    /// Maximum memory of the prefix index, at least 1 MiB. Default 4 GiB: more than a hundred million blocks. At the
    /// maximum the index evicts blocks that were not requested recently.
    pub index_memory: ByteSize,
    /// Trace file: the router appends a line for each served request, for `blockyard replay` and `blockyard calibrate`.
    /// Default none.
    pub trace_file: Option<PathBuf>,
    /// Latency targets, for the order of the admission queue and for the planner.
    pub slo: Slo,
    /// Planning of roles: whether workers change between prefill and decode as traffic shifts.
    pub planner: planner::Settings,
    /// Queueing of requests when the workers are overloaded.
    pub admission: Admission,
    /// Overrides for single models, by model id. Default none.
    pub models: BTreeMap<String, Overrides>,
}

/// Overrides for one model. A key that is not set is as for all models.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Overrides {
    /// A preset instead of the settings for all models.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub preset: Option<Preset>,
    /// As in [`Settings`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub policy: Option<Policy>,
    /// As in [`Settings`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disaggregation: Option<Disaggregation>,
    /// As in [`Settings`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub decode_interference_weight: Option<f64>,
    /// As in [`Settings`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prefix_affinity: Option<f64>,
}

/// A set of defaults.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Preset {
    /// The delay of other requests counts as much as a request's own.
    #[default]
    Balanced,
    /// Requests queue longer for a cached prefix, so that less is computed twice. For fleets under full load.
    Cache,
    /// Short time between tokens: requests avoid workers that decode many sequences, and are disaggregated sooner. For
    /// interactive use.
    Latency,
}

/// Larger weights would make every other term of a sum of costs vanish.
const WEIGHTS: std::ops::RangeInclusive<f64> = 0.0..=1e6;
/// Upper limit of `index_memory`: more than any machine has.
const INDEX_MEMORY_MAX: ByteSize = ByteSize(1 << 50);

/// Checked settings, with those of each model resolved.
#[derive(Debug)]
pub(crate) struct ResolvedSettings {
    pub(crate) settings: Settings,
    default_tuning: Tuning,
    models: BTreeMap<String, Tuning>,
}

impl Default for Settings {
    fn default() -> Self {
        Preset::Balanced.settings()
    }
}

impl Preset {
    /// All presets.
    pub const ALL: [Self; 3] = [Self::Balanced, Self::Cache, Self::Latency];

    /// The name in configuration and output.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Balanced => "balanced",
            Self::Cache => "cache",
            Self::Latency => "latency",
        }
    }

    /// The settings of a preset.
    pub fn settings(self) -> Settings {
        let (decode_interference_weight, prefix_affinity) = match self {
            Self::Balanced => (1.0, 0.0),
            // As if two more prompts queued everywhere: a prefix is worth three times its own prefill time.
            Self::Cache => (1.0, 2.0),
            // One more sequence slows each step of its whole batch.
            Self::Latency => (4.0, 0.0),
        };
        Settings {
            preset: self,
            policy: Policy::Kv,
            disaggregation: Disaggregation::Auto,
            decode_interference_weight,
            prefix_affinity,
            seed: 0,
            index_memory: ByteSize(Index::DEFAULT_MEMORY_LIMIT as u64),
            trace_file: None,
            slo: Slo::default(),
            planner: planner::Settings::default(),
            admission: Admission::default(),
            models: BTreeMap::new(),
        }
    }
}

impl Settings {
    /// Problems with the values.
    pub fn check(&self) -> Vec<Problem> {
        let weights = |key: &str, weights: [(&str, Option<f64>); 2]| {
            let of = |(name, weight): (&str, Option<f64>)| {
                Problem::unless_within(&format!("{key}.{name}"), weight?, WEIGHTS)
            };
            weights.into_iter().filter_map(of).collect::<Vec<_>>()
        };
        let Self { decode_interference_weight, prefix_affinity, .. } = self;
        let mut problems = weights(
            "router",
            [
                ("decode_interference_weight", Some(*decode_interference_weight)),
                ("prefix_affinity", Some(*prefix_affinity)),
            ],
        );
        let index_memory = ByteSize(Index::MIN_MEMORY_LIMIT as u64)..=INDEX_MEMORY_MAX;
        problems.extend(Problem::unless_within("router.index_memory", self.index_memory, index_memory));
        problems.extend(self.slo.check());
        problems.extend(self.planner.check());
        problems.extend(self.admission.check());
        problems.extend(self.policy.check("router.policy"));
        for (model, overrides) in &self.models {
            let Overrides { decode_interference_weight, prefix_affinity, policy, .. } = overrides;
            let key = format!("router.models.{model}");
            problems.extend(weights(
                &key,
                [("decode_interference_weight", *decode_interference_weight), ("prefix_affinity", *prefix_affinity)],
            ));
            problems.extend(policy.iter().flat_map(|policy| policy.check(&format!("{key}.policy"))));
        }
        problems
    }

    /// The same settings with one policy for all models.
    #[must_use]
    pub fn choosing(mut self, policy: &Policy) -> Self {
        self.models.values_mut().for_each(|model| model.policy = Some(policy.clone()));
        Self { policy: policy.clone(), ..self }
    }

    /// Tuning of models that are not named.
    pub(crate) fn tuning(&self) -> Tuning {
        let Self { policy, disaggregation, decode_interference_weight, prefix_affinity, .. } = self.clone();
        Tuning { policy, disaggregation, decode_interference_weight, prefix_affinity }
    }
}

impl ResolvedSettings {
    /// Checks settings and resolves them.
    pub(crate) fn new(settings: Settings) -> Result<Self, String> {
        if let Some(problem) = settings.check().first() {
            return Err(problem.to_string());
        }
        Ok(Self::from_valid(settings))
    }

    /// Resolves settings that were checked before.
    pub(crate) fn from_valid(settings: Settings) -> Self {
        let default_tuning = settings.tuning();
        let of = |(model, overrides): (&String, &Overrides)| (model.clone(), overrides.over(&default_tuning));
        let models = settings.models.iter().map(of).collect();
        Self { settings, default_tuning, models }
    }

    /// Tuning of a model.
    pub(crate) fn of(&self, model: &str) -> &Tuning {
        self.models.get(model).unwrap_or(&self.default_tuning)
    }
}

impl Overrides {
    fn over(&self, default_tuning: &Tuning) -> Tuning {
        let base = self.preset.map_or_else(|| default_tuning.clone(), |preset| preset.settings().tuning());
        Tuning {
            policy: self.policy.clone().unwrap_or(base.policy),
            disaggregation: self.disaggregation.unwrap_or(base.disaggregation),
            decode_interference_weight: self.decode_interference_weight.unwrap_or(base.decode_interference_weight),
            prefix_affinity: self.prefix_affinity.unwrap_or(base.prefix_affinity),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_key_or_invalid_value_is_an_error_that_names_it() {
        assert_eq!(toml::from_str::<Settings>("").unwrap(), Settings::default());
        let error = toml::from_str::<Settings>("polcy = 'kv'").unwrap_err().to_string();
        assert!(error.contains("polcy"), "{error}");
        for (text, key) in [
            ("decode_interference_weight = nan", "router.decode_interference_weight"),
            ("prefix_affinity = -1", "router.prefix_affinity"),
            ("prefix_affinity = 1e300", "router.prefix_affinity"),
            ("index_memory = '1000B'", "router.index_memory"),
            ("[models.small]\ndecode_interference_weight = inf", "router.models.small.decode_interference_weight"),
            ("[models.small]\npolicy = { score = [] }", "router.models.small.policy.score"),
            ("policy = { score = [{ term = 'queue', weight = nan }] }", "router.policy.score"),
            ("policy = { filter = [{ queue_below = 0 }], score = [{ term = 'queue' }] }", "router.policy.filter"),
            ("[planner]\nmax_workers = 1", "router.planner.max_workers"),
            ("[slo]\nttft = '25h'", "router.slo.ttft"),
            ("[admission.tenants.a]\nmax_inflight_tokens = 0", "router.admission.tenants.a.max_inflight_tokens"),
        ] {
            let problems = toml::from_str::<Settings>(text).unwrap().check();
            assert!(problems.len() == 1 && problems[0].key == key, "{text}: {problems:?}");
        }
    }

    #[test]
    fn model_overrides_start_from_all_models_or_a_preset() {
        let text = "decode_interference_weight = 2\n[models.'a.b']\npolicy = 'session'\n[models.c]\npreset = 'cache'\n\
                    prefix_affinity = 9";
        let resolved = ResolvedSettings::new(toml::from_str(text).unwrap()).unwrap();
        let tuning = |model| {
            let Tuning { policy, decode_interference_weight, prefix_affinity, .. } = resolved.of(model);
            (policy.name(), *decode_interference_weight, *prefix_affinity)
        };
        assert_eq!(tuning("anything"), ("kv", 2.0, 0.0));
        assert_eq!(tuning("a.b"), ("session", 2.0, 0.0));
        assert_eq!(tuning("c"), ("kv", 1.0, 9.0));
    }
}
