//! Events as one process publishes and receives them.

use super::hop;
use crate::sim::network::Node;
use crate::sim::world::{Rng, World};
use futures::future::BoxFuture;
use futures::stream::{self, BoxStream, StreamExt};
use kvbm::{BlockEvent, Epoch, EventLog, Snapshot};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;
use worker::plane::local::LocalEvents;
use worker::plane::{Event, EventBody, Events, Lease, PlaneError, RangeAnswer, Source, Topic};

/// The process that answers for a source.
pub(in crate::sim) type Offered = Arc<Mutex<BTreeMap<Source, Node>>>;

/// The event plane of one process.
pub(in crate::sim) struct NodeEvents {
    world: Arc<World>,
    node: Node,
    plane: Arc<LocalEvents>,
    offered: Offered,
    outgoing: mpsc::UnboundedSender<(Instant, Event)>,
    requests: Mutex<Rng>,
    subscriptions: AtomicU64,
    /// Distinguishes the processes that a node had one after the other.
    life: u64,
}

impl NodeEvents {
    /// The plane of a process that runs until `dead`.
    pub(in crate::sim) fn new(
        world: &Arc<World>,
        node: Node,
        life: u64,
        plane: &Arc<LocalEvents>,
        offered: &Offered,
        dead: CancellationToken,
    ) -> Arc<Self> {
        let (outgoing, incoming) = mpsc::unbounded_channel();
        let sending = send(world.clone(), node, plane.clone(), incoming, world.rng(&format!("send {node}"), life));
        tokio::spawn(async move { dead.run_until_cancelled(sending).await });
        Arc::new(Self {
            world: world.clone(),
            node,
            plane: plane.clone(),
            offered: offered.clone(),
            outgoing,
            requests: Mutex::new(world.rng(&format!("ask {node}"), life)),
            subscriptions: AtomicU64::new(0),
            life,
        })
    }

    /// Sends a request to the process that answers for a source.
    async fn ask(&self, source: Source) -> Result<Node, PlaneError> {
        hop(&self.world, self.node, Node::Broker, &self.requests).await?;
        let owner = self.offered.lock().get(&source).copied();
        let owner = owner.ok_or_else(|| PlaneError::Absent(source.to_string()))?;
        hop(&self.world, Node::Broker, owner, &self.requests).await?;
        Ok(owner)
    }

    async fn answer(&self, owner: Node) -> Result<(), PlaneError> {
        hop(&self.world, owner, Node::Broker, &self.requests).await?;
        hop(&self.world, Node::Broker, self.node, &self.requests).await
    }
}

/// Publishes what a process sends, in order.
async fn send(
    world: Arc<World>,
    node: Node,
    plane: Arc<LocalEvents>,
    mut sent: mpsc::UnboundedReceiver<(Instant, Event)>,
    mut rng: Rng,
) {
    while let Some((at, event)) = sent.recv().await {
        sleep_until(at + world.network.delay(&mut rng)).await;
        world.network.thawed(node).await;
        if world.network.is_cut(node, Node::Broker) {
            world.log(format_args!("{node} loses {}", Brief(&event)));
        } else {
            world.log(format_args!("{node} publishes {}", Brief(&event)));
            plane.publish(event);
        }
    }
}

/// What one subscription of a process receives.
struct Subscription {
    world: Arc<World>,
    node: Node,
    events: BoxStream<'static, Event>,
    /// Events on their way, by the time of their arrival and their number.
    on_the_way: BTreeMap<(Instant, u64), Event>,
    count: u64,
    last: Instant,
    rng: Rng,
}

impl Subscription {
    async fn next(&mut self) -> Option<Event> {
        loop {
            let first = self.on_the_way.first_key_value().map(|((due, _), _)| *due);
            tokio::select! {
                biased;
                () = sleep_until(first.unwrap_or_else(Instant::now)), if first.is_some() => {
                    self.world.network.thawed(self.node).await;
                    let (_, mut event) = self.on_the_way.pop_first()?;
                    if let EventBody::Block { event: BlockEvent::Removed { blocks, .. }, .. } = &mut event.body
                        && self.world.network.quality().skips_removals
                    {
                        blocks.clear();
                    }
                    if !self.world.network.is_cut(Node::Broker, self.node) {
                        return Some(event);
                    }
                }
                event = self.events.next() => self.carry(event?),
            }
        }
    }

    /// Decides when an event arrives, and whether.
    fn carry(&mut self, event: Event) {
        let (quality, now) = (self.world.network.quality(), Instant::now());
        if self.rng.chance(quality.loss) {
            return;
        }
        let mut due = now + self.rng.duration(&quality.delay);
        if self.rng.chance(quality.reordering) {
            // Later ones overtake it.
            due += self.rng.duration(&(Duration::ZERO..quality.delay.end * 4));
        } else {
            due = due.max(self.last);
            self.last = due;
        }
        if self.rng.chance(quality.duplication) {
            let again = due + self.rng.duration(&quality.delay);
            self.count += 1;
            self.on_the_way.insert((again, self.count), event.clone());
        }
        self.count += 1;
        self.on_the_way.insert((due, self.count), event);
    }
}

impl Events for NodeEvents {
    fn publish(&self, event: Event) {
        // A process that has ended sends nothing.
        let _ = self.outgoing.send((Instant::now(), event));
    }

    fn subscribe(&self, topic: Topic) -> BoxStream<'static, Event> {
        let number = self.subscriptions.fetch_add(1, Ordering::Relaxed);
        let subscription = Subscription {
            world: self.world.clone(),
            node: self.node,
            events: self.plane.subscribe(topic),
            on_the_way: BTreeMap::new(),
            count: 0,
            last: Instant::now(),
            rng: self.world.rng(&format!("receive {}", self.node), self.life << 8 | number),
        };
        stream::unfold(subscription, |mut subscription| async move {
            let event = subscription.next().await?;
            Some((event, subscription))
        })
        .boxed()
    }

    fn offer(&self, source: Source, log: Arc<EventLog>) -> Lease {
        let lease = self.plane.offer(source, log);
        self.offered.lock().insert(source, self.node);
        lease
    }

    fn range(&self, source: Source, epoch: Epoch, after: u64) -> BoxFuture<'_, RangeAnswer> {
        Box::pin(async move {
            let owner = self.ask(source).await?;
            let range = self.plane.range(source, epoch, after).await;
            self.answer(owner).await?;
            let events = range.as_ref().ok().and_then(Option::as_ref).map(Vec::len);
            self.world.log(format_args!("{} gets range of {source}: {events:?} after {after}", self.node));
            range
        })
    }

    fn snapshot(&self, source: Source) -> BoxFuture<'_, Result<Snapshot, PlaneError>> {
        Box::pin(async move {
            let owner = self.ask(source).await?;
            let snapshot = self.plane.snapshot(source).await;
            self.answer(owner).await?;
            if let Ok(snapshot) = &snapshot {
                self.world.snapshot_arrives(self.node, source, snapshot.epoch);
            }
            let number =
                snapshot.as_ref().map(|snapshot| (snapshot.epoch.0, snapshot.number, snapshot.blocks().count()));
            self.world.log(format_args!("{} gets snapshot of {source}: {number:?}", self.node));
            snapshot
        })
    }
}

/// An event as one line.
struct Brief<'a>(&'a Event);

impl std::fmt::Display for Brief<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Event { source, epoch, body } = self.0;
        write!(f, "{source}/{} ", epoch.0)?;
        match body {
            EventBody::Block { number, event } => match event {
                BlockEvent::Stored { level, blocks, .. } => write!(f, "{number} stored {} {level}", blocks.len()),
                BlockEvent::Removed { level, blocks } => write!(f, "{number} removed {} {level}", blocks.len()),
                BlockEvent::Cleared { level } => write!(f, "{number} cleared {level}"),
            },
            EventBody::Digest { number, .. } => write!(f, "digest at {number}"),
            EventBody::Load(load) => write!(
                f,
                "load at {}: {} running, {} waiting, {} tokens, {} blocks",
                load.number, load.running, load.waiting, load.waiting_tokens, load.active_blocks
            ),
            EventBody::Reservations(updates) => write!(f, "{} reservation updates", updates.len()),
            EventBody::RoleRequest { worker, role } => write!(f, "asks {worker} to be {role}"),
        }
    }
}
