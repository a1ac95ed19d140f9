//! Which worker a request goes to: pure, values in, choice out.
//!
//! Owns the cost of each choice in seconds, the decision and its explanation, the choice whether prefill happens elsewhere,
//! composed policies, and the plan of how many workers prefill and decode. Promises the same decision for the same values;
//! time and random numbers are passed in.
//!
//! Not here: who asks, what becomes of the decision, and how load and cache contents are known.

mod composition;
mod cost;
mod decide;
mod disaggregate;
pub(crate) mod explain;
mod inputs;
pub(crate) mod planner;
mod select;
mod tuning;

pub use composition::{Composition, Filter, Pick, Policy, Score, Term};
pub(crate) use cost::OUTPUT_TOKENS;
pub(crate) use decide::{Ask, Decision, Row, Scratch, decide};
pub(crate) use disaggregate::Split;
pub(crate) use inputs::{Overlaps, Survey};
pub(crate) use select::Turn;
pub use tuning::Disaggregation;
pub(crate) use tuning::Tuning;
