//! The checksum of two parts from those of each: CRC-64/NVME, whose checksums `crc_fast` computes.
//!
//! A CRC is the remainder of a polynomial over GF(2). Bytes that follow multiply the polynomial of those before them by
//! a power of x, so the remainder of both parts is that of the first one, multiplied by this power, plus that of the
//! second one. The library computes the power as a matrix, which takes 0.3 ms, longer than reading a small block; here
//! it is a product of at most 64 powers from a table, in about a microsecond.

/// The polynomial. In this and all numbers here, the most significant bit is the coefficient of the lowest power.
const POLYNOMIAL: u64 = 0xAD93_D235_94C9_3659_u64.reverse_bits();

/// The power x⁰.
const ONE: u64 = 1 << 63;

/// The remainders of x to the power of 8 · 2ⁿ: the factors of 2ⁿ bytes.
static POWERS: [u64; 64] = powers();

const fn powers() -> [u64; 64] {
    let mut powers = [ONE >> 8; 64];
    let mut at = 1;
    while at < 64 {
        powers[at] = product(powers[at - 1], powers[at - 1]);
        at += 1;
    }
    powers
}

/// The remainder of the product of two polynomials.
const fn product(a: u64, mut b: u64) -> u64 {
    let (mut sum, mut bit) = (0, ONE);
    while bit != 0 {
        if a & bit != 0 {
            sum ^= b;
        }
        b = (b >> 1) ^ if b & 1 == 0 { 0 } else { POLYNOMIAL };
        bit >>= 1;
    }
    sum
}

/// The checksum of two parts: `first` and `second` are their checksums, the second part has `length` bytes.
pub(super) fn combine(first: u64, second: u64, length: u64) -> u64 {
    let bits = (0..u64::BITS).filter(|bit| length & (1 << bit) != 0);
    bits.fold(first, |sum, bit| product(sum, POWERS[bit as usize])) ^ second
}

#[cfg(test)]
mod tests {
    use super::*;
    use crc_fast::{CrcAlgorithm, checksum};
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn the_checksum_of_both_parts_follows_from_that_of_each(
            first in prop::collection::vec(any::<u8>(), 0..300),
            second in prop::collection::vec(any::<u8>(), 0..70_000),
        ) {
            let [one, two] = [&first, &second].map(|part| checksum(CrcAlgorithm::Crc64Nvme, part));
            let both = checksum(CrcAlgorithm::Crc64Nvme, &[first, second.clone()].concat());
            prop_assert_eq!(combine(one, two, second.len() as u64), both);
        }
    }

    #[test]
    fn large_lengths_are_those_of_the_library() {
        for length in [0, 1, (1 << 31) + 5, u64::MAX >> 4] {
            let expected = crc_fast::checksum_combine(CrcAlgorithm::Crc64Nvme, 0x1234_5678_9abc_def0, 77, length);
            assert_eq!(combine(0x1234_5678_9abc_def0, 77, length), expected, "{length} bytes");
        }
    }
}
