//! The path of a request: place, admit, send, and until its first output retry on another worker.
//!
//! ```text
//!   admit ─▶ prefill request ── Handoff ──▶ decode request ── first output ──▶ the client's stream
//!     ▲          └── failed: the decode worker computes the prompt │     (both run at the same time)
//!     └──────────────── rejected, failed, left ────────────────────┘
//! ```
//!
//! A stream whose worker fails or is stopped after the first output is continued on another worker.
//!
//! Everything that a request holds (its reservations, its requests to workers, its permit) lives in the future or the
//! stream that the client holds, so dropping either at any point cancels both requests to workers and releases what was
//! reserved.
//!
//! Not here: the order of queued requests, the choice of a worker, and background tasks.

pub(crate) mod admit;
mod attempt;
mod continued;
mod copy_ahead;
mod handoff;
mod place;
mod prediction;
mod send;
mod serve;

pub(crate) use copy_ahead::order as order_copy;
pub(crate) use place::place;
pub(crate) use serve::serve;
