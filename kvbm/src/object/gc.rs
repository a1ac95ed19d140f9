//! Garbage collection of a store: marks objects, and deletes marked objects after a grace period.
//!
//! ```text
//!   live ──expired, duplicate, max age, over capacity──▶ marked ──grace──▶ deleted, then manifests without objects
//!           pinned objects are kept       a tombstone list names them; followers stop reading them
//! ```
//!
//! No locks: any number of collectors may run at the same time, and an interrupted run only leaves work behind.

mod age;
mod cache;
mod collector;
mod compact;
mod inventory;
mod plan;
mod policy;
mod schedule;
mod verification;

pub use collector::{Collector, GcReport, ObjectTotals};
pub use compact::Compaction;
pub use inventory::{Inventory, StoredGroup};
#[cfg(test)]
pub(super) use plan::PLANS;
pub use policy::{MarkReason, Policy, headroom};
pub use schedule::{GcOutcome, GcScheduler};
pub use verification::Verification;
