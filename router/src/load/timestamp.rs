//! A time as one number, for those who compare the times of a thousand workers and read the clock once.

use std::sync::LazyLock;
use tokio::time::Instant;

/// Nanoseconds since long before this process. Only differences mean anything; 0 is no time at all.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct Moment(u64);

/// Lies in the middle of what the number can say, so that a clock that a test has moved may lie on either side of it.
static BASE: LazyLock<std::time::Instant> = LazyLock::new(std::time::Instant::now);
const BASE_BITS: u64 = 1 << 63;

impl Moment {
    #[inline]
    pub(crate) const fn bits(self) -> u64 {
        self.0
    }

    /// So many nanoseconds later.
    pub(crate) const fn after(self, nanoseconds: u64) -> Self {
        Self(self.0 + nanoseconds)
    }
}

impl From<Instant> for Moment {
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
    fn moments_are_as_far_apart_as_their_instants_on_both_sides_of_the_base() {
        let base = Instant::from_std(*BASE);
        let (second, bits) = (Duration::from_secs(1), |at: Instant| Moment::from(at).bits());
        assert_eq!(bits(base + second) - bits(base), 1_000_000_000);
        assert_eq!(bits(base) - bits(base - second), 1_000_000_000);
    }
}
