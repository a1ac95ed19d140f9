//! One engine beside its cache: engines, phases, reporting, serving, and the planes that carry them.
//!
//! ```text
//!   router ──Request──▶ Engine ◀── kvbm (blocks in and out)
//!      ▲                   │
//!      └── Discovery, Events ── who is there, what changed
//! ```
//!
//! [`engine`] holds the one idea of the system, the [`Engine`](engine::Engine) trait, and the engines themselves.
//! [`plane`] holds the two things left to abstract between processes.
//! [`serve`] puts an engine onto the planes.

pub mod engine;
pub mod handoff;
pub mod llama;
pub mod metrics;
pub mod plane;
pub mod serve;
