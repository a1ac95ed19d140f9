//! How fast a tier is, as seen while onboarding, how much others want of it, and whether it is to be asked at all.

use super::plan::{Known, Measured, Patience};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::time::Instant;

/// What is known of one tier. The time is passed in.
#[derive(Default)]
pub(super) struct Gauge {
    state: Mutex<State>,
    /// Blocks that loads wait for now.
    queued: AtomicU64,
    /// Blocks that it answered for, to whomever. Relaxed, like the other: figures, which order nothing.
    answered: AtomicU64,
}

#[derive(Clone, Copy, Default)]
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
    /// Blocks that the time is for, those for others included: they took their share of it.
    pub(super) blocks: u64,
    /// Until its last answer, or until we stopped listening.
    pub(super) elapsed: Duration,
    /// Blocks that others waited for when it was asked: the first answer came after them.
    pub(super) queued: u64,
}

impl Gauge {
    /// The weight of a new latency, and what remains of old throughput. A change is believed after three loads or so.
    const NEW: f64 = 0.3;
    /// A measurement fades over this time: a tier that was slow for once deserves another try.
    const STALE: Duration = Duration::from_secs(30);
    /// After a first silence the tier is left alone for this long, then twice as long, ...
    const BACKOFF: Duration = Duration::from_secs(1);
    /// ... up to 64 times as long. Nobody waits for the answer to a try, but each is a read that may never end.
    const STRIKES_MAX: u32 = 6;

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether to ask the tier.
    pub(super) fn is_awake(&self, now: Instant) -> bool {
        self.lock().asleep_until.is_none_or(|until| until <= now)
    }

    /// So many blocks were asked for.
    pub(super) fn asked(&self, blocks: usize) {
        self.queued.fetch_add(blocks as u64, Relaxed);
    }

    /// It answered for one of them. How many it answered for until now.
    pub(super) fn answer(&self) -> u64 {
        self.queued.fetch_sub(1, Relaxed);
        self.answered.fetch_add(1, Relaxed) + 1
    }

    /// Nobody waits for so many of them any more.
    pub(super) fn recalled(&self, blocks: usize) {
        self.queued.fetch_sub(blocks as u64, Relaxed);
    }

    /// Blocks that loads wait for now.
    pub(super) fn queued(&self) -> u64 {
        self.queued.load(Relaxed)
    }

    /// For the plan: what was seen, fading to nothing known.
    pub(super) fn known(&self, now: Instant) -> Known {
        self.lock().known(self.queued(), now)
    }

    /// The same for a load under way: with what it has seen itself so far, and without the blocks that it waits for, which
    /// nobody has to wait behind.
    pub(super) fn known_amid(&self, seen: Seen, own: usize, now: Instant) -> Known {
        self.lock().after(seen, now).known(self.queued().saturating_sub(own as u64), now)
    }

    /// For people and routers, however old: seconds of latency, and per block.
    pub(super) fn last(&self) -> Option<(f64, f64)> {
        let state = self.lock();
        state.latency.map(|(latency, _)| (latency, state.seconds_per_block()))
    }

    /// Learns from a load. True when the tier is to be left alone for a while.
    pub(super) fn learn(&self, seen: Seen, now: Instant) -> bool {
        let mut state = self.lock();
        *state = state.after(seen, now);
        seen.is_silence()
    }
}

impl Seen {
    /// Nothing came, and the tier had its chance.
    fn is_silence(&self) -> bool {
        self.first.is_none() && self.elapsed >= Patience::GRACE
    }
}

impl State {
    fn seconds_per_block(&self) -> f64 {
        if self.blocks > 0.0 { self.seconds / self.blocks } else { 0.0 }
    }

    fn known(&self, queued: u64, now: Instant) -> Known {
        if self.strikes > 0 {
            return Known::Silent;
        }
        let Some((latency, at)) = self.latency else { return Known::Nothing };
        let left = 1.0 - now.saturating_duration_since(at).as_secs_f64() / Gauge::STALE.as_secs_f64();
        if left <= 0.0 {
            return Known::Nothing;
        }
        let (latency, seconds_per_block) = (latency * left, self.seconds_per_block() * left);
        Known::Speed(Measured { latency, seconds_per_block, queued: queued as usize })
    }

    /// What is known once a load has shown `seen`.
    fn after(mut self, seen: Seen, now: Instant) -> Self {
        let Some(first) = seen.first else {
            // Otherwise something else ended the load before the tier had its chance. Of many that wait for it at once, one
            // finds out for all.
            let asleep = self.asleep_until.is_some_and(|until| until > now);
            if seen.is_silence() && !asleep {
                self.asleep_until = Some(now + Gauge::BACKOFF * 2_u32.pow(self.strikes));
                self.strikes = (self.strikes + 1).min(Gauge::STRIKES_MAX);
            }
            return self;
        };
        self.strikes = 0;
        self.asleep_until = None;
        let fresh = (first.as_secs_f64() - seen.queued as f64 * self.seconds_per_block()).max(0.0);
        let old = self.latency.map_or(fresh, |(latency, _)| latency);
        self.latency = Some((old + Gauge::NEW * (fresh - old), now));
        if seen.blocks > 1 {
            self.blocks = self.blocks * (1.0 - Gauge::NEW) + (seen.blocks - 1) as f64;
            self.seconds = self.seconds * (1.0 - Gauge::NEW) + seen.elapsed.saturating_sub(first).as_secs_f64();
        }
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    fn seen(first: Option<u64>, blocks: u64, elapsed: Duration) -> Seen {
        Seen { first: first.map(ms), blocks, elapsed, queued: 0 }
    }

    #[test]
    fn a_silent_tier_sleeps_longer_each_time_until_it_speaks() {
        let (gauge, mut now) = (Gauge::default(), Instant::now());
        let silent = seen(None, 0, Patience::GRACE);
        for seconds in [1, 2, 4, 8, 16, 32, 64, 64] {
            assert!(gauge.is_awake(now));
            assert!(gauge.learn(silent, now));
            assert!(!gauge.is_awake(now + Duration::from_secs(seconds) - ms(1)));
            now += Duration::from_secs(seconds);
            assert_eq!(gauge.known(now), Known::Silent, "asked again, and not waited for");
        }
        gauge.learn(seen(Some(1), 1, ms(1)), now);
        assert!(matches!(gauge.known(now), Known::Speed(_)));
        gauge.learn(silent, now);
        assert!(gauge.is_awake(now + Duration::from_secs(1)), "it begins anew");
    }

    #[test]
    fn many_who_find_out_at_once_are_one_strike() {
        let (gauge, now) = (Gauge::default(), Instant::now());
        for _ in 0..10 {
            gauge.learn(seen(None, 0, Patience::GRACE), now);
        }
        assert!(gauge.is_awake(now + Gauge::BACKOFF));
    }

    #[test]
    fn a_wait_that_something_else_ended_is_no_strike() {
        let (gauge, now) = (Gauge::default(), Instant::now());
        assert!(!gauge.learn(seen(None, 0, ms(10)), now));
        assert!(gauge.is_awake(now));
        assert_eq!(gauge.known(now), Known::Nothing);
    }

    #[test]
    fn large_loads_decide_the_throughput_and_age_forgets_it() {
        let (gauge, now) = (Gauge::default(), Instant::now());
        gauge.learn(seen(Some(5), 1_001, ms(1_005)), now);
        gauge.learn(seen(Some(5), 2, ms(50)), now);
        let Known::Speed(measured) = gauge.known(now) else { panic!("it was seen") };
        assert!((measured.seconds_per_block - 0.001).abs() < 0.0001, "{measured:?}");
        assert_eq!(gauge.known(now + Gauge::STALE), Known::Nothing);
    }

    #[test]
    fn what_others_want_is_queue_and_neither_latency_nor_slowness() {
        let (gauge, now) = (Gauge::default(), Instant::now());
        gauge.learn(seen(Some(5), 101, ms(105)), now);
        // Asked behind 50 blocks of somebody else; its own 100 came mixed with another 100.
        gauge.learn(Seen { first: Some(ms(55)), blocks: 201, elapsed: ms(255), queued: 50 }, now);
        gauge.asked(30);
        gauge.answer();
        gauge.recalled(9);
        let Known::Speed(measured) = gauge.known(now) else { panic!("it was seen") };
        assert!((measured.latency - 0.005).abs() < 1e-6, "{measured:?}");
        assert!((measured.seconds_per_block - 0.001).abs() < 1e-6, "{measured:?}");
        assert_eq!(measured.queued, 20);
    }
}
