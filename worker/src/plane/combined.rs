//! Two planes as one: that of a deployment, and a local one with workers that only this process knows.
//!
//! ```text
//!   watch, subscribe, range, snapshot ──▶ both
//!   register, publish, offer          ──▶ the shared one
//! ```
//! What belongs to this process alone, such as the servers behind a gateway, is registered and published in the local
//! plane itself. So the other processes do not see it, and it does not depend on the shared plane: while that is
//! unavailable, local instances join and leave, and their logs answer.
//!
//! Changes and events of each plane stay in their order. There is no order between those of the two planes. Ids are
//! unique across both.

#![forbid(unsafe_code)]

use super::{Discovery, Event, Events, Instance, Lease, Membership, PlaneError, RangeAnswer, Source, Topic};
use crate::engine::Engine;
use futures::future::{BoxFuture, ready};
use futures::stream::{self, BoxStream, StreamExt};
use kvbm::{Epoch, EventLog, Snapshot};
use std::sync::Arc;

/// The instances of two planes.
pub struct CombinedDiscovery {
    shared: Arc<dyn Discovery>,
    local: Arc<dyn Discovery>,
}

/// The events of two planes.
pub struct CombinedEvents {
    shared: Arc<dyn Events>,
    local: Arc<dyn Events>,
}

impl CombinedDiscovery {
    /// The instances of `shared`, and those of `local`, which other processes do not see.
    pub fn new(shared: Arc<dyn Discovery>, local: Arc<dyn Discovery>) -> Self {
        Self { shared, local }
    }
}

impl CombinedEvents {
    /// The events of `shared`, and those of `local`, which other processes do not see.
    pub fn new(shared: Arc<dyn Events>, local: Arc<dyn Events>) -> Self {
        Self { shared, local }
    }
}

impl Discovery for CombinedDiscovery {
    fn register(&self, instance: Instance, engine: Arc<dyn Engine>) -> BoxFuture<'_, Result<Lease, PlaneError>> {
        self.shared.register(instance, engine)
    }

    fn watch(&self) -> BoxStream<'static, Membership> {
        both(self.shared.watch(), self.local.watch())
    }
}

impl Events for CombinedEvents {
    fn publish(&self, event: Event) {
        self.shared.publish(event);
    }

    fn subscribe(&self, topic: Topic) -> BoxStream<'static, Event> {
        both(self.shared.subscribe(topic), self.local.subscribe(topic))
    }

    fn offer(&self, source: Source, log: Arc<EventLog>) -> Lease {
        self.shared.offer(source, log)
    }

    fn range(&self, source: Source, epoch: Epoch, after: u64) -> BoxFuture<'_, RangeAnswer> {
        Box::pin(async move {
            // The local plane knows at once whether the source is one of its own.
            match self.local.range(source, epoch, after).await {
                Err(PlaneError::Absent(_)) => self.shared.range(source, epoch, after).await,
                answer => answer,
            }
        })
    }

    fn snapshot(&self, source: Source) -> BoxFuture<'_, Result<Snapshot, PlaneError>> {
        Box::pin(async move {
            match self.local.snapshot(source).await {
                Err(PlaneError::Absent(_)) => self.shared.snapshot(source).await,
                answer => answer,
            }
        })
    }
}

/// The items of both streams, each in its order. It ends with the first that ends: neither should, and without one of
/// them its reader would know only a part without noticing.
fn both<T: Send + 'static>(one: BoxStream<'static, T>, other: BoxStream<'static, T>) -> BoxStream<'static, T> {
    let with_end = |stream: BoxStream<'static, T>| stream.map(Some).chain(stream::once(ready(None)));
    stream::select(with_end(one), with_end(other)).scan((), |(), item| ready(item)).boxed()
}

#[cfg(test)]
mod tests;
