//! Events in memory: one channel per topic, and the offered logs.

use super::link::{Link, SentEvent, Subscription, wait};
use crate::plane::{Event, Events, Lease, Offers, PlaneError, RANGE_MAX, RangeAnswer, Source, Topic};
use futures::future::BoxFuture;
use futures::stream::{self, BoxStream, StreamExt};
use kvbm::{Epoch, EventLog, Snapshot};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use tokio::sync::broadcast;
use tokio::time::Instant;

/// Events in memory.
pub struct LocalEvents {
    /// One channel per topic.
    senders: [broadcast::Sender<SentEvent>; Topic::ALL.len()],
    offers: Arc<Offers>,
    /// Numbers subscriptions.
    counter: AtomicU64,
    link: Link,
}

impl LocalEvents {
    /// Events over a link with these faults.
    pub fn new(link: Link) -> Self {
        let senders = Topic::ALL.map(|_| broadcast::Sender::new(link.backlog));
        Self { senders, offers: Arc::default(), counter: AtomicU64::new(0), link }
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
        let key = self.offers.add(source, log);
        let offers = Arc::clone(&self.offers);
        Lease::new(move || offers.withdraw(source, key))
    }

    fn range(&self, source: Source, epoch: Epoch, after: u64) -> BoxFuture<'_, RangeAnswer> {
        Box::pin(async move {
            let log = self.offers.of_epoch(source, epoch)?;
            let kept = log.and_then(|log| log.after(after, RANGE_MAX).ok());
            wait(Instant::now(), self.link.lag).await;
            Ok(kept)
        })
    }

    fn snapshot(&self, source: Source) -> BoxFuture<'_, Result<Snapshot, PlaneError>> {
        Box::pin(async move {
            let log = self.offers.latest(source)?;
            let snapshot = log.snapshot_in_background().await;
            wait(Instant::now(), self.link.lag).await;
            Ok(snapshot)
        })
    }
}
