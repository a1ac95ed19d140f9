//! KV handoff: where the decode worker finds the blocks of a prefill worker, and which of them are computed.
//!
//! ```text
//!   prefill worker            ticket            decode worker
//!   HandoffProgress ─────────────────────────▶ Peers::find
//!     │ computed, complete                       │
//!     └──────────── ProgressStream ─────────────▶│ so many leading blocks
//!       G1, G2 ──────────── Tier ───────────────▶│ these blocks, verified like those of any tier
//! ```
//!
//! The prefill worker writes a [`HandoffTicket`] into the opaque [`Handoff`] once the first blocks are computed; the
//! decode worker looks the worker id up in [`Peers`], follows the [`Progress`] and onboards from that worker's memory,
//! in this process or, by its URL, in another one. The decode worker pulls: the prefill worker waits for nothing. An
//! unknown peer is not an error: its blocks are recomputed.

mod known_peers;
mod progress;

pub use progress::{HandoffId, HandoffProgress, Progress, ProgressStream};

use crate::engine::{Handoff, PeerMemory};
use crate::plane::WorkerId;
use bytes::Bytes;
use dashmap::DashMap;
use futures::{StreamExt, stream};
use known_peers::KnownPeers;
use kvbm::Tier;
use parking_lot::Mutex;
use progress::Handoffs;
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use tokio::time::Instant;

/// What a prefill worker sends to the decode worker.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct HandoffTicket {
    /// The worker whose memory holds the blocks.
    pub peer: WorkerId,
    /// The URL of its process, if other processes can reach it.
    pub url: Option<String>,
    /// Which of its hand-overs it is.
    pub handoff: HandoffId,
}

/// A worker whose memory a prefix is copied from.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct PeerTicket {
    /// The worker.
    pub peer: WorkerId,
    /// The URL of its process, if that is another one.
    pub url: Option<String>,
}

/// The blocks of a hand-over.
pub struct HandedBlocks {
    /// The memory that has them.
    pub memory: Arc<dyn Tier>,
    /// Which of them are computed.
    pub progress: ProgressStream,
}

impl HandoffTicket {
    /// The ticket as opaque bytes for the router.
    pub fn encode(&self) -> Handoff {
        Handoff(serde_json::to_vec(self).map(Bytes::from).expect("a ticket serializes to JSON"))
    }

    /// Reads a ticket; `None` when the bytes are not a ticket of this engine.
    pub fn decode(handoff: &Handoff) -> Option<Self> {
        serde_json::from_slice(&handoff.0).ok()
    }
}

impl PeerTicket {
    /// The ticket as opaque bytes.
    pub fn encode(&self) -> PeerMemory {
        PeerMemory(serde_json::to_vec(self).map(Bytes::from).expect("a ticket serializes to JSON"))
    }

    /// Reads a ticket; `None` when the bytes are not a ticket of this engine.
    pub fn decode(memory: &PeerMemory) -> Option<Self> {
        serde_json::from_slice(&memory.0).ok()
    }
}

/// Workers whose memory can be read from this process.
#[derive(Clone, Default)]
pub struct Peers(Arc<PeerTable>);

#[derive(Default)]
struct PeerTable {
    local: DashMap<WorkerId, Arc<dyn Tier>>,
    others: Option<OtherProcesses>,
    /// Workers of other processes.
    remote: Mutex<KnownPeers>,
    handoffs: Handoffs,
}

/// The memory of a worker in another process.
pub trait RemoteMemory: Tier {
    /// The progress of one of its prefills.
    fn progress(&self, handoff: HandoffId) -> ProgressStream;
}

/// How workers of other processes are reached, and how they reach this one.
pub struct OtherProcesses {
    /// The URL of this process.
    pub url: String,
    /// The memory of a worker at a URL.
    pub connect: ConnectPeer,
}

/// Makes a tier of the memory of a worker at a URL. It must not wait.
pub type ConnectPeer = Box<dyn Fn(WorkerId, &str) -> Arc<dyn RemoteMemory> + Send + Sync>;

impl Peers {
    /// Peers in this process and in others.
    pub fn with_other_processes(others: OtherProcesses) -> Self {
        Self(Arc::new(PeerTable { others: Some(others), ..PeerTable::default() }))
    }

    /// Makes a worker's blocks readable by the other workers.
    pub fn insert(&self, worker: WorkerId, memory: Arc<dyn Tier>) {
        self.0.local.insert(worker, memory);
    }

    /// Withdraws a worker's blocks.
    pub fn remove(&self, worker: WorkerId) {
        self.0.local.remove(&worker);
    }

    /// The memory of a worker of this process as a tier.
    pub fn find_local(&self, worker: WorkerId) -> Option<Arc<dyn Tier>> {
        self.0.local.get(&worker).map(|entry| Arc::clone(&entry))
    }

    /// Begins a hand-over of a worker of this process.
    pub fn begin(&self, worker: WorkerId) -> (HandoffTicket, HandoffProgress) {
        let progress = self.0.handoffs.begin();
        let url = self.0.others.as_ref().map(|others| others.url.clone());
        (HandoffTicket { peer: worker, url, handoff: progress.id() }, progress)
    }

    /// The progress of a hand-over of a worker of this process. `None`: it has ended.
    pub fn follow(&self, handoff: HandoffId) -> Option<ProgressStream> {
        self.0.handoffs.follow(handoff)
    }

    /// The blocks that a worker hands over. `None`: the worker is unknown.
    pub fn find(&self, ticket: &HandoffTicket) -> Option<HandedBlocks> {
        if let Some(memory) = self.find_local(ticket.peer) {
            let progress = self.follow(ticket.handoff).unwrap_or_else(|| stream::empty().boxed());
            return Some(HandedBlocks { memory, progress });
        }
        let memory = self.remote(ticket.peer, ticket.url.as_deref()?)?;
        let progress = memory.progress(ticket.handoff);
        Some(HandedBlocks { memory, progress })
    }

    /// The memory of a worker of this process or another one. `None`: the worker is unknown.
    pub fn memory(&self, ticket: &PeerTicket) -> Option<Arc<dyn Tier>> {
        if let Some(memory) = self.find_local(ticket.peer) {
            return Some(memory);
        }
        let memory = self.remote(ticket.peer, ticket.url.as_deref()?)?;
        Some(memory)
    }

    /// The memory of a worker of another process.
    fn remote(&self, peer: WorkerId, url: &str) -> Option<Arc<dyn RemoteMemory>> {
        let others = self.0.others.as_ref()?;
        Some(self.0.remote.lock().get(peer, url, Instant::now(), || (others.connect)(peer, url)))
    }

    /// Number of hand-overs of this process that have not ended.
    pub fn open_handoffs(&self) -> usize {
        self.0.handoffs.len()
    }
}

impl std::fmt::Debug for Peers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Peers({} here, {} elsewhere)", self.0.local.len(), self.0.remote.lock().len())
    }
}
