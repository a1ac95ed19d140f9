//! Events: changes of blocks, loads and reservations, and requests to change a role.

use super::{Role, Source, WorkerId};
use kvbm::{BlockEvent, CacheDigest, Epoch, Level};
use serde::{Deserialize, Serialize};

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
    /// here, and the next heartbeats repeat ends. Sent at least once a second, as a heartbeat.
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
        /// Tokens of context that its decode steps read: the prompt and half of the expected output.
        #[serde(default)]
        context_tokens: u64,
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
    /// The request has ended. Sent several times: the receiver ignores it if it has no such reservation.
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
    /// Requests that left the batch because their output is not read. They use no blocks, and other requests do not
    /// wait for them.
    #[serde(default)]
    pub paused: u32,
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

impl Load {
    /// Whether the worker has no request.
    pub fn is_idle(&self) -> bool {
        self.running == 0 && self.waiting == 0 && self.paused == 0
    }
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
