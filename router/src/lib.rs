//! Many engines behaving as one.
//!
//! ```text
//!            Request
//!               │
//!   feed ──▶ place: index (who holds the prefix) + load (who is busy) → cost → select ──▶ Booking
//!  (events)     │
//!               ▼
//!         dispatch: [prefill leg ──Handoff──▶] decode leg ──▶ Output …
//! ```
//!
//! The [`Router`] is an [`Engine`](worker::engine::Engine) over the engines that discovery shows it. It reads no block and
//! knows no protocol: names of blocks come in as events, and requests go out as they came.

#![forbid(unsafe_code)]

mod fleet;
mod router;
mod settings;

pub use router::{Error, Router};
pub use settings::{Disaggregation, Policy, Settings};
