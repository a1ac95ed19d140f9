//! Wall clock dates in whole seconds.
//!
//! The retention of a block is stored beside its payload and read by other processes days later, so it consists of
//! dates. Callers read the clock and pass the date in. The clock may be set forwards and backwards. Not here: waiting
//! and measuring, for which the crate uses `tokio::time`.

use std::fmt;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// A date in whole seconds since 1970, up to the year 2106. It is never zero, which encodes "none".
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Date(NonZeroU32);

impl Date {
    /// The date so many seconds after 1970, or the nearest representable one.
    pub const fn from_unix(seconds: u64) -> Self {
        let seconds = if seconds > u32::MAX as u64 { u32::MAX } else { seconds as u32 };
        match NonZeroU32::new(seconds) {
            Some(seconds) => Self(seconds),
            None => Self(NonZeroU32::MIN),
        }
    }

    /// Decodes a date from a block header, where zero is none.
    pub const fn decode(seconds: u32) -> Option<Self> {
        match NonZeroU32::new(seconds) {
            Some(seconds) => Some(Self(seconds)),
            None => None,
        }
    }

    /// Encodes a date for a block header.
    pub const fn encode(date: Option<Self>) -> u32 {
        match date {
            Some(date) => date.0.get(),
            None => 0,
        }
    }

    /// The date `time` later, rounded down to whole seconds.
    #[must_use]
    pub const fn after(self, time: Duration) -> Self {
        Self::from_unix((self.0.get() as u64).saturating_add(time.as_secs()))
    }

    /// The date `time` earlier, rounded to whole seconds.
    #[must_use]
    pub const fn before(self, time: Duration) -> Self {
        Self::from_unix((self.0.get() as u64).saturating_sub(time.as_secs()))
    }

    /// The time since `earlier`; zero if that date is later.
    pub(crate) const fn since(self, earlier: Self) -> Duration {
        Duration::from_secs(self.0.get().saturating_sub(earlier.0.get()) as u64)
    }
}

impl fmt::Debug for Date {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Date({})", self.0)
    }
}

/// A source of dates: the system clock, or one that is set by hand. Clones share it.
#[derive(Clone, Debug, Default)]
pub struct Clock(Option<Arc<AtomicU32>>);

impl Clock {
    /// The system clock.
    pub const fn system() -> Self {
        Self(None)
    }

    /// A clock that changes only when it is [set](Self::set), for tests and replays.
    pub fn manual(at: Date) -> Self {
        Self(Some(Arc::new(AtomicU32::new(at.0.get()))))
    }

    /// Sets a manual clock. Has no effect on the system clock.
    pub fn set(&self, to: Date) {
        if let Some(manual) = &self.0 {
            manual.store(to.0.get(), Ordering::Relaxed);
        }
    }

    /// The current date.
    pub fn now(&self) -> Date {
        let seconds = match &self.0 {
            Some(manual) => u64::from(manual.load(Ordering::Relaxed)),
            // A system clock before 1970 counts as 1970.
            None => SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs()),
        };
        Date::from_unix(seconds)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_saturate_at_both_ends() {
        let last = Date::from_unix(u64::MAX);
        assert_eq!(last.after(Duration::MAX), last);
        assert_eq!(Date::from_unix(0), Date::from_unix(1));
        assert_eq!(Date::decode(Date::encode(Some(last))), Some(last));
        assert_eq!(Date::decode(Date::encode(None)), None);
    }
}
