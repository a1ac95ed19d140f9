//! Whether encoding pays: what a sample says of the bytes, and what rates say of the device. Pure.

use crate::block::Codec;

/// Bytes per second, both ways.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Rates {
    /// Towards the device: encoding, writing.
    pub offload: f64,
    /// From the device: reading, decoding.
    pub onboard: f64,
}

/// A sample is so many windows, spread over the block so that keys and values of several layers are in it,
const WINDOWS: usize = 8;
/// of so many bytes each: enough values that the entropy of their exponents is known within a few hundredths of a bit.
const WINDOW: usize = 4096;

/// Onboarding must become faster by this much; less is not worth the cores.
const GAIN: f64 = 1.1;
/// Offloading may become slower down to this share of the device's speed: nobody waits for it.
const SLOWER: f64 = 0.5;

/// The codec that a sample of the bytes favours, and the ratio that it promises.
pub fn favourite(raw: &[u8]) -> (Codec, f64) {
    let step = (raw.len() / WINDOWS).max(WINDOW).next_multiple_of(4);
    let windows = || raw.chunks(step).map(|part| &part[..part.len().min(WINDOW)]);
    let bf16 = ratio(2, order_0(windows().flat_map(|window| window.chunks_exact(2)).map(exponent)));
    let f32 = ratio(4, order_0(windows().flat_map(|window| window.chunks_exact(4)).map(exponent)));
    if f32 > bf16 { (Codec::F32, f32) } else { (Codec::Bf16, bf16) }
}

/// Whether blocks come up faster when they rest encoded at `ratio`, while going down is not held up.
///
/// The codec works while the device does, so the slower of the two sets the pace.
pub fn pays(ratio: f64, codec: Rates, device: Rates) -> bool {
    let onboard = (device.onboard * ratio).min(codec.onboard);
    let offload = (device.offload * ratio).min(codec.offload);
    onboard >= device.onboard * GAIN && offload >= device.offload * SLOWER
}

/// The best ratio that any code of single bytes reaches on the planes of these values: what the codec is held against.
pub fn bound(codec: Codec, raw: &[u8]) -> f64 {
    let width = match codec {
        Codec::Raw => return 1.0,
        Codec::Bf16 => 2,
        Codec::F32 => 4,
    };
    let values = || raw.chunks_exact(width);
    let bits: f64 = (0..width - 1).map(|plane| order_0(values().map(|value| turned(value)[plane]))).sum();
    (width * 8) as f64 / (bits + order_0(values().map(exponent)))
}

/// The value's bytes after the turn, lowest first.
fn turned(value: &[u8]) -> [u8; 4] {
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
    turned(value)[value.len() - 1]
}

/// The ratio when all but the exponents stay as they are.
fn ratio(width: usize, exponent_bits: f64) -> f64 {
    (width * 8) as f64 / ((width - 1) as f64 * 8.0 + exponent_bits)
}

/// Bits per byte.
fn order_0(bytes: impl Iterator<Item = u8>) -> f64 {
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
    fn a_sample_tells_floats_apart_from_what_does_not_shrink() {
        let values = synthetic::kv(1, SHAPE);
        let (codec, ratio) = favourite(&synthetic::bf16(&values));
        assert!(codec == Codec::Bf16 && (1.4..1.6).contains(&ratio), "{codec:?} {ratio}");
        let (codec, ratio) = favourite(&synthetic::f32(&values));
        assert!(codec == Codec::F32 && (1.15..1.25).contains(&ratio), "{codec:?} {ratio}");
        let mut noise = vec![0; 100_000];
        blake3::Hasher::new().finalize_xof().fill(&mut noise);
        let (_, ratio) = favourite(&noise);
        assert!((0.95..1.02).contains(&ratio), "{ratio}");
    }

    #[test]
    fn the_estimate_is_near_what_all_bytes_would_say() {
        let raw = synthetic::bf16(&synthetic::kv(2, SHAPE));
        let all = ratio(2, order_0(raw.chunks_exact(2).map(exponent)));
        assert!((favourite(&raw).1 / all - 1.0).abs() < 0.02);
    }

    #[test]
    fn short_and_empty_blocks_have_an_estimate() {
        for length in 0..40 {
            assert!(favourite(&vec![7; length]).1.is_finite());
        }
    }

    #[test]
    fn encoding_pays_where_the_device_is_slower_than_the_codec() {
        let codec = Rates { offload: 1e9, onboard: 4e9 };
        let device = |onboard: f64| Rates { offload: onboard / 2.0, onboard };
        assert!(pays(1.4, codec, device(0.1e9)));
        assert!(pays(1.4, codec, device(2e9)));
        assert!(!pays(1.4, codec, device(3.8e9)), "decoding would hold it up");
        assert!(!pays(1.05, codec, device(0.1e9)), "too little is gained");
        let slow_to_encode = Rates { offload: 0.1e9, ..codec };
        assert!(!pays(1.4, slow_to_encode, device(1e9)), "offloading could not keep up");
    }
}
