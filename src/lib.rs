//! The program: command line, the one configuration, and the composition of roles.
//!
//! ```text
//!   cli ─▶ config ─▶ node ─┬─ frontend ─▶ router ─▶ workers ─▶ kvbm
//!                          └─ banner
//! ```
//! Everything that serves is an [`Engine`](worker::engine::Engine); this crate only decides which, and where.

#![forbid(unsafe_code)]

pub mod admin;
pub mod banner;
pub mod bench;
pub mod cache;
pub mod cli;
pub mod config;
pub mod error_text;
pub mod fit;
pub mod machine;
pub mod node;
pub mod panics;
mod process;
pub mod reload;
pub mod replay;
