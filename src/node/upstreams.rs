//! Servers behind this gateway: asks each for its models, and registers these as workers.
//!
//! A server that does not answer yet is asked again until it does, so the order of starting does not matter. One that
//! stops answering stays registered: the router's circuit breaker and health checks keep requests away from it.
//!
//! The KV events of a server are followed where it publishes them, so that the router knows its cache. Its first
//! model and the adapters of that get the events. Further models are further names of the first, under which the router
//! estimates the cache.

use super::workers::epoch_now;
use crate::config::{KvEvents, Upstream};
use anyhow::Context;
use http::HeaderValue;
use kvbm::EventLog;
use std::num::NonZero;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout_at};
use upstream::kv_events::Source;
use upstream::relay::client::{Client, Settings};
use upstream::relay::headers::bearer;
use upstream::{
    CacheEvents, DEFAULT_BLOCK_SIZE, KvSources, ListedModel, ModelLog, Salts, UpstreamEngine, UpstreamSettings,
    discover,
};
use worker::engine::{Engine, ModelCard};
use worker::plane::{Instance, Role, WorkerId};
use worker::serve::{Planes, Worker};

/// Time between attempts to reach a server. Servers load their models for a minute.
const RETRY_INTERVAL: Duration = Duration::from_secs(2);
/// Workers of one server: its model and its adapters. Their ids are those of the server times this.
const MAX_MODELS: usize = 1 << 16;

/// How vLLM publishes its KV events.
const START_VLLM: &str = "start vLLM with --kv-events-config '{\"enable_kv_cache_events\":true,\"publisher\":\"zmq\",\
    \"endpoint\":\"tcp://*:5557\",\"replay_endpoint\":\"tcp://*:5558\"}'";

/// The servers behind this gateway. Dropping it deregisters them.
pub(super) struct Upstreams {
    tasks: JoinSet<()>,
    known: watch::Receiver<Vec<Known>>,
}

/// A server that has answered.
#[derive(Clone)]
pub(super) struct Known {
    pub(super) url: String,
    pub(super) models: Vec<String>,
}

impl Upstreams {
    /// Starts asking all servers. Fails if the configuration of one cannot be used.
    pub(super) fn start(configured: &[Upstream], planes: &Planes) -> anyhow::Result<Self> {
        let (sender, known) = watch::channel(Vec::new());
        let sender = Arc::new(sender);
        let salts = Arc::new(Salts::default());
        let mut tasks = JoinSet::new();
        for (number, upstream) in configured.iter().enumerate() {
            let client = Client::new(&upstream.url, &Settings::default())
                .with_context(|| format!("upstreams.{number}: {} cannot be used", upstream.url))?;
            let api_key = upstream.api_key().with_context(|| format!("upstreams.{number}.api_key_file"))?;
            let api_key = api_key.map(|key| bearer(&key).context("the key has characters that no header may have"));
            let server = Server {
                number,
                url: upstream.url.to_string(),
                host: upstream.url.host().unwrap_or_default().to_owned(),
                client,
                api_key: api_key.transpose()?,
                kv_events: upstream.kv_events.clone(),
                block_size: upstream.block_size,
                salts: Arc::clone(&salts),
                planes: planes.clone(),
            };
            tasks.spawn(server.run(Arc::clone(&sender)));
        }
        Ok(Self { tasks, known })
    }

    /// Waits until a server has answered, at most until `deadline`. Returns those that have.
    pub(super) async fn until_known(&self, deadline: Instant) -> Vec<Known> {
        let mut known = self.known.clone();
        // The senders live as long as the tasks, which end only when this is dropped.
        let _ = timeout_at(deadline, known.wait_for(|known| !known.is_empty())).await;
        known.borrow().clone()
    }

    /// Deregisters all servers. Streams that were started go on.
    pub(super) async fn stop(mut self) {
        self.tasks.shutdown().await;
    }
}

/// One server.
struct Server {
    number: usize,
    url: String,
    host: String,
    client: Client,
    api_key: Option<HeaderValue>,
    /// As configured.
    kv_events: KvEvents,
    /// As configured.
    block_size: Option<NonZero<u32>>,
    /// Of all servers.
    salts: Arc<Salts>,
    planes: Planes,
}

impl Server {
    /// Registers the server's models once it answers, for as long as the task lives.
    async fn run(self, known: Arc<watch::Sender<Vec<Known>>>) {
        let mut last_error = String::new();
        let listed = loop {
            match discover(&self.client, self.api_key.as_ref()).await {
                Ok(listed) => break listed,
                Err(error) => {
                    // Once per reason: a server that loads its model is asked dozens of times.
                    let error = error.to_string();
                    if error != last_error {
                        tracing::warn!(upstream = %self.url, %error, "upstream does not answer; asking again");
                        last_error = error;
                    }
                    sleep(RETRY_INTERVAL).await;
                }
            }
        };
        let kv = self.kv_sources().await;
        let models: Vec<String> = listed.iter().map(|model| model.card.id.clone()).collect();
        let block_size = kv.block_size.unwrap_or(DEFAULT_BLOCK_SIZE).get();
        let (mut workers, mut logs) = (Vec::new(), Vec::new());
        for (at, ListedModel { mut card, is_adapter }) in listed.into_iter().take(MAX_MODELS).enumerate() {
            card.block_size = block_size as usize;
            let gets_events = is_adapter || logs.iter().all(|log: &ModelLog| log.adapter.is_some());
            card.has_exact_blocks = gets_events && !kv.sources.is_empty();
            let log = Arc::new(EventLog::new(epoch_now()));
            if card.has_exact_blocks {
                let adapter = is_adapter.then(|| card.id.clone());
                logs.push(ModelLog { identity: card.identity.clone(), adapter, log: Arc::clone(&log) });
            }
            match self.register(at, card, log).await {
                Ok(worker) => workers.push(worker),
                Err(error) => tracing::error!(upstream = %self.url, %error, "a model cannot be registered"),
            }
        }
        tracing::info!(upstream = %self.url, ?models, "upstream registered");
        known.send_modify(|known| known.push(Known { url: self.url.clone(), models }));
        CacheEvents::new(self.url.clone(), logs, Arc::clone(&self.salts), block_size).follow(kv.sources).await;
    }

    /// Where the server publishes its KV events, and its block size. What is configured is stronger than what the
    /// server says, because a server may not know how it is reached.
    async fn kv_sources(&self) -> KvSources {
        let listed = KvSources::ask(&self.client, self.api_key.as_ref(), &self.host).await;
        let is_named = !listed.sources.is_empty();
        let sources = match self.kv_events.clone() {
            KvEvents::Off => Vec::new(),
            KvEvents::Auto => listed.sources,
            KvEvents::At { live, replay } => vec![Source { live, replay, topic: String::new() }],
        };
        if sources.is_empty() {
            let remedy = if is_named { "set kv_events = \"auto\" in [[upstreams]]" } else { START_VLLM };
            tracing::info!(
                upstream = %self.url,
                "routing is approximate: the server's cache is estimated from the prompts sent to it, without its KV \
                 events; {remedy}"
            );
        }
        KvSources { sources, block_size: self.block_size.or(listed.block_size) }
    }

    async fn register(&self, at: usize, card: ModelCard, log: Arc<EventLog>) -> anyhow::Result<Worker> {
        let card = Arc::new(card);
        let api_key = self.api_key.clone();
        let settings = UpstreamSettings { api_key, salts: Arc::clone(&self.salts) };
        let engine = Arc::new(UpstreamEngine::new(self.client.clone(), settings, Arc::clone(&card)));
        let load = engine.load();
        let id = WorkerId((self.number * MAX_MODELS + at) as u64 + 1);
        let instance = Instance { id, epoch: log.epoch(), role: Role::Both, model: card, stores: Vec::new() };
        Ok(Worker::start(&self.planes, instance, engine as Arc<dyn Engine>, log, load).await?)
    }
}
