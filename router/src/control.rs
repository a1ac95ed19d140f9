//! Background tasks that keep the shared state current.
//!
//! Owns the feed (membership, load reports and KV events, with resync after gaps), the exchange of reservations with
//! other routers, the health checks of failed or idle workers, copies of shared prefixes ahead of demand, and the role
//! changes of the planner. Guarantees that each task runs until it is cancelled; a task that ends by itself has failed.
//!
//! Not here: the path of a request (`dispatch`), and the algorithms, which are pure.

pub(crate) mod copier;
mod feed;
pub(crate) mod prober;
pub(crate) mod rebalance;
pub(crate) mod replicas;

pub(crate) use feed::Feed;
pub(crate) use feed::cursor::{Outcome, SourceCursor};
