//! The planes between processes: *who is there* ([`Discovery`]) and *what changed* ([`Events`]).
//!
//! The request plane is no trait of its own: discovery hands out an [`Engine`] for each instance. What holds of a plane
//! holds of the one in memory too: it numbers, lags and expires like the one on the wire.

#[cfg(test)]
pub(crate) mod contract;
pub mod local;

use crate::engine::{Engine, ModelCard};
use futures::future::BoxFuture;
use futures::stream::BoxStream;
use kvbm::{BlockEvent, Digest, Epoch, EventLog, Level, Numbered, Snapshot};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::sync::Arc;

/// Names a worker, for its whole life and in every process.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Serialize, Deserialize)]
pub struct WorkerId(pub u64);

impl fmt::Display for WorkerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "w{}", self.0)
    }
}

/// Names a shared store (an SSD log of a process, an object store of a fleet) in every process that reaches it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Serialize, Deserialize)]
pub struct StoreId(pub u64);

impl fmt::Display for StoreId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "s{:08x}", self.0)
    }
}

/// Names a router, one of several that send to the same workers, for one life of it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Serialize, Deserialize)]
pub struct RouterId(pub u64);

impl fmt::Display for RouterId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "r{:08x}", self.0)
    }
}

/// Who announces: a worker its own memory, a store what outlives its writers, a router what it sends where.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Source {
    /// A worker's G1 and G2.
    Worker(WorkerId),
    /// A shared G3 or G4.
    Store(StoreId),
    /// A router's bookings and wishes.
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

/// What a worker does.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// Prefill for others.
    Prefill,
    /// Decode, and prefill what is short.
    Decode,
    /// Everything.
    #[default]
    Both,
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Prefill => "prefill",
            Self::Decode => "decode",
            Self::Both => "both",
        })
    }
}

/// A worker as others see it.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Instance {
    /// Its name.
    pub id: WorkerId,
    /// Its life; a restart has another.
    pub epoch: Epoch,
    /// What it does.
    pub phase: Phase,
    /// What it serves.
    pub model: Arc<ModelCard>,
    /// The shared stores that it can onboard from.
    pub stores: Vec<StoreId>,
}

/// Something changed among the instances.
#[derive(Clone)]
pub enum Membership {
    /// A worker came, or came back in a new epoch.
    Joined(Arc<Instance>, Arc<dyn Engine>),
    /// A worker's lease ended.
    Left(WorkerId, Epoch),
}

/// Who is there.
///
/// # Contract
/// - `register` MUST make the instance visible to every watcher until the lease is dropped, or its process dies and the
///   lease runs out.
/// - `watch` MUST first yield a `Joined` for each instance that is there, then every change, in order, without loss.
pub trait Discovery: Send + Sync + 'static {
    /// Announces a worker, for as long as the lease is kept.
    fn register(&self, instance: Instance, engine: Arc<dyn Engine>) -> BoxFuture<'_, Result<Lease, PlaneError>>;

    /// All instances, and then all changes.
    fn watch(&self) -> BoxStream<'static, Membership>;
}

/// Keeps an instance visible; dropping it withdraws the instance.
#[must_use = "dropping a lease withdraws the instance"]
pub struct Lease(Option<Box<dyn FnOnce() + Send>>);

impl Lease {
    /// A lease that calls `withdraw` when it is dropped.
    pub fn new(withdraw: impl FnOnce() + Send + 'static) -> Self {
        Self(Some(Box::new(withdraw)))
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if let Some(withdraw) = self.0.take() {
            withdraw();
        }
    }
}

impl fmt::Debug for Lease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Lease")
    }
}

/// A numbered event of one source's life. Events of one source are gapless from 1 within an epoch; who sees a gap asks for
/// the events after the last one before it, then, when they are kept no more, for a snapshot, and goes on with the stale view
/// meanwhile.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Event {
    /// Who announces.
    pub source: Source,
    /// In which life.
    pub epoch: Epoch,
    /// What.
    pub body: EventBody,
}

/// What an event says.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EventBody {
    /// Blocks came or went. Numbered.
    Block {
        /// Gapless from 1 within the epoch.
        number: u64,
        /// What happened.
        event: BlockEvent,
    },
    /// What rests with the source, as one number, for whoever follows it to compare with what he believes. Not numbered.
    Digest {
        /// The last event that it includes; as of another it says nothing.
        number: u64,
        /// All that was announced and not taken back.
        digest: Digest,
    },
    /// How a worker is doing now. Not numbered: only the latest counts. From workers only.
    Load(Load),
    /// What a router sends where, for the other routers. Not numbered: workers report soon after what is missed here. At
    /// least once a second, if only to say that the router is there.
    Bookings(Vec<Booked>),
    /// A router's wish that a worker change its phase. Not numbered: it is wished again while it holds.
    Phase {
        /// Whose.
        worker: WorkerId,
        /// From now on.
        phase: Phase,
    },
}

/// A change in what one router has booked.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Booked {
    /// A request was placed.
    Placed {
        /// The booking's, the router's own.
        number: u64,
        /// Where.
        worker: WorkerId,
        /// Prompt tokens to compute there.
        prefill_tokens: u64,
        /// Blocks that prompt and output will take.
        blocks: u64,
        /// Whether it decodes there.
        decodes: bool,
        /// Short names of some of the prompt's blocks, which it will leave behind there with all before them.
        anchors: Vec<u64>,
    },
    /// It waits in its router no longer, though it goes elsewhere first.
    Going(u64),
    /// It went out to the worker.
    Sent(u64),
    /// It will compute this many prompt tokens there, other than first booked.
    Amended {
        /// The booking's.
        number: u64,
        /// Tokens.
        prefill_tokens: u64,
    },
    /// Its first token is there.
    Started(u64),
    /// It has ended.
    Released(u64),
}

/// What a subscriber wants to hear of.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum Topic {
    /// Blocks and load: for routers.
    Cache,
    /// What other routers book: for routers.
    Bookings,
    /// Who shall do what: for workers.
    Phases,
}

impl Topic {
    /// All topics.
    pub const ALL: [Self; 3] = [Self::Cache, Self::Bookings, Self::Phases];
}

impl EventBody {
    /// Where it belongs.
    pub const fn topic(&self) -> Topic {
        match self {
            Self::Block { .. } | Self::Digest { .. } | Self::Load(_) => Topic::Cache,
            Self::Bookings(_) => Topic::Bookings,
            Self::Phase { .. } => Topic::Phases,
        }
    }
}

/// How a worker is doing: measured, never configured. Sent when it changes, and at least once a second.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct Load {
    /// The last block number at the time of sending, so that a lost last event is noticed.
    pub number: u64,
    /// Prompt tokens accepted and not yet computed.
    pub waiting_tokens: u64,
    /// Requests in the batch.
    pub running: u32,
    /// Requests accepted and not yet in the batch.
    pub waiting: u32,
    /// Requests that fit into a batch; 0 when unknown.
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

/// How fast blocks come up from a tier, as measured.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub struct OnboardSpeed {
    /// From where.
    pub level: Level,
    /// Time until the first block.
    pub latency_seconds: f64,
    /// Bytes per second after that.
    pub bytes_per_second: f64,
    /// Blocks that others there wait for now: whoever asks comes after them.
    #[serde(default)]
    pub queued_blocks: u64,
}

/// What changed.
///
/// # Contract
/// - `publish` MUST NOT wait; events MAY be lost, and a slow subscriber MUST be the one that loses, the oldest first.
/// - A subscription MUST yield events of its topic only, and MUST NOT end while the plane is there, whatever it loses. Those of one
///   source SHOULD come in the order in which they were published, and once.
/// - `range` and `snapshot` MUST be answered by the source itself, from its log and after they were asked, whatever was lost on the
///   way to whoever asks; or say that it is not there. They MAY take long, or fail: who asks is patient for a while and asks again.
/// - Where a source is offered several times, as by processes that share a store, `snapshot` MUST be answered from the latest life,
///   and `range` from the one that it names.
/// - `range` MUST answer with events after the number, in their order and without a gap, the first of them first, at most
///   [`RANGE_MAX`], or fewer where messages are small: whoever lacks more asks again. It MUST be empty only when there are none
///   yet, and `None` when nobody lives that life, or does not keep all of them any more.
/// - `snapshot` MUST be as of the number that it says. It may be far larger than a message.
pub trait Events: Send + Sync + 'static {
    /// Sends an event to whoever listens.
    fn publish(&self, event: Event);

    /// Events of a topic from now on.
    fn subscribe(&self, topic: Topic) -> BoxStream<'static, Event>;

    /// Lets others ask for what the source's log tells, for as long as the lease is kept.
    fn offer(&self, source: Source, log: Arc<EventLog>) -> Lease;

    /// Events of one life of a source, after a number.
    fn range(
        &self,
        source: Source,
        epoch: Epoch,
        after: u64,
    ) -> BoxFuture<'_, Result<Option<Vec<Numbered>>, PlaneError>>;

    /// All blocks of a source.
    fn snapshot(&self, source: Source) -> BoxFuture<'_, Result<Snapshot, PlaneError>>;
}

/// Events in one answer. What a worker announces in a second under load, and some hundred kilobytes; it bounds how long the log is
/// locked, too.
pub const RANGE_MAX: usize = 512;

/// A plane could not do what was asked.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum PlaneError {
    /// Nobody of that name is there.
    #[error("{0} is not registered")]
    Absent(String),
    /// The plane itself does not answer.
    #[error("control plane unavailable: {0}")]
    Unavailable(String),
}
