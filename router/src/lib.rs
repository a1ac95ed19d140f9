//! Many engines behaving as one.
//!
//! ```text
//!            Request                                          who is there, what changed
//!               │                                                        │
//!               ▼                                                        ▼
//!   dispatch ▶ place ◀── index: who holds the prefix ◀───────────────── feed
//!      │        │ └───── books: who is busy, as reported and booked ◀────┘
//!      │        └ cost (seconds, term by term) ▶ disaggregate ▶ select ▶ Booking
//!      ▼
//!   [prefill leg ── Handoff ──▶] decode leg ── Output … ──▶ the client; until the first of them, another try elsewhere
//! ```
//!
//! The [`Router`] is an [`Engine`](worker::engine::Engine) over the engines that discovery shows it. `cost`, `disaggregate`
//! and `select` are pure. It reads no block and knows no protocol: names of blocks come in as events, and requests go out
//! as they came.
//!
//! ```
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), router::Error> {
//! use router::{Router, Settings};
//! use std::sync::Arc;
//! use worker::engine::{Engine, Readiness};
//! use worker::plane::RouterId;
//! use worker::plane::local::{Bus, Roster};
//!
//! let (discovery, events) = (Arc::new(Roster::default()), Arc::new(Bus::default()));
//! let router = Router::new(RouterId(1), discovery, events, Settings::default(), &prometheus::Registry::new())?;
//! assert!(matches!(router.readiness(), Readiness::NotReady(_)), "nobody has joined yet");
//! # Ok(()) }
//! ```

#![forbid(unsafe_code)]

mod admission;
mod audit;
mod balance;
mod believed;
mod booking;
mod cordon;
mod core;
mod cost;
mod decide;
mod desks;
mod disaggregate;
mod dispatch;
mod door;
mod explain;
mod feed;
mod fleet;
mod forecast;
mod health;
mod herald;
pub mod index;
mod load;
#[doc(hidden)]
pub mod measure;
mod metrics;
mod numbers;
mod pace;
mod place;
mod planner;
mod policy;
mod probe;
mod problem;
mod promise;
mod record;
pub mod replay;
mod replica;
mod router;
mod select;
mod sent;
mod settings;
mod survey;
mod traffic;
mod trust;

#[cfg(test)]
mod tests;

pub use self::core::Error;
pub use admission::settings::{Settings as Admission, Tenant};
pub use cordon::{NoSuchWorker, WorkerStatus};
pub use planner::{Mode as PlannerMode, Settings as PlannerSettings};
pub use policy::{Composition, Filter, Pick, Policy, Score, Term};
pub use problem::Problem;
pub use record::Line as Recorded;
pub use router::Router;
pub use settings::{Disaggregation, Overrides, Preset, Settings};
