//! The time that outlives a process: dates by the wall clock, in whole seconds.
//!
//! How long a block is kept is written down beside its bytes and read by other processes days later, so it is a date. The
//! clock is read at the edge and passed in; it may be set forwards and backwards, and nothing here minds. Look here in
//! vain for waiting and measuring: those are `tokio::time`'s.

use std::fmt;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// A second since 1970, up to the year 2106; never the first one, so that zero can stand for none.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Date(NonZeroU32);

impl Date {
    /// So many seconds after 1970, or the nearest that can be said.
    pub const fn from_unix(seconds: u64) -> Self {
        let seconds = if seconds > u32::MAX as u64 { u32::MAX } else { seconds as u32 };
        match NonZeroU32::new(seconds) {
            Some(seconds) => Self(seconds),
            None => Self(NonZeroU32::MIN),
        }
    }

    /// A date as it stands in headers: zero is none.
    pub const fn decode(seconds: u32) -> Option<Self> {
        match NonZeroU32::new(seconds) {
            Some(seconds) => Some(Self(seconds)),
            None => None,
        }
    }

    /// The date as it stands in headers.
    pub const fn encode(date: Option<Self>) -> u32 {
        match date {
            Some(date) => date.0.get(),
            None => 0,
        }
    }

    /// So much later, cut to whole seconds.
    #[must_use]
    pub const fn after(self, time: Duration) -> Self {
        Self::from_unix((self.0.get() as u64).saturating_add(time.as_secs()))
    }

    /// So much earlier, likewise.
    #[must_use]
    pub const fn before(self, time: Duration) -> Self {
        Self::from_unix((self.0.get() as u64).saturating_sub(time.as_secs()))
    }

    /// The time since an earlier date; zero since a later one.
    pub(crate) const fn since(self, earlier: Self) -> Duration {
        Duration::from_secs(self.0.get().saturating_sub(earlier.0.get()) as u64)
    }
}

impl fmt::Debug for Date {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Date({})", self.0)
    }
}

/// Says what time it is. Clones share it.
#[derive(Clone, Debug, Default)]
pub struct Clock(Option<Arc<AtomicU32>>);

impl Clock {
    /// The machine's.
    pub const fn system() -> Self {
        Self(None)
    }

    /// One that stands still until it is [set](Self::set): for tests and replays.
    pub fn standing(at: Date) -> Self {
        Self(Some(Arc::new(AtomicU32::new(at.0.get()))))
    }

    /// Sets a clock that stands still; the machine's is not ours to set.
    pub fn set(&self, to: Date) {
        if let Some(standing) = &self.0 {
            standing.store(to.0.get(), Ordering::Relaxed);
        }
    }

    /// The time.
    pub fn now(&self) -> Date {
        let seconds = match &self.0 {
            Some(standing) => u64::from(standing.load(Ordering::Relaxed)),
            // A clock that stands before 1970 says 1970.
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
