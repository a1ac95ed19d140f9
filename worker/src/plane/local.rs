//! The planes in memory, for all components in one process and for tests.
//!
//! They behave like planes over a network: discovery deregisters an instance when its lease ends, and a slow subscriber
//! loses events. A [`Link`] describes delay, loss, reordering and duplication; it is seeded, so that each fault is
//! reproducible in a unit test.

#![forbid(unsafe_code)]

mod discovery;
mod events;
mod link;

pub use discovery::LocalDiscovery;
pub use events::LocalEvents;
pub use link::Link;

#[cfg(test)]
mod tests;
