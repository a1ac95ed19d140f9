//! Starts one worker: its memory, its block manager, its engine, and its registration on the planes.

use super::sizes::Sizes;
use super::stores::Stores;
use crate::config::ByteSize;
use anyhow::Context;
use kvbm::{BlockManager, Epoch, EventLog, HostTier, Quotas, Tier};
use prometheus::Registry;
use spans::Tracer;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::time::{Instant, sleep};
use worker::engine::{Engine, ModelCard};
use worker::handoff::Peers;
use worker::llama::{Limits, LlamaEngine, Runtime, Settings};
use worker::plane::{Instance, KvCache, PlaneError, Role, StoreId, WorkerId};
use worker::serve::{Cordon, Planes, Worker};

/// Interval of attempts to register while another process has the registration.
const REGISTER_INTERVAL: Duration = Duration::from_secs(1);
/// How much longer than a lease a start waits for the registration of another process to expire: the server of NATS
/// needs about a second to notice.
const LEASE_MARGIN: Duration = Duration::from_secs(3);

/// What all workers of the process share.
pub(super) struct Shared {
    runtime: Arc<Runtime>,
    sizes: Sizes,
    shares: Quotas,
    planes: Planes,
    lower: Vec<Arc<dyn Tier>>,
    stores: Vec<StoreId>,
    peers: Peers,
    settings: Settings,
    blocks: kvbm::Metrics,
    engines: worker::metrics::Metrics,
    tracer: Tracer,
    /// Time after which the registration of a process that has ended expires.
    lease: Duration,
}

/// A running worker, with its block manager.
pub(super) struct RunningWorker {
    id: WorkerId,
    card: Arc<ModelCard>,
    serving: Worker,
    manager: BlockManager,
    limits: Arc<Limits>,
}

impl Shared {
    pub(super) fn new(
        runtime: Arc<Runtime>,
        sizes: Sizes,
        planes: Planes,
        stores: &Stores,
        settings: Settings,
        blocks: kvbm::Metrics,
        registry: &Registry,
    ) -> anyhow::Result<Self> {
        Ok(Self {
            runtime,
            sizes,
            shares: Quotas::default(),
            planes,
            lower: stores.tiers(),
            stores: stores.ids(),
            peers: Peers::default(),
            settings,
            blocks,
            engines: worker::metrics::Metrics::new(registry)?,
            tracer: Tracer::off(),
            lease: Duration::ZERO,
        })
    }

    /// Registers with leases of this time.
    pub(super) fn with_lease(self, lease: Duration) -> Self {
        Self { lease, ..self }
    }

    /// Applies the quotas of tenants to the memory of each worker.
    pub(super) fn with_quotas(self, shares: Quotas) -> Self {
        Self { shares, ..self }
    }

    /// Hands blocks over to and from these workers.
    pub(super) fn with_peers(self, peers: Peers) -> Self {
        Self { peers, ..self }
    }

    /// Traces offloads.
    pub(super) fn with_tracer(self, tracer: Tracer) -> Self {
        Self { tracer, ..self }
    }

    /// Starts a worker and registers it.
    pub(super) async fn start(&self, id: WorkerId, role: Role) -> anyhow::Result<RunningWorker> {
        let epoch = epoch_now();
        let log = Arc::new(EventLog::new(epoch));
        let block = self.runtime.block_bytes();
        let refused = |tier: &str, key: &str, bytes: u64| {
            let size = ByteSize(bytes).about();
            format!(
                "the system refuses {size} for {tier} of worker {id} ({key}); make it smaller: --set {key}=…, or raise \
                 the limit of the address space (ulimit -v)"
            )
        };
        let g1 = self.sizes.g1;
        let memory =
            self.runtime.memory((g1 / block as u64) as usize).with_context(|| refused("G1", "tiers.g1", g1))?;
        let device = memory.device();
        let fingerprint = device.fingerprint();
        let host = |bytes: u64| {
            let host = HostTier::new(bytes, block, fingerprint, Arc::clone(&log), &self.blocks);
            host.map(|host| host.with_quotas(&self.shares)).with_context(|| refused("G2", "tiers.g2", bytes))
        };
        let host = self.sizes.g2.map(host).transpose()?;
        let manager = BlockManager::new(device, host, self.lower.clone(), Arc::clone(&log), self.blocks.clone());
        let manager = manager.with_quotas(&self.shares).with_tracer(self.tracer.clone());
        self.peers.insert(id, manager.peer());
        let engine = LlamaEngine::start(
            id,
            Arc::clone(&self.runtime),
            memory,
            manager.clone(),
            self.peers.clone(),
            self.engines.of(&id.to_string(), &self.runtime.card().id),
            self.settings,
        );
        let card = Arc::clone(engine.card());
        let kv_cache = Some(KvCache { fingerprint, blocks: manager.capacity() as u64 });
        let (model, stores) = (Arc::clone(&card), self.stores.clone());
        let instance = Instance { id, epoch, role, model, stores, kv_cache };
        let (load, limits) = (engine.load(), Arc::clone(engine.limits()));
        let (engine, until) = (engine as Arc<dyn Engine>, Instant::now() + self.lease + LEASE_MARGIN);
        let serving = loop {
            let (instance, engine, log) = (instance.clone(), Arc::clone(&engine), Arc::clone(&log));
            match Worker::start(&self.planes, instance, engine, log, load.clone()).await {
                // The process before this one was killed, and the clock was set back since then.
                Err(PlaneError::Refused(why)) if Instant::now() < until => {
                    tracing::warn!(worker = %id, why, "waiting for the lease of another process to expire");
                    sleep(REGISTER_INTERVAL).await;
                }
                started => break started.with_context(|| format!("worker {id} cannot be registered"))?,
            }
        };
        Ok(RunningWorker { id, card, serving, manager, limits })
    }
}

impl RunningWorker {
    /// The worker and its block manager.
    pub(super) fn blocks(&self) -> (WorkerId, BlockManager) {
        (self.id, self.manager.clone())
    }

    /// The model, with the context of the engine.
    pub(super) fn card(&self) -> &Arc<ModelCard> {
        &self.card
    }

    /// The limits of its engine.
    pub(super) fn limits(&self) -> Arc<Limits> {
        Arc::clone(&self.limits)
    }

    /// Takes the worker out of service and back.
    pub(super) fn cordon(&self) -> (WorkerId, Cordon) {
        (self.id, self.serving.cordon().clone())
    }

    pub(super) fn into_parts(self) -> (Worker, BlockManager) {
        (self.serving, self.manager)
    }
}

/// The epoch of a writer of events: the start time in milliseconds, so a restart has a later epoch.
pub(super) fn epoch_now() -> Epoch {
    Epoch(SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64))
}
