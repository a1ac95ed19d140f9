//! Identities of workers, stores and routers, which are the sources of events.

use serde::{Deserialize, Serialize};
use std::fmt;

/// Identifies a worker in every process, across restarts.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Serialize, Deserialize)]
pub struct WorkerId(pub u64);

impl fmt::Display for WorkerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "w{}", self.0)
    }
}

/// Identifies what computes: workers with the same one share its speed. For engines on the CPU it is the machine.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Serialize, Deserialize)]
pub struct DeviceId(pub u64);

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
