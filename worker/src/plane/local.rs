//! Planes in memory, for every role in one process and for tests.
//!
//! They are not simplified: a [`Roster`] withdraws who loses its lease, and a [`Bus`] loses what a slow subscriber does
//! not fetch. How well they carry is a [`Link`], seeded, so that a lost event, a late one or one that comes twice is an ordinary
//! unit test.

#![forbid(unsafe_code)]

mod link;

pub use link::Link;

use super::{Discovery, Event, Events, Instance, Lease, Membership, PlaneError, RANGE_MAX, Source, Topic, WorkerId};
use crate::engine::Engine;
use futures::future::BoxFuture;
use futures::stream::{self, BoxStream, StreamExt};
use kvbm::{Epoch, EventLog, Numbered, Snapshot};
use link::{Line, Sent};
use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::{broadcast, mpsc};
use tokio::time::Instant;

/// Who is there, in memory.
#[derive(Default)]
pub struct Roster {
    state: Arc<Mutex<Present>>,
    lag: Duration,
}

/// What changed, in memory.
pub struct Bus {
    /// By topic.
    senders: [broadcast::Sender<Sent>; Topic::ALL.len()],
    offers: Arc<Mutex<HashMap<Source, Offers>>>,
    /// Numbers offers and subscriptions.
    counter: AtomicU64,
    link: Link,
}

/// Those of one source, the latest life last.
type Offers = BTreeMap<(Epoch, u64), Arc<EventLog>>;

#[derive(Default)]
struct Present {
    leases: u64,
    /// Ordered, so that every watcher starts with the same sequence.
    members: BTreeMap<WorkerId, Member>,
    /// Unbounded, because the contract forbids loss; changes are as rare as workers that come and go.
    watchers: Vec<mpsc::UnboundedSender<(Instant, Membership)>>,
}

struct Member {
    lease: u64,
    instance: Arc<Instance>,
    engine: Arc<dyn Engine>,
}

impl Roster {
    /// A roster whose watchers learn of everything `lag` later.
    pub fn lagging(lag: Duration) -> Self {
        Self { state: Arc::default(), lag }
    }

    /// Lets the lease of a worker run out, as if its process had died: the lease still held withdraws nothing any more.
    pub fn expire(&self, id: WorkerId) {
        let mut state = lock(&self.state);
        if let Some(member) = state.members.remove(&id) {
            state.tell(&Membership::Left(id, member.instance.epoch));
        }
    }
}

impl Discovery for Roster {
    fn register(&self, instance: Instance, engine: Arc<dyn Engine>) -> BoxFuture<'_, Result<Lease, PlaneError>> {
        Box::pin(async move {
            let (id, instance) = (instance.id, Arc::new(instance));
            let mut state = lock(&self.state);
            state.leases += 1;
            let lease = state.leases;
            state.tell(&Membership::Joined(Arc::clone(&instance), Arc::clone(&engine)));
            state.members.insert(id, Member { lease, instance, engine });
            let shared = Arc::clone(&self.state);
            Ok(Lease::new(move || lock(&shared).withdraw(id, lease)))
        })
    }

    fn watch(&self) -> BoxStream<'static, Membership> {
        let (sender, receiver) = mpsc::unbounded_channel();
        let mut state = lock(&self.state);
        let now = Instant::now();
        for Member { instance, engine, .. } in state.members.values() {
            // The receiver is right here, so this cannot fail.
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

impl Present {
    fn withdraw(&mut self, id: WorkerId, lease: u64) {
        // Someone who came back in a new epoch has a lease of its own; the old one must not take it down.
        if self.members.get(&id).is_some_and(|member| member.lease == lease)
            && let Some(member) = self.members.remove(&id)
        {
            self.tell(&Membership::Left(id, member.instance.epoch));
        }
    }

    fn tell(&mut self, change: &Membership) {
        let now = Instant::now();
        self.watchers.retain(|watcher| watcher.send((now, change.clone())).is_ok());
    }
}

impl Bus {
    /// A bus over a link of the given quality.
    pub fn new(link: Link) -> Self {
        let senders = Topic::ALL.map(|_| broadcast::Sender::new(link.backlog));
        Self { senders, offers: Arc::default(), counter: AtomicU64::new(0), link }
    }

    /// The logs of a source that is there.
    fn offered<T>(&self, source: Source, choose: impl FnOnce(&Offers) -> T) -> Result<T, PlaneError> {
        lock(&self.offers).get(&source).map(choose).ok_or_else(|| PlaneError::Absent(source.to_string()))
    }
}

impl Default for Bus {
    fn default() -> Self {
        Self::new(Link::default())
    }
}

impl Events for Bus {
    fn publish(&self, event: Event) {
        // Nobody listening is not an error.
        let _ = self.senders[event.body.topic() as usize].send((Instant::now(), event));
    }

    fn subscribe(&self, topic: Topic) -> BoxStream<'static, Event> {
        let nth = self.counter.fetch_add(1, Ordering::Relaxed);
        let (line, lag) = (Line::new(self.senders[topic as usize].subscribe(), self.link, nth), self.link.lag);
        stream::unfold(line, move |mut line| async move {
            let (at, event) = line.next().await?;
            wait(at, lag).await;
            Some((event, line))
        })
        .boxed()
    }

    fn offer(&self, source: Source, log: Arc<EventLog>) -> Lease {
        let key = (log.epoch(), self.counter.fetch_add(1, Ordering::Relaxed));
        lock(&self.offers).entry(source).or_default().insert(key, log);
        let offers = Arc::clone(&self.offers);
        Lease::new(move || {
            let mut offers = lock(&offers);
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
            let of_life =
                |offers: &Offers| offers.range((epoch, 0)..=(epoch, u64::MAX)).next_back().map(|(_, log)| log.clone());
            let kept = self.offered(source, of_life)?.and_then(|log| log.after(after, RANGE_MAX).ok());
            wait(Instant::now(), self.link.lag).await;
            Ok(kept)
        })
    }

    fn snapshot(&self, source: Source) -> BoxFuture<'_, Result<Snapshot, PlaneError>> {
        Box::pin(async move {
            let latest = |offers: &Offers| offers.values().next_back().cloned();
            let log = self.offered(source, latest)?.expect("a source without an offer has no entry");
            let told = log.told().await;
            wait(Instant::now(), self.link.lag).await;
            Ok(told)
        })
    }
}

/// Does nothing without a lag: even a sleep of no length would cost a turn of the timer.
async fn wait(since: Instant, lag: Duration) {
    if !lag.is_zero() {
        tokio::time::sleep_until(since + lag).await;
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing that runs under these locks can panic half-way through a change.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
