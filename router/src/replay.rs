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
mod capacity;
mod engine;
mod lru;
mod options;
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
pub use capacity::{SATURATION_FACTOR, capacity, replay};
pub use options::{AdmissionMode, Options, PolicyUnderTest};
pub use plot::goodput_svg;
pub use profile::{Link, Profile, Store};
pub use results::{Results, Slo};
pub use simulation::Stalled;
pub use trace::{BLOCK_TOKENS, Trace, TraceError};
