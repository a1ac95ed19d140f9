//! The highest request rate that a fleet sustains.

use super::options::{Options, PolicyUnderTest};
use super::profile::Profile;
use super::results::RunOutcome;
use super::simulation::{RunError, Simulation};
use super::trace::{BLOCK_TOKENS, Trace};
use super::traffic::Traffic;
use crate::policy::Policy;
use crate::state::Settings;
use std::collections::HashSet;

/// The service of a fleet at a rate, in seconds.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Service {
    /// 99th percentile of the time to first token; infinite when admission rejects more than a hundredth.
    pub ttft_p99_s: f64,
    /// Median time between tokens.
    pub itl_p50_s: f64,
}

/// The highest rate, in requests per second, at which `least-loaded` keeps its p99 time to first token and its median
/// time between tokens below ten times those of an idle fleet. A request that admission rejects counts as one whose
/// first token never comes. The default settings apply, without copies ahead of demand, so that a load factor means the
/// same rate whatever is tuned. `progress` receives each tried rate and its service.
pub fn capacity(traffic: &Traffic, options: &Options, mut progress: impl FnMut(f64, Service)) -> Result<f64, RunError> {
    let options = &Options { settings: Settings { prefetch: false, ..Settings::default() }, ..options.clone() };
    let mut service = |rate| {
        let policy = PolicyUnderTest::Policy(Policy::LeastLoaded);
        let outcome = Simulation::new(&traffic.at(rate, SEED), options, &policy, rate, SEED)?.run()?;
        let service = Service::of(&outcome);
        progress(rate, service);
        Ok::<_, RunError>(service)
    };
    let trace = traffic.at(1.0, SEED);
    let [without_hits, with_all_hits] = rate_bounds(&trace, &options.profile, options.workers.len() as f64);
    let idle = service(without_hits * IDLE_LOAD)?;
    let (mut low, mut high) = (without_hits * LOWEST, with_all_hits * HIGHEST);
    while high / low > 1.0 + RATE_PRECISION {
        let middle = (low * high).sqrt();
        *(if service(middle)?.is_within(SATURATION_FACTOR, idle) { &mut low } else { &mut high }) = middle;
    }
    Ok(low)
}

/// The p99 time to first token, and the median time between tokens, of a saturated fleet, divided by those of an idle
/// fleet.
pub const SATURATION_FACTOR: f64 = 10.0;
/// Load of an idle fleet, as a share of the bound without cache hits: requests rarely overlap.
const IDLE_LOAD: f64 = 0.02;
/// Where the search begins, as shares of the bound without and with cache hits. Prompts of very different lengths
/// saturate a fleet far below the first; and for the time of a run a fleet bears somewhat more than the second.
const LOWEST: f64 = 0.1;
const HIGHEST: f64 = 1.5;
/// The search ends when its bounds differ by this share.
const RATE_PRECISION: f64 = 0.01;
const SEED: u64 = 0;

impl Service {
    pub(super) fn of(outcome: &RunOutcome) -> Self {
        Self { ttft_p99_s: outcome.ttft_quantile_of_all(0.99), itl_p50_s: outcome.inter_token_gaps.quantile(0.5) }
    }

    fn is_within(self, factor: f64, idle: Self) -> bool {
        // Of outputs of one token no time between tokens is known.
        self.ttft_p99_s < factor * idle.ttft_p99_s && self.itl_p50_s <= factor * idle.itl_p50_s
    }
}

/// Rates at which the work of all requests takes all time of `workers`: prefill alone without any cache hit; and
/// prefill and decode, without the constant time of steps, when all is cached that an unlimited cache has.
fn rate_bounds(trace: &Trace, profile: &Profile, workers: f64) -> [f64; 2] {
    let mut seen = HashSet::<u32>::new();
    let (mut without_hits, mut with_all_hits) = (0.0, 0.0);
    for spec in &trace.requests {
        let cached = spec.blocks.iter().take_while(|block| !seen.insert(**block)).count();
        seen.extend(&spec.blocks);
        let cached = (cached as u64 * BLOCK_TOKENS).min(spec.input_tokens - 1);
        without_hits += profile.prefill_s(spec.input_tokens, 0);
        with_all_hits += profile.prefill_s(spec.input_tokens - cached, cached) + profile.decode_s(spec);
    }
    [without_hits, with_all_hits].map(|seconds| workers * trace.len() as f64 / seconds)
}
