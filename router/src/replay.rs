//! Simulation of this router over a trace, in virtual time, to compare policies, request rates and fleets.
//!
//! ```text
//!   traffic ─▶ arrivals ─▶ SimulatedRouter: index, load, cost, selection ─▶ Engine: pool, batch, steps ─▶ Results
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
mod clairvoyant;
mod engine;
mod lru;
mod options;
mod plane;
mod planner;
mod plot;
mod pool;
mod profile;
mod random;
mod results;
mod router;
mod runs;
mod simulation;
#[cfg(test)]
mod slo_tests;
pub(crate) mod stub_engine;
mod trace;
mod traffic;
mod workload;

#[cfg(test)]
mod tests;

pub use baselines::Peer;
pub use calibration::{Calibration, CalibrationError, calibrate};
pub use capacity::{SATURATION_FACTOR, Service, capacity};
pub use options::{AdmissionMode, Options, PolicyUnderTest, QueueOrder};
pub use planner::{Planned, PlannedTarget};
pub use plot::html_report;
pub use profile::{Link, Profile, Store};
pub use results::{Copies, Results, Slo};
pub use runs::{CLAIRVOYANT, Runs};
pub use simulation::RunError;
pub use trace::{BLOCK_TOKENS, Trace, TraceError};
pub use traffic::Traffic;
pub use workload::Workload;
