//! The tasks that run beside requests and keep the shared state true.
//!
//! Owns the feed (membership, reports and block events, with gaps repaired), the exchange of reservations with other routers,
//! the prober of workers that failed or are idle, and the changes of roles that the planner wants. Promises that each task
//! runs until it is cancelled; one that ends by itself has failed.
//!
//! Not here: the path of a request, and the algorithms, which are pure.

mod feed;
pub(crate) mod prober;
pub(crate) mod rebalance;
pub(crate) mod replicas;

pub(crate) use feed::Feed;
pub(crate) use feed::view::{Outcome, View};
