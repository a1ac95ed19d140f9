//! Maps by number, for numbers that nobody outside can choose so that they collide: names of blocks, which are hashes of their
//! own, and blocks of a trace.

use crate::select::mix;
use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// A map whose keys are a number each.
pub(crate) type Numbered<K, V> = HashMap<K, V, BuildHasherDefault<NumberHasher>>;

/// Scrambles a number, which takes a quarter of what the standard hasher does. The same in every process.
#[derive(Default)]
pub(crate) struct NumberHasher(u64);

impl Hasher for NumberHasher {
    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u64(u64::from(*byte));
        }
    }

    fn write_u32(&mut self, number: u32) {
        self.write_u64(u64::from(number));
    }

    fn write_u64(&mut self, number: u64) {
        self.0 = mix(self.0 ^ number);
    }

    fn finish(&self) -> u64 {
        self.0
    }
}
