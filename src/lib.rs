//! The program: command line, the one configuration, and the composition of frontend, router, workers and tiers.
//!
//! ```text
//!   commands ─▶ config ─▶ node ─┬─ frontend ─▶ router ─▶ workers ─▶ kvbm
//!                               └─ banner
//! ```
//! Everything that serves is an [`Engine`](worker::engine::Engine). This crate decides which engines run, and connects
//! them.

#![forbid(unsafe_code)]
// It panics if standard error has no reader or is a full disk; `commands::output` does not.
#![deny(clippy::print_stderr)]

pub mod admin;
pub mod commands;
pub mod config;
pub mod node;
pub mod otlp;
pub mod process;
pub mod reload;
