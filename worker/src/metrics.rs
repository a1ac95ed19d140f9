//! What the engines of a process count.

use crate::engine::PromptReport;
use kvbm::Level;
use prometheus::{
    Histogram, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts, Registry,
};
use std::time::Duration;

/// The metrics of all engines in a process, by worker. A process has few workers, so the label is bounded.
#[derive(Clone)]
pub struct Metrics {
    computed: IntCounterVec,
    cached: IntCounterVec,
    generated: IntCounterVec,
    preempted: IntCounterVec,
    pauses: IntCounterVec,
    unread: IntCounterVec,
    step: HistogramVec,
    running: IntGaugeVec,
    waiting: IntGaugeVec,
    paused: IntGaugeVec,
}

impl Metrics {
    /// Declares the metrics, once per registry.
    pub fn new(registry: &Registry) -> prometheus::Result<Self> {
        let counter = |name: &str, help: &str, labels: &[&str]| {
            let counter = IntCounterVec::new(Opts::new(format!("blockyard_worker_{name}"), help), labels)?;
            registry.register(Box::new(counter.clone()))?;
            Ok::<_, prometheus::Error>(counter)
        };
        let gauge = |name: &str, help: &str| {
            let gauge = IntGaugeVec::new(Opts::new(format!("blockyard_worker_{name}"), help), &["worker"])?;
            registry.register(Box::new(gauge.clone()))?;
            Ok::<_, prometheus::Error>(gauge)
        };
        let step = HistogramVec::new(
            HistogramOpts::new(
                "blockyard_worker_step_seconds",
                "Time of an engine step, waiting for its turn included",
            )
            // From a single decode step of a tiny model to a full chunk of a large one.
            .buckets(prometheus::exponential_buckets(0.001, 2.0, 14)?),
            &["worker", "kind"],
        )?;
        registry.register(Box::new(step.clone()))?;
        Ok(Self {
            computed: counter("prompt_tokens_computed_total", "Prompt tokens that were computed", &["worker"])?,
            cached: counter(
                "prompt_tokens_cached_total",
                "Prompt tokens that were found cached, by tier",
                &["worker", "tier"],
            )?,
            generated: counter("generated_tokens_total", "Tokens generated", &["worker"])?,
            preempted: counter("preemptions_total", "Sequences that gave up their blocks to others", &["worker"])?,
            pauses: counter(
                "pauses_total",
                "Sequences that left the batch because their output was not read",
                &["worker"],
            )?,
            unread: counter("unread_total", "Requests that failed because their output was not read", &["worker"])?,
            step,
            running: gauge("requests_running", "Requests in the batch")?,
            waiting: gauge("requests_waiting", "Requests waiting to join the batch")?,
            paused: gauge("requests_paused", "Requests out of the batch until their output is read")?,
        })
    }

    /// The metrics of one worker.
    pub fn of(&self, worker: &str) -> EngineMetrics {
        let each = |counter: &IntCounterVec| counter.with_label_values(&[worker]);
        EngineMetrics {
            computed: each(&self.computed),
            cached: Level::ALL.map(|level| self.cached.with_label_values(&[worker, level.name()])),
            generated: each(&self.generated),
            preempted: each(&self.preempted),
            pauses: each(&self.pauses),
            unread: each(&self.unread),
            prefill_step: self.step.with_label_values(&[worker, "prefill"]),
            decode_step: self.step.with_label_values(&[worker, "decode"]),
            running: self.running.with_label_values(&[worker]),
            waiting: self.waiting.with_label_values(&[worker]),
            paused: self.paused.with_label_values(&[worker]),
        }
    }
}

/// The metrics of one engine.
#[derive(Clone)]
pub struct EngineMetrics {
    computed: IntCounter,
    cached: [IntCounter; Level::ALL.len()],
    generated: IntCounter,
    preempted: IntCounter,
    pauses: IntCounter,
    unread: IntCounter,
    prefill_step: Histogram,
    decode_step: Histogram,
    running: IntGauge,
    waiting: IntGauge,
    paused: IntGauge,
}

impl EngineMetrics {
    pub(crate) fn computed(&self, prompt_tokens: usize) {
        self.computed.inc_by(prompt_tokens as u64);
    }

    pub(crate) fn prompt_cached(&self, report: &PromptReport) {
        for (level, tokens) in &report.cached {
            self.cached[*level as usize].inc_by(u64::from(*tokens));
        }
    }

    pub(crate) fn generated(&self) {
        self.generated.inc();
    }

    pub(crate) fn preempted(&self) {
        self.preempted.inc();
    }

    pub(crate) fn paused(&self) {
        self.pauses.inc();
    }

    pub(crate) fn unread(&self) {
        self.unread.inc();
    }

    pub(crate) fn stepped(&self, prompt_rows: usize, took: Duration) {
        let step = if prompt_rows > 0 { &self.prefill_step } else { &self.decode_step };
        step.observe(took.as_secs_f64());
    }

    pub(crate) fn set_sequences(&self, running: usize, waiting: usize, paused: usize) {
        self.paused.set(paused as i64);
        self.running.set(running as i64);
        self.waiting.set(waiting as i64);
    }
}
