//! A time as one integer, to compare the times of a thousand workers against one reading of the clock.

use std::sync::LazyLock;
use tokio::time::Instant;

/// Nanoseconds since a time before the start of the process. Only differences are meaningful; 0 means no time.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct Timestamp(u64);

/// Maps to the middle of the range, because a clock moved by a test may be before or after it.
static BASE: LazyLock<std::time::Instant> = LazyLock::new(std::time::Instant::now);
const BASE_BITS: u64 = 1 << 63;

impl Timestamp {
    #[inline]
    pub(crate) const fn bits(self) -> u64 {
        self.0
    }

    /// This time plus a number of nanoseconds.
    pub(crate) const fn after(self, nanoseconds: u64) -> Self {
        Self(self.0 + nanoseconds)
    }
}

impl From<Instant> for Timestamp {
    fn from(at: Instant) -> Self {
        let at = at.into_std();
        Self(match at.checked_duration_since(*BASE) {
            Some(after) => BASE_BITS + after.as_nanos() as u64,
            None => BASE_BITS - BASE.duration_since(at).as_nanos() as u64,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn differences_equal_those_of_instants_around_the_base() {
        let base = Instant::from_std(*BASE);
        let (second, bits) = (Duration::from_secs(1), |at: Instant| Timestamp::from(at).bits());
        assert_eq!(bits(base + second) - bits(base), 1_000_000_000);
        assert_eq!(bits(base) - bits(base - second), 1_000_000_000);
    }
}
