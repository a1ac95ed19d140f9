//! The planes between processes: [`Discovery`] (which workers exist) and [`Events`] (what changed).
//!
//! Requests need no trait of their own: discovery yields an [`Engine`] for each instance. The in-memory planes number,
//! delay and expire like those over a network.

pub mod combined;
#[cfg(test)]
pub(crate) mod contract;
mod event;
mod id;
mod kv_cache;
mod lease;
pub mod local;
pub mod nats;
mod offers;

pub use event::{Event, EventBody, Load, OnboardSpeed, ReservationUpdate, Topic};
pub use id::{DeviceId, RouterId, Source, StoreId, WorkerId};
pub use kv_cache::KvCache;
pub use lease::Lease;
pub(crate) use offers::Offers;

use crate::engine::{Engine, ModelCard};
use futures::future::BoxFuture;
use futures::stream::BoxStream;
use kvbm::{Epoch, EventLog, Numbered, Snapshot};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::sync::Arc;

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
    /// Its KV cache; `None` for a server of another program. A record may lack it, so the protocol number is the same
    /// with it and without.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kv_cache: Option<KvCache>,
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
/// - The latest epoch of a worker id is registered. `register` MUST fail with `Refused` if another process has
///   registered the same epoch or a later one. The lease of a former epoch has no effect from then on, and MUST be
///   [lost](Lease::lost): its worker can be registered again when the later epoch has ended.
/// - `watch` MUST first yield a `Joined` for each registered instance, then every change, in order and without loss.
pub trait Discovery: Send + Sync + 'static {
    /// Registers a worker for as long as the lease is kept.
    fn register(&self, instance: Instance, engine: Arc<dyn Engine>) -> BoxFuture<'_, Result<Lease, PlaneError>>;

    /// All instances, then all changes.
    fn watch(&self) -> BoxStream<'static, Membership>;
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
    fn range(&self, source: Source, epoch: Epoch, after: u64) -> BoxFuture<'_, RangeAnswer>;

    /// All blocks of a source.
    fn snapshot(&self, source: Source) -> BoxFuture<'_, Result<Snapshot, PlaneError>>;
}

/// Answer of [`Events::range`]; `None` as its contract says.
pub type RangeAnswer = Result<Option<Vec<Numbered>>, PlaneError>;

/// Events in one answer: what a loaded worker announces in a second, some hundred kilobytes. Also bounds how long the
/// log is locked.
pub const RANGE_MAX: usize = 512;

/// A plane could not answer.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum PlaneError {
    /// The source or instance is not registered.
    #[error("{0} is not registered")]
    Absent(String),
    /// The registration is refused: another process serves under the id.
    #[error("registration refused: {0}")]
    Refused(String),
    /// The server of the plane denies what the caller needs; waiting does not help.
    #[error("control plane denies access: {0}")]
    Denied(String),
    /// The plane itself does not answer, or does not accept writes now.
    #[error("control plane unavailable: {0}")]
    Unavailable(String),
}
