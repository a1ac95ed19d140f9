//! How many blocks of its memory the requests of a worker use per second.

use super::prefix_demand::HORIZON;
use super::timestamp::Timestamp;

/// A mean over [`HORIZON`]: memory is filled in that order of time, and a shorter burst evicts little.
#[derive(Default, Debug)]
pub(super) struct BlockUseRate {
    /// Decayed number of blocks, and the seconds since the first one with the same decay. Their quotient is the rate.
    blocks: f64,
    seconds: f64,
    at: Option<Timestamp>,
}

/// Seconds that are added to the time since the first block: the first few prompts do not give a rate.
const MIN_SECONDS: f64 = 10.0;

impl BlockUseRate {
    /// A request uses blocks.
    pub(super) fn used(&mut self, blocks: f64, now: Timestamp) {
        self.advance(now);
        self.blocks += blocks;
    }

    /// Time has passed.
    pub(super) fn advance(&mut self, now: Timestamp) {
        let elapsed = self.at.map_or(0, |at| now.bits().saturating_sub(at.bits())) as f64 / 1e9;
        let keep = (-elapsed / HORIZON).exp();
        self.blocks *= keep;
        self.seconds = HORIZON + (self.seconds - HORIZON) * keep;
        self.at = Some(now);
    }

    /// Blocks per second.
    pub(super) fn per_second(&self) -> f64 {
        self.blocks / (self.seconds + MIN_SECONDS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;
    use tokio::time::Instant;

    #[test]
    fn the_rate_is_known_early_and_falls_when_nothing_is_used() {
        let (mut rate, start) = (BlockUseRate::default(), Instant::now());
        let mut used = |from: u32, to| {
            (from..to).for_each(|nth| rate.used(10.0, (start + Duration::from_millis(100) * nth).into()));
            rate.per_second()
        };
        let (early, late) = (used(0, 100), used(100, 3_000));
        assert!((40.0..60.0).contains(&early) && (80.0..100.0).contains(&late), "{early} {late}");
        rate.advance((start + Duration::from_mins(10)).into());
        assert!(rate.per_second() < 1.0, "{rate:?}");
    }
}
