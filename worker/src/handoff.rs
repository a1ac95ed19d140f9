//! KV handoff: where the decode worker finds the blocks of a prefill worker.
//!
//! The prefill worker writes a [`HandoffTicket`] into the opaque [`Handoff`]; the decode worker looks the worker id up
//! in [`Peers`] and onboards from that worker's memory, in this process or, by its URL, in another one. An unknown peer
//! is not an error: its blocks are recomputed.

use crate::engine::Handoff;
use crate::plane::WorkerId;
use bytes::Bytes;
use dashmap::DashMap;
use kvbm::{Level, Tier};
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// What a prefill worker sends to the decode worker.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct HandoffTicket {
    /// The worker whose memory holds the blocks.
    pub peer: WorkerId,
    /// The URL of its process, if other processes can reach it.
    pub url: Option<String>,
    /// Prompt tokens that the prefill worker found cached, by tier: they were not computed for this request.
    pub cached: Vec<(Level, u32)>,
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

/// Workers whose memory can be read from this process.
#[derive(Clone, Default)]
pub struct Peers(Arc<Known>);

#[derive(Default)]
struct Known {
    local: DashMap<WorkerId, Arc<dyn Tier>>,
    others: Option<OtherProcesses>,
    /// Workers of other processes with their URLs, kept so that their speed is measured once.
    remote: DashMap<WorkerId, (String, Arc<dyn Tier>)>,
}

/// How workers of other processes are reached, and how they reach this one.
pub struct OtherProcesses {
    /// The URL of this process.
    pub url: String,
    /// The memory of a worker at a URL.
    pub connect: ConnectPeer,
}

/// Makes a tier of the memory of a worker at a URL. It must not wait.
pub type ConnectPeer = Box<dyn Fn(WorkerId, &str) -> Arc<dyn Tier> + Send + Sync>;

impl Peers {
    /// Peers in this process and in others.
    pub fn with_other_processes(others: OtherProcesses) -> Self {
        Self(Arc::new(Known { others: Some(others), ..Known::default() }))
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

    /// The memory of the worker that handed blocks over.
    pub fn find(&self, ticket: &HandoffTicket) -> Option<Arc<dyn Tier>> {
        self.find_local(ticket.peer).or_else(|| {
            let (others, url) = (self.0.others.as_ref()?, ticket.url.as_ref()?);
            let connect = || (url.clone(), (others.connect)(ticket.peer, url));
            let mut known = self.0.remote.entry(ticket.peer).or_insert_with(connect);
            if known.0 != *url {
                *known = connect();
            }
            Some(Arc::clone(&known.1))
        })
    }

    /// A ticket for blocks of a worker of this process.
    pub fn ticket(&self, worker: WorkerId, cached: Vec<(Level, u32)>) -> HandoffTicket {
        HandoffTicket { peer: worker, url: self.0.others.as_ref().map(|others| others.url.clone()), cached }
    }
}

impl std::fmt::Debug for Peers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Peers({} here, {} elsewhere)", self.0.local.len(), self.0.remote.len())
    }
}
