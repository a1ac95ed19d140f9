//! Admission: a request whose worker is saturated waits in the router, where it can still be overtaken, rerouted and
//! rejected.
//!
//! ```text
//!   place ─▶ does its worker have capacity? ── yes, and the queue is empty ──▶ admitted
//!              │ no                                                       ▲
//!              ▼            a load report, a first token, an end          │ its turn
//!           the queue ────────────────────────────────────────────────────┘
//!              ├─ another worker is idle, or its own has left ─▶ placed again, same position
//!              └─ shed, past its deadline, or waits for too long ─▶ rejected
//! ```
//!
//! A request is placed and reserved **before** it is admitted. Whether it has to wait depends on the worker that it
//! would go to, so the worker is chosen first. And its reservation counts on that worker while it waits, so that
//! requests placed after it see the same load as if it waited in the worker's own queue: without the reservation they
//! would all choose the worker that looks idle. A worker's saturation leaves out the reservations of requests that
//! were not sent yet; otherwise queued requests would keep each other waiting.
//!
//! The [`FairQueue`](queue) decides the order, the [`AdmissionController`] what becomes of each request; both are
//! pure. [`Admission`] adds the lock, the wake-ups and the metrics. Not here: placement, and the future in which a
//! request waits (`dispatch/admit.rs`).

mod backlog;
mod controller;
mod drain_rate;
mod live;
mod queue;
mod saturation;
mod settings;
mod ticket;

pub(crate) use controller::{AdmissionController, Context, Resolution};
pub(crate) use live::{Admission, Permit};
pub(crate) use saturation::Stage;
pub use settings::{LateRequests, Settings, Tenant};
pub(crate) use ticket::{QueuedRequest, Route, Ticket};

#[cfg(test)]
mod tests;
