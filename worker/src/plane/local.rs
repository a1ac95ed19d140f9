//! The planes in memory, for all components in one process and for tests.
//!
//! They behave like planes over a network: discovery deregisters an instance when its lease ends, and a slow subscriber
//! loses events. A [`Link`] describes delay, loss, reordering and duplication; it is seeded, so that each fault is
//! reproducible in a unit test.

#![forbid(unsafe_code)]

mod link;

pub use link::Link;

use super::{Discovery, Event, Events, Instance, Lease, Membership, PlaneError, RANGE_MAX, Source, Topic, WorkerId};
use crate::engine::Engine;
use futures::future::BoxFuture;
use futures::stream::{self, BoxStream, StreamExt};
use kvbm::{Epoch, EventLog, Numbered, Snapshot};
use link::{SentEvent, Subscription};
use parking_lot::Mutex;
use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::sync::{broadcast, mpsc};
use tokio::time::Instant;

/// Discovery in memory.
#[derive(Default)]
pub struct LocalDiscovery {
    state: Arc<Mutex<DiscoveryState>>,
    lag: Duration,
}

/// Events in memory.
pub struct LocalEvents {
    /// One channel per topic.
    senders: [broadcast::Sender<SentEvent>; Topic::ALL.len()],
    offers: Arc<Mutex<HashMap<Source, OfferedLogs>>>,
    /// Numbers offers and subscriptions.
    counter: AtomicU64,
    link: Link,
}

/// The logs offered for one source, ordered by epoch and then by offer.
type OfferedLogs = BTreeMap<(Epoch, u64), Arc<EventLog>>;

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
            let (id, instance) = (instance.id, Arc::new(instance));
            let mut state = self.state.lock();
            state.leases += 1;
            let lease = state.leases;
            state.notify_watchers(&Membership::Joined(Arc::clone(&instance), Arc::clone(&engine)));
            state.registered.insert(id, Registered { lease, instance, engine });
            let shared = Arc::clone(&self.state);
            Ok(Lease::new(move || shared.lock().deregister(id, lease)))
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

impl LocalEvents {
    /// Events over a link with these faults.
    pub fn new(link: Link) -> Self {
        let senders = Topic::ALL.map(|_| broadcast::Sender::new(link.backlog));
        Self { senders, offers: Arc::default(), counter: AtomicU64::new(0), link }
    }

    /// Selects one of the logs offered for a source.
    fn offered<T>(&self, source: Source, choose: impl FnOnce(&OfferedLogs) -> T) -> Result<T, PlaneError> {
        self.offers.lock().get(&source).map(choose).ok_or_else(|| PlaneError::Absent(source.to_string()))
    }
}

impl Default for LocalEvents {
    fn default() -> Self {
        Self::new(Link::default())
    }
}

impl Events for LocalEvents {
    fn publish(&self, event: Event) {
        // Having no subscriber is not an error.
        let _ = self.senders[event.body.topic() as usize].send((Instant::now(), event));
    }

    fn subscribe(&self, topic: Topic) -> BoxStream<'static, Event> {
        let nth = self.counter.fetch_add(1, Ordering::Relaxed);
        let (subscription, lag) =
            (Subscription::new(self.senders[topic as usize].subscribe(), self.link, nth), self.link.lag);
        stream::unfold(subscription, move |mut subscription| async move {
            let (at, event) = subscription.next().await?;
            wait(at, lag).await;
            Some((event, subscription))
        })
        .boxed()
    }

    fn offer(&self, source: Source, log: Arc<EventLog>) -> Lease {
        let key = (log.epoch(), self.counter.fetch_add(1, Ordering::Relaxed));
        self.offers.lock().entry(source).or_default().insert(key, log);
        let offers = Arc::clone(&self.offers);
        Lease::new(move || {
            let mut offers = offers.lock();
            if let Entry::Occupied(mut of) = offers.entry(source) {
                of.get_mut().remove(&key);
                if of.get().is_empty() {
                    of.remove();
                }
            }
        })
    }

    fn range(
        &self,
        source: Source,
        epoch: Epoch,
        after: u64,
    ) -> BoxFuture<'_, Result<Option<Vec<Numbered>>, PlaneError>> {
        Box::pin(async move {
            let of_epoch = |offers: &OfferedLogs| {
                offers.range((epoch, 0)..=(epoch, u64::MAX)).next_back().map(|(_, log)| log.clone())
            };
            let kept = self.offered(source, of_epoch)?.and_then(|log| log.after(after, RANGE_MAX).ok());
            wait(Instant::now(), self.link.lag).await;
            Ok(kept)
        })
    }

    fn snapshot(&self, source: Source) -> BoxFuture<'_, Result<Snapshot, PlaneError>> {
        Box::pin(async move {
            let latest = |offers: &OfferedLogs| offers.values().next_back().cloned();
            let log = self.offered(source, latest)?.expect("a source without an offer has no entry");
            let snapshot = log.snapshot_in_background().await;
            wait(Instant::now(), self.link.lag).await;
            Ok(snapshot)
        })
    }
}

/// Returns at once without a lag: even a sleep of zero would yield to the timer.
async fn wait(since: Instant, lag: Duration) {
    if !lag.is_zero() {
        tokio::time::sleep_until(since + lag).await;
    }
}

#[cfg(test)]
mod tests;
