//! Cordon and drain of workers, as in Kubernetes: a cordoned worker gets no new requests, draining waits until it has
//! none, and uncordoning gives it requests again.
//!
//! A cordon holds in this router alone, until the process ends. Not here: the end of the worker, which is up to its
//! own process.

use crate::router::Router;
use serde::Serialize;
use std::time::Duration;
use tokio::time::{Instant, sleep};
use worker::plane::{KvCache, Role, WorkerId};

/// Interval at which a drain checks the worker: an operator waits for it.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// State of a worker for an operator.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct WorkerStatus {
    /// Id of the worker in logs and explanations, like `w1`.
    pub worker: String,
    /// Where it is, if that is not this process: the URL of its server or process, without credentials.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub address: Option<String>,
    /// Id of the model that it serves.
    pub model: String,
    /// Role: prefill, decode or both.
    pub role: Role,
    /// Whether it gets no new requests.
    pub cordoned: bool,
    /// Number of requests on the worker, before and after their first token.
    pub requests: u32,
    /// Its KV cache, if it is a worker of this program.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kv_cache: Option<KvCache>,
    /// Why it gets no requests although it is not cordoned.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unused: Option<&'static str>,
}

/// Why an upstream is unused.
const SAME_NAME: &str = "workers serve a model of this name, and requests go to them only";

/// There is no worker with that id.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("there is no worker {0}")]
pub struct NoSuchWorker(pub WorkerId);

impl Router {
    /// All registered workers.
    pub fn workers(&self) -> Vec<WorkerStatus> {
        let (fleet, now) = (self.core.fleet.snapshot(), Instant::now());
        let status = |member: &std::sync::Arc<crate::fleet::Worker>| {
            let stats = member.load.stats(now);
            WorkerStatus {
                worker: member.id().to_string(),
                address: member.engine.address(),
                model: member.instance.model.id.clone(),
                role: member.instance.role,
                cordoned: fleet.is_cordoned(member.id()),
                requests: stats.prompts.max(stats.sequences),
                kv_cache: member.instance.kv_cache,
                unused: fleet.is_unused(member).then_some(SAME_NAME),
            }
        };
        fleet.workers().map(status).collect()
    }

    /// Gives a worker no new requests from now on. Requests that are queued for it are placed again.
    pub fn cordon(&self, id: WorkerId) -> Result<(), NoSuchWorker> {
        self.set_cordon(id, true)
    }

    /// Gives a worker requests again.
    pub fn uncordon(&self, id: WorkerId) -> Result<(), NoSuchWorker> {
        self.set_cordon(id, false)
    }

    /// Waits until a worker has no requests.
    pub async fn drained(&self, id: WorkerId) -> Result<(), NoSuchWorker> {
        loop {
            let fleet = self.core.fleet.snapshot();
            let stats = fleet.get(id).ok_or(NoSuchWorker(id))?.load.stats(Instant::now());
            if stats.prompts == 0 && stats.sequences == 0 {
                return Ok(());
            }
            sleep(POLL_INTERVAL).await;
        }
    }

    fn set_cordon(&self, id: WorkerId, cordoned: bool) -> Result<(), NoSuchWorker> {
        if !self.core.fleet.cordon(id, cordoned) {
            return Err(NoSuchWorker(id));
        }
        if cordoned {
            tracing::info!(worker = %id, "worker cordoned");
        } else {
            tracing::info!(worker = %id, "worker uncordoned");
        }
        self.core.admission.notify();
        Ok(())
    }
}
