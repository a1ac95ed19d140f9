//! Every metric of the router: name, unit, help.

use crate::policy::Policy;
use crate::trust::Mode;
use prometheus::{
    Counter, GaugeVec, Histogram, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts,
    Registry, core::Collector,
};
use worker::plane::WorkerId;

/// What is seen of the router. Cheap to clone. Labels are bounded: a worker's go when it leaves.
#[derive(Clone)]
pub(crate) struct Metrics {
    pub(crate) requests: IntCounterVec,
    pub(crate) retries: IntCounterVec,
    pub(crate) disaggregated: IntCounterVec,
    pub(crate) decision_seconds: Histogram,
    pub(crate) predicted_tokens: IntCounter,
    pub(crate) actual_tokens: IntCounter,
    pub(crate) false_tokens: IntCounter,
    pub(crate) missed_tokens: IntCounter,
    pub(crate) regret_seconds: Counter,
    pub(crate) index_mode: IntGaugeVec,
    pub(crate) queued_tokens: IntGaugeVec,
    pub(crate) workers: IntGaugeVec,
    pub(crate) events: IntCounterVec,
    pub(crate) repairs: IntCounterVec,
    pub(crate) drifts: IntCounter,
    pub(crate) index_memberships: IntGauge,
    pub(crate) index_bytes: IntGauge,
    pub(crate) replicas: IntGauge,
    pub(crate) desired: IntGaugeVec,
    pub(crate) flips: IntCounterVec,
    pub(crate) requests_waiting: IntGaugeVec,
    pub(crate) waiting_tokens: IntGaugeVec,
    pub(crate) drain_rate: GaugeVec,
    pub(crate) admissions: IntCounterVec,
    pub(crate) wait_seconds: HistogramVec,
    pub(crate) probes: IntCounterVec,
    pub(crate) recorded: IntCounterVec,
    pub(crate) index_forgotten: IntCounter,
}

impl Metrics {
    #[expect(clippy::too_many_lines, reason = "one metric after the other")]
    pub(crate) fn new(registry: &Registry) -> Result<Self, prometheus::Error> {
        let counter = |name, help| enter(registry, IntCounter::new(name, help));
        let counters = |name: &str, help: &str, labels: &[&str]| {
            enter(registry, IntCounterVec::new(Opts::new(name, help), labels))
        };
        let gauge = |name, help| enter(registry, IntGauge::new(name, help));
        let gauges =
            |name: &str, help: &str, labels: &[&str]| enter(registry, IntGaugeVec::new(Opts::new(name, help), labels));
        let decision_seconds = HistogramOpts::new(
            "blockyard_router_decision_seconds",
            "Time to decide where a request goes: naming its blocks, asking the index, weighing the workers.",
        )
        // 5 µs to 10 ms: a decision is due in tens of microseconds.
        .buckets(prometheus::exponential_buckets(5e-6, 2.0, 12)?);
        let wait_seconds = HistogramOpts::new(
            "blockyard_router_wait_seconds",
            "Time that requests waited in the router before they went to a worker, of those that did, by priority.",
        )
        // 1 ms to 65 s: nobody waits longer unless the configuration says so.
        .buckets(prometheus::exponential_buckets(1e-3, 2.0, 17)?);
        let drain_rate = Opts::new(
            "blockyard_router_drain_tokens_per_second",
            "Tokens to be computed and generated of requests that leave the waiting room, per second, as last measured while \
             requests waited, by model.",
        );
        Ok(Self {
            requests: counters(
                "blockyard_router_requests_total",
                "Requests placed, by the worker that decodes and the policy that chose it.",
                &["worker", "policy"],
            )?,
            retries: counters(
                "blockyard_router_retries_total",
                "Requests that went on to another worker before their first output, by why the last one did not serve.",
                &["reason"],
            )?,
            disaggregated: counters(
                "blockyard_router_disaggregated_total",
                "Requests whose prompt went to a prefill worker: handed_over, or fell_back to the worker that decodes.",
                &["outcome"],
            )?,
            decision_seconds: enter(registry, Histogram::with_opts(decision_seconds))?,
            predicted_tokens: counter(
                "blockyard_router_overlap_predicted_tokens_total",
                "Prompt tokens that the index expected to be cached where the request went.",
            )?,
            actual_tokens: counter(
                "blockyard_router_overlap_actual_tokens_total",
                "Prompt tokens that the engine found cached.",
            )?,
            false_tokens: counter(
                "blockyard_router_overlap_false_tokens_total",
                "Prompt tokens that were expected to be cached and were not.",
            )?,
            missed_tokens: counter(
                "blockyard_router_overlap_missed_tokens_total",
                "Prompt tokens that were cached and not expected to be.",
            )?,
            regret_seconds: enter(
                registry,
                Counter::new(
                    "blockyard_router_regret_seconds_total",
                    "Time that computing what was expected to be cached took longer than the next best choice would have.",
                ),
            )?,
            index_mode: gauges(
                "blockyard_router_index_mode",
                "1 for what a worker's cache is known by: exact, its events; approximate, what was sent there.",
                &["worker", "mode"],
            )?,
            queued_tokens: gauges(
                "blockyard_router_queued_tokens",
                "Prompt tokens that wait for prefill, as reported and booked.",
                &["worker"],
            )?,
            workers: gauges("blockyard_router_workers", "Workers that are there, by phase.", &["phase"])?,
            events: counters(
                "blockyard_router_events_total",
                "Block events received, by what became of them: applied, held, duplicate, stale, gap, new_life.",
                &["outcome"],
            )?,
            repairs: counters(
                "blockyard_router_repairs_total",
                "Questions to sources, for missed events or to learn a new source, by the answer: ranged, none or not_kept (events); taken or outdated (a snapshot); failed.",
                &["outcome"],
            )?,
            drifts: counter(
                "blockyard_router_drifts_total",
                "Times that what the index believed of a source was not what the source said it holds, though no event was missing.",
            )?,
            index_memberships: gauge(
                "blockyard_router_index_memberships",
                "Pairs of a block and a place where it rests, in the index.",
            )?,
            index_bytes: gauge("blockyard_router_index_bytes", "Bytes that the index takes for its blocks.")?,
            replicas: gauge("blockyard_router_replicas", "Routers over the same workers, this one included.")?,
            desired: gauges(
                "blockyard_planner_desired_replicas",
                "Workers of a phase that would keep the planner's targets: for whoever starts and stops workers.",
                &["model", "phase"],
            )?,
            flips: counters(
                "blockyard_planner_flips_total",
                "Workers that this router wished another phase, by that phase.",
                &["phase"],
            )?,
            requests_waiting: gauges(
                "blockyard_router_requests_waiting",
                "Requests that wait in the router until a worker takes them, by model; see \
                 blockyard_worker_requests_waiting for those that wait in a worker.",
                &["model"],
            )?,
            waiting_tokens: gauges(
                "blockyard_router_waiting_tokens",
                "Prompt tokens of requests that wait in the router, by priority.",
                &["priority"],
            )?,
            drain_rate: enter(registry, GaugeVec::new(drain_rate, &["model"]))?,
            admissions: counters(
                "blockyard_router_admissions_total",
                "Requests at the door, by priority and what became of them: straight, waited; refused on arrival: full, \
                 tenant_full, predicted_timeout; refused while they waited: displaced, predicted_timeout_queued, in_vain, \
                 late; gone while they waited.",
                &["priority", "outcome"],
            )?,
            wait_seconds: enter(registry, HistogramVec::new(wait_seconds, &["priority"]))?,
            probes: counters(
                "blockyard_router_probes_total",
                "Requests of one token to workers that were idle or left alone, by outcome: well or fault.",
                &["outcome"],
            )?,
            recorded: counters(
                "blockyard_router_recorded_total",
                "Requests that were to be recorded (router.record), by what came of it: written, or dropped.",
                &["outcome"],
            )?,
            index_forgotten: counter(
                "blockyard_router_index_forgotten_pages_total",
                "Pages of up to 64 blocks that the index forgot to stay within its budget.",
            )?,
        })
    }

    /// Takes a worker out of the labels.
    pub(crate) fn forget(&self, worker: WorkerId) {
        let worker = worker.to_string();
        // A worker that never got a request has no series; that is not an error.
        for policy in Policy::NAMES {
            let _ = self.requests.remove_label_values(&[&worker, policy]);
        }
        let _ = self.queued_tokens.remove_label_values(&[&worker]);
        for mode in Mode::NAMES {
            let _ = self.index_mode.remove_label_values(&[&worker, mode]);
        }
    }
}

/// Counts one request in a gauge until it is dropped.
pub(crate) struct Counted(IntGauge);

impl Counted {
    pub(crate) fn in_gauge(gauge: IntGauge) -> Self {
        gauge.inc();
        Self(gauge)
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.dec();
    }
}

fn enter<C: Collector + Clone + 'static>(
    registry: &Registry,
    metric: Result<C, prometheus::Error>,
) -> Result<C, prometheus::Error> {
    let metric = metric?;
    registry.register(Box::new(metric.clone()))?;
    Ok(metric)
}
