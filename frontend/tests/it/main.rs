//! The front door over HTTP, in process, before an engine that says what a test tells it to.

#![expect(clippy::unwrap_used, reason = "what a test expects stands in it")]

mod access;
mod cache;
mod chat;
mod completions;
mod extensions;
mod fake;
mod limits;
mod logs;
mod operations;
mod refusals;
mod scheduling;
mod serving;
mod streams;
mod tiny_tokenizer;
