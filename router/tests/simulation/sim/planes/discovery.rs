//! Discovery as one process sees it. An instance stays visible until its process withdraws it, or has not renewed its
//! lease for [`LEASE`].

use super::hop;
use crate::sim::link::LinkEngine;
use crate::sim::network::Node;
use crate::sim::world::{Rng, World};
use futures::future::BoxFuture;
use futures::stream::{self, BoxStream, StreamExt};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::{Arc, Weak};
use std::time::Duration;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use worker::engine::Engine;
use worker::plane::local::LocalDiscovery;
use worker::plane::{Discovery, Instance, Lease, Membership, PlaneError, WorkerId};

/// A registration that is not renewed ends after this time: that of the planes on NATS.
pub(in crate::sim) const LEASE: Duration = Duration::from_secs(6);
/// Interval of renewals, and at which ended leases are found.
pub(in crate::sim) const RENEWAL: Duration = Duration::from_millis(500);

/// All registrations, as the server of the planes has them.
pub(in crate::sim) struct Registrations {
    world: Arc<World>,
    plane: LocalDiscovery,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    count: u64,
    by_id: BTreeMap<WorkerId, Registration>,
    /// The process of each instance: worker and epoch.
    processes: BTreeMap<(WorkerId, u64), CancellationToken>,
}

struct Registration {
    number: u64,
    instance: Instance,
    engine: Arc<dyn Engine>,
    dead: CancellationToken,
    renewed: Instant,
    /// `None` while the lease has ended although its process runs.
    lease: Option<Lease>,
}

impl Registrations {
    pub(in crate::sim) fn new(world: &Arc<World>) -> Arc<Self> {
        let all = Arc::new(Self { world: world.clone(), plane: LocalDiscovery::default(), state: Mutex::default() });
        let ticking = Arc::downgrade(&all);
        tokio::spawn(async move {
            loop {
                tokio::time::sleep(RENEWAL).await;
                let Some(all) = Weak::upgrade(&ticking) else { return };
                all.renew().await;
            }
        });
        all
    }

    /// Renews the leases of processes that are reached, and ends those of others.
    async fn renew(&self) {
        let now = Instant::now();
        let (mut ended, mut again) = (Vec::new(), Vec::new());
        {
            let mut state = self.state.lock();
            for (id, registration) in &mut state.by_id {
                let is_reached = self.world.network.reaches(Node::Worker(id.0), Node::Broker);
                if is_reached && !registration.dead.is_cancelled() {
                    registration.renewed = now;
                    if registration.lease.is_none() {
                        again.push((*id, registration.number));
                    }
                } else if now - registration.renewed >= LEASE
                    && let Some(lease) = registration.lease.take()
                {
                    self.world.log(format_args!("the lease of {id} ends"));
                    ended.push(lease);
                }
            }
            state.by_id.retain(|_, registration| registration.lease.is_some() || !registration.dead.is_cancelled());
        }
        drop(ended);
        for (id, number) in again {
            let (instance, engine) = match self.state.lock().by_id.get(&id) {
                Some(found) if found.number == number => (found.instance.clone(), found.engine.clone()),
                _ => continue,
            };
            self.world.log(format_args!("{id} is registered again"));
            let lease = self.plane.register(instance, engine).await;
            let mut state = self.state.lock();
            if let (Some(found), Ok(lease)) = (state.by_id.get_mut(&id), lease) {
                found.lease = Some(lease);
            }
        }
    }

    async fn register(
        self: &Arc<Self>,
        instance: Instance,
        engine: Arc<dyn Engine>,
        dead: &CancellationToken,
    ) -> Result<u64, PlaneError> {
        let id = instance.id;
        {
            let mut state = self.state.lock();
            let other = state.by_id.get(&id).filter(|known| known.instance.epoch >= instance.epoch);
            // The same process registers again when it changes its role.
            if other.is_some_and(|known| known.instance.epoch > instance.epoch || known.dead.is_cancelled()) {
                return Err(PlaneError::Refused(format!("{id} is registered in a later epoch")));
            }
            state.processes.insert((id, instance.epoch.0), dead.clone());
        }
        let lease = Some(self.plane.register(instance.clone(), engine.clone()).await?);
        let mut state = self.state.lock();
        state.count += 1;
        let number = state.count;
        let registration =
            Registration { number, instance, engine, dead: dead.clone(), renewed: Instant::now(), lease };
        let previous = state.by_id.insert(id, registration);
        drop(state);
        drop(previous);
        Ok(number)
    }

    fn withdraw(&self, id: WorkerId, number: u64) {
        let mut state = self.state.lock();
        if state.by_id.get(&id).is_some_and(|registration| registration.number == number) {
            self.world.log(format_args!("{id} is withdrawn"));
            let registration = state.by_id.remove(&id);
            drop(state);
            drop(registration);
        }
    }

    fn process(&self, instance: &Instance) -> CancellationToken {
        self.state.lock().processes.get(&(instance.id, instance.epoch.0)).cloned().unwrap_or_default()
    }
}

/// Discovery of one process.
pub(in crate::sim) struct NodeDiscovery {
    world: Arc<World>,
    node: Node,
    all: Arc<Registrations>,
    requests: Arc<Mutex<Rng>>,
    dead: CancellationToken,
    life: u64,
}

impl NodeDiscovery {
    /// Discovery of a process that runs until `dead`.
    pub(in crate::sim) fn new(
        world: &Arc<World>,
        node: Node,
        life: u64,
        all: &Arc<Registrations>,
        dead: CancellationToken,
    ) -> Arc<Self> {
        let requests = Arc::new(Mutex::new(world.rng(&format!("discovery {node}"), life)));
        Arc::new(Self { world: world.clone(), node, all: all.clone(), requests, dead, life })
    }
}

impl Discovery for NodeDiscovery {
    fn register(&self, instance: Instance, engine: Arc<dyn Engine>) -> BoxFuture<'_, Result<Lease, PlaneError>> {
        Box::pin(async move {
            hop(&self.world, self.node, Node::Broker, &self.requests).await?;
            let (id, role, epoch) = (instance.id, instance.role, instance.epoch.0);
            let number = self.all.register(instance, engine, &self.dead).await?;
            self.world.log(format_args!("{id} registers as {role} in epoch {epoch}"));
            let (world, node, all) = (self.world.clone(), self.node, self.all.clone());
            let (requests, dead) = (self.requests.clone(), self.dead.clone());
            Ok(Lease::new(move || {
                // A process that was killed withdraws nothing, and one that is cut off only ends its lease.
                if !dead.is_cancelled() {
                    tokio::spawn(async move {
                        if hop(&world, node, Node::Broker, &requests).await.is_ok() {
                            all.withdraw(id, number);
                        }
                    });
                }
            }))
        })
    }

    fn watch(&self) -> BoxStream<'static, Membership> {
        let rng = self.world.rng(&format!("watch {}", self.node), self.life);
        let state = (self.all.plane.watch(), self.world.clone(), self.all.clone(), self.node, rng);
        stream::unfold(state, |(mut changes, world, all, node, mut rng)| async move {
            let change = changes.next().await?;
            let delay = world.network.delay(&mut rng);
            tokio::time::sleep(delay).await;
            world.network.reached(Node::Broker, node).await;
            let change = match change {
                Membership::Joined(instance, engine) => {
                    world.log(format_args!("{node} sees {} join in epoch {}", instance.id, instance.epoch.0));
                    let (to, dead) = (Node::Worker(instance.id.0), all.process(&instance));
                    let engine = LinkEngine::new(&world, node, to, engine, dead, rng.next());
                    Membership::Joined(instance, Arc::new(engine))
                }
                Membership::Left(id, epoch) => {
                    world.log(format_args!("{node} sees {id} leave epoch {}", epoch.0));
                    Membership::Left(id, epoch)
                }
            };
            Some((change, (changes, world, all, node, rng)))
        })
        .boxed()
    }
}
