//! The `[router.admission]` section of the configuration.

use crate::config::Problem;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::time::Duration;
use units::HumanDuration;

/// Limits of the admission queue, and shares of tenants.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Settings {
    /// Maximum number of prompt tokens in the queue, of all requests together. Default 4,194,304: 16 MiB of token ids
    /// beside bodies of about four times that, and more than a small fleet computes in `max_queue_time`.
    pub max_queued_tokens: u64,
    /// Maximum time of a request in the queue. A request whose estimated time at the measured rate is longer is
    /// rejected on arrival. Default 60 s: after that time proxies time out.
    pub max_queue_time: HumanDuration,
    /// What becomes of a request that waits and can no longer meet `router.slo.ttft`. Default `last`.
    pub late_requests: LateRequests,
    /// Share and limits of each tenant; `"*"` is for all other tenants.
    pub tenants: BTreeMap<String, Tenant>,
}

/// What becomes of a queued request that can no longer meet the target of the time to first token.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LateRequests {
    /// It waits behind those that can.
    #[default]
    Last,
    /// It is rejected.
    Reject,
}

/// One tenant's share and limits.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Tenant {
    /// Share of the service, relative to other tenants with queued requests. Default 1.
    pub weight: f64,
    /// Maximum number of prompt tokens of its running requests, until their last byte is sent. Default: no limit.
    pub max_inflight_tokens: Option<u64>,
    /// Maximum number of prompt tokens of its queued requests. Default: no limit but the queue's.
    pub max_queued_tokens: Option<u64>,
}

/// Allowed values of `max_queue_time`.
const QUEUE_TIME: RangeInclusive<HumanDuration> =
    HumanDuration(Duration::ZERO)..=HumanDuration(Duration::from_hours(24));
/// Limits of a tenant that is not in the configuration.
const DEFAULT_TENANT: Tenant = Tenant { weight: 1.0, max_inflight_tokens: None, max_queued_tokens: None };
/// Key of the limits of all other tenants.
const OTHER_TENANTS: &str = "*";

impl Default for Settings {
    fn default() -> Self {
        Self {
            max_queued_tokens: 4 << 20,
            max_queue_time: HumanDuration::secs(60),
            late_requests: LateRequests::Last,
            tenants: BTreeMap::new(),
        }
    }
}

impl Default for Tenant {
    fn default() -> Self {
        DEFAULT_TENANT
    }
}

impl Settings {
    /// Share and limits of a tenant.
    pub(crate) fn tenant(&self, name: &str) -> &Tenant {
        self.tenants.get(name).or_else(|| self.tenants.get(OTHER_TENANTS)).unwrap_or(&DEFAULT_TENANT)
    }

    /// Problems with the values.
    pub(crate) fn check(&self) -> Vec<Problem> {
        let Self { max_queue_time, tenants, .. } = self;
        let mut problems = Vec::new();
        problems.extend(Problem::unless_within("router.admission.max_queue_time", *max_queue_time, QUEUE_TIME));
        for (name, Tenant { weight, max_inflight_tokens, .. }) in tenants {
            let key = |key: &str| format!("router.admission.tenants.{name}.{key}");
            problems.extend(Problem::unless_within(&key("weight"), *weight, 0.001..=1000.0));
            if *max_inflight_tokens == Some(0) {
                let problem = "expected at least 1: with 0 none of its requests could ever run";
                problems.push(Problem::new(key("max_inflight_tokens"), problem));
            }
        }
        problems
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tenant_gets_its_own_settings_or_those_of_all_others() {
        let text = "[tenants.blue]\nweight = 3\nmax_inflight_tokens = 100\n[tenants.\"*\"]\nweight = 0.5";
        let settings: Settings = toml::from_str(text).unwrap();
        assert_eq!(settings.check(), []);
        let blue = Tenant { weight: 3.0, max_inflight_tokens: Some(100), max_queued_tokens: None };
        assert_eq!((settings.tenant("blue"), settings.tenant("red").weight), (&blue, 0.5));
        assert_eq!(Settings::default().tenant("red"), &Tenant::default());
    }

    #[test]
    fn invalid_value_is_an_error_that_names_its_key() {
        let wrong: Settings = toml::from_str("[tenants.blue]\nweight = 0").unwrap();
        assert_eq!(wrong.check()[0].key, "router.admission.tenants.blue.weight");
        let wrong: Settings = toml::from_str("max_queue_time = '25h'").unwrap();
        assert_eq!(wrong.check()[0].key, "router.admission.max_queue_time");
    }
}
