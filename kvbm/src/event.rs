//! Block events: numbered logs of the blocks that a process or a store adds and removes.
//!
//! A worker's G1 and G2 share one log. Each shared store (the G3 of a process, the G4 of a fleet) has its own, so that
//! routers index its blocks under the store. Events are numbered from 1 without gaps within an [`Epoch`]. A reader that
//! sees a gap requests the missing events while the log retains them, and otherwise a [`Snapshot`]. The log updates
//! the set of announced blocks together with the numbers, so a snapshot is consistent with its number.

mod batch;
mod digest;
mod log;
mod snapshot;

pub(crate) use batch::StoredBatch;
pub use digest::{CacheDigest, SetDigest};
pub use log::{EventLog, Gap};
pub use snapshot::{Run, Snapshot};

use crate::block::{Level, SequenceHash};
use serde::{Deserialize, Serialize};

/// Identifies one lifetime of an event log. A restart begins a new epoch with a higher number.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Serialize, Deserialize)]
pub struct Epoch(pub u64);

/// A change of the set of blocks at one level.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BlockEvent {
    /// Blocks were stored at `level`. Each is the child of the one before it, and the first is a child of `parent`.
    Stored {
        /// The level that now has the blocks.
        level: Level,
        /// Parent of the first block; `None` if it begins a sequence.
        parent: Option<SequenceHash>,
        /// A run of one chain, not empty.
        blocks: Vec<SequenceHash>,
    },
    /// Blocks were removed from `level`.
    Removed {
        /// The level that no longer has the blocks.
        level: Level,
        /// The blocks in any order, not empty.
        blocks: Vec<SequenceHash>,
    },
    /// All blocks were removed from `level`.
    Cleared {
        /// The level that is empty now.
        level: Level,
    },
}

/// An event with its number.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Numbered {
    /// Number of the event: from 1, without gaps within an epoch.
    pub number: u64,
    /// The event.
    pub event: BlockEvent,
}
