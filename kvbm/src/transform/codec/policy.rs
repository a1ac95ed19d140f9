//! Decides whether encoding a block is worth it: by a sample of its bytes, and the throughput of device and codec.
//! Pure.

use crate::block::Codec;

/// Throughput in bytes per second.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Rates {
    /// Encoding, or writing to the device.
    pub offload: f64,
    /// Reading from the device, or decoding.
    pub onboard: f64,
}

/// Number of windows of a sample, spread over the block so that it has keys and values of several layers.
const WINDOWS: usize = 8;
/// Bytes of a window: enough values to estimate the entropy of their exponents within a few hundredths of a bit.
const WINDOW: usize = 4096;

/// Minimum speedup of onboarding; less is not worth the CPU time.
const MIN_SPEEDUP: f64 = 1.1;
/// Minimum throughput of offloading, as a fraction of the device's: no request waits for it.
const MIN_OFFLOAD_FRACTION: f64 = 0.5;

/// The codec with the best estimated ratio for the bytes, and that ratio. Reads a sample only.
pub fn best_codec(raw: &[u8]) -> (Codec, f64) {
    let step = (raw.len() / WINDOWS).max(WINDOW).next_multiple_of(4);
    let windows = || raw.chunks(step).map(|part| &part[..part.len().min(WINDOW)]);
    let bf16 = ratio(2, byte_entropy(windows().flat_map(|window| window.chunks_exact(2)).map(exponent)));
    let f32 = ratio(4, byte_entropy(windows().flat_map(|window| window.chunks_exact(4)).map(exponent)));
    if f32 > bf16 { (Codec::F32, f32) } else { (Codec::Bf16, bf16) }
}

/// Whether encoding at `ratio` makes onboarding faster without slowing offloading down too much.
///
/// Codec and device work at the same time, so the slower of the two determines the throughput.
pub fn is_worth_it(ratio: f64, codec: Rates, device: Rates) -> bool {
    let onboard = (device.onboard * ratio).min(codec.onboard);
    let offload = (device.offload * ratio).min(codec.offload);
    onboard >= device.onboard * MIN_SPEEDUP && offload >= device.offload * MIN_OFFLOAD_FRACTION
}

/// Upper bound of the ratio that a code of single bytes can reach on the planes of these values.
pub fn entropy_bound(codec: Codec, raw: &[u8]) -> f64 {
    let width = match codec {
        Codec::Raw => return 1.0,
        Codec::Bf16 => 2,
        Codec::F32 => 4,
    };
    let values = || raw.chunks_exact(width);
    let bits: f64 = (0..width - 1).map(|plane| byte_entropy(values().map(|value| rotated(value)[plane]))).sum();
    (width * 8) as f64 / (bits + byte_entropy(values().map(exponent)))
}

/// The value's bytes after a rotation by one bit, lowest first.
fn rotated(value: &[u8]) -> [u8; 4] {
    match *value {
        [a, b] => {
            let [low, high] = u16::from_le_bytes([a, b]).rotate_left(1).to_le_bytes();
            [low, high, 0, 0]
        }
        [a, b, c, d] => u32::from_le_bytes([a, b, c, d]).rotate_left(1).to_le_bytes(),
        _ => unreachable!("values have two or four bytes"),
    }
}

fn exponent(value: &[u8]) -> u8 {
    rotated(value)[value.len() - 1]
}

/// The ratio if only the exponents are compressed.
fn ratio(width: usize, exponent_bits: f64) -> f64 {
    (width * 8) as f64 / ((width - 1) as f64 * 8.0 + exponent_bits)
}

/// Entropy in bits per byte, each byte on its own.
fn byte_entropy(bytes: impl Iterator<Item = u8>) -> f64 {
    let mut counts = [0u32; 256];
    let mut total = 0u32;
    bytes.for_each(|byte| {
        counts[usize::from(byte)] += 1;
        total += 1;
    });
    let bits = |count: &u32| -> f64 {
        let share = f64::from(*count) / f64::from(total);
        -share * share.log2()
    };
    counts.iter().filter(|count| **count > 0).map(bits).sum()
}

#[cfg(test)]
mod tests {
    use super::super::synthetic::{self, Shape};
    use super::*;

    const SHAPE: Shape = Shape { layers: 2, tokens: 16, channels: 256 };

    #[test]
    fn a_sample_distinguishes_floats_from_noise() {
        let values = synthetic::kv(1, SHAPE);
        let (codec, ratio) = best_codec(&synthetic::bf16(&values));
        assert!(codec == Codec::Bf16 && (1.4..1.6).contains(&ratio), "{codec:?} {ratio}");
        let (codec, ratio) = best_codec(&synthetic::f32(&values));
        assert!(codec == Codec::F32 && (1.15..1.25).contains(&ratio), "{codec:?} {ratio}");
        let mut noise = vec![0; 100_000];
        blake3::Hasher::new().finalize_xof().fill(&mut noise);
        let (_, ratio) = best_codec(&noise);
        assert!((0.95..1.02).contains(&ratio), "{ratio}");
    }

    #[test]
    fn the_sampled_ratio_is_near_that_of_all_bytes() {
        let raw = synthetic::bf16(&synthetic::kv(2, SHAPE));
        let all = ratio(2, byte_entropy(raw.chunks_exact(2).map(exponent)));
        assert!((best_codec(&raw).1 / all - 1.0).abs() < 0.02);
    }

    #[test]
    fn short_and_empty_blocks_have_an_estimate() {
        for length in 0..40 {
            assert!(best_codec(&vec![7; length]).1.is_finite());
        }
    }

    #[test]
    fn encoding_is_worth_it_on_a_device_slower_than_the_codec() {
        let codec = Rates { offload: 1e9, onboard: 4e9 };
        let device = |onboard: f64| Rates { offload: onboard / 2.0, onboard };
        assert!(is_worth_it(1.4, codec, device(0.1e9)));
        assert!(is_worth_it(1.4, codec, device(2e9)));
        assert!(!is_worth_it(1.4, codec, device(3.8e9)), "decoding would be the bottleneck");
        assert!(!is_worth_it(1.05, codec, device(0.1e9)), "too little is gained");
        let slow_to_encode = Rates { offload: 0.1e9, ..codec };
        assert!(!is_worth_it(1.4, slow_to_encode, device(1e9)), "offloading could not keep up");
    }
}
