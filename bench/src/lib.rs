//! Shared code of the benchmarks: a `blockyard serve` process, a timing client, prompts, tables.
//!
//! Everything is measured from outside: at the client, or by running programs that measure parts. No crate of Blockyard
//! is linked.

pub mod client;
pub mod conversation;
pub mod figure;
pub mod gateway;
pub mod metrics;
pub mod options;
pub mod prompt;
pub mod report;
pub mod server;
pub mod streams;
pub mod suite;
pub mod threads;
pub mod workloads;
