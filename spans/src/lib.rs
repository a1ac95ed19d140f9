//! Spans of distributed traces, in the terms of OpenTelemetry: what a request does, from HTTP to the tiers of blocks.
//!
//! ```text
//!   Tracer ── root ──▶ Span ── context ──▶ Context ── span ──▶ Span …      per request; guards, ended by drop
//!                        │                    │
//!                        │                    └── inject ──▶ traceparent ── extract ──▶ Tracer of another process
//!                        └── drop ──▶ SpanQueue ──▶ exporter
//! ```
//! A [`Context`] travels with its request and is empty while tracing is off: then no span allocates, reads the clock or
//! takes a lock. The same holds for requests that are not sampled, whose context only has ids for other programs. The
//! queue is bounded, and a span that finds it full is dropped and counted: tracing delays no request.
//!
//! Of the log, which is that of `tracing`, only the rate limit of its lines is here ([`LogLimit`]): every crate writes
//! lines, and this crate is below all that do. Not here: the export (the program does it).
//!
//! ```
//! use spans::{Kind, Sampling, Tracer};
//!
//! let (tracer, mut queue) = Tracer::new(Sampling::ratio(1.0));
//! let mut request = tracer.root("GET /", Kind::Server, None);
//! let mut child = request.context().span("lookup", Kind::Internal);
//! child.set("hits", 3_u64);
//! drop(child);
//! request.set("http.response.status_code", 200_u64);
//! drop(request);
//! let ended = queue.take(10);
//! assert_eq!(ended.iter().map(|span| &*span.name).collect::<Vec<_>>(), ["lookup", "GET /"]);
//! assert_eq!(ended[0].parent, Some(ended[1].id));
//! assert!(Tracer::off().root("GET /", Kind::Server, None).context().traceparent().is_none());
//! ```

#![forbid(unsafe_code)]

mod context;
mod headers;
mod id;
mod log_limit;
mod span;
mod tracer;

pub use context::{CallerContext, Context};
pub use headers::{extract, inject};
pub use id::{SpanId, TraceId};
pub use log_limit::{FaultLog, LogLimit};
pub use span::{EndedSpan, Event, Kind, Span, Value};
pub use tracer::{Sampling, SpanQueue, Tracer};

#[cfg(test)]
mod tests;
