//! KV handoff: where the decode worker finds the blocks of a prefill worker.
//!
//! The prefill worker writes a [`HandoffTicket`] into the opaque [`Handoff`]; the decode worker looks the worker id up
//! in [`Peers`] and onboards from that worker's memory. An unknown peer is not an error: its blocks are recomputed.

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
pub struct Peers(Arc<DashMap<WorkerId, Arc<dyn Tier>>>);

impl Peers {
    /// Makes a worker's blocks readable by the other workers.
    pub fn insert(&self, worker: WorkerId, memory: Arc<dyn Tier>) {
        self.0.insert(worker, memory);
    }

    /// Withdraws a worker's blocks.
    pub fn remove(&self, worker: WorkerId) {
        self.0.remove(&worker);
    }

    /// A worker's memory as a tier.
    pub fn find(&self, worker: WorkerId) -> Option<Arc<dyn Tier>> {
        self.0.get(&worker).map(|entry| Arc::clone(&entry))
    }
}

impl std::fmt::Debug for Peers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Peers({})", self.0.len())
    }
}
