//! Where the spans of a request belong: the trace, and the span that is the parent of the next ones.

use crate::id::{SpanId, TraceId, is_lower_hex};
use crate::span::{Kind, Span};
use crate::tracer::Shared;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};
use tokio::time::Instant;

/// Where the spans of a request belong. Empty while tracing is off, which is the default.
#[derive(Clone, Default)]
pub struct Context(Option<Branch>);

#[derive(Clone)]
struct Branch {
    trace: Arc<Trace>,
    span: SpanId,
}

/// What the spans of one trace in this process share.
pub(crate) struct Trace {
    id: TraceId,
    /// `tracestate`, as it came.
    state: Option<Box<str>>,
    is_sampled: bool,
    tracer: Arc<Shared>,
    /// The same time on both clocks: a step of the system clock must not move spans of one trace against each other.
    started: (SystemTime, Instant),
    spans: AtomicU32,
}

/// The trace and span to which the spans of a request belong, from the headers of a caller in another process.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CallerContext {
    pub(crate) trace: TraceId,
    pub(crate) span: SpanId,
    pub(crate) is_sampled: bool,
    pub(crate) state: Option<Box<str>>,
}

/// Spans of one trace in one process. 128 choices on three workers each have fewer; above that a viewer shows nothing
/// useful, and one request would fill the queue.
const MAX_SPANS: u32 = 1000;

impl Context {
    /// That of a request that is not traced.
    pub const fn none() -> Self {
        Self(None)
    }

    /// Begins a trace in this process.
    pub(crate) fn begin(tracer: &Arc<Shared>, id: TraceId, is_sampled: bool, state: Option<Box<str>>) -> Self {
        let started = (SystemTime::now(), Instant::now());
        let span = tracer.ids.span();
        let trace = Trace { id, state, is_sampled, tracer: Arc::clone(tracer), started, spans: AtomicU32::new(0) };
        Self(Some(Branch { trace: Arc::new(trace), span }))
    }

    /// A span within the parent, from now on.
    pub fn span(&self, name: &'static str, kind: Kind) -> Span {
        if self.is_sampled() { self.span_since(name, kind, Instant::now()) } else { Span::unrecorded(self.clone()) }
    }

    /// A span within the parent that has begun before.
    pub fn span_since(&self, name: &'static str, kind: Kind, since: Instant) -> Span {
        let Some(Branch { trace, span }) = self.0.as_ref().filter(|branch| branch.trace.is_sampled) else {
            return Span::unrecorded(self.clone());
        };
        let child = Self(Some(Branch { trace: Arc::clone(trace), span: trace.tracer.ids.span() }));
        Span::recorded(child, Some(*span), name, kind, since)
    }

    /// Whether spans are recorded.
    pub fn is_sampled(&self) -> bool {
        self.0.as_ref().is_some_and(|branch| branch.trace.is_sampled)
    }

    /// The id of the trace, if it is recorded: for log lines.
    pub fn trace_id(&self) -> Option<TraceId> {
        self.0.as_ref().filter(|branch| branch.trace.is_sampled).map(|branch| branch.trace.id)
    }

    /// The value of the header `traceparent` for a request that belongs to the span. It is also there for traces that
    /// are not sampled, so that no other program begins a trace of its own for a part of the request.
    pub fn traceparent(&self) -> Option<String> {
        let Branch { trace, span } = self.0.as_ref()?;
        Some(format!("00-{}-{span}-{:02x}", trace.id, u8::from(trace.is_sampled)))
    }

    /// The value of the header `tracestate`.
    pub fn tracestate(&self) -> Option<&str> {
        self.0.as_ref()?.trace.state.as_deref()
    }

    pub(crate) fn ids(&self) -> Option<(TraceId, SpanId)> {
        self.0.as_ref().map(|branch| (branch.trace.id, branch.span))
    }

    pub(crate) fn trace(&self) -> Option<&Trace> {
        self.0.as_ref().map(|branch| &*branch.trace)
    }
}

impl Trace {
    /// Whether one more span may be recorded.
    pub(crate) fn admit(&self) -> bool {
        let is_admitted = self.spans.fetch_add(1, Ordering::Relaxed) < MAX_SPANS;
        if !is_admitted {
            self.tracer.count_dropped();
        }
        is_admitted
    }

    /// Nanoseconds since 1970.
    pub(crate) fn unix_nanos(&self, at: Instant) -> u64 {
        let (system, instant) = self.started;
        let time = match at.checked_duration_since(instant) {
            Some(after) => system + after,
            None => system - instant.duration_since(at),
        };
        time.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos() as u64)
    }

    pub(crate) fn tracer(&self) -> &Shared {
        &self.tracer
    }
}

impl CallerContext {
    /// Parses the value of `traceparent` (W3C Trace Context, level 1). Of later versions the known part is read.
    pub(crate) fn parse(traceparent: &str) -> Option<Self> {
        let mut parts = traceparent.trim().splitn(5, '-');
        let (version, trace, span, flags) = (parts.next()?, parts.next()?, parts.next()?, parts.next()?);
        let is_valid = is_lower_hex(version, 2) && version != "ff" && is_lower_hex(flags, 2);
        if !is_valid || (version == "00" && parts.next().is_some()) {
            return None;
        }
        let is_sampled = u8::from_str_radix(flags, 16).ok()? & 1 == 1;
        Some(Self { trace: TraceId::parse(trace)?, span: SpanId::parse(span)?, is_sampled, state: None })
    }
}

impl PartialEq for Context {
    fn eq(&self, other: &Self) -> bool {
        self.ids() == other.ids()
    }
}

impl Eq for Context {}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Context({})", self.traceparent().as_deref().unwrap_or("none"))
    }
}
