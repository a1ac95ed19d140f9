//! Runs of a trace at a request rate, and the highest rate that a fleet sustains.

use super::options::{Options, PolicyUnderTest};
use super::results::Results;
use super::simulation::{Simulation, Stalled};
use super::trace::Trace;
use crate::policy::Policy;
use crate::settings::Settings;

/// Replays a trace at `rate` requests per second, with the seeds 0 to `runs` - 1, and averages the results.
pub fn replay(
    trace: &Trace,
    options: &Options,
    policy: &PolicyUnderTest,
    rate: f64,
    runs: u64,
) -> Result<Results, Stalled> {
    let run = |seed| Simulation::new(trace, options, policy, rate, seed).run();
    let all: Vec<Results> =
        (0..runs.max(1)).map(|seed| Ok(run(seed)?.results(rate, options.slo))).collect::<Result<_, _>>()?;
    Ok(Results { policy: policy.name().to_owned(), ..Results::mean_of_runs(&all) })
}

/// The highest rate, in requests per second, at which `least-loaded` keeps its p99 time to first token below ten times
/// that of an idle fleet. The default settings apply, so that a load factor means the same rate whatever is tuned.
/// `progress` receives each tried rate and its p99 time to first token, in seconds.
pub fn capacity(trace: &Trace, options: &Options, mut progress: impl FnMut(f64, f64)) -> Result<f64, Stalled> {
    let options = &Options { settings: Settings::default(), ..options.clone() };
    let mut p99 = |rate| {
        let p99 = replay(trace, options, &PolicyUnderTest::Policy(Policy::LeastLoaded), rate, 1)?.ttft_p99_s;
        progress(rate, p99);
        Ok(p99)
    };
    // Upper bound: prefill alone, without cache hits.
    let prefill: f64 = trace.requests.iter().map(|spec| options.profile.prefill_s(spec.input_tokens, 0)).sum();
    let at_most = options.workers.len() as f64 * trace.len() as f64 / prefill;
    let limit = SATURATION_FACTOR * p99(at_most * IDLE_LOAD)?;
    let (mut low, mut high) = (at_most * 0.1, at_most * 2.0);
    while high / low > 1.0 + RATE_PRECISION {
        let middle = (low * high).sqrt();
        *(if p99(middle)? < limit { &mut low } else { &mut high }) = middle;
    }
    Ok(low)
}

/// The p99 time to first token of a saturated fleet, divided by that of an idle fleet.
pub const SATURATION_FACTOR: f64 = 10.0;
/// Load of an idle fleet, as a share of the upper bound: requests rarely overlap.
const IDLE_LOAD: f64 = 0.02;
/// The search ends when its bounds differ by this share.
const RATE_PRECISION: f64 = 0.01;
