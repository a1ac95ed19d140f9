//! Metrics of the export of spans.

use prometheus::core::{Collector, Desc};
use prometheus::proto::MetricFamily;
use prometheus::{IntCounter, IntCounterVec, Opts, Registry};
use std::sync::{Arc, OnceLock};

/// Metrics of the export of spans.
pub(super) struct Metrics {
    pub(super) exported: IntCounter,
    pub(super) rejected: IntCounter,
    pub(super) unsent: IntCounter,
    count_of_queue: Arc<OnceLock<Count>>,
}

/// Reads a number.
type Count = Box<dyn Fn() -> u64 + Send + Sync>;

/// Dropped spans by reason. The number of the queue is read at each scrape.
struct Dropped {
    by_reason: IntCounterVec,
    of_queue: IntCounter,
    count_of_queue: Arc<OnceLock<Count>>,
}

impl Metrics {
    pub(super) fn new(registry: &Registry) -> Result<Self, prometheus::Error> {
        let exported = IntCounter::new("blockyard_tracing_spans_exported_total", "Spans that the collector accepted.")?;
        let help = "Spans that were not exported, by reason: queue, rejected or unsent.";
        let by_reason = IntCounterVec::new(Opts::new("blockyard_tracing_spans_dropped_total", help), &["reason"])?;
        let [of_queue, rejected, unsent] =
            ["queue", "rejected", "unsent"].map(|reason| by_reason.with_label_values(&[reason]));
        let count_of_queue = Arc::new(OnceLock::new());
        registry.register(Box::new(exported.clone()))?;
        registry.register(Box::new(Dropped { by_reason, of_queue, count_of_queue: Arc::clone(&count_of_queue) }))?;
        Ok(Self { exported, rejected, unsent, count_of_queue })
    }

    /// Reads the number of spans that the queue dropped from here on with `count`.
    pub(super) fn read_dropped(&self, count: impl Fn() -> u64 + Send + Sync + 'static) {
        // There is one queue.
        let _ = self.count_of_queue.set(Box::new(count));
    }
}

impl Collector for Dropped {
    fn desc(&self) -> Vec<&Desc> {
        self.by_reason.desc()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        let count = self.count_of_queue.get().map_or(0, |count| count());
        self.of_queue.inc_by(count.saturating_sub(self.of_queue.get()));
        self.by_reason.collect()
    }
}
