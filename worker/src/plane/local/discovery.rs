//! Discovery in memory: the registered instances, and the watchers of their changes.

use super::link::wait;
use crate::engine::Engine;
use crate::plane::{Discovery, Instance, Lease, Membership, PlaneError, WorkerId};
use futures::future::BoxFuture;
use futures::stream::{self, BoxStream, StreamExt};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// Discovery in memory.
#[derive(Default)]
pub struct LocalDiscovery {
    state: Arc<Mutex<DiscoveryState>>,
    lag: Duration,
}

#[derive(Default)]
struct DiscoveryState {
    leases: u64,
    /// Ordered, so that every watcher starts with the same sequence.
    registered: BTreeMap<WorkerId, Registered>,
    /// Unbounded, because the contract forbids loss; workers register and leave rarely.
    watchers: Vec<mpsc::UnboundedSender<(Instant, Membership)>>,
}

struct Registered {
    lease: u64,
    instance: Arc<Instance>,
    engine: Arc<dyn Engine>,
    /// Cancelled when a later epoch is registered.
    lost: CancellationToken,
}

impl LocalDiscovery {
    /// Discovery whose watchers see every change `lag` later.
    pub fn lagging(lag: Duration) -> Self {
        Self { state: Arc::default(), lag }
    }

    /// Expires the lease of a worker, as if its process had died. Dropping the lease later has no effect.
    pub fn expire(&self, id: WorkerId) {
        let mut state = self.state.lock();
        if let Some(entry) = state.registered.remove(&id) {
            state.notify_watchers(&Membership::Left(id, entry.instance.epoch));
        }
    }
}

impl Discovery for LocalDiscovery {
    fn register(&self, instance: Instance, engine: Arc<dyn Engine>) -> BoxFuture<'_, Result<Lease, PlaneError>> {
        Box::pin(async move {
            let (id, epoch, instance) = (instance.id, instance.epoch, Arc::new(instance));
            let mut state = self.state.lock();
            if let Some(other) = state.registered.get(&id).filter(|other| other.instance.epoch > epoch) {
                let later = other.instance.epoch.0;
                return Err(PlaneError::Refused(format!("worker {id} is registered in the later epoch {later}")));
            }
            state.leases += 1;
            let lease = state.leases;
            state.notify_watchers(&Membership::Joined(Arc::clone(&instance), Arc::clone(&engine)));
            let lost = CancellationToken::new();
            let registered = Registered { lease, instance, engine, lost: lost.clone() };
            let former = state.registered.insert(id, registered);
            if let Some(former) = former.filter(|former| former.instance.epoch != epoch) {
                former.lost.cancel();
            }
            let shared = Arc::clone(&self.state);
            Ok(Lease::with_loss(lost, move || shared.lock().deregister(id, lease)))
        })
    }

    fn watch(&self) -> BoxStream<'static, Membership> {
        let (sender, receiver) = mpsc::unbounded_channel();
        let mut state = self.state.lock();
        let now = Instant::now();
        for Registered { instance, engine, .. } in state.registered.values() {
            // The receiver exists here, so sending cannot fail.
            let _ = sender.send((now, Membership::Joined(Arc::clone(instance), Arc::clone(engine))));
        }
        state.watchers.push(sender);
        let lag = self.lag;
        stream::unfold(receiver, move |mut receiver| async move {
            let (at, change) = receiver.recv().await?;
            wait(at, lag).await;
            Some((change, receiver))
        })
        .boxed()
    }
}

impl DiscoveryState {
    fn deregister(&mut self, id: WorkerId, lease: u64) {
        // A worker that registered again has a newer lease; the old one must not deregister it.
        if self.registered.get(&id).is_some_and(|entry| entry.lease == lease)
            && let Some(entry) = self.registered.remove(&id)
        {
            self.notify_watchers(&Membership::Left(id, entry.instance.epoch));
        }
    }

    fn notify_watchers(&mut self, change: &Membership) {
        let now = Instant::now();
        self.watchers.retain(|watcher| watcher.send((now, change.clone())).is_ok());
    }
}
