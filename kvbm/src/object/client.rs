//! Requests to an object store: put, get, head, list, delete. Each has a timeout, is retried where that may help, and
//! is counted.
//!
//! ```text
//!   request ─▶ attempt ──response──▶          a slow read ─▶ a second request (hedged); the first response counts
//!                 ▲  └─failure──▶ pause ─┐
//!                 └──────────────────────┘    within the retry budget of `RetryPolicy`
//! ```
//!
//! Circuit breaker: after 8 consecutive failures, reads and writes of blocks fail at once. The follower goes on
//! polling every second; its first successful poll closes the circuit.

pub(super) mod health;
mod listing;
mod requests;
pub(super) mod retry;
pub(super) mod unreadable;
pub(super) mod url;

pub use requests::RequestCounts;
pub(super) use requests::{Client, is_too_large};
