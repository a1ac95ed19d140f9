//! How fast a tier is, as seen while onboarding, and whether it is to be asked at all.

use crate::plan::{Measured, Patience};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::time::Instant;

/// What is known of one tier. The time is passed in.
#[derive(Default)]
pub(super) struct Gauge(Mutex<State>);

#[derive(Default)]
struct State {
    /// Seconds to the first block, smoothed; and when that was last seen.
    latency: Option<(f64, Instant)>,
    /// Blocks after the first and the seconds they took, both fading alike, so that large loads count for more.
    blocks: f64,
    seconds: f64,
    strikes: u32,
    asleep_until: Option<Instant>,
}

/// What one load showed of its tier.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) struct Seen {
    /// Until the first answer; `None`: there was none.
    pub(super) first: Option<Duration>,
    /// Blocks that the time is for.
    pub(super) blocks: usize,
    /// Until its last answer, or until we stopped listening.
    pub(super) elapsed: Duration,
}

impl Gauge {
    /// The weight of a new latency, and what remains of old throughput. A change is believed after three loads or so.
    const NEW: f64 = 0.3;
    /// A measurement fades over this time: a tier that was slow for once deserves another try.
    const STALE: Duration = Duration::from_secs(30);
    /// After a first silence the tier is left alone for this long, then twice as long, ...
    const BACKOFF: Duration = Duration::from_secs(1);
    /// ... up to 64 times as long: each try may cost one request its grace.
    const STRIKES_MAX: u32 = 6;

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether to ask the tier.
    pub(super) fn is_awake(&self, now: Instant) -> bool {
        self.lock().asleep_until.is_none_or(|until| until <= now)
    }

    /// For the plan: what was seen, fading to nothing known.
    pub(super) fn measured(&self, now: Instant) -> Option<Measured> {
        let state = self.lock();
        let (latency, at) = state.latency?;
        let left = 1.0 - now.saturating_duration_since(at).as_secs_f64() / Self::STALE.as_secs_f64();
        let seconds_per_block = state.seconds_per_block() * left;
        (left > 0.0).then_some(Measured { latency: latency * left, seconds_per_block })
    }

    /// For people and routers, however old: latency in seconds, and seconds per block.
    pub(super) fn last(&self) -> Option<Measured> {
        let state = self.lock();
        state.latency.map(|(latency, _)| Measured { latency, seconds_per_block: state.seconds_per_block() })
    }

    /// Learns from a load. True when the tier is to be left alone for a while.
    pub(super) fn learn(&self, seen: Seen, now: Instant) -> bool {
        let mut state = self.lock();
        let Some(first) = seen.first else { return state.silent(seen.elapsed, now) };
        state.strikes = 0;
        state.asleep_until = None;
        let fresh = first.as_secs_f64();
        let old = state.latency.map_or(fresh, |(latency, _)| latency);
        state.latency = Some((old + Self::NEW * (fresh - old), now));
        if seen.blocks > 1 {
            state.blocks = state.blocks * (1.0 - Self::NEW) + (seen.blocks - 1) as f64;
            state.seconds = state.seconds * (1.0 - Self::NEW) + seen.elapsed.saturating_sub(first).as_secs_f64();
        }
        false
    }
}

impl State {
    fn seconds_per_block(&self) -> f64 {
        if self.blocks > 0.0 { self.seconds / self.blocks } else { 0.0 }
    }

    fn silent(&mut self, waited: Duration, now: Instant) -> bool {
        if waited < Patience::GRACE {
            // Something else ended the load before the tier had its chance.
            return false;
        }
        self.asleep_until = Some(now + Gauge::BACKOFF * 2_u32.pow(self.strikes));
        self.strikes = (self.strikes + 1).min(Gauge::STRIKES_MAX);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    #[test]
    fn a_silent_tier_sleeps_longer_each_time_until_it_speaks() {
        let (gauge, mut now) = (Gauge::default(), Instant::now());
        let silent = Seen { first: None, blocks: 0, elapsed: Patience::GRACE };
        for seconds in [1, 2, 4, 8, 16, 32, 64, 64] {
            assert!(gauge.is_awake(now));
            assert!(gauge.learn(silent, now));
            assert!(!gauge.is_awake(now + Duration::from_secs(seconds) - ms(1)));
            now += Duration::from_secs(seconds);
        }
        gauge.learn(Seen { first: Some(ms(1)), blocks: 1, elapsed: ms(1) }, now);
        gauge.learn(silent, now);
        assert!(gauge.is_awake(now + Duration::from_secs(1)), "it begins anew");
    }

    #[test]
    fn a_wait_that_something_else_ended_is_no_strike() {
        let (gauge, now) = (Gauge::default(), Instant::now());
        assert!(!gauge.learn(Seen { first: None, blocks: 0, elapsed: ms(10) }, now));
        assert!(gauge.is_awake(now));
        assert_eq!(gauge.measured(now), None);
    }

    #[test]
    fn large_loads_decide_the_throughput_and_age_forgets_it() {
        let (gauge, now) = (Gauge::default(), Instant::now());
        gauge.learn(Seen { first: Some(ms(5)), blocks: 1_001, elapsed: ms(1_005) }, now);
        gauge.learn(Seen { first: Some(ms(5)), blocks: 2, elapsed: ms(50) }, now);
        let measured = gauge.measured(now).unwrap();
        assert!((measured.seconds_per_block - 0.001).abs() < 0.0001, "{measured:?}");
        assert_eq!(gauge.measured(now + Gauge::STALE), None);
    }
}
