//! Compares all sixteen-bit lanes of a few words with one value: SSE2 on x86-64, SWAR (SIMD within a register)
//! elsewhere. A hash table whose buckets are cache lines compares the tags of a bucket this way.

/// Words that are compared together.
pub const WORDS: usize = 3;
/// Lanes per word.
pub const LANES: usize = 4;
/// Bits per lane.
pub const BITS: u32 = u64::BITS / LANES as u32;

/// A bit mask of the lanes that equal `value`. Bit 0 is the lowest lane of the first word.
#[cfg(target_arch = "x86_64")]
#[inline]
pub fn equal_lanes([one, two, three]: [u64; WORDS], value: u16) -> u32 {
    use std::arch::x86_64::{
        _mm_cmpeq_epi16, _mm_cvtsi64_si128, _mm_movemask_epi8, _mm_packs_epi16, _mm_set_epi64x, _mm_set1_epi16,
    };
    // SAFETY: these instructions access no memory, and every x86-64 processor has them.
    let lanes = unsafe {
        let value = _mm_set1_epi16(value.cast_signed());
        let first = _mm_cmpeq_epi16(_mm_set_epi64x(two.cast_signed(), one.cast_signed()), value);
        let rest = _mm_cmpeq_epi16(_mm_cvtsi64_si128(three.cast_signed()), value);
        _mm_movemask_epi8(_mm_packs_epi16(first, rest))
    };
    lanes.cast_unsigned() & ((1 << (WORDS * LANES)) - 1)
}

/// A bit mask of the lanes that equal `value`. Bit 0 is the lowest lane of the first word.
#[cfg(not(target_arch = "x86_64"))]
#[inline]
pub fn equal_lanes(words: [u64; WORDS], value: u16) -> u32 {
    portable(words, value)
}

/// [`equal_lanes`] without processor-specific instructions.
#[cfg(any(test, not(target_arch = "x86_64")))]
fn portable(words: [u64; WORDS], value: u16) -> u32 {
    const LOW: u64 = 0x0001_0001_0001_0001;
    const ALL_BUT_HIGH: u64 = 0x7fff_7fff_7fff_7fff;
    let in_word = |word: u64| {
        let differs = word ^ (u64::from(value) * LOW);
        // The highest bit of each lane is left out of the sum, so that no lane carries into the next.
        let nonzero = ((differs & ALL_BUT_HIGH) + ALL_BUT_HIGH) | differs;
        let equal = !(nonzero | ALL_BUT_HIGH) >> (BITS - 1);
        (equal | equal >> (BITS - 1) | equal >> (2 * (BITS - 1)) | equal >> (3 * (BITS - 1))) as u32
            & ((1 << LANES) - 1)
    };
    words.iter().rev().fold(0, |lanes, word| lanes << LANES | in_word(*word))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn only_lanes_with_the_value_are_in_the_mask(
            lanes in proptest::collection::vec(
                proptest::sample::select(vec![0_u16, 1, 2, 0x7fff, 0x8000, 0x8001, 0xfffe, 0xffff]),
                WORDS * LANES,
            ),
            value in proptest::sample::select(vec![0_u16, 1, 0x7fff, 0x8000, 0xffff]),
        ) {
            let word = |lanes: &[u16]| lanes.iter().rev().fold(0, |word, lane| word << BITS | u64::from(*lane));
            let words = std::array::from_fn(|at| word(&lanes[at * LANES..][..LANES]));
            let expected = lanes.iter().rev().fold(0, |bits, lane| bits << 1 | u32::from(*lane == value));
            prop_assert_eq!(equal_lanes(words, value), expected);
            prop_assert_eq!(portable(words, value), expected);
        }
    }
}
