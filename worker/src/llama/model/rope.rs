//! Rotary position embedding (`RoPE`): dimension `i` of a head rotates with `i + head_dim / 2`, by an angle
//! proportional to the position.

#![expect(clippy::inline_always, reason = "compiled anew for each instruction set, by being inlined into `call_wide`")]

use crate::llama::loader::{Llama3Scaling, Rope};
use std::f64::consts::TAU;

/// The frequency of each pair of dimensions: its angle per position.
pub(super) struct Rotation {
    frequencies: Vec<f32>,
}

impl Rotation {
    /// The frequencies for heads of `head_dim` dimensions.
    pub(super) fn new(rope: &Rope, head_dim: usize) -> Self {
        let frequency = |pair: usize| {
            // Single precision from here on, like the models' reference code: at position 8,000 its rounding is
            // visible.
            let plain = (1.0 / rope.theta.powf(2.0 * pair as f64 / head_dim as f64)) as f32;
            rope.scaling.as_ref().map_or(plain, |scaling| scaled(scaling, f64::from(plain)) as f32)
        };
        Self { frequencies: (0..head_dim / 2).map(frequency).collect() }
    }

    /// Cosines, then sines, of the angles at `position`; `into` is one head long.
    pub(super) fn at(&self, position: usize, into: &mut [f32]) {
        let (cos, sin) = into.split_at_mut(self.frequencies.len());
        for ((frequency, cos), sin) in self.frequencies.iter().zip(cos).zip(sin) {
            let (s, c) = f64::from(position as f32 * frequency).sin_cos();
            (*cos, *sin) = (c as f32, s as f32);
        }
    }
}

/// Rotates one head by the angles of [`Rotation::at`].
#[inline(always)]
pub(super) fn rotate(head: &mut [f32], angles: &[f32]) {
    let half = head.len() / 2;
    let (cos, sin) = angles.split_at(half);
    let (first, second) = head.split_at_mut(half);
    for (((a, b), cos), sin) in first.iter_mut().zip(second).zip(cos).zip(sin) {
        (*a, *b) = (a.mul_add(*cos, -(*b * *sin)), b.mul_add(*cos, *a * *sin));
    }
}

/// Llama 3's scaled frequency for a longer context.
fn scaled(scaling: &Llama3Scaling, frequency: f64) -> f64 {
    let Llama3Scaling { factor, low_freq_factor: low, high_freq_factor: high, original_context } = *scaling;
    // Rotations of the pair within the context of the pretraining.
    let turns = original_context as f64 * frequency / TAU;
    if turns < low {
        frequency / factor
    } else if turns > high {
        frequency
    } else {
        let smooth = (turns - low) / (high - low);
        (1.0 - smooth) * frequency / factor + smooth * frequency
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn llama3() -> Rope {
        let scaling =
            Llama3Scaling { factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original_context: 8192 };
        Rope { theta: 500_000.0, scaling: Some(scaling) }
    }

    #[test]
    fn a_rotation_turns_by_the_position() {
        let rotation = Rotation::new(&Rope { theta: 10_000.0, scaling: None }, 4);
        let mut angles = [0.0; 4];
        rotation.at(3, &mut angles);
        let mut head = [1.0, 0.0, 0.0, 1.0];
        rotate(&mut head, &angles);
        // Pairs are (0, 2) and (1, 3); their frequencies are 1 and 1/100.
        let want = [3f32.cos(), -(0.03f32.sin()), 3f32.sin(), 0.03f32.cos()];
        assert!(head.iter().zip(want).all(|(a, b)| (a - b).abs() < 1e-6), "{head:?} {want:?}");
    }

    #[test]
    fn scaling_keeps_short_wavelengths() {
        let plain = Rotation::new(&Rope { scaling: None, ..llama3() }, 128).frequencies;
        let stretched = Rotation::new(&llama3(), 128).frequencies;
        assert_eq!(plain[0].to_bits(), stretched[0].to_bits());
        assert!((plain[63] / stretched[63] - 8.0).abs() < 1e-5);
        let between = plain.iter().zip(&stretched).filter(|(p, s)| *p / *s > 1.001 && *p / *s < 7.999).count();
        assert!(between > 0, "some waves are blended");
        assert!(stretched.windows(2).all(|pair| pair[0] > pair[1]), "the order of waves stays");
    }
}
