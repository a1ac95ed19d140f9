//! Vector arithmetic whose results depend only on the values: loops over arrays of lanes that the compiler turns into
//! the vector instructions of the machine.
//!
//! Every sum is a chain of fused multiply-adds per lane, in an order fixed in the source; lanes are combined only in
//! [`Simd::sum`]. So AVX-512, AVX2 and portable code give the same bits, and a wider machine is only faster. (Without
//! an FMA instruction `mul_add` is a slow library call with the same result.)

#![expect(clippy::inline_always, reason = "compiled anew for each instruction set, by being inlined into `call_wide`")]

/// Number of values per vector. Sixteen fill one AVX-512 register, two of AVX2, four of NEON.
pub(super) const LANES: usize = 16;

/// One value per lane, aligned so that no load straddles two cache lines.
#[derive(Clone, Copy, PartialEq, Debug)]
#[repr(align(64))]
pub(super) struct Simd(pub(super) [f32; LANES]);

impl Simd {
    /// The same value in every lane.
    #[inline(always)]
    pub(super) const fn all(value: f32) -> Self {
        Self([value; LANES])
    }

    /// Applies `f` to each lane.
    #[inline(always)]
    pub(super) fn map(self, f: impl Fn(f32) -> f32) -> Self {
        let mut out = self;
        for lane in &mut out.0 {
            *lane = f(*lane);
        }
        out
    }

    /// Applies `f` to each pair of lanes.
    #[inline(always)]
    pub(super) fn zip(self, other: Self, f: impl Fn(f32, f32) -> f32) -> Self {
        let mut out = self;
        for i in 0..LANES {
            out.0[i] = f(self.0[i], other.0[i]);
        }
        out
    }

    /// `self · factor + addend`, rounded once per lane.
    #[inline(always)]
    pub(super) fn fma(self, factor: f32, addend: Self) -> Self {
        self.zip(addend, |x, sum| x.mul_add(factor, sum))
    }

    /// The sum of all lanes, always added in the same tree.
    #[inline(always)]
    pub(super) fn sum(self) -> f32 {
        let mut lanes = self.0;
        let mut half = LANES / 2;
        while half > 0 {
            for i in 0..half {
                lanes[i] += lanes[i + half];
            }
            half /= 2;
        }
        lanes[0]
    }
}

/// Instruction sets for which [`wide!`] compiles its work.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum InstructionSet {
    /// The baseline of the architecture.
    Plain,
    /// AVX2 with FMA.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// AVX-512.
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

impl InstructionSet {
    /// The widest of them that this machine has. Cheap: the standard library caches the detection.
    pub(super) fn detect() -> Self {
        #[cfg(target_arch = "x86_64")]
        {
            use std::arch::is_x86_feature_detected as has;
            if has!("avx512f") && has!("avx512bw") && has!("avx512vl") && has!("avx512dq") && has!("fma") {
                return Self::Avx512;
            }
            if has!("avx2") && has!("fma") {
                return Self::Avx2;
            }
        }
        Self::Plain
    }
}

/// Evaluates an expression with the widest instructions of this machine. Functions that it calls must be
/// `#[inline(always)]` to profit.
macro_rules! wide {
    ($work:expr) => {
        $crate::llama::model::simd::call_wide(
            // Otherwise the closure would be a function of its own, compiled for the baseline.
            #[inline(always)]
            || $work,
        )
    };
}
pub(super) use wide;

/// What [`wide!`] expands to.
#[inline]
pub(super) fn call_wide<R>(f: impl FnOnce() -> R) -> R {
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,fma")]
    fn avx2<R>(f: impl FnOnce() -> R) -> R {
        f()
    }
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma")]
    fn avx512<R>(f: impl FnOnce() -> R) -> R {
        f()
    }
    match InstructionSet::detect() {
        InstructionSet::Plain => f(),
        // SAFETY: `detect` found these features.
        #[cfg(target_arch = "x86_64")]
        InstructionSet::Avx2 => unsafe { avx2(f) },
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        InstructionSet::Avx512 => unsafe { avx512(f) },
    }
}

/// Prefetches memory that is read some microseconds later, into the L2 cache.
#[inline]
pub(super) fn prefetch(values: &[f32]) {
    #[cfg(target_arch = "x86_64")]
    for line in values.chunks(64 / size_of::<f32>()) {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        // SAFETY: a hint that neither reads nor faults; the address is that of a value.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(line.as_ptr().cast()) };
    }
    // Other architectures rely on the hardware prefetcher.
    #[cfg(not(target_arch = "x86_64"))]
    let _ = values;
}

/// Sum of squares: element `i` goes to lane `i % LANES`.
#[inline(always)]
pub(super) fn sum_of_squares(x: &[f32]) -> f32 {
    let mut lanes = Simd::all(0.0);
    let chunks = x.chunks_exact(LANES);
    let rest = chunks.remainder();
    for chunk in chunks {
        for (lane, x) in lanes.0.iter_mut().zip(chunk) {
            *lane = x.mul_add(*x, *lane);
        }
    }
    for (lane, x) in lanes.0.iter_mut().zip(rest) {
        *lane = x.mul_add(*x, *lane);
    }
    lanes.sum()
}

/// `e^x` within two units in the last place; 0 below -87.3, where it would be subnormal, and infinity above 88.3.
///
/// `2^n · e^r` with `n` the nearest integer to `x / ln 2`, and a polynomial for `e^r` on `|r| ≤ ln 2 / 2`
/// (Cephes' `expf`).
#[inline(always)]
#[expect(clippy::excessive_precision, reason = "the constants as published")]
pub(super) fn exp(x: f32) -> f32 {
    // Adding and subtracting 1.5 · 2^23 rounds to the nearest integer, ties to even.
    const ROUND: f32 = 12_582_912.0;
    const LN2_HIGH: f32 = 0.693_359_375;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    // Outside of these bounds 2^n has no normal representation; the selects at the end return 0 and infinity.
    const LOWEST: f32 = -87.336_54;
    const HIGHEST: f32 = 88.376_26;

    // Not `clamp`: a NaN must stay the same NaN on every machine.
    let bounded = if x < LOWEST { LOWEST } else { x };
    let bounded = if bounded > HIGHEST { HIGHEST } else { bounded };
    let shifted = bounded.mul_add(std::f32::consts::LOG2_E, ROUND);
    let n = shifted - ROUND;
    let r = n.mul_add(-LN2_HIGH, bounded);
    let r = n.mul_add(-LN2_LOW, r);
    let p = 1.987_569_15e-4_f32;
    let p = p.mul_add(r, 1.398_199_950_7e-3);
    let p = p.mul_add(r, 8.333_451_907_3e-3);
    let p = p.mul_add(r, 4.166_579_589_4e-2);
    let p = p.mul_add(r, 1.666_666_545_9e-1);
    let p = p.mul_add(r, 5.000_000_120_1e-1);
    let p = p.mul_add(r * r, r) + 1.0;
    // The low bits of `shifted` hold `n`; moved to the exponent's place they give 2^n. A NaN is kept by `p`.
    let power = f32::from_bits((shifted.to_bits() << 23).wrapping_add(127 << 23));
    let y = p * power;
    let y = if x < LOWEST { 0.0 } else { y };
    if x > HIGHEST { f32::INFINITY } else { y }
}

/// `x · sigmoid(x)`.
#[inline(always)]
pub(super) fn silu(x: f32) -> f32 {
    x / (1.0 + exp(-x))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_within_two_units_in_the_last_place() {
        let mut worst = 0i64;
        for i in -873_000..=880_000 {
            let x = i as f32 * 1e-4;
            let want = f64::from(x).exp() as f32;
            let got = exp(x);
            worst = worst.max((i64::from(got.to_bits()) - i64::from(want.to_bits())).abs());
        }
        assert!(worst <= 2, "{worst} units off");
        assert_eq!(exp(0.0).to_bits(), 1.0f32.to_bits());
        assert_eq!(exp(f32::NEG_INFINITY).to_bits(), 0);
        assert_eq!(exp(-100.0).to_bits(), 0);
        assert!(exp(100.0).is_infinite() && exp(f32::NAN).is_nan());
    }

    #[inline(always)]
    fn some_of_each(x: &[f32]) -> (f32, Vec<f32>) {
        (sum_of_squares(x), x.iter().map(|x| silu(*x)).collect())
    }

    #[test]
    fn wide_and_plain_code_agree_bit_for_bit() {
        let x: Vec<f32> = (0..1003).map(|i| ((i * 7919) % 2003) as f32 * 0.01 - 10.0).collect();
        let (plain_sum, plain) = some_of_each(&x);
        let (wide_sum, wide) = wide!(some_of_each(&x));
        assert_eq!(plain_sum.to_bits(), wide_sum.to_bits());
        assert!(plain.iter().zip(&wide).all(|(a, b)| a.to_bits() == b.to_bits()));
    }
}
