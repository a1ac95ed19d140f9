//! The online softmax of up to [`LANES`] queries over tiles of keys, and the sums that it needs. Lanes do not
//! interact: a lane's result depends on its own query and on the keys that it sees. The code is written once and
//! compiled for each instruction set; all give the same bits.

#![expect(clippy::inline_always, reason = "compiled anew for each instruction set, by being inlined into `call_wide`")]

use super::super::kv_cache::TILE;
use super::super::simd::{LANES, Simd, exp, prefetch};

/// Number of keys (or dimensions) whose sums are kept in registers at a time.
const UNROLLED: usize = 4;

/// The causal and window mask of an item: each lane sees the keys `from .. to`. Lanes beyond the end of the item have
/// the mask of its last lane.
#[derive(Clone, Copy)]
pub(super) struct Mask {
    pub(super) from: [i32; LANES],
    pub(super) to: [i32; LANES],
}

/// An online softmax (Milakov and Gimelshein, 2018): the largest score so far, the sum of weights, and the weighted
/// sum of values, both relative to that score.
pub(super) struct Softmax {
    pub(super) max: Simd,
    pub(super) sum: Simd,
    pub(super) weighted_sum: Vec<Simd>,
}

impl Mask {
    /// The first key that any lane sees. Lanes are in the order of their positions.
    pub(super) fn start(&self) -> usize {
        self.from[0] as usize
    }

    /// One past the last key that any lane sees.
    pub(super) fn end(&self) -> usize {
        self.to[LANES - 1] as usize
    }

    /// The same mask, with keys counted from `position`.
    #[inline(always)]
    fn counted_from(&self, position: usize) -> Self {
        Self { from: self.from.map(|from| from - position as i32), to: self.to.map(|to| to - position as i32) }
    }

    /// `seen` in the lanes that see the key, `unseen` in the others.
    #[inline(always)]
    fn select(&self, key: usize, seen: Simd, unseen: Simd) -> Simd {
        let mut out = unseen;
        for lane in 0..LANES {
            // Always both comparisons: a branch per lane would prevent a single masked move.
            let sees = i32::from(self.from[lane] <= key as i32) & i32::from((key as i32) < self.to[lane]);
            out.0[lane] = if sees == 1 { seen.0[lane] } else { unseen.0[lane] };
        }
        out
    }
}

/// Up to [`TILE`] keys or values, as contiguous slices.
pub(super) struct Segments<'a> {
    pub(super) slices: [&'a [f32]; TILE],
    pub(super) used: usize,
}

impl Segments<'_> {
    pub(super) fn prefetch(&self) {
        self.slices[..self.used].iter().for_each(|slice| prefetch(slice));
    }
}

impl Softmax {
    pub(super) fn empty(dim: usize) -> Self {
        Self { max: Simd::all(f32::NEG_INFINITY), sum: Simd::all(0.0), weighted_sum: vec![Simd::all(0.0); dim] }
    }

    /// Adds the keys from position `start` on.
    #[inline(always)]
    pub(super) fn step(
        &mut self,
        queries: &[Simd],
        keys: &Segments<'_>,
        values: &Segments<'_>,
        mask: &Mask,
        start: usize,
    ) {
        let mut scores = [Simd::all(0.0); TILE];
        let tokens = score(queries, keys, &mut scores);
        let mask = mask.counted_from(start);
        let all_seen = (0..LANES).all(|lane| mask.from[lane] <= 0 && tokens as i32 <= mask.to[lane]);
        let scores = &mut scores[..tokens];
        if !all_seen {
            for (key, scores) in scores.iter_mut().enumerate() {
                *scores = mask.select(key, *scores, Simd::all(f32::NEG_INFINITY));
            }
        }
        let max = scores.iter().fold(self.max, |max, score| max.zip(*score, larger));
        let base = max.map(base);
        if max != self.max {
            let rescale = self.max.zip(base, weight);
            self.sum = self.sum.zip(rescale, product);
            for sum in &mut self.weighted_sum {
                *sum = sum.zip(rescale, product);
            }
        }
        self.max = max;
        for score in scores.iter_mut() {
            *score = score.zip(base, weight);
            self.sum = self.sum.zip(*score, sum);
        }
        if all_seen {
            add_weighted::<true>(&mut self.weighted_sum, scores, values, &mask);
        } else {
            add_weighted::<false>(&mut self.weighted_sum, scores, values, &mask);
        }
    }

    /// Adds the softmax over the keys that follow.
    #[inline(always)]
    pub(super) fn merge(&mut self, next: &Self) {
        let max = self.max.zip(next.max, larger);
        let base = max.map(base);
        let rescale = [self.max.zip(base, weight), next.max.zip(base, weight)];
        self.sum = merge_lanes([self.sum, next.sum], rescale, [self.max, next.max]);
        for (sum, next_sum) in self.weighted_sum.iter_mut().zip(&next.weighted_sum) {
            *sum = merge_lanes([*sum, *next_sum], rescale, [self.max, next.max]);
        }
        self.max = max;
    }
}

/// Combines two sums, each relative to its own `max`, into one relative to the common one. A lane for which one of
/// the two is empty takes the other unchanged.
#[inline(always)]
fn merge_lanes([a, b]: [Simd; 2], rescale: [Simd; 2], max: [Simd; 2]) -> Simd {
    let mut out = a;
    for i in 0..LANES {
        let both = a.0[i].mul_add(rescale[0].0[i], b.0[i] * rescale[1].0[i]);
        let first = if max[0].0[i] == f32::NEG_INFINITY { b.0[i] } else { both };
        out.0[i] = if max[1].0[i] == f32::NEG_INFINITY { a.0[i] } else { first };
    }
    out
}

/// The larger of two scores.
#[inline(always)]
fn larger(a: f32, b: f32) -> f32 {
    if a > b { a } else { b }
}

/// The score that weights are relative to: the largest score, or 0 for a lane without keys, which makes its weights
/// 0.
#[inline(always)]
fn base(max: f32) -> f32 {
    if max == f32::NEG_INFINITY { 0.0 } else { max }
}

/// The weight of a score relative to `base`: `e^(score - base)`.
#[inline(always)]
fn weight(score: f32, base: f32) -> f32 {
    exp(score - base)
}

#[inline(always)]
fn product(a: f32, b: f32) -> f32 {
    a * b
}

#[inline(always)]
fn sum(a: f32, b: f32) -> f32 {
    a + b
}

/// Computes the scores of all lanes with each key; returns the number of keys.
#[inline(always)]
fn score(queries: &[Simd], keys: &Segments<'_>, scores: &mut [Simd; TILE]) -> usize {
    let dim = queries.len();
    let mut token = 0;
    for segment in &keys.slices[..keys.used] {
        let mut groups = segment.chunks_exact(UNROLLED * dim);
        for group in groups.by_ref() {
            let sums = dot_products::<UNROLLED>(queries, group);
            scores[token..token + UNROLLED].copy_from_slice(&sums);
            token += UNROLLED;
        }
        for key in groups.remainder().chunks_exact(dim) {
            scores[token] = dot_products::<1>(queries, key)[0];
            token += 1;
        }
    }
    token
}

/// Dot products of all lanes' queries with `N` consecutive keys: one chain of fused multiply-adds over the dimensions
/// for each.
#[inline(always)]
fn dot_products<const N: usize>(queries: &[Simd], keys: &[f32]) -> [Simd; N] {
    let dim = queries.len();
    let keys: [&[f32]; N] = std::array::from_fn(|n| &keys[n * dim..][..dim]);
    let mut sums = [Simd::all(0.0); N];
    for (d, query) in queries.iter().enumerate() {
        for n in 0..N {
            sums[n] = query.fma(keys[n][d], sums[n]);
        }
    }
    sums
}

/// Adds the weighted values to `weighted_sum`: one chain over the keys for each dimension. Unless `ALL` lanes see all
/// keys, a lane's chain contains only the keys that it sees.
#[inline(always)]
fn add_weighted<const ALL: bool>(weighted_sum: &mut [Simd], weights: &[Simd], values: &Segments<'_>, mask: &Mask) {
    let dim = weighted_sum.len();
    let mut d = 0;
    while d + UNROLLED <= dim {
        add_weighted_dimensions::<UNROLLED, ALL>(weighted_sum, d, weights, values, mask);
        d += UNROLLED;
    }
    while d < dim {
        add_weighted_dimensions::<1, ALL>(weighted_sum, d, weights, values, mask);
        d += 1;
    }
}

/// [`add_weighted`] for the dimensions `d .. d + N`.
#[inline(always)]
fn add_weighted_dimensions<const N: usize, const ALL: bool>(
    weighted_sum: &mut [Simd],
    d: usize,
    weights: &[Simd],
    values: &Segments<'_>,
    mask: &Mask,
) {
    let dim = weighted_sum.len();
    let mut sums: [Simd; N] = std::array::from_fn(|n| weighted_sum[d + n]);
    let mut key = 0;
    for segment in &values.slices[..values.used] {
        let count = segment.len() / dim;
        for (weight, value) in weights[key..key + count].iter().zip(segment.chunks_exact(dim)) {
            let value = &value[d..d + N];
            for n in 0..N {
                let sum = weight.fma(value[n], sums[n]);
                sums[n] = if ALL { sum } else { mask.select(key, sum, sums[n]) };
            }
            key += 1;
        }
    }
    weighted_sum[d..d + N].copy_from_slice(&sums);
}

#[cfg(test)]
mod tests {
    use super::super::super::simd::wide;
    use super::*;
    use proptest::prelude::*;

    fn pattern(n: usize, seed: usize) -> Vec<f32> {
        (0..n).map(|i| ((i * 7919 + seed * 104_729) % 2003) as f32 / 500.0 - 2.0).collect()
    }

    fn segments(values: &[f32], tokens: usize, dim: usize) -> Segments<'_> {
        // Blocks of five tokens: slices that do not fill a vector.
        let mut segments = Segments { slices: [&[]; TILE], used: 0 };
        for piece in values[..tokens * dim].chunks(5 * dim) {
            segments.slices[segments.used] = piece;
            segments.used += 1;
        }
        segments
    }

    fn bits(softmax: &Softmax) -> Vec<u32> {
        let lanes = softmax.weighted_sum.iter().chain([&softmax.max, &softmax.sum]);
        lanes.flat_map(|lanes| lanes.0.map(f32::to_bits)).collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

        /// The same code is compiled for several instruction sets, and blocks may be used on another machine.
        #[test]
        fn every_machine_computes_the_same_bits(
            dim in 1usize..20,
            tiles in prop::collection::vec(1usize..=TILE, 1..4),
            first in 0i32..200,
            window in prop_oneof![Just(i32::MAX), Just(50)],
            seed in 0usize..1000,
        ) {
            let mut queries = vec![Simd::all(0.0); dim];
            for (query, values) in queries.iter_mut().zip(pattern(dim * LANES, seed).chunks_exact(LANES)) {
                query.0.copy_from_slice(values);
            }
            let to: [i32; LANES] = std::array::from_fn(|lane| first + lane as i32 / 3 + 1);
            let mask = Mask { from: to.map(|to| (to - window).max(0)), to };
            let (mut plain, mut wide) = (Softmax::empty(dim), Softmax::empty(dim));
            for (i, tokens) in tiles.iter().enumerate() {
                let (keys, values) = (pattern(TILE * dim, seed + i), pattern(TILE * dim, seed + 7 + i));
                let (keys, values) = (segments(&keys, *tokens, dim), segments(&values, *tokens, dim));
                plain.step(&queries, &keys, &values, &mask, i * TILE);
                wide!(wide.step(&queries, &keys, &values, &mask, i * TILE));
                prop_assert_eq!(bits(&plain), bits(&wide));
            }
            let (mut plain_sum, mut wide_sum) = (Softmax::empty(dim), Softmax::empty(dim));
            for _ in 0..2 {
                plain_sum.merge(&plain);
                wide!(wide_sum.merge(&wide));
            }
            prop_assert_eq!(bits(&plain_sum), bits(&wide_sum));
        }
    }
}
