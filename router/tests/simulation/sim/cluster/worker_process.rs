//! A worker in a process of its own: engine, block manager with its tiers, and its registration on the planes.

use super::{Cluster, STORE};
use crate::sim::engine::{Parts, SimEngine};
use crate::sim::link::LinkTier;
use crate::sim::model::{BLOCK_BYTES, Device};
use crate::sim::network::Node;
use crate::sim::scenario::WorkerShape;
use crate::sim::world::Memory;
use kvbm::{BlockManager, Clock, Date, Epoch, EventLog, Faults, Faulty, HostTier, Tier};
use router::index::Holder;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;
use worker::handoff::{OtherProcesses, Peers};
use worker::plane::{Instance, WorkerId};
use worker::serve::Worker;

/// A worker that runs.
pub(in crate::sim) struct WorkerProcess {
    pub(in crate::sim) epoch: u64,
    pub(in crate::sim) manager: BlockManager,
    pub(in crate::sim) engine: Arc<SimEngine>,
    pub(in crate::sim) log: Arc<EventLog>,
    clock: Clock,
    /// By how many seconds the clock is wrong.
    pub(in crate::sim) clock_error: i64,
    /// The shared store, with faults.
    pub(in crate::sim) store: Option<Arc<Faulty>>,
    worker: Option<Worker>,
    dead: CancellationToken,
}

/// The date at which simulations start.
const DATE: u64 = 1_800_000_000;
/// Delay until a process that could not register tries again.
const START_DELAY: Duration = Duration::from_millis(500);

impl Cluster {
    /// Starts a worker in a new epoch. Returns when it is registered.
    pub(in crate::sim) async fn start_worker(self: &Arc<Self>, id: WorkerId, shape: &WorkerShape) {
        let (world, node, epoch, dead) = (&self.world, Node::Worker(id.0), self.life(), CancellationToken::new());
        let metrics = match kvbm::Metrics::new(&prometheus::Registry::new()) {
            Ok(metrics) => metrics,
            Err(error) => return world.violated(format_args!("{id}: {error}")),
        };
        let (log, clock) = (Arc::new(EventLog::new(Epoch(epoch))), Clock::manual(self.date()));
        let device = Device::new(shape.variant, shape.device_blocks);
        let host = (shape.host_blocks > 0).then(|| {
            let bytes = (shape.host_blocks * BLOCK_BYTES) as u64;
            let fingerprint = shape.variant.fingerprint();
            HostTier::with_clock(bytes, BLOCK_BYTES, fingerprint, log.clone(), &metrics, clock.clone())
                .expect("the memory of a simulated worker is small")
        });
        let store = self.store.as_ref().map(|store| {
            let tier = LinkTier::to_store(world, node, store.clone(), epoch);
            Arc::new(Faulty::new(tier, world.rng("tier", epoch).next(), Faults::default()))
        });
        let lower = store.iter().map(|store| store.clone() as Arc<dyn Tier>).collect();
        let manager = BlockManager::with_clock(device.clone(), host, lower, log.clone(), metrics, clock.clone());
        // The world has the peers.
        let connecting = Arc::downgrade(world);
        let peers = Peers::with_other_processes(OtherProcesses {
            url: node.to_string(),
            connect: Box::new(move |peer, _| {
                let world = connecting.upgrade().expect("the simulation ends after its processes");
                LinkTier::to_peer(&world, node, peer, epoch)
            }),
        });
        world.memories.lock().insert(id, Memory { tier: manager.peer(), handoffs: peers.clone() });
        let engine = SimEngine::start(Parts {
            world: world.clone(),
            worker: id,
            device,
            manager: manager.clone(),
            peers,
            speed: shape.speed,
            dead: dead.clone(),
        });
        world.log(format_args!("{id} starts in epoch {epoch}"));
        let process = WorkerProcess {
            epoch,
            manager,
            engine: engine.clone(),
            log: log.clone(),
            clock,
            clock_error: 0,
            store,
            worker: None,
            dead: dead.clone(),
        };
        self.logs.lock().push((Holder::Worker(id), log.clone()));
        self.workers.lock().insert(id, process);
        let planes = self.planes(node, epoch, &dead);
        let stores = self.store.iter().map(|_| STORE).collect();
        let instance =
            Instance { id, epoch: Epoch(epoch), role: shape.role, model: shape.variant.card(), stores, kv_cache: None };
        loop {
            let load = engine.load();
            let started = Worker::start(&planes, instance.clone(), engine.clone(), log.clone(), load);
            match dead.run_until_cancelled(started).await {
                None => return,
                Some(Ok(worker)) => {
                    let mut workers = self.workers.lock();
                    match workers.get_mut(&id).filter(|process| process.epoch == epoch) {
                        Some(process) => process.worker = Some(worker),
                        // Killed meanwhile.
                        None => drop(worker),
                    }
                    return;
                }
                Some(Err(error)) => {
                    world.log(format_args!("{id} cannot register: {error}"));
                    sleep(START_DELAY).await;
                }
            }
        }
    }

    /// The date now, by an exact clock.
    fn date(&self) -> Date {
        Date::from_unix(DATE + self.world.now().as_secs())
    }

    /// Sets the clocks of all workers.
    pub(in crate::sim) fn set_clocks(&self) {
        let now = DATE + self.world.now().as_secs();
        for process in self.workers.lock().values() {
            process.clock.set(Date::from_unix(now.saturating_add_signed(process.clock_error)));
        }
    }

    /// Kills a worker: it withdraws nothing, its connections are reset, and its memory is lost.
    pub(in crate::sim) fn kill_worker(&self, id: WorkerId) {
        let process = self.workers.lock().remove(&id);
        if let Some(process) = process {
            self.world.log(format_args!("{id} is killed"));
            process.dead.cancel();
            self.gone(id, &process);
        }
    }

    /// Takes a worker out of the list without ending it: another process with its id will start. `None`: it does not
    /// run.
    pub(in crate::sim) fn displace_worker(&self, id: WorkerId) -> Option<WorkerProcess> {
        let process = self.workers.lock().remove(&id)?;
        self.world.log(format_args!("epoch {} of {id} gets a successor with its id", process.epoch));
        self.displaced.lock().push(id);
        Some(process)
    }

    /// Kills a process that another one with its id has displaced.
    pub(in crate::sim) fn end_displaced(&self, id: WorkerId, process: WorkerProcess) {
        self.world.log(format_args!("epoch {}, which was displaced, is killed", process.epoch));
        process.dead.cancel();
        let mut displaced = self.displaced.lock();
        if let Some(at) = displaced.iter().position(|displaced| *displaced == id) {
            displaced.swap_remove(at);
        }
        self.ended.lock().insert(id, (process.epoch, Instant::now()));
        drop(process);
    }

    /// Stops a worker in order: it withdraws, finishes its requests, and ends. Requests that take longer than the limit
    /// are cut off.
    pub(in crate::sim) async fn drain_worker(&self, id: WorkerId, limit: Option<Duration>) {
        let (worker, dead, epoch) = {
            let mut workers = self.workers.lock();
            let Some(process) = workers.get_mut(&id) else { return };
            let Some(worker) = process.worker.take() else { return };
            (worker, process.dead.clone(), process.epoch)
        };
        self.world.log(format_args!("{id} drains"));
        let draining = dead.run_until_cancelled(worker.drain());
        let drained = match limit {
            Some(limit) => timeout(limit, draining).await.unwrap_or(Some(())),
            None => draining.await,
        };
        // Killed meanwhile.
        if drained.is_none() {
            return;
        }
        let process = {
            let mut workers = self.workers.lock();
            workers.get(&id).is_some_and(|process| process.epoch == epoch).then(|| workers.remove(&id))
        };
        if let Some(Some(process)) = process {
            self.world.log(format_args!("{id} has drained"));
            process.dead.cancel();
            self.gone(id, &process);
        }
    }

    fn gone(&self, id: WorkerId, process: &WorkerProcess) {
        self.world.memories.lock().remove(&id);
        self.ended.lock().insert(id, (process.epoch, Instant::now()));
    }
}
