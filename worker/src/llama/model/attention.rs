//! Causal attention of new tokens over paged keys and values, grouped heads, optional sliding window.
//!
//! A *lane* is one query: one head of one token. Up to [`LANES`] lanes that share a key/value head form an *item*; lanes
//! never meet, so a query's result cannot depend on its neighbours. Along the keys everything is cut at multiples of
//! fixed numbers of **positions**, whatever the chunk, the block size or the batch:
//!
//! ```text
//!   positions   0 ........ 512 ........ 1024 ...      SPLIT: a partial softmax each, folded in order
//!                 |64|64|..   |64|64|..               TILE: one step of the running softmax
//! ```
//!
//! Who computes a split changes nothing, so long contexts with few queries (decode) are spread over threads split by split
//! and many queries (prefill) item by item. A key that a lane may not see leaves that lane as it was, to the bit.

use super::kv_cache::{Arena, Half, SPLIT, TILE};
use super::simd::{LANES, Lanes, wide};
use kvbm::BlockId;
use rayon::prelude::*;
use softmax::{Segments, Sight, Softmax};

mod softmax;

/// Rows that one thread takes at a time where results are put in place: less is not worth waking another.
const ROWS: usize = 32;

/// The heads of a layer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Heads {
    pub(super) queries: usize,
    pub(super) kv: usize,
    pub(super) dim: usize,
    /// A token sees itself and this many less one before it.
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
    /// Row of the first one in the fused queries, keys and values.
    pub(super) row: usize,
    /// How many.
    pub(super) tokens: usize,
    /// Position of the first one.
    pub(super) start: usize,
    /// Blocks of the sequence.
    pub(super) table: &'a [BlockId],
}

impl Span<'_> {
    /// Without the first `before` tokens.
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

/// Attention of every query in `spans`, to `out`: a row of `heads.queries * heads.dim` per token, in order.
pub(super) fn attend(heads: Heads, qkv: &[f32], spans: &[Span<'_>], arena: &Arena, layer: usize, out: &mut [f32]) {
    let group = heads.group();
    let items: Vec<Item<'_>> = spans
        .iter()
        .flat_map(|&span| {
            let lanes = (0..span.tokens * group).step_by(LANES);
            (0..heads.kv)
                .flat_map(move |kv_head| lanes.clone().map(move |first_lane| Item { span, kv_head, first_lane }))
        })
        .collect();
    let layer = Layer { heads, qkv, arena, index: layer };
    let finished: Vec<Vec<Lanes>> = if items.len() < 4 * rayon::current_num_threads() {
        let splits: Vec<_> = items.iter().flat_map(|item| layer.splits(item).map(move |split| (item, split))).collect();
        let mut partial =
            splits.par_iter().map(|(item, split)| layer.partial(item, *split)).collect::<Vec<_>>().into_iter();
        items.iter().map(|item| layer.fold(partial.by_ref().take(layer.splits(item).len()))).collect()
    } else {
        items.par_iter().map(|item| layer.fold(layer.splits(item).map(|split| layer.partial(item, split)))).collect()
    };
    scatter(heads, spans, &finished, out);
}

/// From `[item][dimension][lane]` to rows.
fn scatter(heads: Heads, spans: &[Span<'_>], finished: &[Vec<Lanes>], out: &mut [f32]) {
    let group = heads.group();
    let mut first = 0;
    // Per row: the items of its span, how many of them each key/value head has, and the row's first lane in those.
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

/// What all items of a layer share.
#[derive(Clone, Copy)]
struct Layer<'a> {
    heads: Heads,
    qkv: &'a [f32],
    arena: &'a Arena,
    index: usize,
}

impl Layer<'_> {
    fn sight(&self, item: &Item<'_>) -> Sight {
        let group = self.heads.group();
        let last = item.span.tokens * group - 1;
        let to = std::array::from_fn(|lane| (item.span.start + (item.first_lane + lane).min(last) / group + 1) as i32);
        // Positions are far below 2^31: a context that long would not fit any memory.
        let window = self.heads.window.map_or(i32::MAX, |window| window.min(i32::MAX as usize) as i32);
        Sight { from: to.map(|to: i32| (to - window).max(0)), to }
    }

    /// The splits that any lane of an item sees.
    fn splits(&self, item: &Item<'_>) -> std::ops::Range<usize> {
        let sight = self.sight(item);
        sight.start() / SPLIT..sight.end().div_ceil(SPLIT)
    }

    /// Queries of an item, scaled, `[dimension][lane]`.
    fn queries(&self, item: &Item<'_>) -> Vec<Lanes> {
        let Heads { dim, .. } = self.heads;
        let group = self.heads.group();
        let scale = 1.0 / (dim as f32).sqrt();
        let mut queries = vec![Lanes::all(0.0); dim];
        for lane in 0..LANES.min(item.span.tokens * group - item.first_lane) {
            let (token, head) = ((item.first_lane + lane) / group, (item.first_lane + lane) % group);
            let start = (item.span.row + token) * self.heads.row() + (item.kv_head * group + head) * dim;
            for (to, from) in queries.iter_mut().zip(&self.qkv[start..start + dim]) {
                to.0[lane] = from * scale;
            }
        }
        queries
    }

    /// The softmax over one split.
    fn partial(&self, item: &Item<'_>, split: usize) -> Softmax {
        let queries = self.queries(item);
        let sight = self.sight(item);
        let mut softmax = Softmax::empty(self.heads.dim);
        let end = sight.end().min((split + 1) * SPLIT);
        // Nobody else in this pass reads these keys: they come from memory, not from a cache.
        let alone = item.span.tokens * self.heads.group() <= LANES;
        for tile in (sight.start().max(split * SPLIT) / TILE * TILE..end).step_by(TILE) {
            let keys = self.segments(item, Half::Keys, tile, end.min(tile + TILE));
            let values = self.segments(item, Half::Values, tile, end.min(tile + TILE));
            if alone {
                let next = tile + TILE;
                self.segments(item, Half::Keys, next, end.min(next + TILE)).prefetch();
                self.segments(item, Half::Values, next, end.min(next + TILE)).prefetch();
            }
            wide!(softmax.step(&queries, &keys, &values, &sight, tile));
        }
        softmax
    }

    /// Keys or values of the positions `from .. to`, block by block.
    fn segments(&self, item: &Item<'_>, half: Half, from: usize, to: usize) -> Segments<'_> {
        let block_size = self.arena.block_size();
        let mut segments = Segments { slices: [&[]; TILE], used: 0 };
        let mut position = from;
        while position < to {
            let (block, offset) = (position / block_size, position % block_size);
            let end = block_size.min(offset + to - position);
            let tokens = self.arena.tokens(item.span.table[block], self.index, half, item.kv_head, end);
            segments.slices[segments.used] = &tokens[offset * self.heads.dim..];
            segments.used += 1;
            position += end - offset;
        }
        segments
    }

    /// Folds the partial softmaxes of an item, in order, and divides: `[dimension][lane]`.
    fn fold(&self, partials: impl Iterator<Item = Softmax>) -> Vec<Lanes> {
        let mut whole = Softmax::empty(self.heads.dim);
        partials.for_each(|partial| wide!(whole.fold(&partial)));
        for mix in &mut whole.mix {
            *mix = mix.zip(whole.sum, |mix, sum| mix / sum);
        }
        whole.mix
    }
}
