//! Offloading: one [`worker`] per tier, with a bounded queue, in batches, away from the async threads.
//!
//! ```text
//!   register ──▶ worker of G2: copies from the device, adds checksums ──┬──▶ worker of G3: stores, from G2's memory
//!                                                                       └──▶ worker of G4: stores, from G2's memory
//! ```
//!
//! A queue contains hashes, not blocks: it pins no memory, and an allocation never waits for a slow disk. A block that
//! is evicted before its batch is dropped and counted, like one for which the queue had no room. It is held only while
//! its batch is copied or stored. Cache domains share a queue fairly ([`fair_queue`]).
//!
//! A worker that panics poisons the manager ([`Core::poison`](super::shared::Core::poison)).

mod batching;
mod fair_queue;
mod queue;
mod worker;
mod workers;

pub(super) use fair_queue::OffloadRequest;
pub(super) use workers::OffloadWorkers;
