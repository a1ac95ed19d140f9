//! The processes of a simulation: routers, workers, the store, and the server of the planes.

mod router_process;
mod worker_process;

pub(super) use router_process::RouterProcess;
pub(super) use worker_process::WorkerProcess;

use super::network::Node;
use super::planes::{NodeDiscovery, NodeEvents, Offered, Registrations};
use super::scenario::Scenario;
use super::store::SharedStore;
use super::world::World;
use kvbm::{Epoch, EventLog};
use parking_lot::Mutex;
use router::index::Holder;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use worker::plane::local::LocalEvents;
use worker::plane::{Source, StoreId, WorkerId};
use worker::serve::{EventPublisher, Planes};

/// Id of the shared store.
pub(super) const STORE: StoreId = StoreId(1);

/// All processes. Those that have ended are gone from the maps.
pub(super) struct Cluster {
    pub(super) world: Arc<World>,
    pub(super) scenario: Scenario,
    pub(super) registrations: Arc<Registrations>,
    plane: Arc<LocalEvents>,
    offered: Offered,
    pub(super) store: Option<Arc<SharedStore>>,
    pub(super) workers: Mutex<BTreeMap<WorkerId, WorkerProcess>>,
    pub(super) routers: Mutex<BTreeMap<u64, RouterProcess>>,
    /// When workers last died or left, with the epoch.
    pub(super) ended: Mutex<BTreeMap<WorkerId, (u64, Instant)>>,
    /// The events of each worker that ever ran, and of the store.
    pub(super) logs: Mutex<Vec<(Holder, Arc<EventLog>)>>,
    /// Workers of which a displaced process runs.
    pub(super) displaced: Mutex<Vec<WorkerId>>,
    /// Counts processes, so that each has a number of its own.
    lives: AtomicU64,
    _publisher: Option<EventPublisher>,
}

impl Cluster {
    pub(super) fn new(world: &Arc<World>, scenario: Scenario) -> Arc<Self> {
        let (plane, offered) = (Arc::new(LocalEvents::default()), Offered::default());
        let log = Arc::new(EventLog::new(Epoch(1)));
        let store = scenario.store_blocks.map(|blocks| SharedStore::new(log.clone(), blocks));
        let publisher = store.as_ref().map(|_| {
            let events = NodeEvents::new(world, Node::Store, 0, &plane, &offered, CancellationToken::new());
            EventPublisher::start(events, Source::Store(STORE), log.clone())
        });
        let logs = store.iter().map(|_| (Holder::Store(STORE), log.clone())).collect();
        Arc::new(Self {
            world: world.clone(),
            scenario,
            registrations: Registrations::new(world),
            plane,
            offered,
            store,
            workers: Mutex::default(),
            routers: Mutex::default(),
            ended: Mutex::default(),
            logs: Mutex::new(logs),
            displaced: Mutex::default(),
            lives: AtomicU64::new(0),
            _publisher: publisher,
        })
    }

    /// The number of a new process.
    fn life(&self) -> u64 {
        self.lives.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Both planes of a process that runs until `dead`.
    fn planes(&self, node: Node, life: u64, dead: &CancellationToken) -> Planes {
        Planes {
            discovery: NodeDiscovery::new(&self.world, node, life, &self.registrations, dead.clone()),
            events: NodeEvents::new(&self.world, node, life, &self.plane, &self.offered, dead.clone()),
        }
    }
}
