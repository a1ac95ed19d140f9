//! Gateways side by side: a load generator, engines that compute nothing, and the processes of the gateways.
//!
//! ```text
//!   load ── HTTP ──▶ a gateway (peers) ── HTTP ──▶ engine (program `engine`)
//!                       │                            └── KV events (zmq)
//!                       └── process: its CPU time and memory, from /proc
//! ```
//! All of them share the machine, so requests per second are a property of the whole. The comparable figure is the CPU
//! time of a gateway's processes per request or per chunk.

pub mod engine;
pub mod figures;
pub mod http;
pub mod load;
pub mod measure;
pub mod options;
pub mod peers;
pub mod process;
pub mod scenario;
pub mod tokenizer;
pub mod zmq;
