//! Synthetic KV with the statistics of a trained model's, for tests and benchmarks of codecs. A function of the seed.
//!
//! Keys have a scale per channel (log-normal, fixed for the layer), and a few outlier channels with a large offset.
//! Values are Gaussian with one scale per layer. Not here: correlations between tokens.

use std::f32::consts::TAU;

/// The shape of the KV of some layers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Shape {
    /// Number of layers.
    pub layers: usize,
    /// Number of tokens of a block.
    pub tokens: usize,
    /// Number of KV heads times their dimension.
    pub channels: usize,
}

/// Standard deviation of the logarithm of a channel's scale.
const SPREAD: f32 = 0.5;
/// One channel in this many is an outlier.
const OUTLIERS: usize = 25;
/// Offset of an outlier channel, as a multiple of its scale.
const OFFSET: f32 = 6.0;

/// Generates KV: per layer all keys, then all values; token by token, channel by channel.
pub fn kv(seed: u64, shape: Shape) -> Vec<f32> {
    let mut values = Vec::with_capacity(shape.layers * shape.tokens * shape.channels * 2);
    for layer in 0..shape.layers {
        let mut normal = Normal::new(seed, layer);
        let channels: Vec<(f32, f32)> = (0..shape.channels)
            .map(|channel| {
                let scale = (SPREAD * normal.next()).exp();
                let side = if normal.next() < 0.0 { -OFFSET } else { OFFSET };
                (scale, if channel % OUTLIERS == layer % OUTLIERS { side * scale } else { 0.0 })
            })
            .collect();
        for _ in 0..shape.tokens {
            values.extend(channels.iter().map(|(scale, offset)| offset + scale * normal.next()));
        }
        let scale = (SPREAD * normal.next()).exp();
        values.extend((0..shape.tokens * shape.channels).map(|_| scale * normal.next()));
    }
    values
}

/// The values as bf16, rounded to nearest, ties to even.
pub fn bf16(values: &[f32]) -> Vec<u8> {
    let round = |value: &f32| {
        let bits = value.to_bits();
        ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16) as u16
    };
    values.iter().flat_map(|value| round(value).to_le_bytes()).collect()
}

/// The values as f32.
pub fn f32(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

/// A generator of standard normal variables (Box and Muller, 1958).
struct Normal {
    random: blake3::OutputReader,
    spare: Option<f32>,
}

impl Normal {
    fn new(seed: u64, layer: usize) -> Self {
        let mut hasher = blake3::Hasher::new();
        hasher.update(&seed.to_le_bytes()).update(&(layer as u64).to_le_bytes());
        Self { random: hasher.finalize_xof(), spare: None }
    }

    fn next(&mut self) -> f32 {
        if let Some(spare) = self.spare.take() {
            return spare;
        }
        let mut bytes = [0; 8];
        self.random.fill(&mut bytes);
        let word = u64::from_le_bytes(bytes);
        // Uniform variables are never 0, so the logarithm is finite.
        let uniform = |bits: u32| (f64::from(bits) + 0.5) as f32 / 2f32.powi(32);
        let (radius, angle) = ((-2.0 * uniform(word as u32).ln()).sqrt(), TAU * uniform((word >> 32) as u32));
        self.spare = Some(radius * angle.sin());
        radius * angle.cos()
    }
}
