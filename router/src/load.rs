//! How busy each worker is, and what may be concluded from it.
//!
//! Owns the books of a worker (its last report, and what was booked since), the snapshots that decisions read without a
//! lock, the speeds and queues estimated from them, and the totals of what requests asked. Promises that nothing is counted
//! twice: neither in the report and again as a booking, nor at two levels.
//!
//! Not here: which worker is there at all, and what the load means for a choice.

mod books;
mod estimate;
#[cfg(test)]
mod loom;
mod published;
mod snapshots;
mod stats;
mod sync;
mod timestamp;
mod traffic;

pub(crate) use books::{Amount, Books};
#[cfg(test)]
pub(crate) use estimate::stand_in;
pub(crate) use estimate::{Pace, prefill_speed};
pub(crate) use snapshots::{Desk, Desks};
pub(crate) use stats::Standing;
#[cfg(test)]
pub(crate) use stats::{Figure, Speeds};
pub(crate) use timestamp::Moment;
pub(crate) use traffic::{Totals, Traffic};
