//! Hand-over: where a prefill worker's blocks are to be had.
//!
//! The prefill worker writes a [`Ticket`] into the opaque [`Handoff`]; the decode worker's [`Peers`] turns the name in it into
//! a tier to onboard from. A peer that is not known is no error: its blocks are recomputed.

use crate::engine::Handoff;
use crate::plane::WorkerId;
use bytes::Bytes;
use dashmap::DashMap;
use kvbm::{Level, Tier};
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// What a prefill worker says to the decode worker.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Ticket {
    /// Whose memory holds the blocks.
    pub peer: WorkerId,
    /// Prompt tokens that the prefill worker found cached, and where: nobody computed them for this request.
    pub cached: Vec<(Level, u32)>,
}

impl Ticket {
    /// The ticket as the router carries it.
    pub fn seal(&self) -> Handoff {
        Handoff(serde_json::to_vec(self).map(Bytes::from).expect("a ticket serializes to JSON"))
    }

    /// Reads a ticket; `None` when it is not one of ours.
    pub fn open(handoff: &Handoff) -> Option<Self> {
        serde_json::from_slice(&handoff.0).ok()
    }
}

/// The workers whose memory can be read from here.
#[derive(Clone, Default)]
pub struct Peers(Arc<DashMap<WorkerId, Arc<dyn Tier>>>);

impl Peers {
    /// Lets others read a worker's blocks.
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
