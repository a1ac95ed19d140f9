//! How long a request's blocks are kept, and how they rank beside others: said by whoever sends the request, honoured by
//! every tier.

use super::date::Date;
use super::hash::DomainId;
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// What a request asks for its blocks. The default asks for nothing: they stay for as long as there is room.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Retention {
    /// Not served when older than this.
    pub ttl: Option<Duration>,
    /// Not given up before this has passed, as long as pins do not take more than a tier grants them.
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

impl Priority {
    /// All, from the least.
    pub(crate) const ALL: [Self; 3] = [Self::Low, Self::Normal, Self::High];
}

impl Default for Retention {
    fn default() -> Self {
        Self { ttl: None, pin: None, store: true, priority: Priority::Normal }
    }
}

impl Retention {
    /// What a block that came to be at `now` carries of it.
    pub fn from(&self, now: Date) -> Keep {
        let expires = self.ttl.map(|ttl| now.after(ttl));
        // A pin keeps what may be served, and nothing longer.
        let pinned = self.pin.map(|pin| now.after(pin)).map(|pinned| expires.map_or(pinned, |end| pinned.min(end)));
        Keep { expires, pinned, store: self.store, priority: self.priority }
    }
}

/// A [`Retention`] as it goes with a block from tier to tier, with dates instead of durations.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Keep {
    /// A miss from then on.
    pub expires: Option<Date>,
    /// Not given up before.
    pub pinned: Option<Date>,
    /// Whether it may rest anywhere below the device.
    pub store: bool,
    /// Who goes first when there is no room.
    pub priority: Priority,
}

impl Default for Keep {
    fn default() -> Self {
        Self { expires: None, pinned: None, store: true, priority: Priority::Normal }
    }
}

impl Keep {
    /// Whether it may no longer be served.
    pub fn is_over(&self, now: Date) -> bool {
        self.expires.is_some_and(|expires| expires <= now)
    }

    /// What becomes of a block that two requests want: the more of each.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        Self {
            expires: self.expires.zip(other.expires).map(|(one, other)| one.max(other)),
            pinned: self.pinned.max(other.pinned),
            store: self.store || other.store,
            priority: self.priority.max(other.priority),
        }
    }
}

/// What goes with a block wherever it goes, beside its name and its bytes: whose it is, and how long it is kept.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Custody {
    /// Who may share it.
    pub domain: DomainId,
    /// How long it is kept.
    pub keep: Keep,
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Date = Date::from_unix(1_000);

    const fn seconds(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn durations_become_dates_and_a_pin_ends_with_what_it_keeps() {
        let keep = Retention { ttl: Some(seconds(60)), pin: Some(seconds(90)), ..Retention::default() }.from(NOW);
        assert_eq!((keep.expires, keep.pinned), (Some(Date::from_unix(1_060)), Some(Date::from_unix(1_060))));
        assert!(!keep.is_over(Date::from_unix(1_059)) && keep.is_over(Date::from_unix(1_060)));
        assert_eq!(Retention::default().from(NOW), Keep::default());
    }

    #[test]
    fn of_two_requests_the_more_generous_decides_in_each_point() {
        let short = Retention { ttl: Some(seconds(5)), store: false, priority: Priority::High, ..Retention::default() };
        let long =
            Retention { ttl: Some(seconds(9)), pin: Some(seconds(2)), priority: Priority::Low, ..Retention::default() };
        let (short, long) = (short.from(NOW), long.from(NOW));
        let both = Keep { expires: long.expires, pinned: long.pinned, store: true, priority: Priority::High };
        assert_eq!((short.and(long), long.and(short)), (both, both));
        assert_eq!(short.and(Keep::default()).expires, None, "who asks for nothing asks for no end");
    }
}
