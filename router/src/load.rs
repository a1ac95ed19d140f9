//! Load of each worker and what is derived from it.
//!
//! Owns the load of a worker (its last report plus bookings not yet in it), the snapshots that decisions read without a
//! lock, the service estimates derived from them, and the traffic totals. Promises that nothing is counted twice:
//! neither in the report and again as a booking, nor at two tiers.
//!
//! Not here: the list of workers (`fleet`), and what load means for a choice (`policy`).

mod estimate;
#[cfg(test)]
mod loom;
mod published;
mod snapshots;
mod stats;
mod sync;
mod timestamp;
mod traffic;
mod worker_load;

#[cfg(test)]
pub(crate) use estimate::defaults;
pub(crate) use estimate::{ServiceEstimate, prefill_speed};
pub(crate) use snapshots::{SnapshotCache, WorkerSnapshot};
pub(crate) use stats::LoadStats;
#[cfg(test)]
pub(crate) use stats::{Measured, Speeds};
pub(crate) use timestamp::Timestamp;
pub(crate) use traffic::{Totals, Traffic};
pub(crate) use worker_load::{Demand, WorkerLoad};
