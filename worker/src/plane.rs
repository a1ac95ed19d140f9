//! The planes between processes: [`Discovery`] (which workers exist) and [`Events`] (what changed).
//!
//! Requests need no trait of their own: discovery yields an [`Engine`] for each instance. The in-memory planes number,
//! delay and expire like those over a network.

#[cfg(test)]
pub(crate) mod contract;
pub mod local;

use crate::engine::{Engine, ModelCard};
use futures::future::BoxFuture;
use futures::stream::BoxStream;
use kvbm::{BlockEvent, CacheDigest, Epoch, EventLog, Level, Numbered, Snapshot};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::sync::Arc;

/// Identifies a worker in every process, across restarts.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Serialize, Deserialize)]
pub struct WorkerId(pub u64);

impl fmt::Display for WorkerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "w{}", self.0)
    }
}

/// Identifies a shared store (the SSD log of a process, the object store of a fleet) in every process that reaches it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Serialize, Deserialize)]
pub struct StoreId(pub u64);

impl fmt::Display for StoreId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "s{:08x}", self.0)
    }
}

/// Identifies one of several routers that send to the same workers. A restarted router has a new id.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Serialize, Deserialize)]
pub struct RouterId(pub u64);

impl fmt::Display for RouterId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "r{:08x}", self.0)
    }
}

/// The source of events: a worker for its own memory, a store for blocks that outlive their writers, a router for its
/// reservations.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Source {
    /// A worker: its G1 and G2.
    Worker(WorkerId),
    /// A shared store: G3 or G4.
    Store(StoreId),
    /// A router: its reservations and role requests.
    Router(RouterId),
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Worker(id) => id.fmt(f),
            Self::Store(id) => id.fmt(f),
            Self::Router(id) => id.fmt(f),
        }
    }
}

/// The role of a worker.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// Computes prefills for other workers.
    Prefill,
    /// Decodes, and computes short prefills itself.
    Decode,
    /// Prefill and decode.
    #[default]
    Both,
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Prefill => "prefill",
            Self::Decode => "decode",
            Self::Both => "both",
        })
    }
}

/// A worker as other processes see it.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Instance {
    /// The worker's id.
    pub id: WorkerId,
    /// The worker's epoch; a restart begins a new one.
    pub epoch: Epoch,
    /// The worker's role.
    pub role: Role,
    /// The model that it serves.
    pub model: Arc<ModelCard>,
    /// The shared stores that it can onboard from.
    pub stores: Vec<StoreId>,
}

/// A change of the set of instances.
#[derive(Clone)]
pub enum Membership {
    /// A worker registered, or registered again in a new epoch or role.
    Joined(Arc<Instance>, Arc<dyn Engine>),
    /// A worker's lease ended.
    Left(WorkerId, Epoch),
}

/// Which workers exist.
///
/// # Contract
/// - `register` MUST make the instance visible to every watcher until the lease is dropped, or its process ends and the
///   lease expires.
/// - `watch` MUST first yield a `Joined` for each registered instance, then every change, in order and without loss.
pub trait Discovery: Send + Sync + 'static {
    /// Registers a worker for as long as the lease is kept.
    fn register(&self, instance: Instance, engine: Arc<dyn Engine>) -> BoxFuture<'_, Result<Lease, PlaneError>>;

    /// All instances, then all changes.
    fn watch(&self) -> BoxStream<'static, Membership>;
}

/// Keeps an instance registered; dropping it deregisters the instance.
#[must_use = "dropping a lease deregisters the instance"]
pub struct Lease(Option<Box<dyn FnOnce() + Send>>);

impl Lease {
    /// A lease that calls `deregister` when it is dropped.
    pub fn new(deregister: impl FnOnce() + Send + 'static) -> Self {
        Self(Some(Box::new(deregister)))
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if let Some(deregister) = self.0.take() {
            deregister();
        }
    }
}

impl fmt::Debug for Lease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Lease")
    }
}

/// An event of one source in one epoch. Numbered events of a source are gapless from 1 within an epoch. A subscriber
/// that sees a gap asks for the range after the last event before it, or for a snapshot when the log no longer holds
/// that range, and uses its stale view meanwhile.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Event {
    /// The source.
    pub source: Source,
    /// The epoch of the source.
    pub epoch: Epoch,
    /// The content.
    pub body: EventBody,
}

/// The content of an event.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EventBody {
    /// Blocks were stored or removed. Numbered.
    Block {
        /// Gapless from 1 within the epoch.
        number: u64,
        /// The change.
        event: BlockEvent,
    },
    /// A digest of the source's blocks, which followers compare with their own view. Not numbered.
    Digest {
        /// The number of the last event that the digest includes; it can be compared only with a view of the same
        /// number.
        number: u64,
        /// The digest of all blocks that are stored and not removed.
        digest: CacheDigest,
    },
    /// The current load of a worker. Not numbered: only the latest counts. From workers only.
    Load(Load),
    /// Changes of a router's reservations, for the other routers. Not numbered: load reports soon cover what is lost
    /// here. Sent at least once a second, as a heartbeat.
    Reservations(Vec<ReservationUpdate>),
    /// A router asks a worker to change its role. Not numbered: the request is repeated while it holds.
    RoleRequest {
        /// The worker.
        worker: WorkerId,
        /// The new role.
        role: Role,
    },
}

/// A change of one router's reservations.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ReservationUpdate {
    /// A request was placed on a worker.
    Placed {
        /// The number of the reservation, unique within the router.
        number: u64,
        /// The worker.
        worker: WorkerId,
        /// Prompt tokens that the worker computes.
        prefill_tokens: u64,
        /// Blocks that prompt and output take.
        blocks: u64,
        /// Whether the worker decodes the request.
        decodes: bool,
        /// Checkpoint hashes: short hashes of some of the prompt's blocks. The worker will hold these blocks and all
        /// before them.
        anchors: Vec<u64>,
    },
    /// The request left the router's admission queue, possibly for a prefill on another worker first.
    Dequeued(u64),
    /// The request was sent to the worker.
    Sent(u64),
    /// The worker computes another number of prompt tokens than first reserved.
    Revised {
        /// The number of the reservation.
        number: u64,
        /// Prompt tokens that the worker computes.
        prefill_tokens: u64,
    },
    /// The first token was received.
    Started(u64),
    /// The request has ended.
    Released(u64),
}

/// A class of events that can be subscribed to.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum Topic {
    /// Blocks, digests and load; for routers.
    Cache,
    /// Reservations of other routers; for routers.
    Reservations,
    /// Role requests; for workers.
    RoleRequests,
}

impl Topic {
    /// All topics.
    pub const ALL: [Self; 3] = [Self::Cache, Self::Reservations, Self::RoleRequests];
}

impl EventBody {
    /// The topic of the event.
    pub const fn topic(&self) -> Topic {
        match self {
            Self::Block { .. } | Self::Digest { .. } | Self::Load(_) => Topic::Cache,
            Self::Reservations(_) => Topic::Reservations,
            Self::RoleRequest { .. } => Topic::RoleRequests,
        }
    }
}

/// The measured load of a worker. Sent when it changes, and at least once a second.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct Load {
    /// Number of the last block event at the time of sending, so that the loss of the last event is noticed.
    pub number: u64,
    /// Prompt tokens accepted and not computed yet.
    pub waiting_tokens: u64,
    /// Requests in the batch.
    pub running: u32,
    /// Requests accepted and not yet in the batch.
    pub waiting: u32,
    /// Maximum number of requests in the batch; 0 when unknown.
    pub sequences_max: u32,
    /// G1 blocks in use by requests.
    pub active_blocks: u64,
    /// G1 blocks in all.
    pub total_blocks: u64,
    /// Measured prefill speed, tokens per second; `None` until measured.
    pub prefill_tokens_per_second: Option<f64>,
    /// Measured time of one decode step, seconds; `None` until measured.
    pub decode_step_seconds: Option<f64>,
    /// Bytes of one block.
    pub block_bytes: u64,
    /// Measured onboarding, per tier.
    pub onboard: Vec<OnboardSpeed>,
}

/// Measured speed of onboarding from a tier.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub struct OnboardSpeed {
    /// The tier.
    pub level: Level,
    /// Time to the first block, in seconds.
    pub latency_seconds: f64,
    /// Bytes per second after that.
    pub bytes_per_second: f64,
    /// Blocks queued at the tier now; a new request is served after them.
    #[serde(default)]
    pub queued_blocks: u64,
}

/// Events of workers, stores and routers.
///
/// # Contract
/// - `publish` MUST NOT wait. Events MAY be lost; only a slow subscriber MUST lose events, the oldest first.
/// - A subscription MUST yield events of its topic only, and MUST NOT end while the plane exists, whatever is lost.
///   Events of one source SHOULD arrive once and in the order in which they were published.
/// - `range` and `snapshot` MUST be answered by the source itself, from its log at the time of the call, whatever
///   events were lost; or fail with `Absent`. They MAY take long or fail; the caller waits for some time and asks
///   again.
/// - Where a source is offered several times, as by processes that share a store, `snapshot` MUST be answered from the
///   latest epoch, and `range` from the epoch that it names.
/// - `range` MUST return events after the number, in order, without a gap, starting with the first, at most
///   [`RANGE_MAX`], or fewer where messages are small; a caller that needs more asks again. It MUST be empty only when
///   there are no further events yet, and `None` when no log of that epoch is offered or the log no longer holds all of
///   them.
/// - `snapshot` MUST be as of the number that it carries. It may be far larger than a message.
pub trait Events: Send + Sync + 'static {
    /// Sends an event to all subscribers.
    fn publish(&self, event: Event);

    /// Events of a topic from now on.
    fn subscribe(&self, topic: Topic) -> BoxStream<'static, Event>;

    /// Offers a source's log for `range` and `snapshot`, for as long as the lease is kept.
    fn offer(&self, source: Source, log: Arc<EventLog>) -> Lease;

    /// Events of one epoch of a source, after a number.
    fn range(
        &self,
        source: Source,
        epoch: Epoch,
        after: u64,
    ) -> BoxFuture<'_, Result<Option<Vec<Numbered>>, PlaneError>>;

    /// All blocks of a source.
    fn snapshot(&self, source: Source) -> BoxFuture<'_, Result<Snapshot, PlaneError>>;
}

/// Events in one answer: what a loaded worker announces in a second, some hundred kilobytes. Also bounds how long the
/// log is locked.
pub const RANGE_MAX: usize = 512;

/// A plane could not answer.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum PlaneError {
    /// The source or instance is not registered.
    #[error("{0} is not registered")]
    Absent(String),
    /// The plane itself does not answer.
    #[error("control plane unavailable: {0}")]
    Unavailable(String),
}
