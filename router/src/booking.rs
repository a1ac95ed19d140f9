//! Capacity of a worker that is reserved for a request, from the decision until the last output.
//!
//! Owns the reservation, a guard: dropping it releases the capacity. With it go the prefix that the request will leave
//! in the worker's cache, for decisions made meanwhile, and the messages that tell other routers about it.
//!
//! It also has the copies of shared prefixes that are on the way, which no request waits for.
//!
//! Not here: the load of a worker, and the sending of messages.

mod copies;
mod inflight;
mod outbox;
mod reservation;

pub(crate) use copies::{CopyEnd, CopyOrder, PrefixCopies};
pub(crate) use inflight::{InflightPrefix, InflightPrefixes};
pub(crate) use outbox::{ReplicaOutbox, placed};
pub(crate) use reservation::Booking;
