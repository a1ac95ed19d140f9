//! The `[router.admission]` section of the configuration.

use crate::problem::Problem;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Who waits, for how long, and who shares with whom.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Settings {
    /// Prompt tokens that may wait, all requests together. Default 4,194,304: 16 MiB of token ids beside bodies of about
    /// four times that, and more than a small fleet computes in the time that anybody waits.
    pub waiting_tokens_max: u64,
    /// Seconds that a request may wait. One that would wait for longer at the measured rate is refused on arrival. Default 60: then
    /// proxies give up on an answer that has not begun.
    pub wait_seconds_max: f64,
    /// By tenant: its share and its limits; `"*"` is for those not named.
    pub tenants: BTreeMap<String, Tenant>,
}

/// One tenant's share and limits.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Tenant {
    /// Its share beside others who wait. Default 1.
    pub weight: f64,
    /// Prompt tokens of its requests that run, until the last byte. Default none.
    pub running_tokens_max: Option<u64>,
    /// Prompt tokens of its requests that wait. Default none but the room's own.
    pub waiting_tokens_max: Option<u64>,
}

/// A tenant of whom nothing is said.
const UNNAMED: Tenant = Tenant { weight: 1.0, running_tokens_max: None, waiting_tokens_max: None };
/// Stands for tenants that are not named.
const EVERYBODY_ELSE: &str = "*";

impl Default for Settings {
    fn default() -> Self {
        Self { waiting_tokens_max: 4 << 20, wait_seconds_max: 60.0, tenants: BTreeMap::new() }
    }
}

impl Default for Tenant {
    fn default() -> Self {
        UNNAMED
    }
}

impl Settings {
    /// What holds for a tenant.
    pub(crate) fn tenant(&self, name: &str) -> &Tenant {
        self.tenants.get(name).or_else(|| self.tenants.get(EVERYBODY_ELSE)).unwrap_or(&UNNAMED)
    }

    /// All that is wrong with the values.
    pub(crate) fn check(&self) -> Vec<Problem> {
        let Self { wait_seconds_max, tenants, .. } = self;
        let mut problems = Vec::new();
        let wait = Problem::unless_within("router.admission.wait_seconds_max", *wait_seconds_max, 0.0..=86_400.0);
        problems.extend(wait);
        for (name, Tenant { weight, running_tokens_max, .. }) in tenants {
            let key = |key: &str| format!("router.admission.tenants.{name}.{key}");
            problems.extend(Problem::unless_within(&key("weight"), *weight, 0.001..=1000.0));
            if *running_tokens_max == Some(0) {
                let problem = "expected at least 1: with 0 none of its requests could ever run";
                problems.push(Problem::new(key("running_tokens_max"), problem));
            }
        }
        problems
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tenant_has_what_is_said_of_it_or_of_everybody_else() {
        let text = "[tenants.blue]\nweight = 3\nrunning_tokens_max = 100\n[tenants.\"*\"]\nweight = 0.5";
        let settings: Settings = toml::from_str(text).unwrap();
        assert_eq!(settings.check(), []);
        let blue = Tenant { weight: 3.0, running_tokens_max: Some(100), waiting_tokens_max: None };
        assert_eq!((settings.tenant("blue"), settings.tenant("red").weight), (&blue, 0.5));
        assert_eq!(Settings::default().tenant("red"), &Tenant::default());
    }

    #[test]
    fn an_impossible_value_is_an_error_that_names_it() {
        let wrong: Settings = toml::from_str("[tenants.blue]\nweight = 0").unwrap();
        assert_eq!(wrong.check()[0].key, "router.admission.tenants.blue.weight");
        let wrong: Settings = toml::from_str("wait_seconds_max = -1").unwrap();
        assert_eq!(wrong.check()[0].key, "router.admission.wait_seconds_max");
    }
}
