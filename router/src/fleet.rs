//! The workers that are there, and what the router knows of each beside its load.
//!
//! Owns the roster, which is replaced as a whole, each worker's health (a circuit breaker), whether its events are accurate,
//! and, where they are not, an estimate of its cache from what was sent to it. Promises that a reader sees one roster, from
//! the first look to the last.
//!
//! Not here: the tasks that feed it, and the load of its workers.

mod event_accuracy;
mod health;
mod sent_blocks;
mod shadow;
mod workers;

pub(crate) use event_accuracy::{Mode, Reason};
pub(crate) use health::Verdict;
#[cfg(test)]
pub(crate) use sent_blocks::KEPT;
pub(crate) use shadow::{reach, shadow};
pub(crate) use workers::{Fleet, Member, Roster, Seat, Serving};
