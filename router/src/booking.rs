//! A place taken on a worker, from the decision until the last output.
//!
//! Owns the reservation, which is a guard: dropping it gives back what it booked. With it go the prefix that the request
//! will leave in the worker's cache, for decisions made meanwhile, and the notices that tell other routers.
//!
//! Not here: the books themselves, and whoever sends the notices out.

mod inflight;
mod outbox;
mod reservation;

pub(crate) use inflight::{Promise, Promises};
pub(crate) use outbox::Herald;
pub(crate) use reservation::Booking;
