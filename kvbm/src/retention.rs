//! How long a request's blocks are kept, and how they rank beside others: said by whoever sends the request, honoured by
//! every tier.

use serde::{Deserialize, Serialize};
use std::time::Duration;

/// What a request asks for its blocks. The default asks for nothing: they stay for as long as there is room.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Retention {
    /// Not served when older than this.
    pub ttl: Option<Duration>,
    /// Not given up before this has passed, within the domain's quota.
    pub pin: Option<Duration>,
    /// Whether they may rest anywhere below the device.
    pub store: bool,
    /// Who goes first when there is no room.
    pub priority: Priority,
}

/// How urgent, and how dear, beside others. Declared from the least.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Priority {
    /// Batch work: when nobody else wants the place.
    Low,
    /// What says nothing.
    #[default]
    Normal,
    /// Somebody is waiting.
    High,
}

impl Default for Retention {
    fn default() -> Self {
        Self { ttl: None, pin: None, store: true, priority: Priority::Normal }
    }
}
