//! The `[router]` section of the configuration.

use crate::admission::settings::Settings as Admission;
use crate::balance;
use serde::{Deserialize, Serialize};

/// How requests are placed.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Settings {
    /// Which worker gets a request. Default `kv`: the lowest estimated time to first token.
    pub policy: Policy,
    /// Whether long prompts are prefilled on workers of their own. Default `auto`: when the estimated times say so.
    pub disaggregation: Disaggregation,
    /// How much the slowing of other people's decode counts beside one's own first token; 0 looks at the first token only.
    /// Default 1: a second is a second, whoever waits. Raise it where the time between tokens matters most.
    pub decode_weight: f64,
    /// Seeds what is random (`random`, `power-of-two`, and how ties fall). Default 0. Give each replica of a router its own,
    /// so that they do not fall the same way.
    pub seed: u64,
    /// Whether workers change between prefill and decode as traffic shifts.
    pub planner: balance::Settings,
    /// Who waits when the workers have too much to do.
    pub admission: Admission,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            policy: Policy::Kv,
            disaggregation: Disaggregation::Auto,
            decode_weight: 1.0,
            seed: 0,
            planner: balance::Settings::default(),
            admission: Admission::default(),
        }
    }
}

impl Settings {
    /// What is wrong with the values, naming the key.
    pub(crate) fn check(&self) -> Result<(), String> {
        if !self.decode_weight.is_finite() || self.decode_weight < 0.0 {
            return Err(format!("router.decode_weight: {} is not a number of at least 0", self.decode_weight));
        }
        self.planner.check()?;
        self.admission.check()
    }
}

/// Which worker gets a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Policy {
    /// The lowest estimated time to first token: queue, what is not cached, where the rest is to be had, decode load.
    #[default]
    Kv,
    /// Each in turn.
    RoundRobin,
    /// The shortest queue, cache or not.
    LeastLoaded,
    /// Any.
    Random,
    /// The less loaded of two drawn at random.
    PowerOfTwo,
}

impl Policy {
    /// All policies.
    pub const ALL: [Self; 5] = [Self::Kv, Self::RoundRobin, Self::LeastLoaded, Self::Random, Self::PowerOfTwo];

    /// The name in configuration, metrics and explanations.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Kv => "kv",
            Self::RoundRobin => "round-robin",
            Self::LeastLoaded => "least-loaded",
            Self::Random => "random",
            Self::PowerOfTwo => "power-of-two",
        }
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_in_the_configuration_are_the_names_in_metrics() {
        for policy in Policy::ALL {
            let settings: Settings = toml::from_str(&format!("policy = '{}'", policy.name())).unwrap();
            assert_eq!(settings.policy, policy);
        }
        assert_eq!(toml::from_str::<Settings>("").unwrap(), Settings::default());
    }

    #[test]
    fn an_unknown_key_or_an_impossible_value_is_an_error_that_names_it() {
        let error = toml::from_str::<Settings>("polcy = 'kv'").unwrap_err().to_string();
        assert!(error.contains("polcy"), "{error}");
        let error = Settings { decode_weight: f64::NAN, ..Settings::default() }.check().unwrap_err();
        assert!(error.contains("router.decode_weight"), "{error}");
    }
}
