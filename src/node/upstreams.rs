//! Servers behind this gateway: asks each for its models, and registers these as workers.
//!
//! A server that does not answer yet is asked again until it does, so the order of starting does not matter. One that
//! stops answering stays registered: the router's circuit breaker and health checks keep requests away from it.

use super::workers::epoch_now;
use crate::config::Upstream;
use anyhow::Context;
use http::HeaderValue;
use kvbm::EventLog;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout_at};
use upstream::relay::client::{Client, Settings};
use upstream::relay::headers::bearer;
use upstream::{UpstreamEngine, UpstreamSettings, discover};
use worker::engine::{Engine, ModelCard};
use worker::plane::{Instance, Role, WorkerId};
use worker::serve::{Planes, Worker};

/// Time between attempts to reach a server. Servers load their models for a minute.
const RETRY_INTERVAL: Duration = Duration::from_secs(2);
/// Workers of one server: its model and its adapters. Their ids are those of the server times this.
const MAX_MODELS: usize = 1 << 16;

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
        let mut tasks = JoinSet::new();
        for (number, upstream) in configured.iter().enumerate() {
            let client = Client::new(&upstream.url, &Settings::default())
                .with_context(|| format!("upstreams.{number}: {} cannot be used", upstream.url))?;
            let api_key = upstream.api_key().with_context(|| format!("upstreams.{number}.api_key_file"))?;
            let api_key = api_key.map(|key| bearer(&key).context("the key has characters that no header may have"));
            let server = Server {
                number,
                url: upstream.url.to_string(),
                client,
                api_key: api_key.transpose()?,
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
    client: Client,
    api_key: Option<HeaderValue>,
    planes: Planes,
}

impl Server {
    /// Registers the server's models once it answers, for as long as the task lives.
    async fn run(self, known: Arc<watch::Sender<Vec<Known>>>) {
        let mut last_error = String::new();
        let cards = loop {
            match discover(&self.client, self.api_key.as_ref()).await {
                Ok(cards) => break cards,
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
        let models: Vec<String> = cards.iter().map(|card| card.id.clone()).collect();
        let mut workers = Vec::new();
        for (at, card) in cards.into_iter().take(MAX_MODELS).enumerate() {
            match self.register(at, card).await {
                Ok(worker) => workers.push(worker),
                Err(error) => tracing::error!(upstream = %self.url, %error, "a model cannot be registered"),
            }
        }
        tracing::info!(upstream = %self.url, ?models, "upstream registered");
        known.send_modify(|known| known.push(Known { url: self.url.clone(), models }));
        std::future::pending::<()>().await;
    }

    async fn register(&self, at: usize, card: Arc<ModelCard>) -> anyhow::Result<Worker> {
        let settings = UpstreamSettings { api_key: self.api_key.clone(), model: None };
        let engine = Arc::new(UpstreamEngine::new(self.client.clone(), settings, Arc::clone(&card)));
        let load = engine.load();
        let epoch = epoch_now();
        let id = WorkerId((self.number * MAX_MODELS + at) as u64 + 1);
        let instance = Instance { id, epoch, role: Role::Both, model: card, stores: Vec::new() };
        let log = Arc::new(EventLog::new(epoch));
        Ok(Worker::start(&self.planes, instance, engine as Arc<dyn Engine>, log, load).await?)
    }
}
