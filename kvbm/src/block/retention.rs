//! How long blocks are retained, and with which priority: requested per request, applied by every tier.

use super::date::Date;
use super::hash::DomainId;
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// The retention that a request asks for its blocks. By default blocks stay until they are evicted for space.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Retention {
    /// Time to live: a tier does not serve the block after it. `None`: no limit.
    pub ttl: Option<Duration>,
    /// Time during which the block is not evicted, as long as pins take no more of a tier than it grants them.
    pub pin: Option<Duration>,
    /// Whether the block may be stored below the device.
    pub store: bool,
    /// Eviction priority.
    pub priority: Priority,
}

/// Eviction priority of blocks and scheduling priority of requests, from the lowest to the highest.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Priority {
    /// Batch work.
    Low,
    /// The default.
    #[default]
    Normal,
    /// Interactive work.
    High,
}

impl Priority {
    /// All priorities, from the lowest to the highest.
    pub(crate) const ALL: [Self; 3] = [Self::Low, Self::Normal, Self::High];
}

impl Default for Retention {
    fn default() -> Self {
        Self { ttl: None, pin: None, store: true, priority: Priority::Normal }
    }
}

impl Retention {
    /// The retention of a block that is computed at `now`.
    pub fn from(&self, now: Date) -> BlockRetention {
        let expires = self.ttl.map(|ttl| now.after(ttl));
        // A pin ends when the block expires.
        let pinned = self.pin.map(|pin| now.after(pin)).map(|pinned| expires.map_or(pinned, |end| pinned.min(end)));
        BlockRetention { expires, pinned, store: self.store, priority: self.priority }
    }
}

/// The [`Retention`] of one block, as dates. It accompanies the block from tier to tier.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BlockRetention {
    /// The block is a miss from this date on.
    pub expires: Option<Date>,
    /// The block is not evicted before this date.
    pub pinned: Option<Date>,
    /// Whether the block may be stored below the device.
    pub store: bool,
    /// Eviction priority.
    pub priority: Priority,
}

impl Default for BlockRetention {
    fn default() -> Self {
        Self { expires: None, pinned: None, store: true, priority: Priority::Normal }
    }
}

impl BlockRetention {
    /// Whether the block may no longer be served.
    pub fn is_expired(&self, now: Date) -> bool {
        self.expires.is_some_and(|expires| expires <= now)
    }

    /// The retention of a block for which two requests set one: the more generous value of each field.
    #[must_use]
    pub fn merge(self, other: Self) -> Self {
        Self {
            expires: self.expires.zip(other.expires).map(|(one, other)| one.max(other)),
            pinned: self.pinned.max(other.pinned),
            store: self.store || other.store,
            priority: self.priority.max(other.priority),
        }
    }
}

/// Attributes of a block beside its hash and payload.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct BlockAttrs {
    /// Cache domain whose requests may use the block.
    pub domain: DomainId,
    /// Retention of the block.
    pub retention: BlockRetention,
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Date = Date::from_unix(1_000);

    const fn seconds(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn a_pin_ends_when_the_block_expires() {
        let retention = Retention { ttl: Some(seconds(60)), pin: Some(seconds(90)), ..Retention::default() }.from(NOW);
        assert_eq!((retention.expires, retention.pinned), (Some(Date::from_unix(1_060)), Some(Date::from_unix(1_060))));
        assert!(!retention.is_expired(Date::from_unix(1_059)) && retention.is_expired(Date::from_unix(1_060)));
        assert_eq!(Retention::default().from(NOW), BlockRetention::default());
    }

    #[test]
    fn merge_takes_the_more_generous_value_of_each_field() {
        let short = Retention { ttl: Some(seconds(5)), store: false, priority: Priority::High, ..Retention::default() };
        let long =
            Retention { ttl: Some(seconds(9)), pin: Some(seconds(2)), priority: Priority::Low, ..Retention::default() };
        let (short, long) = (short.from(NOW), long.from(NOW));
        let both = BlockRetention { expires: long.expires, pinned: long.pinned, store: true, priority: Priority::High };
        assert_eq!((short.merge(long), long.merge(short)), (both, both));
        assert_eq!(short.merge(BlockRetention::default()).expires, None, "no time to live is the most generous one");
    }
}
