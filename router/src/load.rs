//! Load of each worker and what is derived from it.
//!
//! Owns the load of a worker (its last report plus bookings not yet in it), the snapshots that decisions read without a
//! lock, the service estimates derived from them, what is learned of a model (step times, output lengths), and the
//! traffic totals. Guarantees that nothing is counted twice: neither in the report and again as a booking, nor at two
//! tiers.
//!
//! Not here: the list of workers (`fleet`), and what load means for a choice (`policy`).

mod block_reuse;
mod block_use_rate;
mod change_groups;
mod demand;
mod device_load;
mod estimate;
mod itl_target;
mod least_squares;
mod least_times;
mod load_changes;
#[cfg(test)]
mod loom;
mod model_stats;
mod occupancy;
mod output_lengths;
mod pace;
mod prefill_time;
mod prefix_demand;
mod prompt_flow;
mod published;
mod snapshots;
mod stats;
mod step_time;
mod sync;
mod timestamp;
mod traffic;
mod worker_load;

pub(crate) use demand::Demand;
pub(crate) use device_load::OtherWorkers;
pub(crate) use estimate::{ServiceEstimate, assumed_speed, prefill_speed};
pub(crate) use itl_target::ItlTarget;
pub(crate) use least_times::LeastTimes;
pub(crate) use model_stats::ModelStats;
pub(crate) use output_lengths::{ExpectedOutput, OutputEnd};
pub(crate) use prefill_time::PrefillTime;
pub(crate) use prefix_demand::{HORIZON, SharedPrefix};
pub(crate) use prompt_flow::PromptArrivals;
pub(crate) use snapshots::{SnapshotCache, WorkerSequences, WorkerSnapshot};
pub(crate) use stats::LoadStats;
#[cfg(test)]
pub(crate) use stats::{Measured, Speeds};
pub(crate) use step_time::StepTime;
pub(crate) use timestamp::Timestamp;
pub(crate) use traffic::{Totals, Traffic};
pub(crate) use worker_load::WorkerLoad;
