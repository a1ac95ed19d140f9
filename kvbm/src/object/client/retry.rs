//! How often a request is repeated, and when a read is asked for a second time. Pure: times come in, and the seed.
//!
//! - A repetition waits a random time up to a bound that doubles (full jitter), so that those who failed together do not
//!   come back together; and it takes from a budget that answers fill, so that a store in trouble is not asked more.
//! - A second request goes out once the first has taken longer than 99 of 100 of its size did lately, for at most one read
//!   in twenty.

use std::time::Duration;

/// The bound of the first pause, and of the longest.
const PAUSE: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(2));
/// Repetitions in a row when nothing was answered lately, and how many answers allow one: a store that fails half of its
/// requests is asked a fifth more, not twice as much.
const RETRIES: (u32, u32) = (20, 5);
/// Second requests in a row, and how many reads allow one.
const HEDGES: (u32, u32) = (4, 20);
/// Reads that the 99th percentile is measured over, and how many of them make it worth believing.
const WINDOW: usize = 200;
const KNOWN: usize = 50;
/// A read that is quicker is not worth another request, however quick the others were.
const HEDGE_MIN: Duration = Duration::from_millis(20);
/// Sizes of reads that are measured apart: up to 64 KiB, five times four times as much each, and more.
const CLASSES: usize = 6;

pub(in crate::object) struct Pace {
    /// Answers and reads that allow repetitions and second requests to come.
    answers: u32,
    reads: u32,
    chance: Chance,
    lately: [Window; CLASSES],
}

/// Numbers that look random, the same for the same seed: `SplitMix64`, Steele and others, 2014.
pub(in crate::object) struct Chance(u64);

impl Chance {
    pub(in crate::object) fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// At least 0, less than 1.
    pub(in crate::object) fn draw(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((mixed ^ (mixed >> 31)) >> 11) as f64 / (1_u64 << 53) as f64
    }
}

/// The last durations, in seconds, the oldest overwritten first.
#[derive(Default)]
struct Window {
    seconds: Vec<f32>,
    next: usize,
}

impl Pace {
    pub(in crate::object) fn new(seed: u64) -> Self {
        Self { answers: RETRIES.0 * RETRIES.1, reads: 0, chance: Chance::new(seed), lately: Default::default() }
    }

    /// A request was answered.
    pub(in crate::object) fn answered(&mut self) {
        self.answers = (self.answers + 1).min(RETRIES.0 * RETRIES.1);
    }

    /// How long to wait before the `nth` repetition, if the budget allows one.
    pub(in crate::object) fn pause(&mut self, nth: u32) -> Option<Duration> {
        self.answers = self.answers.checked_sub(RETRIES.1)?;
        let bound = PAUSE.0.saturating_mul(1 << nth.min(16)).min(PAUSE.1);
        Some(bound.mul_f64(self.chance.draw()))
    }

    /// A read of so many bytes begins.
    pub(in crate::object) fn read(&mut self) {
        self.reads = (self.reads + 1).min(HEDGES.0 * HEDGES.1);
    }

    /// A read was answered.
    pub(in crate::object) fn took(&mut self, bytes: u64, time: Duration) {
        let window = &mut self.lately[class(bytes)];
        if window.seconds.len() < WINDOW {
            window.seconds.push(time.as_secs_f32());
        } else {
            window.seconds[window.next] = time.as_secs_f32();
            window.next = (window.next + 1) % WINDOW;
        }
    }

    /// How long a read of so many bytes may take before it is asked for again; `None` while nothing is measured.
    pub(in crate::object) fn patience(&self, bytes: u64) -> Option<Duration> {
        let mut seconds = Some(&self.lately[class(bytes)].seconds).filter(|seconds| seconds.len() >= KNOWN)?.clone();
        let rank = seconds.len() * 99 / 100;
        let (_, slow, _) = seconds.select_nth_unstable_by(rank, f32::total_cmp);
        Some(Duration::from_secs_f32(*slow).max(HEDGE_MIN))
    }

    /// Takes the right to one second request.
    pub(in crate::object) fn hedge(&mut self) -> bool {
        let left = self.reads.checked_sub(HEDGES.1);
        self.reads = left.unwrap_or(self.reads);
        left.is_some()
    }
}

fn class(bytes: u64) -> usize {
    (0..CLASSES - 1).find(|class| bytes <= (64 << 10) << (2 * class)).unwrap_or(CLASSES - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_are_spread_and_are_the_same_for_the_same_seed() {
        let pauses = |seed| -> Vec<Duration> {
            let mut pace = Pace::new(seed);
            (0..8).filter_map(|nth| pace.pause(nth)).collect()
        };
        assert_eq!(pauses(1), pauses(1));
        assert_ne!(pauses(1), pauses(2));
        let bound = |nth: u32| (PAUSE.0 * 2_u32.pow(nth)).min(PAUSE.1);
        let all: Vec<_> = (0..200).map(pauses).collect();
        for nth in 0..8 {
            let at: Vec<Duration> = all.iter().map(|pauses| pauses[nth]).collect();
            assert!(at.iter().all(|pause| *pause <= bound(nth as u32)));
            let (low, high) = (at.iter().min().unwrap(), at.iter().max().unwrap());
            assert!(*low < bound(nth as u32) / 10 && *high > bound(nth as u32) * 9 / 10, "{low:?} to {high:?}");
        }
    }

    #[test]
    fn a_store_that_answers_nothing_is_soon_asked_once_only() {
        let mut pace = Pace::new(1);
        assert_eq!((0..100).filter(|_| pace.pause(1).is_some()).count(), 20);
        (0..10).for_each(|_| pace.answered());
        assert_eq!((0..100).filter(|_| pace.pause(1).is_some()).count(), 2, "a fifth of the answers");
    }

    #[test]
    fn patience_is_the_slowest_of_a_hundred_of_that_size_and_lately() {
        let mut pace = Pace::new(1);
        assert_eq!(pace.patience(1 << 20), None, "not measured");
        for n in 0..200 {
            pace.took(1 << 20, Duration::from_millis(if n % 100 == 0 { 900 } else { 100 }));
        }
        assert_eq!(pace.patience(1 << 20), Some(Duration::from_secs_f32(0.9)));
        assert_eq!(pace.patience(1_000), None, "another size");
        for _ in 0..200 {
            pace.took(1 << 20, Duration::from_millis(3));
        }
        assert_eq!(pace.patience(1 << 20), Some(HEDGE_MIN), "the store is quick now");
    }

    #[test]
    fn at_most_one_read_in_twenty_is_asked_for_again() {
        let mut pace = Pace::new(1);
        let hedged = (0..10_000).filter(|_| {
            pace.read();
            pace.hedge()
        });
        assert_eq!(hedged.count(), 500);
    }
}
