//! The `[router]` section of the configuration.

use crate::admission::Settings as Admission;
use crate::config::{Problem, Slo};
use crate::index::Index;
use crate::policy::planner::{self, Targets};
use crate::policy::{Disaggregation, Policy, Tuning};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::PathBuf;
use units::ByteSize;

/// Settings of the router.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Settings {
    /// Choice of the worker for a request. Default `kv`: the lowest estimated cost.
    pub policy: Policy,
    /// Whether a long prompt is prefilled on a prefill worker. Default `auto`: when the estimated times are shorter.
    pub disaggregation: Disaggregation,
    /// Weight of the time between tokens, of a request and of those beside it, relative to the time to first token. At
    /// 1 both count the same in units of their targets (`slo`). 0 considers the time to first token only. Default 1.
    pub decode_interference_weight: f64,
    /// Whether workers copy prefixes that many requests share into their host memory before a request needs them, from
    /// the memory of another worker or from a store. Default true: no request waits for it. False where each read of a
    /// store costs money.
    pub prefetch: bool,
    /// Seed of random choices (`random`, `power-of-two`, and ties). Default 0. Each router replica mixes its own id in,
    /// so that replicas choose differently.
    pub seed: u64,
    /// Maximum memory of the prefix index, at least 1 MiB. Default 4 GiB: more than a hundred million blocks. At the
    /// maximum the index evicts blocks that were not requested recently.
    pub index_memory: ByteSize,
    /// Trace file: the router appends a line for each served request, for `blockyard replay` and `blockyard calibrate`.
    /// Default none.
    pub trace_file: Option<PathBuf>,
    /// Latency targets, for the admission queue, the choice of workers, the planner and costs.
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
    /// As in [`Settings`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub policy: Option<Policy>,
    /// As in [`Settings`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disaggregation: Option<Disaggregation>,
    /// As in [`Settings`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub decode_interference_weight: Option<f64>,
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
        Self {
            policy: Policy::Kv,
            disaggregation: Disaggregation::Auto,
            decode_interference_weight: 1.0,
            prefetch: true,
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
        let weight =
            |key: &str, weight| Problem::unless_within(&format!("{key}.decode_interference_weight"), weight, WEIGHTS);
        let mut problems: Vec<Problem> = weight("router", self.decode_interference_weight).into_iter().collect();
        let index_memory = ByteSize(Index::MIN_MEMORY_LIMIT as u64)..=INDEX_MEMORY_MAX;
        problems.extend(Problem::unless_within("router.index_memory", self.index_memory, index_memory));
        problems.extend(self.slo.check());
        problems.extend(self.planner.check());
        problems.extend(self.admission.check());
        problems.extend(self.policy.check("router.policy"));
        for (model, overrides) in &self.models {
            let Overrides { decode_interference_weight, policy, .. } = overrides;
            let key = format!("router.models.{model}");
            problems.extend(decode_interference_weight.and_then(|of_model| weight(&key, of_model)));
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
        let Self { policy, disaggregation, decode_interference_weight, slo, .. } = self;
        let decode_tokens = decode_interference_weight * Targets::of(slo).ratio();
        let itl = slo.itl.map(units::HumanDuration::as_secs_f64);
        Tuning { policy: policy.clone(), disaggregation: *disaggregation, decode_tokens, itl }
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
        let target_ratio = Targets::of(&settings.slo).ratio();
        let of =
            |(model, overrides): (&String, &Overrides)| (model.clone(), overrides.over(&default_tuning, target_ratio));
        let models = settings.models.iter().map(of).collect();
        Self { settings, default_tuning, models }
    }

    /// Tuning of a model.
    pub(crate) fn of(&self, model: &str) -> &Tuning {
        self.models.get(model).unwrap_or(&self.default_tuning)
    }
}

impl Overrides {
    /// `target_ratio`: of the first token to that between tokens.
    fn over(&self, default_tuning: &Tuning, target_ratio: f64) -> Tuning {
        let Tuning { policy, disaggregation, decode_tokens, itl } = default_tuning.clone();
        let of_model = self.decode_interference_weight.map(|weight| weight * target_ratio);
        Tuning {
            policy: self.policy.clone().unwrap_or(policy),
            disaggregation: self.disaggregation.unwrap_or(disaggregation),
            decode_tokens: of_model.unwrap_or(decode_tokens),
            itl,
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
            ("decode_interference_weight = -1", "router.decode_interference_weight"),
            ("decode_interference_weight = 1e300", "router.decode_interference_weight"),
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
    fn model_overrides_start_from_all_models() {
        let text = "decode_interference_weight = 2\n[models.'a.b']\npolicy = 'session'\n[models.c]\n\
                    decode_interference_weight = 9\n[slo]\nttft = '2s'\nitl = '50ms'";
        let resolved = ResolvedSettings::new(toml::from_str(text).unwrap()).unwrap();
        let tuning = |model| {
            let Tuning { policy, decode_tokens, .. } = resolved.of(model);
            (policy.name(), *decode_tokens as u64)
        };
        assert_eq!(tuning("anything"), ("kv", 80));
        assert_eq!(tuning("a.b"), ("session", 80));
        assert_eq!(tuning("c"), ("kv", 360));
        assert_eq!((resolved.of("c").itl, Settings::default().tuning().itl), (Some(0.05), None));
    }
}
