//! Begins traces: which of them are recorded, and the queue of spans that have ended.

use crate::context::{CallerContext, Context};
use crate::id::{Ids, TraceId};
use crate::span::{EndedSpan, Kind, Span};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use tokio::sync::mpsc;
use tokio::time::Instant;

/// Begins the traces of a process. Clones share the queue.
#[derive(Clone, Default)]
pub struct Tracer(Option<Arc<Shared>>);

/// What the spans of a process share.
pub(crate) struct Shared {
    pub(crate) ids: Ids,
    sampling: Sampling,
    queue: mpsc::Sender<EndedSpan>,
    dropped: AtomicU64,
}

/// Which traces are recorded when the caller does not say. The decision is a function of the trace id, as that of
/// OpenTelemetry's `TraceIdRatioBased` sampler.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Sampling {
    /// A trace is recorded if the low 63 bits of its id are below.
    below: u64,
}

/// The spans of a process that have ended.
pub struct SpanQueue {
    spans: mpsc::Receiver<EndedSpan>,
    shared: Arc<Shared>,
}

/// Ended spans that wait for export, about 1 MiB. More come while the collector does not answer; then they are dropped.
const MAX_QUEUED: usize = 4096;

impl Sampling {
    /// Records this share of the traces, from 0 to 1.
    pub fn ratio(ratio: f64) -> Self {
        Self { below: (ratio.clamp(0.0, 1.0) * (1_u64 << 63) as f64) as u64 }
    }

    fn records(self, id: TraceId) -> bool {
        id.low() >> 1 < self.below
    }
}

impl Tracer {
    /// A tracer, and the queue of its spans.
    pub fn new(sampling: Sampling) -> (Self, SpanQueue) {
        let (queue, spans) = mpsc::channel(MAX_QUEUED);
        let shared = Arc::new(Shared { ids: Ids::new(), sampling, queue, dropped: AtomicU64::new(0) });
        (Self(Some(Arc::clone(&shared))), SpanQueue { spans, shared })
    }

    /// A tracer that records nothing.
    pub fn off() -> Self {
        Self::default()
    }

    /// Whether traces may be recorded.
    pub fn is_on(&self) -> bool {
        self.0.is_some()
    }

    /// The first span of a trace in this process. The trace is the caller's, and recorded if the caller records it;
    /// without a caller's it is a new one.
    pub fn root(&self, name: &'static str, kind: Kind, caller: Option<CallerContext>) -> Span {
        let Some(shared) = &self.0 else { return Span::default() };
        let (context, parent, is_sampled) = if let Some(CallerContext { trace, span, is_sampled, state }) = caller {
            (Context::begin(shared, trace, is_sampled, state), Some(span), is_sampled)
        } else {
            let id = shared.ids.trace();
            let is_sampled = shared.sampling.records(id);
            (Context::begin(shared, id, is_sampled, None), None, is_sampled)
        };
        if is_sampled { Span::recorded(context, parent, name, kind, Instant::now()) } else { Span::unrecorded(context) }
    }
}

impl std::fmt::Debug for Tracer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(if self.is_on() { "Tracer(on)" } else { "Tracer(off)" })
    }
}

impl Shared {
    pub(crate) fn queue(&self, span: EndedSpan) {
        if self.queue.try_send(span).is_err() {
            self.count_dropped();
        }
    }

    pub(crate) fn count_dropped(&self) {
        self.dropped.fetch_add(1, Ordering::Relaxed);
    }
}

impl SpanQueue {
    /// Waits for a span, and takes up to `max`. Never empty unless the queue was closed.
    pub async fn next(&mut self, max: usize) -> Vec<EndedSpan> {
        let mut spans = Vec::new();
        self.spans.recv_many(&mut spans, max).await;
        spans
    }

    /// Takes up to `max` spans that have ended.
    pub fn take(&mut self, max: usize) -> Vec<EndedSpan> {
        std::iter::from_fn(|| self.spans.try_recv().ok()).take(max).collect()
    }

    /// Number of spans that wait.
    pub fn len(&self) -> usize {
        self.spans.len()
    }

    /// Whether no span waits.
    pub fn is_empty(&self) -> bool {
        self.spans.is_empty()
    }

    /// Reads the number of spans that were dropped, because the queue was full or closed, or their trace too long.
    pub fn dropped(&self) -> impl Fn() -> u64 + Send + Sync + use<> {
        let shared = Arc::clone(&self.shared);
        move || shared.dropped.load(Ordering::Relaxed)
    }
}
