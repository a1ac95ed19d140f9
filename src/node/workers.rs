//! Starts one worker: its memory, its block manager, its engine, and its registration on the planes.

use super::health::Health;
use super::sizes::Sizes;
use super::stores::Stores;
use crate::config::ByteSize;
use crate::process::machine::boot_id;
use anyhow::Context;
use futures::future::BoxFuture;
use kvbm::{BlockManager, Epoch, EventLog, HostTier, Quotas, Tier};
use prometheus::Registry;
use spans::Tracer;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::time::{Instant, sleep};
use worker::engine::{Engine, ModelCard};
use worker::handoff::Peers;
use worker::llama::{Limits, LlamaEngine, Runtime, Settings};
use worker::plane::{DeviceId, Instance, KvCache, PlaneError, Role, StoreId, WorkerId};
use worker::serve::{Cordon, Planes, Worker};

/// Interval of attempts to register while another process has the registration.
const REGISTER_INTERVAL: Duration = Duration::from_secs(1);
/// Longest delay between attempts to register while NATS does not answer or refuses writes. The first is
/// [`REGISTER_INTERVAL`], and each is twice the one before.
const MAX_REGISTER_DELAY: Duration = Duration::from_secs(8);
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
    /// As it was registered first.
    instance: Instance,
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

    /// Starts a worker and registers it. While it cannot be registered, `health` has the reason.
    pub(super) async fn start(&self, id: WorkerId, role: Role, health: &Health) -> anyhow::Result<RunningWorker> {
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
        let device = boot_id().map(DeviceId);
        let host_blocks = self.sizes.g2.map_or(0, |bytes| bytes / block as u64);
        let kv_cache = Some(KvCache { fingerprint, blocks: manager.capacity() as u64, host_blocks, device });
        let (model, stores) = (Arc::clone(&card), self.stores.clone());
        let instance = Instance { id, epoch, role, model, stores, kv_cache };
        let (load, limits) = (engine.load(), Arc::clone(engine.limits()));
        let engine = engine as Arc<dyn Engine>;
        let first = instance.clone();
        let serving = register(id, self.lease, health, || -> BoxFuture<'_, Result<Worker, PlaneError>> {
            let (instance, engine, log) = (instance.clone(), Arc::clone(&engine), Arc::clone(&log));
            Box::pin(Worker::start(&self.planes, instance, engine, log, load.clone()))
        });
        let serving = serving.await.with_context(|| format!("worker {id} cannot be registered"))?;
        Ok(RunningWorker { id, instance: first, card, serving, manager, limits })
    }
}

/// Registers a worker with `start`, and tries again while waiting can help: until the lease of another process has
/// expired, and without a limit until the plane accepts writes. The weights are loaded: a process that ended here would
/// be started again, load them again, and find the same.
async fn register<'a, W>(
    id: WorkerId,
    lease: Duration,
    health: &Health,
    start: impl Fn() -> BoxFuture<'a, Result<W, PlaneError>>,
) -> Result<W, PlaneError> {
    let mut until = Instant::now() + lease + LEASE_MARGIN;
    let (mut delay, mut is_logged) = (REGISTER_INTERVAL, false);
    loop {
        match start().await {
            // The process before this one was killed, and the clock was set back since then.
            Err(PlaneError::Refused(why)) if Instant::now() < until => {
                tracing::warn!(worker = %id, why, "waiting for the lease of another process to expire");
                sleep(REGISTER_INTERVAL).await;
            }
            Err(PlaneError::Unavailable(why)) => {
                if !is_logged {
                    is_logged = true;
                    let seconds = MAX_REGISTER_DELAY.as_secs();
                    tracing::warn!(
                        worker = %id, why,
                        "the worker cannot be registered yet; tried again every few seconds (up to {seconds} s); check \
                         JetStream of the NATS server: its disk and its limits"
                    );
                }
                health.set_registration_problem(Some(format!(
                    "worker {id} cannot be registered yet: {why}; check JetStream of the NATS server: its disk and its \
                     limits"
                )));
                sleep(delay).await;
                delay = (delay * 2).min(MAX_REGISTER_DELAY);
                until = Instant::now() + lease + LEASE_MARGIN;
            }
            registered => {
                health.set_registration_problem(None);
                return registered;
            }
        }
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

    /// The instance, with the role that it has now.
    pub(super) fn instance(&self) -> Instance {
        Instance { role: self.serving.cordon().role(), ..self.instance.clone() }
    }

    pub(super) fn into_parts(self) -> (Worker, BlockManager) {
        (self.serving, self.manager)
    }
}

/// The epoch of a writer of events: the start time in milliseconds, so a restart has a later epoch.
pub(super) fn epoch_now() -> Epoch {
    Epoch(SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64))
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::FutureExt;
    use parking_lot::Mutex;

    const LEASE: Duration = Duration::from_secs(6);

    /// Registers a worker at a plane that answers so, and repeats the last answer. Returns the outcome, and what
    /// `/ready` said before each attempt.
    async fn registered(answers: &[Result<(), PlaneError>]) -> (Result<(), PlaneError>, Vec<Option<String>>) {
        let (health, reasons) = (Health::default(), Mutex::new(Vec::new()));
        let outcome = register(WorkerId(1), LEASE, &health, || {
            let mut reasons = reasons.lock();
            let answer = answers.get(reasons.len()).or(answers.last()).cloned().expect("there is one");
            reasons.push(health.registration_problem());
            std::future::ready(answer).boxed()
        });
        let outcome = outcome.await;
        assert_eq!(health.registration_problem(), None, "it is over");
        (outcome, reasons.into_inner())
    }

    #[tokio::test(start_paused = true)]
    async fn a_registration_is_tried_again_until_the_plane_accepts_it() {
        let mut answers = vec![Err(PlaneError::Unavailable("no space left".into())); 100];
        answers.push(Ok(()));
        let (outcome, reasons) = registered(&answers).await;
        assert_eq!((outcome, reasons.len(), &reasons[0]), (Ok(()), 101, &None));
        for reason in &reasons[1..] {
            let reason = reason.as_deref().unwrap();
            assert!(reason.starts_with("worker w1 cannot be registered yet: no space left"), "{reason}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn what_waiting_cannot_mend_ends_the_start() {
        let denied = PlaneError::Denied("Permissions Violation".into());
        let (outcome, reasons) = registered(&[Err(denied.clone())]).await;
        assert_eq!((outcome, reasons.len()), (Err(denied), 1));
        let refused = PlaneError::Refused("another process serves as worker w1".into());
        let (outcome, reasons) = registered(&[Err(refused.clone())]).await;
        assert_eq!(outcome, Err(refused));
        assert!(reasons.len() > 1, "its lease may expire first");
    }
}
