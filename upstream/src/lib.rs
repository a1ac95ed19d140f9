//! Engines that are servers with OpenAI's API: vLLM, SGLang and others, unchanged.
//!
//! ```text
//!   Engine::generate(Work::Relay) ─▶ engine ─▶ relay: body and headers, connection, response
//!                                       │
//!   models: what the server serves ─────┴─▶ load: what was sent to it and has not ended
//! ```
//!
//! The client's request and the server's response pass as bytes. Not here: which server gets a request (the router),
//! and what is read of a request for that (the frontend).

#![forbid(unsafe_code)]

mod engine;
pub mod kv_events;
mod load;
mod models;
pub mod relay;

pub use engine::{UpstreamEngine, UpstreamSettings};
pub use models::{DiscoverError, discover};
