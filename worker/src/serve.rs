//! Serving: registers an engine on the planes and reports on it.
//!
//! ```text
//!              ┌─uncordon─ deregistered ◀─cordon─┐
//!              ▼                                   │
//!   start ──▶ registered ──────────────────────────┴──drain──▶ deregistered, still reporting ──idle──▶ stopped
//!                   │ engine or reporter stops                                                         ▲
//!                   └──────────────────────────────────────────────────────────────────────────────────┘
//! ```
//!
//! A worker that another process registers in a later epoch is superseded. It tries every second to register again, and
//! is registered when the other process has deregistered or its lease has expired.
//!
//! A [`Worker`] keeps the lease in the task that reports, so a worker that stops reporting is deregistered. When a
//! router asks for another role, the worker registers again in the same epoch, and its requests go on. An
//! [`EventPublisher`] publishes the log of a shared store, whose blocks outlive the workers that wrote them.
//! [`DrainCopies`] requests other workers to copy the prefixes of one that drains.
//!
//! Not here: measuring load. The engine measures it.

mod cordon;
mod drain_copies;
mod publisher;
mod worker;

pub use cordon::Cordon;
pub use drain_copies::{Copies, DrainCopies};
pub use publisher::EventPublisher;
pub use worker::{Planes, Worker};

#[cfg(test)]
mod tests;
