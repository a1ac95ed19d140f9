//! Events in memory: one channel per topic, and the offered logs.

use super::link::{Link, SentEvent, Subscription, wait};
use crate::plane::{Event, Events, Lease, PlaneError, RANGE_MAX, Source, Topic};
use futures::future::BoxFuture;
use futures::stream::{self, BoxStream, StreamExt};
use kvbm::{Epoch, EventLog, Numbered, Snapshot};
use parking_lot::Mutex;
use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use tokio::sync::broadcast;
use tokio::time::Instant;

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
