//! One engine beside its KV cache: the engine interface, the native engine, the planes between processes, and serving.
//!
//! ```text
//!   router ──Request──▶ Engine ◀── kvbm (blocks in and out)
//!      ▲                   │
//!      └── Discovery, Events ── instances, changes
//! ```
//!
//! [`engine`] holds the central trait of the system, [`Engine`](engine::Engine). [`llama`] is the native engine.
//! [`plane`] holds the traits between processes, discovery and events. [`serve`] registers an engine on the planes.
//! [`remote`] carries requests to workers in other processes.
//! [`handoff`] moves prefilled blocks from one worker to another.

pub mod engine;
pub mod handoff;
pub mod llama;
pub mod metrics;
pub mod plane;
pub mod remote;
pub mod serve;
