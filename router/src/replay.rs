//! Simulation of this router over a trace, in virtual time, to compare policies, request rates and fleets.
//!
//! ```text
//!   trace ─▶ arrivals ─▶ SimulatedRouter: index, load, cost, selection ─▶ Engine: pool, batch, steps ─▶ Results, plot
//!                               ▲                                              │
//!                               └──────── block events and load reports ───────┘  (delayed or lost, as configured)
//! ```
//! The routing code is the code that serves requests; only workers and time are simulated. The same trace, options and
//! seed give the same results, bit for bit. `calibrate` derives a worker profile from a trace of served requests.
//!
//! Not here: retries, because a simulated worker does not fail.

mod admission;
mod baselines;
#[doc(hidden)]
pub mod bench_support;
mod calibration;
mod engine;
mod lru;
mod plane;
mod planner;
mod plot;
mod pool;
mod profile;
mod results;
mod router;
mod simulation;
mod trace;

#[cfg(test)]
mod tests;

pub use calibration::{Calibration, CalibrationError, calibrate};
pub use plot::goodput_svg;
pub use profile::{Link, Profile, Store};
pub use results::{Results, Slo};
pub use simulation::Stalled;
pub use trace::{BLOCK_TOKENS, Trace, TraceError};

use crate::policy::Policy;
use crate::settings::{Preset, Settings};
use simulation::Simulation;
use std::time::Duration;
use worker::plane::Role;

/// How the worker of a request is chosen.
#[derive(Clone, PartialEq, Debug)]
pub enum PolicyUnderTest {
    /// A policy of this router, for every model. All other settings are [`Options::settings`].
    Policy(Policy),
    /// This router with its own settings, and their name in output.
    Settings(&'static str, Box<Settings>),
    /// The cost function in NVIDIA Dynamo's documentation.
    DynamoCost,
    /// The cache-aware rule in SMG's documentation.
    SmgCacheAware,
}

/// The simulated fleet, and the delivery of events and reports to the router.
#[derive(Clone, PartialEq, Debug)]
pub struct Options {
    /// Speed and memory of each worker.
    pub profile: Profile,
    /// Role of each worker.
    pub workers: Vec<Role>,
    /// Number of routers that share the requests. Routers exchange their reservations.
    pub replicas: usize,
    /// Delay of block events, load reports and messages between routers.
    pub event_delay: Duration,
    /// Share of block events that are lost, from 0 to 1.
    pub event_loss: f64,
    /// Share of the requests, from 0 to 1, after which no event is lost.
    pub event_loss_until: f64,
    /// Delay of a snapshot that a router requests after it has missed events.
    pub resync_delay: Duration,
    /// Limits that a request must meet to count as goodput.
    pub slo: Slo,
    /// Whether requests pass the admission queue.
    pub admission: AdmissionMode,
    /// Whether the planner changes workers between prefill and decode.
    pub rebalance: bool,
    /// Settings of the router, already validated.
    pub settings: Settings,
}

/// Whether requests pass the router's admission queue.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum AdmissionMode {
    /// Every request is sent to its worker at once, whatever the load.
    #[default]
    Off,
    /// A request is queued while its worker is overloaded.
    Queue,
    /// As `Queue`; also rejects a request whose first token would come later than the SLO's time to first token.
    Deadline,
}

impl AdmissionMode {
    /// Name in output.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::Queue => "queue",
            Self::Deadline => "deadline",
        }
    }
}

impl PolicyUnderTest {
    /// All policies of this router, then those of other routers.
    pub fn all() -> Vec<Self> {
        Policy::ALL.into_iter().map(Self::Policy).chain([Self::DynamoCost, Self::SmgCacheAware]).collect()
    }

    /// The presets. `balanced` has the default settings, and so equals `kv`.
    pub fn presets() -> [Self; 3] {
        Preset::ALL.map(|preset| Self::Settings(preset.name(), Box::new(preset.settings())))
    }

    /// Name in output.
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Policy(policy) => policy.name(),
            Self::Settings(name, _) => name,
            Self::DynamoCost => "dynamo-cost",
            Self::SmgCacheAware => "smg-cache-aware",
        }
    }
}

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
