//! The metrics of the engines of a process.

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
    queue: HistogramVec,
    prefill: HistogramVec,
    decode: HistogramVec,
    handoff: HistogramVec,
    handoffs_sent: IntCounterVec,
    handoffs_received: IntCounterVec,
    handoff_bytes: IntCounterVec,
    prefetches: IntCounterVec,
    prefetched_blocks: IntCounterVec,
    prefetched_bytes: IntCounterVec,
}

/// How keeping the blocks of a prefill for another worker ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum HandoffEnd {
    /// The request has its first token, or its client has disconnected.
    Released,
    /// The request was cancelled before the prefill was complete.
    Cancelled,
    /// They were not fetched for too long.
    Expired,
    /// Another request needed the memory.
    Reclaimed,
}

/// How a prefill on another worker ended for the worker that decodes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum ArrivalOutcome {
    Complete,
    /// The prefill failed, or its worker could not be reached.
    Failed,
    /// It made no progress.
    Stalled,
    /// The ticket names no known worker.
    Unknown,
    /// The request was cancelled.
    Cancelled,
}

/// When bytes of a hand-over arrived.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum HandoffPhase {
    /// While the prompt was being computed.
    Prefill,
    /// Afterwards.
    AfterPrefill,
}

/// How a copy of a prefix ahead of demand ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum PrefetchOutcome {
    Complete,
    /// Declined: requests waited, or another prefix was being copied.
    Busy,
    /// Declined: the host memory is too small, or there is none.
    NoMemory,
    /// Its source did not have it.
    NotFound,
    TimedOut,
    /// It was cancelled: the worker or the router stopped.
    Cancelled,
}

const HANDOFF_ENDS: [&str; 4] = ["released", "cancelled", "expired", "reclaimed"];
const ARRIVAL_OUTCOMES: [&str; 5] = ["complete", "failed", "stalled", "unknown", "cancelled"];
const HANDOFF_PHASES: [&str; 2] = ["prefill", "after_prefill"];
const PREFETCH_OUTCOMES: [&str; 6] = ["complete", "busy", "no_memory", "not_found", "timed_out", "cancelled"];

/// Histogram buckets of the parts of a request, in seconds: from a step of a small model to a queue of minutes.
const PHASE_SECONDS: [f64; 17] =
    [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0];

impl Metrics {
    /// Declares the metrics, once per registry.
    pub fn new(registry: &Registry) -> prometheus::Result<Self> {
        let counter = |name: &str, help: &str, labels: &[&str]| {
            let counter = IntCounterVec::new(Opts::new(format!("blockyard_worker_{name}"), help), labels)?;
            registry.register(Box::new(counter.clone()))?;
            Ok::<_, prometheus::Error>(counter)
        };
        let gauge = |name: &str, help: &str| {
            let gauge = IntGaugeVec::new(Opts::new(format!("blockyard_worker_{name}"), help), &["worker", "model"])?;
            registry.register(Box::new(gauge.clone()))?;
            Ok::<_, prometheus::Error>(gauge)
        };
        let phase = |name: &str, help: &str| {
            let options = HistogramOpts::new(format!("blockyard_worker_{name}"), help).buckets(PHASE_SECONDS.to_vec());
            let histogram = HistogramVec::new(options, &["worker", "model"])?;
            registry.register(Box::new(histogram.clone()))?;
            Ok::<_, prometheus::Error>(histogram)
        };
        let step = HistogramVec::new(
            HistogramOpts::new(
                "blockyard_worker_step_seconds",
                "Duration of an engine step, the wait for the shared compute threads included.",
            )
            // From one decode step of a tiny model to a full prefill chunk of a large one.
            .buckets(prometheus::exponential_buckets(0.001, 2.0, 14)?),
            &["worker", "kind"],
        )?;
        registry.register(Box::new(step.clone()))?;
        Ok(Self {
            computed: counter("prompt_tokens_computed_total", "Prompt tokens that were computed.", &["worker"])?,
            cached: counter(
                "prompt_tokens_cached_total",
                "Prompt tokens that were found cached, by tier.",
                &["worker", "tier"],
            )?,
            generated: counter("generated_tokens_total", "Tokens generated.", &["worker"])?,
            preempted: counter(
                "preemptions_total",
                "Sequences that released their blocks to other sequences and are computed again.",
                &["worker"],
            )?,
            pauses: counter(
                "output_pauses_total",
                "Sequences that left the batch because their output was not read.",
                &["worker"],
            )?,
            unread: counter(
                "output_timeouts_total",
                "Requests that failed because their output was not read in time.",
                &["worker"],
            )?,
            step,
            running: gauge("requests_running", "Requests in the batch.")?,
            waiting: gauge("requests_waiting", "Requests waiting to join the batch.")?,
            paused: gauge("requests_paused", "Requests out of the batch until their output is read.")?,
            queue: phase("queue_seconds", "Time from a request's arrival at the worker until it joins the batch.")?,
            prefill: phase(
                "prefill_seconds",
                "Time from joining the batch until the first token, or until the transfer to a decode worker.",
            )?,
            decode: phase("decode_seconds", "Time from the first token to the last.")?,
            handoff: phase(
                "handoff_seconds",
                "Time from the end of the prefill on another worker until the first step on this one.",
            )?,
            handoffs_sent: counter(
                "handoffs_sent_total",
                "Prefills whose blocks were kept for another worker, by how that ended.",
                &["worker", "end"],
            )?,
            handoffs_received: counter(
                "handoffs_received_total",
                "Prompts that another worker was to compute for this one, by how that ended.",
                &["worker", "outcome"],
            )?,
            handoff_bytes: counter(
                "handoff_received_bytes_total",
                "Bytes of blocks from prefill workers, while the prompt was computed there and afterwards.",
                &["worker", "phase"],
            )?,
            prefetches: counter(
                "prefetches_total",
                "Prefixes that the worker was to copy into its host memory ahead of demand, by how that ended.",
                &["worker", "outcome"],
            )?,
            prefetched_blocks: counter(
                "prefetched_blocks_total",
                "Blocks that the worker copied into its host memory ahead of demand.",
                &["worker"],
            )?,
            prefetched_bytes: counter("prefetched_bytes_total", "Bytes of these blocks.", &["worker"])?,
        })
    }

    /// The metrics of one worker, which serves one model.
    pub fn of(&self, worker: &str, model: &str) -> EngineMetrics {
        let labels = &[worker, model];
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
            running: self.running.with_label_values(labels),
            waiting: self.waiting.with_label_values(labels),
            paused: self.paused.with_label_values(labels),
            queue: self.queue.with_label_values(labels),
            prefill: self.prefill.with_label_values(labels),
            decode: self.decode.with_label_values(labels),
            handoff: self.handoff.with_label_values(labels),
            handoffs_sent: HANDOFF_ENDS.map(|end| self.handoffs_sent.with_label_values(&[worker, end])),
            handoffs_received: ARRIVAL_OUTCOMES
                .map(|outcome| self.handoffs_received.with_label_values(&[worker, outcome])),
            handoff_bytes: HANDOFF_PHASES.map(|phase| self.handoff_bytes.with_label_values(&[worker, phase])),
            prefetches: PREFETCH_OUTCOMES.map(|outcome| self.prefetches.with_label_values(&[worker, outcome])),
            prefetched_blocks: each(&self.prefetched_blocks),
            prefetched_bytes: each(&self.prefetched_bytes),
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
    queue: Histogram,
    prefill: Histogram,
    decode: Histogram,
    handoff: Histogram,
    handoffs_sent: [IntCounter; HANDOFF_ENDS.len()],
    handoffs_received: [IntCounter; ARRIVAL_OUTCOMES.len()],
    handoff_bytes: [IntCounter; HANDOFF_PHASES.len()],
    prefetches: [IntCounter; PREFETCH_OUTCOMES.len()],
    prefetched_blocks: IntCounter,
    prefetched_bytes: IntCounter,
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

    /// A request joined the batch, this long after its arrival.
    pub(crate) fn joined(&self, waited: Duration) {
        self.queue.observe(waited.as_secs_f64());
    }

    /// A prompt is computed: its first token is generated, or its blocks are ready for the handoff.
    pub(crate) fn prefilled(&self, took: Duration) {
        self.prefill.observe(took.as_secs_f64());
    }

    pub(crate) fn handoff_ended(&self, end: HandoffEnd) {
        self.handoffs_sent[end as usize].inc();
    }

    pub(crate) fn arrived(&self, outcome: ArrivalOutcome) {
        self.handoffs_received[outcome as usize].inc();
    }

    pub(crate) fn received(&self, phase: HandoffPhase, bytes: usize) {
        self.handoff_bytes[phase as usize].inc_by(bytes as u64);
    }

    pub(crate) fn prefetch_ended(&self, outcome: PrefetchOutcome) {
        self.prefetches[outcome as usize].inc();
    }

    pub(crate) fn prefetched(&self, blocks: u32, bytes: u64) {
        self.prefetched_blocks.inc_by(blocks.into());
        self.prefetched_bytes.inc_by(bytes);
    }

    /// The first step with a request whose prompt another worker had computed this long ago.
    pub(crate) fn handed_over(&self, took: Duration) {
        self.handoff.observe(took.as_secs_f64());
    }

    /// An answer is complete, this long after its first token.
    pub(crate) fn decoded(&self, took: Duration) {
        self.decode.observe(took.as_secs_f64());
    }
}
