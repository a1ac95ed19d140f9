//! Which of the sixteen-bit lanes of a few words have a value, all looked at at once: what a hash table whose buckets are cache
//! lines does with every one of them.

/// Words that are looked at together.
pub const WORDS: usize = 3;
/// Lanes of a word.
pub const LANES: usize = 4;
/// Bits of a lane.
pub const BITS: u32 = u64::BITS / LANES as u32;

/// A bit for each lane, from the lowest of the first word on, that has the value.
#[cfg(target_arch = "x86_64")]
#[inline]
pub fn with([one, two, three]: [u64; WORDS], value: u16) -> u32 {
    use std::arch::x86_64::{
        _mm_cmpeq_epi16, _mm_cvtsi64_si128, _mm_movemask_epi8, _mm_packs_epi16, _mm_set_epi64x, _mm_set1_epi16,
    };
    // SAFETY: these compute with values only, and every x86-64 has them.
    let lanes = unsafe {
        let value = _mm_set1_epi16(value.cast_signed());
        let first = _mm_cmpeq_epi16(_mm_set_epi64x(two.cast_signed(), one.cast_signed()), value);
        let rest = _mm_cmpeq_epi16(_mm_cvtsi64_si128(three.cast_signed()), value);
        _mm_movemask_epi8(_mm_packs_epi16(first, rest))
    };
    lanes.cast_unsigned() & ((1 << (WORDS * LANES)) - 1)
}

/// A bit for each lane, from the lowest of the first word on, that has the value.
#[cfg(not(target_arch = "x86_64"))]
#[inline]
pub fn with(words: [u64; WORDS], value: u16) -> u32 {
    plain(words, value)
}

/// The same without what only some processors have.
#[cfg(any(test, not(target_arch = "x86_64")))]
fn plain(words: [u64; WORDS], value: u16) -> u32 {
    const LOW: u64 = 0x0001_0001_0001_0001;
    const ALL_BUT_HIGH: u64 = 0x7fff_7fff_7fff_7fff;
    let of = |word: u64| {
        let differs = word ^ (u64::from(value) * LOW);
        // No lane carries over into the next: its highest bit stays out of the sum.
        let some = ((differs & ALL_BUT_HIGH) + ALL_BUT_HIGH) | differs;
        let none = !(some | ALL_BUT_HIGH) >> (BITS - 1);
        (none | none >> (BITS - 1) | none >> (2 * (BITS - 1)) | none >> (3 * (BITS - 1))) as u32 & ((1 << LANES) - 1)
    };
    words.iter().rev().fold(0, |lanes, word| lanes << LANES | of(*word))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_lane_is_found_by_its_value_and_no_other(
            lanes in proptest::collection::vec(
                proptest::sample::select(vec![0_u16, 1, 2, 0x7fff, 0x8000, 0x8001, 0xfffe, 0xffff]),
                WORDS * LANES,
            ),
            value in proptest::sample::select(vec![0_u16, 1, 0x7fff, 0x8000, 0xffff]),
        ) {
            let word = |lanes: &[u16]| lanes.iter().rev().fold(0, |word, lane| word << BITS | u64::from(*lane));
            let words = std::array::from_fn(|at| word(&lanes[at * LANES..][..LANES]));
            let expected = lanes.iter().rev().fold(0, |bits, lane| bits << 1 | u32::from(*lane == value));
            prop_assert_eq!(with(words, value), expected);
            prop_assert_eq!(plain(words, value), expected);
        }
    }
}
