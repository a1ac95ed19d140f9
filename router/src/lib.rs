//! Many engines behaving as one.
//!
//! ```text
//!            Request                                            discovery, load reports, KV events
//!               │                                                             │
//!               ▼                                                             ▼
//!   dispatch ▶ place ◀── index: workers and stores with the prefix ◀──────── feed
//!      │        │ └───── load: last report plus reservations not yet in it ◀──┘
//!      │        └ cost (seconds, term by term) ▶ disaggregate ▶ select ▶ Booking
//!      ▼
//!    admit or queue
//!      ▼
//!   [prefill ── Handoff ──▶] decode ── Output … ──▶ the client; before the first output, retry elsewhere
//! ```
//!
//! The rooms, from top to bottom: `replay`; `router`; `control` (background tasks) and `dispatch` (the path of a
//! request); `state`, which they share; `admission`, `telemetry`, `policy`, `booking`, `fleet`, `load`, `index`,
//! `config` and `hash`. A room is a file and a folder of its name, of which the file declares what others may use;
//! `tests/it/layers.rs` has a table of the allowed imports.
//!
//! The [`Router`] is an [`Engine`](worker::engine::Engine) over the engines that discovery shows it. It reads no block
//! and knows no protocol: block hashes arrive in events, and requests are passed on unchanged. `policy` is pure.
//!
//! ```
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), router::Error> {
//! use router::{Router, Settings};
//! use std::sync::Arc;
//! use worker::engine::{Engine, Readiness};
//! use worker::plane::RouterId;
//! use worker::plane::local::{LocalDiscovery, LocalEvents};
//!
//! let (discovery, events) = (Arc::new(LocalDiscovery::default()), Arc::new(LocalEvents::default()));
//! let router = Router::new(RouterId(1), discovery, events, Settings::default(), &prometheus::Registry::new())?;
//! assert!(matches!(router.readiness(), Readiness::NotReady(_)), "no worker has joined yet");
//! # Ok(()) }
//! ```

#![forbid(unsafe_code)]

mod admission;
mod booking;
mod config;
mod control;
mod dispatch;
mod fleet;
mod hash;
pub mod index;
mod load;
mod policy;
pub mod replay;
mod router;
mod state;
mod telemetry;

#[cfg(test)]
mod tests;

pub use admission::{LateRequests, Settings as Admission, Tenant};
pub use config::{Problem, Quantity, Slo};
pub use policy::planner::{Mode as PlannerMode, Outlook, PlanStatus, Settings as PlannerSettings};
pub use policy::{Composition, Disaggregation, Filter, Pick, Policy, Score, Term};
pub use router::{IndexedEvents, NoSuchWorker, Outstanding, Router, WorkerStatus};
pub use state::{Error, Overrides, Settings};
pub use telemetry::Line as Recorded;
