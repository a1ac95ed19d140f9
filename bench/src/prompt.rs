//! Random prompts as token ids of exact lengths.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// The first id in prompts. Smaller ids are bytes and special tokens.
const FIRST_ID: u32 = 1_000;

/// Number of ids from [`FIRST_ID`] on that every built-in model has.
const IDS: u64 = 3_000;

/// Generates prompts with `SplitMix64` (Steele, Lea and Flood 2014). The same seed gives the same prompts.
#[derive(Clone, Debug)]
pub struct Source(u64);

impl Source {
    /// A source with a seed.
    pub const fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// A seed from the time and the process id.
    pub fn fresh_seed() -> u64 {
        let since = SystemTime::now().duration_since(UNIX_EPOCH);
        since.map_or(0, |since| since.as_nanos() as u64) ^ u64::from(std::process::id()).rotate_left(32)
    }

    /// The next `count` random tokens.
    pub fn tokens(&mut self, count: usize) -> Vec<u32> {
        (0..count).map(|_| FIRST_ID + (self.next() % IDS) as u32).collect()
    }

    /// A random duration from zero to `longest`.
    pub fn up_to(&mut self, longest: Duration) -> Duration {
        longest.mul_f64(self.next() as f64 / u64::MAX as f64)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_seeds_give_equal_prompts() {
        let (mut a, mut b) = (Source::new(1), Source::new(1));
        assert_eq!(a.tokens(64), b.tokens(64));
        assert_ne!(a.tokens(64), Source::new(1).tokens(64));
    }
}
