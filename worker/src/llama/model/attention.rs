//! Causal attention of new tokens over paged keys and values, grouped heads, optional sliding window.
//!
//! A *lane* is one query: one head of one token. Up to [`LANES`] lanes that share a key/value head form an *item*.
//! Lanes do not interact, so a query's result cannot depend on its neighbours. Keys are divided at multiples of fixed
//! numbers of **positions**, independent of chunk, block size and batch:
//!
//! ```text
//!   positions   0 ........ 512 ........ 1024 ...      SPLIT: a partial softmax each, merged in order
//!                 |64|64|..   |64|64|..               TILE: one step of the running softmax
//! ```
//!
//! The thread that computes a split does not change the result. So long contexts with few queries (decode) are spread
//! over threads by split, and many queries (prefill) by item. A key that a lane may not see leaves the lane's state
//! unchanged, to the bit.

use super::kv_cache::{KvCache, KvHalf, SPLIT, TILE};
use super::simd::{LANES, Simd, wide};
use kvbm::BlockId;
use rayon::prelude::*;
use softmax::{Mask, Segments, Softmax};

mod softmax;

/// Rows per task where results are scattered to their places; smaller tasks cost more than they gain.
const ROWS: usize = 32;

/// The attention heads of a layer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Heads {
    pub(super) queries: usize,
    pub(super) kv: usize,
    pub(super) dim: usize,
    /// Length of the sliding window: a token sees itself and `window - 1` tokens before it.
    pub(super) window: Option<usize>,
}

impl Heads {
    /// Length of a row of fused queries, keys and values.
    pub(super) fn row(self) -> usize {
        (self.queries + 2 * self.kv) * self.dim
    }

    /// Query heads per key/value head.
    fn group(self) -> usize {
        self.queries / self.kv
    }
}

/// Consecutive tokens of one sequence whose queries are computed.
#[derive(Clone, Copy)]
pub(super) struct Span<'a> {
    /// Row of the first token in the fused queries, keys and values.
    pub(super) row: usize,
    /// Number of tokens.
    pub(super) tokens: usize,
    /// Position of the first token.
    pub(super) start: usize,
    /// The block table of the sequence.
    pub(super) table: &'a [BlockId],
}

impl Span<'_> {
    /// The span without its first `before` tokens.
    pub(super) fn skip(self, before: usize) -> Self {
        Self { row: self.row + before, tokens: self.tokens - before, start: self.start + before, ..self }
    }
}

/// Up to [`LANES`] queries of one span that share a key/value head.
struct Item<'a> {
    span: Span<'a>,
    kv_head: usize,
    first_lane: usize,
}

/// Computes attention of every query in `spans` into `out`: a row of `heads.queries * heads.dim` per token, in order.
pub(super) fn attend(heads: Heads, qkv: &[f32], spans: &[Span<'_>], kv_cache: &KvCache, layer: usize, out: &mut [f32]) {
    let group = heads.group();
    let items: Vec<Item<'_>> = spans
        .iter()
        .flat_map(|&span| {
            let lanes = (0..span.tokens * group).step_by(LANES);
            (0..heads.kv)
                .flat_map(move |kv_head| lanes.clone().map(move |first_lane| Item { span, kv_head, first_lane }))
        })
        .collect();
    let layer = Layer { heads, qkv, kv_cache, index: layer };
    let finished: Vec<Vec<Simd>> = if items.len() < 4 * rayon::current_num_threads() {
        let splits: Vec<_> = items.iter().flat_map(|item| layer.splits(item).map(move |split| (item, split))).collect();
        let mut partial =
            splits.par_iter().map(|(item, split)| layer.partial(item, *split)).collect::<Vec<_>>().into_iter();
        items.iter().map(|item| layer.merge(partial.by_ref().take(layer.splits(item).len()))).collect()
    } else {
        items.par_iter().map(|item| layer.merge(layer.splits(item).map(|split| layer.partial(item, split)))).collect()
    };
    scatter(heads, spans, &finished, out);
}

/// Transposes `[item][dimension][lane]` to rows.
fn scatter(heads: Heads, spans: &[Span<'_>], finished: &[Vec<Simd>], out: &mut [f32]) {
    let group = heads.group();
    let mut first = 0;
    // Per row: the items of its span, the number of items per key/value head, and the row's first lane in them.
    let rows: Vec<_> = spans
        .iter()
        .flat_map(|span| {
            let per_head = (span.tokens * group).div_ceil(LANES);
            let items = &finished[first..][..per_head * heads.kv];
            first += items.len();
            (0..span.tokens).map(move |token| (items, per_head, token * group))
        })
        .collect();
    let out = out.par_chunks_exact_mut(heads.queries * heads.dim).with_min_len(ROWS);
    rows.par_iter().zip(out).for_each(|((items, per_head, lane), row)| {
        for (head, row) in row.chunks_exact_mut(heads.dim).enumerate() {
            let lane = lane + head % group;
            let item = &items[head / group * per_head + lane / LANES];
            for (to, from) in row.iter_mut().zip(item) {
                *to = from.0[lane % LANES];
            }
        }
    });
}

/// The inputs that all items of a layer share.
#[derive(Clone, Copy)]
struct Layer<'a> {
    heads: Heads,
    qkv: &'a [f32],
    kv_cache: &'a KvCache,
    index: usize,
}

impl Layer<'_> {
    fn mask(&self, item: &Item<'_>) -> Mask {
        let group = self.heads.group();
        let last = item.span.tokens * group - 1;
        let to = std::array::from_fn(|lane| (item.span.start + (item.first_lane + lane).min(last) / group + 1) as i32);
        // Positions are far below 2^31: no memory holds such a context.
        let window = self.heads.window.map_or(i32::MAX, |window| window.min(i32::MAX as usize) as i32);
        Mask { from: to.map(|to: i32| (to - window).max(0)), to }
    }

    /// The splits that at least one lane of an item sees.
    fn splits(&self, item: &Item<'_>) -> std::ops::Range<usize> {
        let mask = self.mask(item);
        mask.start() / SPLIT..mask.end().div_ceil(SPLIT)
    }

    /// The scaled queries of an item, `[dimension][lane]`.
    fn queries(&self, item: &Item<'_>) -> Vec<Simd> {
        let Heads { dim, .. } = self.heads;
        let group = self.heads.group();
        let scale = 1.0 / (dim as f32).sqrt();
        let mut queries = vec![Simd::all(0.0); dim];
        for lane in 0..LANES.min(item.span.tokens * group - item.first_lane) {
            let (token, head) = ((item.first_lane + lane) / group, (item.first_lane + lane) % group);
            let start = (item.span.row + token) * self.heads.row() + (item.kv_head * group + head) * dim;
            for (to, from) in queries.iter_mut().zip(&self.qkv[start..start + dim]) {
                to.0[lane] = from * scale;
            }
        }
        queries
    }

    /// The partial softmax over one split.
    fn partial(&self, item: &Item<'_>, split: usize) -> Softmax {
        let queries = self.queries(item);
        let mask = self.mask(item);
        let mut softmax = Softmax::empty(self.heads.dim);
        let end = mask.end().min((split + 1) * SPLIT);
        // No other item of this pass reads these keys, so they come from memory, not from a cache.
        let alone = item.span.tokens * self.heads.group() <= LANES;
        for tile in (mask.start().max(split * SPLIT) / TILE * TILE..end).step_by(TILE) {
            let keys = self.segments(item, KvHalf::Keys, tile, end.min(tile + TILE));
            let values = self.segments(item, KvHalf::Values, tile, end.min(tile + TILE));
            if alone {
                let next = tile + TILE;
                self.segments(item, KvHalf::Keys, next, end.min(next + TILE)).prefetch();
                self.segments(item, KvHalf::Values, next, end.min(next + TILE)).prefetch();
            }
            wide!(softmax.step(&queries, &keys, &values, &mask, tile));
        }
        softmax
    }

    /// Keys or values of the positions `from .. to`, as slices of blocks.
    fn segments(&self, item: &Item<'_>, half: KvHalf, from: usize, to: usize) -> Segments<'_> {
        let block_size = self.kv_cache.block_size();
        let mut segments = Segments { slices: [&[]; TILE], used: 0 };
        let mut position = from;
        while position < to {
            let (block, offset) = (position / block_size, position % block_size);
            let end = block_size.min(offset + to - position);
            let tokens = self.kv_cache.tokens(item.span.table[block], self.index, half, item.kv_head, end);
            segments.slices[segments.used] = &tokens[offset * self.heads.dim..];
            segments.used += 1;
            position += end - offset;
        }
        segments
    }

    /// Merges the partial softmaxes of an item, in order, and divides by the sum: `[dimension][lane]`.
    fn merge(&self, partials: impl Iterator<Item = Softmax>) -> Vec<Simd> {
        let mut whole = Softmax::empty(self.heads.dim);
        partials.for_each(|partial| wide!(whole.merge(&partial)));
        for weighted_sum in &mut whole.weighted_sum {
            *weighted_sum = weighted_sum.zip(whole.sum, |weighted_sum, sum| weighted_sum / sum);
        }
        whole.weighted_sum
    }
}
