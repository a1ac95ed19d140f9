//! Every metric of the front door. Labels are bounded: endpoints are routes, models are those that were found served.

use prometheus::{
    HistogramOpts, HistogramVec, IntCounterVec, IntGauge, Opts, Registry,
    core::{Collector, Desc},
    proto,
};

/// Seconds, from a token of a small model to a prompt that fills a large one.
const SECONDS: [f64; 17] =
    [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0];

/// The front door's metrics. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Metrics {
    /// Requests by endpoint and status, counted when the last byte was written.
    pub(crate) requests: IntCounterVec,
    /// Requests whose last byte was not written yet.
    pub(crate) in_flight: IntGauge,
    /// From a request's arrival to its first token.
    pub(crate) first_token: HistogramVec,
    /// Between tokens of one choice.
    pub(crate) inter_token: HistogramVec,
    /// From a request's arrival to its last byte.
    pub(crate) duration: HistogramVec,
    /// Prompt tokens, cached ones included.
    pub(crate) prompt_tokens: IntCounterVec,
    /// Prompt tokens that nobody had to compute.
    pub(crate) cached_tokens: IntCounterVec,
    /// Tokens generated.
    pub(crate) generated_tokens: IntCounterVec,
    /// Request fields that are not known.
    pub(crate) unknown_fields: IntCounterVec,
}

impl Metrics {
    /// Registers all of them.
    pub(crate) fn new(registry: &Registry) -> Result<Self, prometheus::Error> {
        let metrics = Self {
            requests: counters("requests_total", "Requests, by route and HTTP status.", &["endpoint", "status"])?,
            in_flight: IntGauge::new("blockyard_frontend_in_flight", "Requests being served.")?,
            first_token: seconds("time_to_first_token_seconds", "From arrival to the first token.")?,
            inter_token: seconds("inter_token_seconds", "Between tokens of one choice.")?,
            duration: seconds("request_seconds", "From arrival to the last byte, requests that generate.")?,
            prompt_tokens: counters("prompt_tokens_total", "Prompt tokens, cached ones included.", &["model"])?,
            cached_tokens: counters("cached_tokens_total", "Prompt tokens that were not computed.", &["model"])?,
            generated_tokens: counters("generated_tokens_total", "Tokens generated.", &["model"])?,
            unknown_fields: counters(
                "unknown_fields_total",
                "Request fields that are not known and were ignored.",
                &["endpoint"],
            )?,
        };
        registry.register(Box::new(metrics.clone()))?;
        Ok(metrics)
    }

    fn all(&self) -> [&dyn Collector; 9] {
        [
            &self.requests,
            &self.in_flight,
            &self.first_token,
            &self.inter_token,
            &self.duration,
            &self.prompt_tokens,
            &self.cached_tokens,
            &self.generated_tokens,
            &self.unknown_fields,
        ]
    }
}

impl Collector for Metrics {
    fn desc(&self) -> Vec<&Desc> {
        self.all().into_iter().flat_map(Collector::desc).collect()
    }

    fn collect(&self) -> Vec<proto::MetricFamily> {
        self.all().into_iter().flat_map(Collector::collect).collect()
    }
}

fn counters(name: &str, help: &str, labels: &[&str]) -> Result<IntCounterVec, prometheus::Error> {
    IntCounterVec::new(Opts::new(format!("blockyard_frontend_{name}"), help), labels)
}

fn seconds(name: &str, help: &str) -> Result<HistogramVec, prometheus::Error> {
    HistogramVec::new(
        HistogramOpts::new(format!("blockyard_frontend_{name}"), help).buckets(SECONDS.to_vec()),
        &["model"],
    )
}
