//! Measures a relayed response: metrics and fields of the log line.

use crate::http::RequestContext;
use crate::metrics::ModelMetrics;
use prometheus::Histogram;
use std::sync::Arc;
use tokio::time::Instant;
use worker::engine::RelayReport;

/// Measures a relayed response. When it is dropped before [`finish`](Self::finish), the response counts as cancelled,
/// or as failed after [`mark_failed`](Self::mark_failed).
///
/// The text of a stream is not read. The times between tokens are those between the parts of its body, which have the
/// tokens that arrived at the same time; the tokens of a stream that was cancelled are its events.
pub(crate) struct RelayMeter {
    context: Arc<RequestContext>,
    metrics: Arc<ModelMetrics>,
    is_stream: bool,
    /// Times between the parts of the body of a stream; found once, because that takes longer than an observation.
    inter_token: Option<Histogram>,
    /// Arrival of the latest part of the body.
    latest: Option<Instant>,
    /// Events of the stream, about.
    events: u32,
    ended: bool,
    failed: bool,
}

impl RelayMeter {
    /// A meter for a request to a model. The prompt's length is known at the end.
    pub(crate) fn new(context: Arc<RequestContext>, model: &Arc<str>, is_stream: bool) -> Self {
        let metrics = Arc::clone(context.record_model(model));
        Self { context, metrics, is_stream, inter_token: None, latest: None, events: 0, ended: false, failed: false }
    }

    /// Records the head of the response, which comes with its first output.
    pub(crate) fn head(&mut self, worker: Option<Arc<str>>) {
        let RequestContext { metrics, arrived, .. } = &*self.context;
        let mut log_fields = self.context.log_fields();
        log_fields.worker = worker;
        if self.is_stream {
            let took = arrived.elapsed().as_secs_f64();
            log_fields.ttft_s = Some(took);
            metrics.first_token.with_label_values(&[&*self.metrics.name]).observe(took);
            self.inter_token = Some(metrics.inter_token.with_label_values(&[&*self.metrics.name]));
        }
    }

    /// Records a part of the body.
    pub(crate) fn body(&mut self, part: &[u8]) {
        let Some(inter_token) = &self.inter_token else { return };
        // Two line ends per event. Streams whose events have more lines are counted as more events.
        let events = memchr::memchr_iter(b'\n', part).count() / 2;
        self.events = self.events.saturating_add(events.max(1) as u32);
        let now = Instant::now();
        if let Some(before) = self.latest.replace(now) {
            inter_token.observe((now - before).as_secs_f64());
        }
    }

    /// Records the end of the response.
    pub(crate) fn finish(&mut self, report: RelayReport) {
        self.ended = true;
        let metrics = &self.metrics;
        if let Some(tokens) = report.prompt_tokens {
            self.context.record_prompt(&metrics.name, tokens as usize);
        }
        if let Some(tokens) = report.cached_tokens {
            metrics.cached_tokens.inc_by(tokens.into());
        }
        if let Some(tokens) = report.completion_tokens {
            metrics.generated_tokens.inc_by(tokens.into());
            metrics.output_length.observe(f64::from(tokens));
        }
        if report.failed {
            self.count_finished("error");
        } else {
            metrics.relayed.inc();
        }
        let mut log_fields = self.context.log_fields();
        log_fields.cached_tokens = report.cached_tokens;
        log_fields.completion_tokens = report.completion_tokens.unwrap_or_default();
    }

    /// Counts a response that did not end as the engine would have ended it.
    fn count_finished(&self, reason: &str) {
        self.context.metrics.finished.with_label_values(&[&*self.metrics.name, reason]).inc();
    }

    /// Marks the response as failed.
    pub(crate) fn mark_failed(&mut self) {
        self.failed = true;
    }
}

impl Drop for RelayMeter {
    fn drop(&mut self) {
        if !self.ended {
            let reason = if self.failed { "error" } else { "cancelled" };
            self.count_finished(reason);
            // The engine reports the tokens at the end only, which did not arrive.
            self.context.log_fields().completion_tokens = self.events;
        }
    }
}
