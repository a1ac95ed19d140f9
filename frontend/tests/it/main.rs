//! The frontend over HTTP, in process, before a scripted engine.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

mod access;
mod cache;
mod chat;
mod completions;
mod extensions;
mod fake;
mod key_file;
mod keys;
mod limits;
mod logs;
mod operations;
mod refusals;
mod relay;
mod scheduling;
mod serving;
mod streams;
mod tenants;
mod test_server;
mod tiny_tokenizer;
mod tls;
mod websockets;
