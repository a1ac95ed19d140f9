//! What may stay in a store, and why an object is marked for deletion.

use crate::block::DomainId;
use crate::tier::Quota;
use serde::Serialize;
use std::collections::BTreeMap;
use std::time::Duration;

/// What may stay in a store.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Policy {
    /// Objects that were not written or read for this time are marked. An object counts as used when an object that
    /// builds on it is used. Default: no limit.
    pub max_age: Option<Duration>,
    /// Maximum bytes in the store, over all domains, including objects whose domain is unknown. Default: no limit.
    pub capacity: Option<u64>,
    /// Bytes of the capacity that are kept free for new objects, unless guaranteed bytes would have to go. Default 0.
    pub headroom: u64,
    /// Guaranteed and maximum bytes of single domains.
    pub quotas: BTreeMap<DomainId, Quota>,
    /// Time from marking an object to deleting it. Default 10 minutes: followers know after seconds, and a load takes
    /// less than a minute. Objects that the collecting process wrote, and no other process read, wait at most 15
    /// seconds.
    pub grace: Duration,
}

impl Default for Policy {
    fn default() -> Self {
        Self { max_age: None, capacity: None, headroom: 0, quotas: BTreeMap::new(), grace: Duration::from_mins(10) }
    }
}

/// Bytes of a capacity to keep free in a store that is being written: an eighth, for what is written until marked
/// objects are deleted.
pub const fn headroom(capacity: u64) -> u64 {
    capacity / 8
}

/// Why an object is marked for deletion.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum MarkReason {
    /// All its blocks are expired.
    Expired,
    /// Other objects contain all its blocks.
    Duplicate,
    /// It was not used for `max_age`.
    MaxAge,
    /// The store is above its capacity.
    Capacity,
}
