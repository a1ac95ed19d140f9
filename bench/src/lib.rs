//! What the benchmarks share: a `blockyard serve` process, a client with a stopwatch, prompts, tables.
//!
//! Everything is measured from outside: as a client sees it, or by running programs that measure parts. Nothing of blockyard
//! is linked in.

pub mod client;
pub mod conversation;
pub mod figure;
pub mod metrics;
pub mod options;
pub mod prompt;
pub mod report;
pub mod server;
pub mod suite;
