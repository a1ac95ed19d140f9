//! `SplitMix64`: a fast mixing function and random number generator. The same on every machine.
//!
//! Source: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014. Not for secrets.

/// The increment of the generator: the golden ratio as a 64-bit fraction, odd.
pub const INCREMENT: u64 = 0x9e37_79b9_7f4a_7c15;

/// Hash of `number`: the first output of a generator with that seed.
pub const fn splitmix64(number: u64) -> u64 {
    mix(number.wrapping_add(INCREMENT))
}

/// The finalizer: the output of a generator whose state is `z`, after the increment.
pub const fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// The generator. The same seed gives the same sequence.
#[derive(Clone, Debug)]
pub struct SplitMix64(u64);

impl SplitMix64 {
    /// A generator whose first output is `splitmix64(seed)`.
    pub const fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The next 64 uniformly distributed bits.
    pub const fn next_u64(&mut self) -> u64 {
        let output = splitmix64(self.0);
        self.0 = self.0.wrapping_add(INCREMENT);
        output
    }

    /// A number from 0 (included) to 1 (excluded), uniformly distributed.
    pub const fn uniform(&mut self) -> f64 {
        (self.next_u64() >> 11) as f64 / (1_u64 << 53) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outputs_match_the_published_sequence() {
        let mut generator = SplitMix64::new(1_234_567);
        let published = [6_457_827_717_110_365_317, 3_203_168_211_198_807_973, 9_817_491_932_198_370_423];
        assert_eq!([0; 3].map(|_| generator.next_u64()), published);
    }
}
