//! Replays a trace through this router on virtual time: what would have been, with other policies, rates and workers.
//!
//! ```text
//!   trace ─▶ arrivals ─▶ Routing: index, books, cost, select ─▶ Engine: pool, batch, steps ─▶ figures, picture
//!                           ▲                                     │
//!                           └──── block events and reports ───────┘  (late, or lost, if asked for)
//! ```
//! The router's part is the live one's own code; only workers and time are made up. The same trace, options and seed give
//! the same figures to the last bit. Look here in vain for retries: a replayed worker does not fail.

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

pub use calibration::{Fit, FitError, fit};
pub use plot::goodput_svg;
pub use profile::{Link, Profile, Store};
pub use results::{Figures, Slo};
pub use simulation::Standstill;
pub use trace::{BLOCK_TOKENS, Trace, TraceError};

use crate::policy::Policy;
use crate::settings::{Preset, Settings};
use simulation::Simulation;
use std::time::Duration;
use worker::plane::Phase;

/// Who chooses the worker.
#[derive(Clone, PartialEq, Debug)]
pub enum Chooser {
    /// A policy of this router for every model; all else is as [`Options::settings`] say.
    Policy(Policy),
    /// This router with settings of its own, which have a name.
    Settings(&'static str, Box<Settings>),
    /// The cost function that NVIDIA Dynamo documents.
    DynamoCost,
    /// The cache-aware rule that SMG documents.
    SmgCacheAware,
}

/// The fleet, and the planes between it and the router.
#[derive(Clone, PartialEq, Debug)]
pub struct Options {
    /// Each worker.
    pub profile: Profile,
    /// What each of them is there for.
    pub workers: Vec<Phase>,
    /// How many routers share the requests, each telling the others what it books.
    pub replicas: usize,
    /// How late block events and reports arrive.
    pub lag: Duration,
    /// The share of block events that never arrive.
    pub loss: f64,
    /// The share of the requests after which no event is lost any more.
    pub loss_until: f64,
    /// How long a snapshot takes that a router asks for because it has missed events.
    pub repair: Duration,
    /// What is good enough.
    pub slo: Slo,
    /// Whether requests pass the router's waiting room.
    pub admission: Admission,
    /// Whether the planner moves workers between prefill and decode.
    pub flip: bool,
    /// How the router is configured, checked.
    pub settings: Settings,
}

/// Whether requests pass the router's waiting room.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Admission {
    /// They go to their workers at once, whatever waits there.
    #[default]
    Off,
    /// They wait in the room while their worker has too much to do.
    Queue,
    /// Besides, a first token that would come later than the SLO says is not worth computing.
    Deadline,
}

impl Admission {
    /// What it is called in output.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::Queue => "queue",
            Self::Deadline => "deadline",
        }
    }
}

impl Chooser {
    /// Everybody, ours first.
    pub fn all() -> Vec<Self> {
        Policy::ALL.into_iter().map(Self::Policy).chain([Self::DynamoCost, Self::SmgCacheAware]).collect()
    }

    /// The presets; `balanced` does what `kv` does.
    pub fn presets() -> [Self; 3] {
        Preset::ALL.map(|preset| Self::Settings(preset.name(), Box::new(preset.settings())))
    }

    /// What it is called in output.
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Policy(policy) => policy.name(),
            Self::Settings(name, _) => name,
            Self::DynamoCost => "dynamo-cost",
            Self::SmgCacheAware => "smg-cache-aware",
        }
    }
}

/// Replays a trace at a rate, in requests per second, with seeds 0, 1, … up to `seeds`, and averages.
pub fn replay(
    trace: &Trace,
    options: &Options,
    chooser: &Chooser,
    rate: f64,
    seeds: u64,
) -> Result<Figures, Standstill> {
    let run = |seed| Simulation::new(trace, options, chooser, rate, seed).run();
    let all: Vec<Figures> =
        (0..seeds.max(1)).map(|seed| Ok(run(seed)?.figures(rate, options.slo))).collect::<Result<_, _>>()?;
    Ok(Figures { policy: chooser.name().to_owned(), ..Figures::over_seeds(&all) })
}

/// The highest rate, in requests per second, at which `least-loaded` keeps its p99 time to first token under
/// [`SATURATED`] times what it is on an idle fleet, with the default settings: whatever is tuned, a load means the same rate.
/// `progress` is told of every rate that was tried.
pub fn capacity(trace: &Trace, options: &Options, mut progress: impl FnMut(f64, f64)) -> Result<f64, Standstill> {
    let options = &Options { settings: Settings::default(), ..options.clone() };
    let mut p99 = |rate| {
        let p99 = replay(trace, options, &Chooser::Policy(Policy::LeastLoaded), rate, 1)?.ttft_p99_s;
        progress(rate, p99);
        Ok(p99)
    };
    // What a fleet that finds nothing in its caches, and decodes nothing, could compute.
    let prefill: f64 = trace.requests.iter().map(|asked| options.profile.prefill_s(asked.input, 0)).sum();
    let at_most = options.workers.len() as f64 * trace.len() as f64 / prefill;
    let limit = SATURATED * p99(at_most * IDLE)?;
    let (mut low, mut high) = (at_most * 0.1, at_most * 2.0);
    while high / low > 1.0 + PRECISION {
        let middle = (low * high).sqrt();
        *(if p99(middle)? < limit { &mut low } else { &mut high }) = middle;
    }
    Ok(low)
}

/// A fleet is saturated when the slowest first tokens take this many times as long as on an idle one.
pub const SATURATED: f64 = 10.0;
/// Of what a fleet can compute: so little that requests rarely meet.
const IDLE: f64 = 0.02;
/// Rates that are closer to each other than this are one rate.
const PRECISION: f64 = 0.01;
