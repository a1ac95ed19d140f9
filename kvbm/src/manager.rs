//! Moves blocks between tiers: offloads them from device memory, and onboards them again.
//!
//! This room owns the [`BlockManager`], the facade that an engine uses; `offload` (queues and workers per tier),
//! `onboard` (one load per request), `plan` (which loads are worth their time), `throughput` (the measured speed of
//! each tier), `reuse` (the prefixes in memory that requests used again) and `peer` (another manager's memory as a
//! tier). It guarantees that a cache hit is never slower than a miss. Not here: which slot holds which block
//! ([`crate::pool`]), and how a tier stores bytes ([`crate::tier`]).
//!
//! **When a background task panics**, the manager is poisoned: it logs an error, and from then on it answers as if
//! there were no tiers below G1. The engine goes on, slower. State that the task may have left incomplete is not used.

mod block_manager;
mod expiry;
mod host_copy;
mod inflight;
mod locate;
mod offload;
mod onboard;
mod peer;
mod plan;
mod reuse;
mod shared;
mod sources;
mod throughput;

pub use block_manager::BlockManager;
pub use host_copy::{Copied, NoRoom};
pub use onboard::{Onboarded, Onboarding, Recompute};
pub use reuse::{ReusedPrefix, ReusedPrefixes};
pub use sources::Speed;

#[cfg(test)]
mod tests;
