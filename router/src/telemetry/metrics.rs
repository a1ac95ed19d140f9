//! Every metric of the router: name, unit, help text, labels.

use crate::fleet::CacheView;
use crate::policy::Policy;
use prometheus::{
    Counter, GaugeVec, Histogram, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts,
    Registry, core::Collector,
};
use worker::plane::WorkerId;

/// The metrics of the router. Clones share them. Labels are bounded: the series of a worker are removed when it leaves.
#[derive(Clone)]
pub(crate) struct Metrics {
    pub(crate) requests: IntCounterVec,
    pub(crate) retries: IntCounterVec,
    pub(crate) stream_moves: IntCounterVec,
    pub(crate) disaggregated_requests: IntCounterVec,
    pub(crate) decision_seconds: Histogram,
    pub(crate) predicted_tokens: IntCounter,
    pub(crate) actual_tokens: IntCounter,
    pub(crate) overpredicted_tokens: IntCounter,
    pub(crate) underpredicted_tokens: IntCounter,
    pub(crate) regret_seconds: Counter,
    pub(crate) shared_prefix_copies: Histogram,
    pub(crate) replications: IntCounter,
    pub(crate) prefix_copies: IntCounterVec,
    pub(crate) output_tokens: IntGaugeVec,
    pub(crate) index_source: IntGaugeVec,
    pub(crate) queued_prefill_tokens: IntGaugeVec,
    pub(crate) workers: IntGaugeVec,
    pub(crate) events: IntCounterVec,
    pub(crate) resyncs: IntCounterVec,
    pub(crate) divergences: IntCounter,
    pub(crate) index_entries: IntGauge,
    pub(crate) index_bytes: IntGauge,
    pub(crate) replicas: IntGauge,
    pub(crate) desired_workers: IntGaugeVec,
    pub(crate) planner_expected: GaugeVec,
    pub(crate) planner_missed: IntGaugeVec,
    pub(crate) role_changes: IntCounterVec,
    pub(crate) admission_queue_requests: IntGaugeVec,
    pub(crate) admission_queue_tokens: IntGaugeVec,
    pub(crate) drain_rate: GaugeVec,
    pub(crate) admission_requests: IntCounterVec,
    pub(crate) late_requests: IntCounterVec,
    pub(crate) admission_wait_seconds: HistogramVec,
    pub(crate) health_checks: IntCounterVec,
    pub(crate) trace_records: IntCounterVec,
    pub(crate) index_evicted_pages: IntCounter,
}

impl Metrics {
    /// Removes the series of all plans.
    pub(crate) fn remove_plans(&self) {
        self.desired_workers.reset();
        self.planner_expected.reset();
        self.planner_missed.reset();
    }

    #[expect(clippy::too_many_lines, reason = "one metric after the other")]
    pub(crate) fn new(registry: &Registry) -> Result<Self, prometheus::Error> {
        let counter = |name, help| register(registry, IntCounter::new(name, help));
        let counters = |name: &str, help: &str, labels: &[&str]| {
            register(registry, IntCounterVec::new(Opts::new(name, help), labels))
        };
        let gauge = |name, help| register(registry, IntGauge::new(name, help));
        let gauges = |name: &str, help: &str, labels: &[&str]| {
            register(registry, IntGaugeVec::new(Opts::new(name, help), labels))
        };
        let shared_prefix_copies = HistogramOpts::new(
            "blockyard_router_shared_prefix_copies",
            "Workers that held the shared prefix of a request when it was placed, of requests with such a prefix.",
        )
        .buckets(prometheus::exponential_buckets(1.0, 2.0, 11)?);
        let decision_seconds = HistogramOpts::new(
            "blockyard_router_decision_seconds",
            "Duration of one routing decision: block hashes, index lookup, cost of each worker.",
        )
        // 5 µs to 10 ms: a decision takes tens of microseconds.
        .buckets(prometheus::exponential_buckets(5e-6, 2.0, 12)?);
        let wait_seconds = HistogramOpts::new(
            "blockyard_router_admission_queue_wait_seconds",
            "Time that requests waited in the admission queue, of those that waited and were sent to a worker, by \
             priority.",
        )
        // 1 ms to 65 s: the default limit on the time in the queue is below that.
        .buckets(prometheus::exponential_buckets(1e-3, 2.0, 17)?);
        let drain_rate = Opts::new(
            "blockyard_router_admission_drain_tokens_per_second",
            "Rate at which requests leave the admission queue, in tokens per second to compute and to generate, by \
             model, as last measured while requests waited.",
        );
        let planner_expected = Opts::new(
            "blockyard_planner_expected_seconds",
            "Expected mean time to first token (ttft) and time between tokens (itl) with the desired workers; infinite \
             while these could not keep up with the load.",
        );
        Ok(Self {
            requests: counters(
                "blockyard_router_requests_total",
                "Requests sent to a worker, by the worker that decodes them and the policy that chose it. Each attempt \
                 counts.",
                &["worker", "policy"],
            )?,
            retries: counters(
                "blockyard_router_retries_total",
                "Retries on another worker before the first output, by reason: busy (the worker rejected the request), \
                 error.",
                &["reason"],
            )?,
            stream_moves: counters(
                "blockyard_router_stream_moves_total",
                "Streams whose worker failed or was stopped after the first output, by outcome: continued (on another \
                 worker), failed.",
                &["outcome"],
            )?,
            disaggregated_requests: counters(
                "blockyard_router_disaggregated_requests_total",
                "Requests that were sent to a prefill worker first, by outcome: remote_prefill (it computed the \
                 prompt), or local_fallback (the prefill failed and the decode worker computed the prompt).",
                &["outcome"],
            )?,
            decision_seconds: register(registry, Histogram::with_opts(decision_seconds))?,
            predicted_tokens: counter(
                "blockyard_router_prefix_predicted_tokens_total",
                "Prompt tokens that the index expected to be cached where the request went.",
            )?,
            actual_tokens: counter(
                "blockyard_router_prefix_actual_tokens_total",
                "Prompt tokens that the engine found cached.",
            )?,
            overpredicted_tokens: counter(
                "blockyard_router_prefix_overpredicted_tokens_total",
                "Prompt tokens that the index expected to be cached and that the engine did not find cached.",
            )?,
            underpredicted_tokens: counter(
                "blockyard_router_prefix_underpredicted_tokens_total",
                "Prompt tokens that the engine found cached and that the index did not expect to be.",
            )?,
            regret_seconds: register(
                registry,
                Counter::new(
                    "blockyard_router_regret_seconds_total",
                    "Estimated time lost by wrong cache predictions, compared with the next best worker.",
                ),
            )?,
            shared_prefix_copies: register(registry, Histogram::with_opts(shared_prefix_copies))?,
            replications: counter(
                "blockyard_router_prefix_replications_total",
                "Requests that were placed on a worker without their shared prefix while others held it.",
            )?,
            prefix_copies: counters(
                "blockyard_router_prefix_copies_total",
                "Copies of shared prefixes that the router ordered ahead of demand, by outcome: started, and \
                 then complete, busy, no_memory, not_found, timed_out, unsupported, failed or cancelled.",
                &["outcome"],
            )?,
            output_tokens: gauges(
                "blockyard_router_output_tokens",
                "Output tokens that a share of the last 500 outputs of a model does not exceed (quantile 0.5 and 0.9), \
                 as the router has learned them for its costs.",
                &["model", "quantile"],
            )?,
            index_source: gauges(
                "blockyard_router_worker_index_source",
                "1 for the source of the router's view of a worker's cache: events (the worker's KV events) or \
                 estimated (from the requests that were sent to it) with the reason, 0 for the others.",
                &["worker", "source", "reason"],
            )?,
            queued_prefill_tokens: gauges(
                "blockyard_router_worker_queued_prefill_tokens",
                "Prompt tokens queued for prefill on a worker: its last report plus reservations that are not yet in \
                 it.",
                &["worker"],
            )?,
            workers: gauges(
                "blockyard_router_workers",
                "Registered workers, by role; 0 for a role without any.",
                &["role"],
            )?,
            events: counters(
                "blockyard_router_index_events_total",
                "KV block events received, by outcome: applied, buffered (an earlier event is missing), duplicate, \
                 stale (of an earlier epoch), gap (events were missed), new_epoch (the source restarted).",
                &["outcome"],
            )?,
            resyncs: counters(
                "blockyard_router_index_resyncs_total",
                "Resync requests to sources of events, by outcome. Range of events: replayed, empty, log_truncated. \
                 Snapshot: snapshot_applied, snapshot_stale. Either: failed.",
                &["outcome"],
            )?,
            divergences: counter(
                "blockyard_router_index_divergences_total",
                "How often the digest of the index differed from the digest of a source although no event was missing.",
            )?,
            index_entries: gauge(
                "blockyard_router_index_entries",
                "Entries in the index, each a pair of a block and a location that holds it.",
            )?,
            index_bytes: gauge("blockyard_router_index_bytes", "Memory that the entries of the index take.")?,
            replicas: gauge("blockyard_router_replicas", "Router replicas that share the workers, this one included.")?,
            desired_workers: gauges(
                "blockyard_planner_desired_workers",
                "Workers per role that the planner computes to meet its targets, within its bound. An autoscaler can \
                 read it.",
                &["model", "role"],
            )?,
            planner_expected: register(registry, GaugeVec::new(planner_expected, &["model", "target"]))?,
            planner_missed: gauges(
                "blockyard_planner_missed_target",
                "1 for a target that the desired workers do not meet, because of the bound of the planner or because \
                 no number of workers can; else 0.",
                &["model", "target"],
            )?,
            role_changes: counters(
                "blockyard_planner_role_changes_total",
                "Role changes that the planner of this router requested, by the new role.",
                &["role"],
            )?,
            admission_queue_requests: gauges(
                "blockyard_router_admission_queue_requests",
                "Requests in the admission queue of the router, by model. blockyard_worker_requests_waiting counts \
                 those that wait in a worker.",
                &["model"],
            )?,
            admission_queue_tokens: gauges(
                "blockyard_router_admission_queue_tokens",
                "Prompt tokens of the requests in the admission queue, by priority.",
                &["priority"],
            )?,
            drain_rate: register(registry, GaugeVec::new(drain_rate, &["model"]))?,
            admission_requests: counters(
                "blockyard_router_admission_requests_total",
                "Requests at admission, by priority and outcome. Admitted: immediate, queued. Rejected on arrival: \
                 queue_full, tenant_limit, predicted_timeout, late. Rejected from the queue: shed, \
                 predicted_timeout_queued, queue_timeout, late, deadline_exceeded. Left the queue: cancelled.",
                &["priority", "outcome"],
            )?,
            late_requests: counters(
                "blockyard_router_admission_late_requests_total",
                "Requests that were sent to a worker when they could no longer meet router.slo.ttft, by priority.",
                &["priority"],
            )?,
            admission_wait_seconds: register(registry, HistogramVec::new(wait_seconds, &["priority"]))?,
            health_checks: counters(
                "blockyard_router_health_checks_total",
                "Health checks of workers, each a request of one token, and of upstreams, by outcome: ok or failed.",
                &["outcome"],
            )?,
            trace_records: counters(
                "blockyard_router_trace_records_total",
                "Records for the trace file (router.trace_file), one per request, by outcome: written or dropped.",
                &["outcome"],
            )?,
            index_evicted_pages: counter(
                "blockyard_router_index_evicted_pages_total",
                "Pages of up to 64 blocks that the index evicted to stay within router.index_memory.",
            )?,
        })
    }

    /// Removes the series of a worker.
    pub(crate) fn remove_worker(&self, worker: WorkerId) {
        let worker = worker.to_string();
        // A worker that never received a request has no series. That is not an error.
        for policy in Policy::NAMES {
            let _ = self.requests.remove_label_values(&[&worker, policy]);
        }
        let _ = self.queued_prefill_tokens.remove_label_values(&[&worker]);
        for [source, reason] in CacheView::ALL.map(CacheView::labels) {
            let _ = self.index_source.remove_label_values(&[&*worker, source, reason]);
        }
    }
}

/// Counts one request in a gauge until this value is dropped.
pub(crate) struct GaugeGuard(IntGauge);

impl GaugeGuard {
    pub(crate) fn new(gauge: IntGauge) -> Self {
        gauge.inc();
        Self(gauge)
    }
}

impl Drop for GaugeGuard {
    fn drop(&mut self) {
        self.0.dec();
    }
}

fn register<C: Collector + Clone + 'static>(
    registry: &Registry,
    metric: Result<C, prometheus::Error>,
) -> Result<C, prometheus::Error> {
    let metric = metric?;
    registry.register(Box::new(metric.clone()))?;
    Ok(metric)
}
