//! Every metric of the HTTP frontend. Labels are bounded: `endpoint` is a route, the settings say how many values
//! `tenant` has, and `model` is a model that is served or expected back. The series of other models are removed,
//! because adapters may come and go under new names for as long as the process runs.

mod exposition;
mod of_model;
mod scrapes;
mod tenants;

pub(crate) use exposition::Format;
pub(crate) use of_model::ModelMetrics;
pub(crate) use scrapes::Scrapes;
pub(crate) use tenants::{TenantMetrics, UsedTokens};

use parking_lot::RwLock;
use prometheus::{
    HistogramOpts, HistogramVec, IntCounterVec, IntGauge, IntGaugeVec, Opts, Registry,
    core::{Collector, Desc},
    proto,
};
use std::collections::{HashMap, HashSet};
use std::sync::{Arc, OnceLock, Weak};
use worker::engine::Engine;

/// Buckets in seconds, from one token of a small model to a prompt that fills the context of a large one.
const SECONDS: [f64; 17] =
    [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0];

/// Buckets in seconds between tokens: steps of a quarter to a half from 5 to 100 ms, coarse beyond.
const TOKEN_SECONDS: [f64; 21] = [
    0.001, 0.0025, 0.005, 0.0075, 0.01, 0.0125, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.06, 0.075, 0.1, 0.15, 0.25,
    0.5, 1.0, 2.5, 10.0,
];

/// Buckets in tokens of a prompt or a choice, from one to the longest contexts, by factors of two.
const TOKENS: [f64; 21] = [
    1.0,
    2.0,
    4.0,
    8.0,
    16.0,
    32.0,
    64.0,
    128.0,
    256.0,
    512.0,
    1024.0,
    2048.0,
    4096.0,
    8192.0,
    16_384.0,
    32_768.0,
    65_536.0,
    131_072.0,
    262_144.0,
    524_288.0,
    1_048_576.0,
];

/// Metrics of requests. Clones share them.
#[derive(Clone)]
pub(crate) struct Metrics {
    /// Requests by endpoint and status, counted when the last byte is written.
    pub(crate) requests: IntCounterVec,
    /// Requests whose last byte is not written yet, without scrapes and health checks.
    pub(crate) in_flight: IntGauge,
    /// WebSocket connections that are open.
    pub(crate) open_websockets: IntGauge,
    /// Bytes on WebSocket connections, by direction.
    pub(crate) websocket_bytes: IntCounterVec,
    /// Time from a request's arrival to its first token.
    pub(crate) first_token: HistogramVec,
    /// Time between tokens of one choice.
    pub(crate) inter_token: HistogramVec,
    /// Time from a request's arrival to its last byte, if it got output.
    pub(crate) duration: HistogramVec,
    /// Prompt tokens of requests that got output, cached ones included.
    pub(crate) prompt_tokens: IntCounterVec,
    /// Prompt tokens that were found in the KV cache.
    pub(crate) cached_tokens: IntCounterVec,
    /// Tokens generated.
    pub(crate) generated_tokens: IntCounterVec,
    /// Unknown request fields.
    pub(crate) unknown_fields: IntCounterVec,
    /// Relayed prompts by the source of their tokens.
    pub(crate) relayed_prompts: IntCounterVec,
    /// Choices that ended, by reason.
    pub(crate) finished: IntCounterVec,
    /// Prompt tokens of one request that got output.
    pub(crate) prompt_length: HistogramVec,
    /// Tokens generated for one choice.
    pub(crate) output_length: HistogramVec,
    /// Reloads of the API keys, by outcome.
    pub(crate) key_reloads: IntCounterVec,
    /// `None`: no metrics of tenants are kept.
    pub(crate) tenants: Option<TenantMetrics>,
    /// The metrics of each model that had a request.
    models: Arc<RwLock<HashMap<Arc<str>, Arc<ModelMetrics>>>>,
    /// Says which models are served.
    engine: Arc<OnceLock<Weak<dyn Engine>>>,
}

impl Metrics {
    /// Registers all metrics, with those of at most this number of tenants.
    pub(crate) fn new(registry: &Registry, max_tenants: usize) -> Result<Self, prometheus::Error> {
        let metrics = Self {
            requests: counters("requests_total", "Requests, by route and HTTP status.", &["endpoint", "status"])?,
            in_flight: IntGauge::new(
                "blockyard_frontend_requests_in_flight",
                "Requests whose last byte is not written yet. Scrapes and health checks do not count.",
            )?,
            open_websockets: IntGauge::new(
                "blockyard_frontend_open_websockets",
                "WebSocket connections of clients to servers behind this gateway that are open.",
            )?,
            websocket_bytes: counters(
                "websocket_bytes_total",
                "Bytes on WebSocket connections, by direction: received from clients, or sent to them.",
                &["direction"],
            )?,
            first_token: histogram("time_to_first_token_seconds", "Time from arrival to the first token.", &SECONDS)?,
            inter_token: histogram(
                "inter_token_latency_seconds",
                "Time between tokens of one choice.",
                &TOKEN_SECONDS,
            )?,
            duration: histogram(
                "request_duration_seconds",
                "Time from arrival to the last byte, of requests to a model that got output.",
                &SECONDS,
            )?,
            prompt_tokens: counters(
                "prompt_tokens_total",
                "Prompt tokens of requests that got output, cached ones included.",
                &["model"],
            )?,
            cached_tokens: counters(
                "cached_tokens_total",
                "Prompt tokens that were found in the KV cache.",
                &["model"],
            )?,
            generated_tokens: counters("generated_tokens_total", "Tokens generated.", &["model"])?,
            unknown_fields: counters(
                "unknown_fields_total",
                "Request fields that are not known and were ignored.",
                &["endpoint"],
            )?,
            relayed_prompts: counters(
                "relayed_prompts_total",
                "Prompts for servers behind this gateway, by the source of the tokens that routing uses.",
                &["model", "tokens"],
            )?,
            finished: counters(
                "choices_finished_total",
                "Choices that ended, by reason: stop (the model, a stop token or a stop string), length (max_tokens or \
                 the context), error, or cancelled (the client disconnected).",
                &["model", "reason"],
            )?,
            prompt_length: histogram(
                "request_prompt_tokens",
                "Prompt tokens of one request that got output, cached ones included.",
                &TOKENS,
            )?,
            output_length: histogram("choice_generated_tokens", "Tokens generated for one choice.", &TOKENS)?,
            key_reloads: counters(
                "key_reloads_total",
                "Changes of the file of API keys, by outcome: applied or rejected.",
                &["outcome"],
            )?,
            tenants: (max_tenants > 0).then(|| TenantMetrics::new(max_tenants)).transpose()?,
            models: Arc::default(),
            engine: Arc::default(),
        };
        registry.register(Box::new(metrics.clone()))?;
        if let Some(tenants) = &metrics.tenants {
            registry.register(Box::new(tenants.clone()))?;
        }
        // An alert computes the increase, and an increase from no series is not seen.
        for outcome in ["applied", "rejected"] {
            metrics.key_reloads.with_label_values(&[outcome]);
        }
        Ok(metrics)
    }

    /// The metrics of a served model.
    pub(crate) fn of_model(&self, model: &Arc<str>) -> Arc<ModelMetrics> {
        if let Some(known) = self.models.read().get(model) {
            return Arc::clone(known);
        }
        // Also without scrapes the number of models is bounded.
        self.remove_former_models();
        let mut models = self.models.write();
        Arc::clone(models.entry(Arc::clone(model)).or_insert_with(|| Arc::new(ModelMetrics::new(self, model))))
    }

    /// Removes the metrics of models that this engine neither serves nor expects back from now on.
    pub(crate) fn follow_models(&self, engine: &Arc<dyn Engine>) {
        // Set once: a process has one engine.
        let _ = self.engine.set(Arc::downgrade(engine));
    }

    /// Removes the series of models that are not served, nor expected back, and have no request any more.
    fn remove_former_models(&self) {
        let Some(engine) = self.engine.get().and_then(Weak::upgrade) else { return };
        let cards = engine.models();
        let served: HashSet<&str> = cards.iter().map(|card| card.id.as_str()).collect();
        let mut former = HashSet::new();
        // The lock is held to the end: a model that returns meanwhile gets series that are not removed.
        let mut models = self.models.write();
        models.retain(|name, metrics| {
            let has_requests = Arc::strong_count(metrics) > 1;
            let is_kept = has_requests || served.contains(&**name) || engine.absence(name).is_some();
            if !is_kept {
                former.insert(Arc::clone(name));
            }
            is_kept
        });
        let histograms =
            [&self.first_token, &self.inter_token, &self.duration, &self.prompt_length, &self.output_length];
        let counters = [&self.prompt_tokens, &self.cached_tokens, &self.generated_tokens];
        for name in &former {
            // A series that no request has used does not exist.
            for family in histograms {
                let _ = family.remove_label_values(&[name]);
            }
            for family in counters {
                let _ = family.remove_label_values(&[name]);
            }
        }
        if !former.is_empty() {
            of_model::remove_series(&self.relayed_prompts, &former);
            of_model::remove_series(&self.finished, &former);
        }
    }

    fn all(&self) -> [&dyn Collector; 16] {
        [
            &self.requests,
            &self.in_flight,
            &self.open_websockets,
            &self.websocket_bytes,
            &self.first_token,
            &self.inter_token,
            &self.duration,
            &self.prompt_tokens,
            &self.cached_tokens,
            &self.generated_tokens,
            &self.unknown_fields,
            &self.relayed_prompts,
            &self.finished,
            &self.prompt_length,
            &self.output_length,
            &self.key_reloads,
        ]
    }
}

impl Collector for Metrics {
    fn desc(&self) -> Vec<&Desc> {
        self.all().into_iter().flat_map(Collector::desc).collect()
    }

    fn collect(&self) -> Vec<proto::MetricFamily> {
        self.remove_former_models();
        self.all().into_iter().flat_map(Collector::collect).collect()
    }
}

/// Metrics of connections. Clones share them.
#[derive(Clone)]
pub(crate) struct ConnectionMetrics {
    pub(crate) open: IntGauge,
    pub(crate) closed: IntCounterVec,
    pub(crate) accept_errors: IntCounterVec,
}

impl ConnectionMetrics {
    pub(crate) fn new(registry: &Registry) -> Result<Self, prometheus::Error> {
        let metrics = Self {
            open: IntGauge::new("blockyard_frontend_open_connections", "Connections that are open.")?,
            closed: counters("connections_closed_total", "Connections that ended, by what ended them.", &["reason"])?,
            accept_errors: counters("accept_errors_total", "Connections that could not be accepted.", &["error"])?,
        };
        registry.register(Box::new(metrics.open.clone()))?;
        registry.register(Box::new(metrics.closed.clone()))?;
        registry.register(Box::new(metrics.accept_errors.clone()))?;
        Ok(metrics)
    }
}

/// Metrics of the tokenizers of servers behind this gateway.
pub(crate) struct TokenizerMetrics {
    /// Whether the local tokenizer of a model is used, by kind of prompt.
    pub(crate) local_tokenizer_used: IntGaugeVec,
    /// Prompts whose tokens a server was asked for.
    pub(crate) requests: IntCounterVec,
}

impl TokenizerMetrics {
    pub(crate) fn new(registry: &Registry) -> Result<Self, prometheus::Error> {
        let help = "1: the model's local tokenizer has the tokens of its servers for this kind of prompt. 0: it has \
                    others, so the servers are asked.";
        let options = Opts::new("blockyard_frontend_local_tokenizer_used", help);
        let metrics = Self {
            local_tokenizer_used: IntGaugeVec::new(options, &["model", "prompts"])?,
            requests: counters(
                "tokenize_requests_total",
                "Prompts whose tokens a server was asked for, by outcome.",
                &["model", "outcome"],
            )?,
        };
        registry.register(Box::new(metrics.local_tokenizer_used.clone()))?;
        registry.register(Box::new(metrics.requests.clone()))?;
        Ok(metrics)
    }

    /// Removes the series of a model whose last server has left.
    pub(crate) fn remove_model(&self, model: &str) {
        let former = HashSet::from([Arc::from(model)]);
        of_model::remove_series(&self.local_tokenizer_used, &former);
        of_model::remove_series(&self.requests, &former);
    }
}

fn counters(name: &str, help: &str, labels: &[&str]) -> Result<IntCounterVec, prometheus::Error> {
    IntCounterVec::new(Opts::new(format!("blockyard_frontend_{name}"), help), labels)
}

fn histogram(name: &str, help: &str, buckets: &[f64]) -> Result<HistogramVec, prometheus::Error> {
    let options = HistogramOpts::new(format!("blockyard_frontend_{name}"), help).buckets(buckets.to_vec());
    HistogramVec::new(options, &["model"])
}
