//! Latency targets of the service: the `[router.slo]` section of the configuration.
//!
//! The admission queue prefers requests that can still meet the first target (`admission/queue/order.rs`), and sends a
//! worker no more sequences than meet the second (`admission/saturation.rs`). Workers that meet both are preferred
//! (`policy/decide.rs`). The planner computes how many workers meet both. Costs weigh the time between tokens against
//! the time to first token by their ratio. Not here: the deadline that a request brings itself (`deadline_ms`).

use super::Problem;
use serde::{Deserialize, Serialize};
use std::ops::RangeInclusive;
use std::time::Duration;
use units::HumanDuration;

/// Targets of every request.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Slo {
    /// Target of the time to first token. Default none: the admission queue keeps the order of arrival, and the planner
    /// and the costs take 1 s.
    pub ttft: Option<HumanDuration>,
    /// Target of the time between tokens. Default none: workers are filled up to their batch and memory, and the
    /// planner and the costs take 50 ms.
    pub itl: Option<HumanDuration>,
}

/// Accepted range of targets: from less than any decode step to a day.
const TARGETS: RangeInclusive<HumanDuration> =
    HumanDuration(Duration::from_micros(100))..=HumanDuration(Duration::from_hours(24));

impl Slo {
    /// Problems with the values.
    pub(crate) fn check(&self) -> Vec<Problem> {
        let keys = [("router.slo.ttft", self.ttft), ("router.slo.itl", self.itl)];
        keys.into_iter().filter_map(|(key, target)| Problem::unless_within(key, target?, TARGETS)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_target_of_zero_is_an_error_that_names_the_key() {
        let problems = Slo { itl: Some(HumanDuration::default()), ..Slo::default() }.check();
        assert_eq!(problems[0].key, "router.slo.itl");
        assert_eq!(Slo::default().check(), []);
    }
}
