//! The running softmax of up to [`LANES`] queries over tiles of keys, and the sums under it.
//!
//! Lanes never meet here: what a lane gets depends on its own query, and on the keys that it sees. The arithmetic is written
//! once and compiled for each instruction set; all give the same bits.

#![expect(clippy::inline_always, reason = "compiled anew for each instruction set, by being inlined into `widely`")]

use super::super::kv_cache::TILE;
use super::super::simd::{LANES, Lanes, exp, prefetch};

/// Keys (or dimensions) whose sums are kept in registers side by side.
const WIDE: usize = 4;

/// The keys that each lane sees: `from .. to`. Lanes beyond the item's end see what its last one sees.
#[derive(Clone, Copy)]
pub(super) struct Sight {
    pub(super) from: [i32; LANES],
    pub(super) to: [i32; LANES],
}

/// A softmax on its way: the largest score so far, the sum of weights, the weighted sum of values, relative to it.
pub(super) struct Softmax {
    pub(super) max: Lanes,
    pub(super) sum: Lanes,
    pub(super) mix: Vec<Lanes>,
}

impl Sight {
    /// The first key that any lane sees. Lanes are in the order of their positions.
    pub(super) fn start(&self) -> usize {
        self.from[0] as usize
    }

    /// Past the last key that any lane sees.
    pub(super) fn end(&self) -> usize {
        self.to[LANES - 1] as usize
    }

    /// The same, counted from `position`.
    #[inline(always)]
    fn counted_from(&self, position: usize) -> Self {
        Self { from: self.from.map(|from| from - position as i32), to: self.to.map(|to| to - position as i32) }
    }

    /// `seen` in the lanes that see a key, `unseen` in the others.
    #[inline(always)]
    fn select(&self, key: usize, seen: Lanes, unseen: Lanes) -> Lanes {
        let mut out = unseen;
        for lane in 0..LANES {
            // Both comparisons always: a branch per lane would keep this from being one masked move.
            let sees = i32::from(self.from[lane] <= key as i32) & i32::from((key as i32) < self.to[lane]);
            out.0[lane] = if sees == 1 { seen.0[lane] } else { unseen.0[lane] };
        }
        out
    }
}

/// Up to [`TILE`] keys or values, in pieces that are contiguous.
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
        Self { max: Lanes::all(f32::NEG_INFINITY), sum: Lanes::all(0.0), mix: vec![Lanes::all(0.0); dim] }
    }

    /// Takes the keys from position `start` on in.
    #[inline(always)]
    pub(super) fn step(
        &mut self,
        queries: &[Lanes],
        keys: &Segments<'_>,
        values: &Segments<'_>,
        sight: &Sight,
        start: usize,
    ) {
        let mut scores = [Lanes::all(0.0); TILE];
        let tokens = score(queries, keys, &mut scores);
        let sight = sight.counted_from(start);
        let all_seen = (0..LANES).all(|lane| sight.from[lane] <= 0 && tokens as i32 <= sight.to[lane]);
        let scores = &mut scores[..tokens];
        if !all_seen {
            for (key, scores) in scores.iter_mut().enumerate() {
                *scores = sight.select(key, *scores, Lanes::all(f32::NEG_INFINITY));
            }
        }
        let max = scores.iter().fold(self.max, |max, score| max.zip(*score, larger));
        let base = max.map(base);
        if max != self.max {
            let shrink = self.max.zip(base, shrink);
            self.sum = self.sum.zip(shrink, product);
            for mix in &mut self.mix {
                *mix = mix.zip(shrink, product);
            }
        }
        self.max = max;
        for score in scores.iter_mut() {
            *score = score.zip(base, shrink);
            self.sum = self.sum.zip(*score, sum);
        }
        if all_seen {
            mix::<true>(&mut self.mix, scores, values, &sight);
        } else {
            mix::<false>(&mut self.mix, scores, values, &sight);
        }
    }

    /// Appends the softmax over the keys that follow.
    #[inline(always)]
    pub(super) fn fold(&mut self, next: &Self) {
        let max = self.max.zip(next.max, larger);
        let base = max.map(base);
        let shrink = [self.max.zip(base, shrink), next.max.zip(base, shrink)];
        self.sum = join_lanes([self.sum, next.sum], shrink, [self.max, next.max]);
        for (mix, next_mix) in self.mix.iter_mut().zip(&next.mix) {
            *mix = join_lanes([*mix, *next_mix], shrink, [self.max, next.max]);
        }
        self.max = max;
    }
}

/// Two sums, each relative to its own `max`, as one relative to a common one. A lane that one of the two has nothing for
/// is taken from the other as it is.
#[inline(always)]
fn join_lanes([a, b]: [Lanes; 2], shrink: [Lanes; 2], max: [Lanes; 2]) -> Lanes {
    let mut out = a;
    for i in 0..LANES {
        let both = a.0[i].mul_add(shrink[0].0[i], b.0[i] * shrink[1].0[i]);
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

/// What weights are relative to: the largest score, or 0 for a lane that has seen nothing, which makes its weights 0.
#[inline(always)]
fn base(max: f32) -> f32 {
    if max == f32::NEG_INFINITY { 0.0 } else { max }
}

/// `e^(x - base)`.
#[inline(always)]
fn shrink(x: f32, base: f32) -> f32 {
    exp(x - base)
}

#[inline(always)]
fn product(a: f32, b: f32) -> f32 {
    a * b
}

#[inline(always)]
fn sum(a: f32, b: f32) -> f32 {
    a + b
}

/// Scores of all lanes with each key; answers how many keys there were.
#[inline(always)]
fn score(queries: &[Lanes], keys: &Segments<'_>, scores: &mut [Lanes; TILE]) -> usize {
    let dim = queries.len();
    let mut token = 0;
    for segment in &keys.slices[..keys.used] {
        let mut groups = segment.chunks_exact(WIDE * dim);
        for group in groups.by_ref() {
            let sums = dots::<WIDE>(queries, group);
            scores[token..token + WIDE].copy_from_slice(&sums);
            token += WIDE;
        }
        for key in groups.remainder().chunks_exact(dim) {
            scores[token] = dots::<1>(queries, key)[0];
            token += 1;
        }
    }
    token
}

/// Dot products of all lanes' queries with `N` consecutive keys: a chain over the dimensions each.
#[inline(always)]
fn dots<const N: usize>(queries: &[Lanes], keys: &[f32]) -> [Lanes; N] {
    let dim = queries.len();
    let keys: [&[f32]; N] = std::array::from_fn(|n| &keys[n * dim..][..dim]);
    let mut sums = [Lanes::all(0.0); N];
    for (d, query) in queries.iter().enumerate() {
        for n in 0..N {
            sums[n] = query.fma(keys[n][d], sums[n]);
        }
    }
    sums
}

/// Adds the values, weighted, to `mix`: a chain over the keys for each dimension. Unless `ALL` lanes see all keys, each
/// lane's chain has only those that it sees.
#[inline(always)]
fn mix<const ALL: bool>(mix: &mut [Lanes], weights: &[Lanes], values: &Segments<'_>, sight: &Sight) {
    let dim = mix.len();
    let mut d = 0;
    while d + WIDE <= dim {
        mix_some::<WIDE, ALL>(mix, d, weights, values, sight);
        d += WIDE;
    }
    while d < dim {
        mix_some::<1, ALL>(mix, d, weights, values, sight);
        d += 1;
    }
}

/// [`mix`] for the dimensions `d .. d + N`.
#[inline(always)]
fn mix_some<const N: usize, const ALL: bool>(
    mix: &mut [Lanes],
    d: usize,
    weights: &[Lanes],
    values: &Segments<'_>,
    sight: &Sight,
) {
    let dim = mix.len();
    let mut sums: [Lanes; N] = std::array::from_fn(|n| mix[d + n]);
    let mut key = 0;
    for segment in &values.slices[..values.used] {
        let count = segment.len() / dim;
        for (weight, value) in weights[key..key + count].iter().zip(segment.chunks_exact(dim)) {
            let value = &value[d..d + N];
            for n in 0..N {
                let sum = weight.fma(value[n], sums[n]);
                sums[n] = if ALL { sum } else { sight.select(key, sum, sums[n]) };
            }
            key += 1;
        }
    }
    mix[d..d + N].copy_from_slice(&sums);
}

#[cfg(test)]
mod tests {
    use super::super::super::simd::wide;
    use super::*;
    use proptest::prelude::*;

    fn wave(n: usize, seed: usize) -> Vec<f32> {
        (0..n).map(|i| ((i * 7919 + seed * 104_729) % 2003) as f32 / 500.0 - 2.0).collect()
    }

    fn segments(values: &[f32], tokens: usize, dim: usize) -> Segments<'_> {
        // Blocks of five: pieces that fill no vector.
        let mut segments = Segments { slices: [&[]; TILE], used: 0 };
        for piece in values[..tokens * dim].chunks(5 * dim) {
            segments.slices[segments.used] = piece;
            segments.used += 1;
        }
        segments
    }

    fn bits(softmax: &Softmax) -> Vec<u32> {
        let lanes = softmax.mix.iter().chain([&softmax.max, &softmax.sum]);
        lanes.flat_map(|lanes| lanes.0.map(f32::to_bits)).collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

        /// What is written once is compiled for several machines: blocks may travel between them.
        #[test]
        fn every_machine_computes_the_same_bits(
            dim in 1usize..20,
            tiles in prop::collection::vec(1usize..=TILE, 1..4),
            first in 0i32..200,
            window in prop_oneof![Just(i32::MAX), Just(50)],
            seed in 0usize..1000,
        ) {
            let mut queries = vec![Lanes::all(0.0); dim];
            for (query, values) in queries.iter_mut().zip(wave(dim * LANES, seed).chunks_exact(LANES)) {
                query.0.copy_from_slice(values);
            }
            let to: [i32; LANES] = std::array::from_fn(|lane| first + lane as i32 / 3 + 1);
            let sight = Sight { from: to.map(|to| (to - window).max(0)), to };
            let (mut plain, mut wide) = (Softmax::empty(dim), Softmax::empty(dim));
            for (i, tokens) in tiles.iter().enumerate() {
                let (keys, values) = (wave(TILE * dim, seed + i), wave(TILE * dim, seed + 7 + i));
                let (keys, values) = (segments(&keys, *tokens, dim), segments(&values, *tokens, dim));
                plain.step(&queries, &keys, &values, &sight, i * TILE);
                wide!(wide.step(&queries, &keys, &values, &sight, i * TILE));
                prop_assert_eq!(bits(&plain), bits(&wide));
            }
            let (mut plain_sum, mut wide_sum) = (Softmax::empty(dim), Softmax::empty(dim));
            for _ in 0..2 {
                plain_sum.fold(&plain);
                wide!(wide_sum.fold(&wide));
            }
            prop_assert_eq!(bits(&plain_sum), bits(&wide_sum));
        }
    }
}
