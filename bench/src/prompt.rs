//! Prompts as token ids: exact lengths, and no two alike unless they are meant to be.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// The first ids of a vocabulary are bytes and special tokens; prompts keep clear of them.
const FIRST_ID: u32 = 1_000;

/// Ids that every built-in model has from [`FIRST_ID`] on.
const IDS: u64 = 3_000;

/// Makes prompts; the same seed makes the same ones. (`SplitMix64`, Steele, Lea and Flood 2014.)
#[derive(Clone, Debug)]
pub struct Source(u64);

impl Source {
    /// A source of prompts.
    pub const fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// A seed that no earlier run had.
    pub fn fresh_seed() -> u64 {
        let since = SystemTime::now().duration_since(UNIX_EPOCH);
        since.map_or(0, |since| since.as_nanos() as u64) ^ u64::from(std::process::id()).rotate_left(32)
    }

    /// This many tokens, never made before by this source.
    pub fn tokens(&mut self, count: usize) -> Vec<u32> {
        (0..count).map(|_| FIRST_ID + (self.next() % IDS) as u32).collect()
    }

    /// A time from nothing to `longest`.
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
    fn prompts_repeat_with_the_seed_only() {
        let (mut a, mut b) = (Source::new(1), Source::new(1));
        assert_eq!(a.tokens(64), b.tokens(64));
        assert_ne!(a.tokens(64), Source::new(1).tokens(64));
    }
}
