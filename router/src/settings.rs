//! The `[router]` section of the configuration.

use crate::admission::settings::Settings as Admission;
use crate::index::Index;
use crate::planner;
use crate::policy::Policy;
use crate::problem::Problem;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::PathBuf;

/// How requests are placed.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Settings {
    /// What the keys below it are when nobody sets them. Default `balanced`. The loader fills them in.
    pub preset: Preset,
    /// Which worker gets a request. Default `kv`: the lowest estimated time to first token.
    pub policy: Policy,
    /// Whether long prompts are prefilled on workers of their own. Default `auto`: when the estimated times say so.
    pub disaggregation: Disaggregation,
    /// How much the slowing of other people's decode counts beside one's own first token; 0 looks at the first token only.
    /// Default 1: a second is a second, whoever waits. Raise it where the time between tokens matters most.
    pub decode_weight: f64,
    /// How many prompts are thought to wait behind each, beyond those that do. Default 0: only those who are there count. The
    /// more, the longer a request queues for a cached prefix rather than computing it again elsewhere.
    pub cache_bias: f64,
    /// Seeds what is random (`random`, `power-of-two`, and how ties fall). Default 0. Each replica of a router mixes its own
    /// name in, so that they do not fall the same way.
    pub seed: u64,
    /// Bytes that the index of who holds which block may take. Default 4 GiB: a hundred million blocks and more. Beyond, it forgets
    /// what nobody asked for lately.
    pub index_bytes: u64,
    /// A file to which a line is added for each request that was served, for `blockyard replay` and `blockyard fit`. Default none.
    pub record: Option<PathBuf>,
    /// Whether workers change between prefill and decode as traffic shifts.
    pub planner: planner::Settings,
    /// Who waits when the workers have too much to do.
    pub admission: Admission,
    /// What is otherwise for some models, by their id. Default nothing.
    pub models: BTreeMap<String, Overrides>,
}

/// What is otherwise for one model. What is not set is as for all.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Overrides {
    /// Starts from a preset instead of what holds for all.
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
    pub decode_weight: Option<f64>,
    /// As in [`Settings`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cache_bias: Option<f64>,
}

/// A set of defaults.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Preset {
    /// A second is a second, whoever waits.
    #[default]
    Balanced,
    /// Compute as little as possible twice: queue longer where the prefix is. For fleets that are full.
    Cache,
    /// Keep the time between tokens short: stay away from workers that decode a lot, and prefill apart sooner. For people who
    /// read along.
    Latency,
}

/// Whether a prompt may be prefilled on another worker than the one that decodes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Disaggregation {
    /// When the prefill would hold up decode for longer than the hand-over takes, and a prefill worker is not too busy.
    #[default]
    Auto,
    /// Whenever a prefill worker is there and a full block is not cached: for measurements.
    Always,
    /// Never: a prompt is prefilled where it is decoded.
    Never,
}

/// What one model's requests are placed by, nothing left open.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Tuning {
    pub(crate) policy: Policy,
    pub(crate) disaggregation: Disaggregation,
    pub(crate) decode_weight: f64,
    pub(crate) cache_bias: f64,
}

/// Weights beyond this make every other term of a sum of costs vanish.
const WEIGHTS: std::ops::RangeInclusive<f64> = 0.0..=1e6;
/// A pebibyte: more than any machine has.
const INDEX_BYTES_MAX: u64 = 1 << 50;

/// Settings that were checked, worked out for every model that they name.
#[derive(Debug)]
pub(crate) struct Rules {
    pub(crate) settings: Settings,
    everyone: Tuning,
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

    /// The settings that it stands for.
    pub fn settings(self) -> Settings {
        let (decode_weight, cache_bias) = match self {
            Self::Balanced => (1.0, 0.0),
            // As if two more waited everywhere: a prefix is worth three times its own time in queue.
            Self::Cache => (1.0, 2.0),
            // A step that one more sequence slows is paid by all of its batch, at every token.
            Self::Latency => (4.0, 0.0),
        };
        Settings {
            preset: self,
            policy: Policy::Kv,
            disaggregation: Disaggregation::Auto,
            decode_weight,
            cache_bias,
            seed: 0,
            index_bytes: Index::BUDGET as u64,
            record: None,
            planner: planner::Settings::default(),
            admission: Admission::default(),
            models: BTreeMap::new(),
        }
    }
}

impl Settings {
    /// All that is wrong with the values.
    pub fn check(&self) -> Vec<Problem> {
        let weights = |key: &str, weights: [(&str, Option<f64>); 2]| {
            let of = |(name, weight): (&str, Option<f64>)| {
                Problem::unless_within(&format!("{key}.{name}"), weight?, WEIGHTS)
            };
            weights.into_iter().filter_map(of).collect::<Vec<_>>()
        };
        let Self { decode_weight, cache_bias, .. } = self;
        let mut problems =
            weights("router", [("decode_weight", Some(*decode_weight)), ("cache_bias", Some(*cache_bias))]);
        let index_bytes = Index::BUDGET_LEAST as u64..=INDEX_BYTES_MAX;
        problems.extend(Problem::unless_within("router.index_bytes", self.index_bytes, index_bytes));
        problems.extend(self.planner.check());
        problems.extend(self.admission.check());
        problems.extend(self.policy.check("router.policy"));
        for (model, overrides) in &self.models {
            let Overrides { decode_weight, cache_bias, policy, .. } = overrides;
            let key = format!("router.models.{model}");
            problems.extend(weights(&key, [("decode_weight", *decode_weight), ("cache_bias", *cache_bias)]));
            problems.extend(policy.iter().flat_map(|policy| policy.check(&format!("{key}.policy"))));
        }
        problems
    }

    /// The same with one policy, whichever model is asked for.
    #[must_use]
    pub fn choosing(mut self, policy: &Policy) -> Self {
        self.models.values_mut().for_each(|model| model.policy = Some(policy.clone()));
        Self { policy: policy.clone(), ..self }
    }

    /// What holds for every model that is not named.
    pub(crate) fn tuning(&self) -> Tuning {
        let Self { policy, disaggregation, decode_weight, cache_bias, .. } = self.clone();
        Tuning { policy, disaggregation, decode_weight, cache_bias }
    }
}

impl Rules {
    /// Checks settings as a whole, and works them out.
    pub(crate) fn new(settings: Settings) -> Result<Self, String> {
        if let Some(problem) = settings.check().first() {
            return Err(problem.to_string());
        }
        Ok(Self::of_sound(settings))
    }

    /// Works out settings that were checked before.
    pub(crate) fn of_sound(settings: Settings) -> Self {
        let everyone = settings.tuning();
        let of = |(model, overrides): (&String, &Overrides)| (model.clone(), overrides.over(&everyone));
        let models = settings.models.iter().map(of).collect();
        Self { settings, everyone, models }
    }

    /// What holds for a model.
    pub(crate) fn of(&self, model: &str) -> &Tuning {
        self.models.get(model).unwrap_or(&self.everyone)
    }
}

impl Overrides {
    fn over(&self, everyone: &Tuning) -> Tuning {
        let base = self.preset.map_or_else(|| everyone.clone(), |preset| preset.settings().tuning());
        Tuning {
            policy: self.policy.clone().unwrap_or(base.policy),
            disaggregation: self.disaggregation.unwrap_or(base.disaggregation),
            decode_weight: self.decode_weight.unwrap_or(base.decode_weight),
            cache_bias: self.cache_bias.unwrap_or(base.cache_bias),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_key_or_an_impossible_value_is_an_error_that_names_it() {
        assert_eq!(toml::from_str::<Settings>("").unwrap(), Settings::default());
        let error = toml::from_str::<Settings>("polcy = 'kv'").unwrap_err().to_string();
        assert!(error.contains("polcy"), "{error}");
        for (text, key) in [
            ("decode_weight = nan", "router.decode_weight"),
            ("cache_bias = -1", "router.cache_bias"),
            ("cache_bias = 1e300", "router.cache_bias"),
            ("index_bytes = 1000", "router.index_bytes"),
            ("[models.small]\ndecode_weight = inf", "router.models.small.decode_weight"),
            ("[models.small]\npolicy = { score = [] }", "router.models.small.policy.score"),
            ("policy = { score = [{ term = 'queue', weight = nan }] }", "router.policy.score"),
            ("policy = { filter = [{ queue_below = -1 }], score = [{ term = 'queue' }] }", "router.policy.filter"),
            ("[planner]\nttft_s = 1e300", "router.planner.ttft_s"),
            ("[admission.tenants.a]\nrunning_tokens_max = 0", "router.admission.tenants.a.running_tokens_max"),
        ] {
            let problems = toml::from_str::<Settings>(text).unwrap().check();
            assert!(problems.len() == 1 && problems[0].key == key, "{text}: {problems:?}");
        }
    }

    #[test]
    fn a_model_of_its_own_starts_from_what_holds_for_all_or_from_a_preset() {
        let text =
            "decode_weight = 2\n[models.'a.b']\npolicy = 'session'\n[models.c]\npreset = 'cache'\ncache_bias = 9";
        let rules = Rules::new(toml::from_str(text).unwrap()).unwrap();
        let tuning = |model| {
            let Tuning { policy, decode_weight, cache_bias, .. } = rules.of(model);
            (policy.name(), *decode_weight, *cache_bias)
        };
        assert_eq!(tuning("anything"), ("kv", 2.0, 0.0));
        assert_eq!(tuning("a.b"), ("session", 2.0, 0.0));
        assert_eq!(tuning("c"), ("kv", 1.0, 9.0));
    }
}
