//! Choice of the worker for a request. Pure: values in, choice out.
//!
//! Owns the cost of each choice in seconds, the decision and its explanation, the choice between aggregated and
//! disaggregated serving, composed policies, and the plan of how many workers prefill and decode. Guarantees the same
//! decision for the same values: time and random numbers are passed in.
//!
//! Not here: reservations and sending (`dispatch`), and how load and cache contents are known (`load`, `index`).

mod composition;
mod copy_ahead;
mod cost;
mod decide;
mod disaggregate;
pub(crate) mod explain;
mod inputs;
pub(crate) mod planner;
mod prompt;
mod replication;
mod select;
mod tuning;

pub use composition::{Composition, Filter, Pick, Policy, Score, Term};
pub(crate) use decide::{Decision, PlacementRequest, ScoredWorker, Scratch, decide};
pub(crate) use disaggregate::ServingMode;
pub(crate) use inputs::{FleetView, Overlaps};
pub(crate) use replication::Replication;
pub(crate) use select::SelectionContext;
pub use tuning::Disaggregation;
pub(crate) use tuning::Tuning;
