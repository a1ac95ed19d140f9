//! G4, and the shared flash folder G3.5 above it: blocks in an object store that several processes share, many blocks
//! per object.
//!
//! ```text
//!   store ─▶ pack ─▶ object ─▶ manifest ─▶ catalog, event, answer
//!   load  ─▶ catalog ─▶ coalesced ranges, in parallel ─▶ stream of blocks
//!   every second ─▶ list of writers, their next manifests ─▶ catalog, events
//! ```
//!
//! A block is stored when the store has acknowledged its object and the manifest that lists it. No conditional writes
//! and no locks: each process writes under an id of its own, and objects are immutable. An object that is missing or
//! has changed costs its blocks: each is a counted miss and leaves the catalog. Objects are only deleted by garbage
//! collection (`gc`). A discard concerns the copy that was read, and lasts as long as the process; after a restart the
//! block is verified, and discarded, again.

mod access_log;
mod catalog;
mod client;
mod follower;
mod format;
pub mod gc;
mod probe;
mod reader;
mod settings;
#[cfg(test)]
mod tests;
mod tier;
mod usage;
mod writer;

pub use client::RequestCounts;
pub use client::health::StoreHealth;
pub use client::url::{Access, Cloud, Credentials, Endpoint, InvalidLocation, StoreLocation};
pub use gc::{Collector, Compaction, GcOutcome, GcReport, GcScheduler, ObjectTotals, Verification};
pub use probe::ProbeError;
pub use settings::{OpenError, Settings};
pub use tier::ObjectTier;
