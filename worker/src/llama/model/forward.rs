//! The forward pass: chunks of several sequences in, KV written to their blocks, logits of the requested rows out.
//!
//! All rows of all chunks go through one product per matrix. A row's result depends only on its own tokens: products
//! ([`linear`](super::linear)) and attention ([`attention`]) guarantee it, and the rest is computed per row. Not
//! here: scheduling and the ownership of blocks. The caller names the slots and owns those that are written.

#![expect(clippy::inline_always, reason = "compiled anew for each instruction set, by being inlined into `call_wide`")]

use super::attention::{self, Heads, Span};
use super::kv_cache::KvCache;
use super::linear::Linear;
use super::rope::{self, Rotation};
use super::simd::{silu, sum_of_squares, wide};
use crate::llama::loader::{self, Config, Weights};
use kvbm::BlockId;
use parking_lot::Mutex;
use rayon::prelude::*;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread;
use tokio::sync::oneshot;

/// Rows per task where work is row by row; smaller tasks cost more than they gain.
const ROWS: usize = 8;

/// Rows whose logits are visited at once: enough for a product at full speed, 20 MB for a vocabulary of 150,000.
const VISITED: usize = 32;

/// A model, ready to compute: one copy of the weights and one thread pool, to be shared.
pub(crate) struct Model {
    config: Config,
    heads: Heads,
    embed: Linear,
    layers: Vec<Layer>,
    norm: Vec<f32>,
    head: Option<Linear>,
    identity: [u8; 32],
    rotation: Rotation,
    pool: rayon::ThreadPool,
    /// Buffers of earlier passes, for reuse: fresh pages for every pass would cost about 2 % of it.
    scratch: Mutex<Vec<Scratch>>,
}

struct Layer {
    attention_norm: Vec<f32>,
    qkv: Linear,
    qkv_bias: Option<Vec<f32>>,
    q_norm: Option<Vec<f32>>,
    k_norm: Option<Vec<f32>>,
    output: Linear,
    ffn_norm: Vec<f32>,
    gate_up: Linear,
    down: Linear,
}

/// Consecutive tokens of one sequence: a part of a prompt, or the single token of a decode step.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Chunk<'a> {
    /// The tokens, at least one, each within the vocabulary.
    pub(crate) tokens: &'a [u32],
    /// Position of the first token. The table's blocks hold the KV of all positions before it.
    pub(crate) start: usize,
    /// The sequence's block table up to the chunk's end. The caller owns the blocks that the chunk writes.
    pub(crate) table: &'a [BlockId],
    /// Whether the logits after the last token are requested.
    pub(crate) logits: bool,
}

/// Tokens whose logits are passed to a function as they are computed, because together they would be too large to
/// keep.
pub(crate) struct LogitsVisitor<'a, T> {
    /// The tokens of each chunk.
    pub(crate) tokens: &'a [Range<usize>],
    /// Called with the index of the chunk, the index of the token in it and the logits after the token, on several
    /// threads.
    pub(crate) each: &'a (dyn Fn(usize, usize, &[f32]) -> T + Sync),
}

/// Logits of the chunks that request them, in order.
pub(crate) struct Logits<'a> {
    vocabulary: usize,
    data: &'a mut [f32],
}

impl Logits<'_> {
    /// The logits of the `i`-th chunk that requests them.
    #[cfg(test)]
    pub(crate) fn row(&mut self, i: usize) -> &mut [f32] {
        &mut self.data[i * self.vocabulary..][..self.vocabulary]
    }

    /// The logits of all chunks that request them, for parallel iteration.
    pub(crate) fn rows(&mut self) -> rayon::slice::ChunksExactMut<'_, f32> {
        self.data.par_chunks_exact_mut(self.vocabulary)
    }
}

/// The intermediate buffers of a pass, with a row per token in each.
#[derive(Default)]
struct Scratch {
    /// The residual stream, `[hidden]`.
    stream: Vec<f32>,
    /// The stream after RMS norm, `[hidden]`.
    normed: Vec<f32>,
    /// Queries, keys, values, as in [`Heads::row`].
    qkv: Vec<f32>,
    /// The output of attention, `[heads · head_dim]`.
    attended: Vec<f32>,
    /// Gate and up projections, `[2 · intermediate]`.
    gate_up: Vec<f32>,
    /// The gated activation, `[intermediate]`.
    gated: Vec<f32>,
    /// Cosines and sines of the position, `[head_dim]`.
    angles: Vec<f32>,
    /// Logits, `[vocabulary]`, of the requested rows.
    logits: Vec<f32>,
}

/// A token's position in its sequence and its slot and offset in memory.
#[derive(Clone, Copy)]
struct TokenPosition {
    token: u32,
    position: usize,
    slot: BlockId,
    offset: usize,
}

impl Model {
    /// Converts the weights for computing on `threads` threads. Fails if they cannot be started.
    pub(crate) fn new(config: Config, weights: Weights, threads: usize) -> Result<Self, rayon::ThreadPoolBuildError> {
        let pool =
            rayon::ThreadPoolBuilder::new().num_threads(threads).thread_name(|i| format!("compute-{i}")).build()?;
        let Weights { embed, layers, norm, head, identity } = weights;
        let heads =
            Heads { queries: config.heads, kv: config.kv_heads, dim: config.head_dim, window: config.sliding_window };
        let rotation = Rotation::new(&config.rope, config.head_dim);
        // One matrix after the other, so that two layouts of all weights never exist at once.
        let (embed, layers, head) =
            pool.install(|| (Linear::new(embed), layers.into_iter().map(Layer::new).collect(), head.map(Linear::new)));
        Ok(Self { config, heads, embed, layers, norm, head, identity, rotation, pool, scratch: Mutex::default() })
    }

    /// The shape of the model.
    pub(crate) fn config(&self) -> &Config {
        &self.config
    }

    /// Runs a job on a compute thread. An error is the panic of the job.
    ///
    /// Not on a blocking thread of the async runtime, which would only wait for the compute threads: every step would
    /// wake one more thread twice.
    pub(crate) async fn run<R: Send + 'static>(&self, job: impl FnOnce() -> R + Send + 'static) -> thread::Result<R> {
        let (sender, receiver) = oneshot::channel();
        self.pool.spawn(move || {
            // Without a receiver the engine was dropped meanwhile.
            let _ = sender.send(catch_unwind(AssertUnwindSafe(job)));
        });
        receiver.await.expect("the job sends its result, also that of a panic")
    }

    /// A KV cache for this model.
    pub(crate) fn kv_cache(&self, block_size: usize, blocks: usize) -> std::io::Result<KvCache> {
        KvCache::new(&self.config, block_size, blocks, &self.identity)
    }

    /// Computes the chunks, each of another sequence, and writes their KV. `then` is called with the logits on a
    /// compute thread. Blocks the calling thread.
    #[cfg(test)]
    pub(crate) fn forward<R: Send>(
        &self,
        chunks: &[Chunk<'_>],
        kv: &KvCache,
        then: impl FnOnce(Logits<'_>) -> R + Send,
    ) -> R {
        let visit = LogitsVisitor { tokens: &vec![0..0; chunks.len()], each: &|_, _, _| {} };
        self.forward_visiting(chunks, kv, &visit, then).0
    }

    /// Computes the chunks, each of another sequence, and writes their KV. `then` is called with the logits of the
    /// chunks that request them, and `visit` with those of the tokens that it names, on the compute threads. Blocks
    /// the calling thread.
    pub(crate) fn forward_visiting<R: Send, T: Send>(
        &self,
        chunks: &[Chunk<'_>],
        kv: &KvCache,
        visit: &LogitsVisitor<'_, T>,
        then: impl FnOnce(Logits<'_>) -> R + Send,
    ) -> (R, Vec<Vec<T>>) {
        let scratch = || self.scratch.lock();
        let mut taken = scratch().pop().unwrap_or_default();
        let result = self.pool.install(|| {
            let (logits, visited) = self.pass(chunks, kv, visit, &mut taken);
            (then(logits), visited)
        });
        scratch().push(taken);
        result
    }

    fn pass<'s, T: Send>(
        &self,
        chunks: &[Chunk<'_>],
        kv: &KvCache,
        visit: &LogitsVisitor<'_, T>,
        scratch: &'s mut Scratch,
    ) -> (Logits<'s>, Vec<Vec<T>>) {
        let positions: Vec<TokenPosition> = chunks.iter().flat_map(|chunk| chunk.positions(kv.block_size())).collect();
        let all = spans(chunks);
        // Of each chunk the rows from the first one whose logits are requested.
        let first = |(chunk, visited): (&Chunk<'_>, &Range<usize>)| match chunk.tokens.len() {
            _ if !visited.is_empty() => visited.start,
            tokens if chunk.logits => tokens - 1,
            tokens => tokens,
        };
        let firsts: Vec<usize> = chunks.iter().zip(visit.tokens).map(first).collect();
        let asked: Vec<Span<'_>> = all.iter().zip(&firsts).map(|(span, first)| span.skip(*first)).collect();
        scratch.make_room(&self.config, positions.len());
        self.embed_tokens(&positions, scratch);
        for (l, layer) in self.layers.iter().enumerate() {
            layer.keys_and_values(self, l, &positions, kv, scratch);
            // Every row needs the last layer's keys and values; the rest of that layer only the rows whose logits are
            // requested.
            let spans = if l + 1 < self.layers.len() { &all } else { &asked };
            if l + 1 == self.layers.len() {
                scratch.keep_rows(&asked, self.config.hidden);
            }
            layer.attention_and_ffn(self, l, spans, kv, scratch);
        }
        let rows = asked.iter().map(|span| span.tokens).sum();
        self.normalize(rows, &self.norm, scratch);
        // The end of each chunk's rows among the remaining rows.
        let mut end = 0;
        let ends: Vec<usize> = asked
            .iter()
            .map(|span| {
                end += span.tokens;
                end
            })
            .collect();
        let mut visited = Vec::with_capacity(chunks.len());
        for (c, chunk) in chunks.iter().enumerate() {
            // The row of the chunk's token, among the remaining rows.
            let row = |token: usize| ends[c] + token - chunk.tokens.len();
            let tokens = visit.tokens[c].clone();
            visited.push(self.visit(tokens, row, &|token, logits| (visit.each)(c, token, logits), scratch));
        }
        let requested = ends.iter().zip(chunks).filter(|(_, chunk)| chunk.logits).map(|(end, _)| end - 1);
        let hidden = self.config.hidden;
        let mut rows = 0;
        for row in requested {
            // Rows only move down, so none is overwritten before it has moved.
            scratch.normed.copy_within(row * hidden..(row + 1) * hidden, rows * hidden);
            rows += 1;
        }
        (self.logits(rows, scratch), visited)
    }

    /// Calls `each` with the logits after these tokens of a chunk, whose rows `row` gives.
    fn visit<T: Send>(
        &self,
        tokens: Range<usize>,
        row: impl Fn(usize) -> usize,
        each: &(dyn Fn(usize, &[f32]) -> T + Sync),
        scratch: &mut Scratch,
    ) -> Vec<T> {
        let (hidden, vocabulary) = (self.config.hidden, self.config.vocabulary);
        let Scratch { normed, logits: data, .. } = scratch;
        if !tokens.is_empty() {
            data.resize(data.len().max(tokens.len().clamp(2, VISITED) * vocabulary), 0.0);
        }
        let mut results = Vec::with_capacity(tokens.len());
        for from in tokens.clone().step_by(VISITED) {
            let count = VISITED.min(tokens.end - from);
            self.output().apply(count, &normed[row(from) * hidden..], data);
            let rows = data.par_chunks_exact(vocabulary).take(count).enumerate();
            results.par_extend(rows.map(|(i, logits)| each(from + i, logits)));
        }
        results
    }

    /// Embeds the tokens and computes the angles of their positions.
    fn embed_tokens(&self, positions: &[TokenPosition], scratch: &mut Scratch) {
        let Config { hidden, head_dim, .. } = self.config;
        let stream = scratch.stream.par_chunks_exact_mut(hidden).with_min_len(ROWS);
        let angles = scratch.angles.par_chunks_exact_mut(head_dim);
        positions.par_iter().zip(stream).zip(angles).for_each(|((place, stream), angles)| {
            self.embed.row(place.token as usize, stream);
            self.rotation.at(place.position, angles);
        });
    }

    /// The output projection: from the normed stream to logits.
    fn output(&self) -> &Linear {
        self.head.as_ref().unwrap_or(&self.embed)
    }

    /// Logits of the first `rows` rows of the normed stream.
    fn logits<'s>(&self, rows: usize, scratch: &'s mut Scratch) -> Logits<'s> {
        let vocabulary = self.config.vocabulary;
        let Scratch { normed, logits, .. } = scratch;
        if rows > 0 {
            // Products need room for two rows. Each value is overwritten.
            logits.resize(logits.len().max(rows.max(2) * vocabulary), 0.0);
        }
        self.output().apply(rows, normed, logits);
        Logits { vocabulary, data: &mut logits[..rows * vocabulary] }
    }

    /// Applies RMS norm to the first `rows` rows of the stream.
    fn normalize(&self, rows: usize, gain: &[f32], scratch: &mut Scratch) {
        let Config { hidden, norm_eps, .. } = self.config;
        let normed = scratch.normed.par_chunks_exact_mut(hidden).with_min_len(ROWS);
        normed.zip(scratch.stream.par_chunks_exact(hidden)).take(rows).for_each(|(normed, row)| {
            normed.copy_from_slice(row);
            wide!(rms_norm(normed, gain, norm_eps));
        });
    }
}

impl Layer {
    fn new(layer: loader::Layer) -> Self {
        Self {
            attention_norm: layer.attention_norm,
            qkv: Linear::new(layer.qkv),
            qkv_bias: layer.qkv_bias,
            q_norm: layer.q_norm,
            k_norm: layer.k_norm,
            output: Linear::new(layer.output),
            ffn_norm: layer.ffn_norm,
            gate_up: Linear::new(layer.gate_up),
            down: Linear::new(layer.down),
        }
    }

    /// From the stream to queries in `scratch.qkv`, and to keys and values in the blocks.
    fn keys_and_values(
        &self,
        model: &Model,
        l: usize,
        positions: &[TokenPosition],
        kv: &KvCache,
        scratch: &mut Scratch,
    ) {
        let Heads { queries, kv: kv_heads, dim, .. } = model.heads;
        model.normalize(positions.len(), &self.attention_norm, scratch);
        self.qkv.apply(positions.len(), &scratch.normed, &mut scratch.qkv);
        let rows = scratch.qkv.par_chunks_exact_mut(model.heads.row()).with_min_len(ROWS);
        let angles = scratch.angles.par_chunks_exact(dim);
        positions.par_iter().zip(rows).zip(angles).for_each(|((place, row), angles)| {
            if let Some(bias) = &self.qkv_bias {
                row.iter_mut().zip(bias).for_each(|(x, bias)| *x += bias);
            }
            let (q, rest) = row.split_at_mut(queries * dim);
            let (k, v) = rest.split_at_mut(kv_heads * dim);
            for (heads, gain) in [(q, &self.q_norm), (&mut *k, &self.k_norm)] {
                wide!(place_heads(heads, gain.as_deref(), model.config.norm_eps, angles));
            }
            kv.write_token(place.slot, place.offset, l, k, v);
        });
    }

    /// From queries, keys and values back to the stream, one row per token of `spans`.
    fn attention_and_ffn(&self, model: &Model, l: usize, spans: &[Span<'_>], kv: &KvCache, scratch: &mut Scratch) {
        let rows = spans.iter().map(|span| span.tokens).sum();
        attention::attend(model.heads, &scratch.qkv, spans, kv, l, &mut scratch.attended);
        self.output.add(rows, &scratch.attended, &mut scratch.stream);
        model.normalize(rows, &self.ffn_norm, scratch);
        self.gate_up.apply(rows, &scratch.normed, &mut scratch.gate_up);
        let width = model.config.intermediate;
        let gated = scratch.gated.par_chunks_exact_mut(width).with_min_len(ROWS);
        gated.zip(scratch.gate_up.par_chunks_exact(2 * width)).take(rows).for_each(|(gated, gate_up)| {
            wide!(gate(gated, gate_up));
        });
        self.down.add(rows, &scratch.gated, &mut scratch.stream);
    }
}

impl Chunk<'_> {
    fn positions(self, block_size: usize) -> impl Iterator<Item = TokenPosition> {
        let end = self.start + self.tokens.len();
        assert!(
            end <= self.table.len() * block_size,
            "the table has {} blocks, the chunk ends at {end}",
            self.table.len()
        );
        self.tokens.iter().zip(self.start..).map(move |(&token, position)| TokenPosition {
            token,
            position,
            slot: self.table[position / block_size],
            offset: position % block_size,
        })
    }
}

/// The rows of each chunk.
fn spans<'a>(chunks: &[Chunk<'a>]) -> Vec<Span<'a>> {
    let place = |row: &mut usize, chunk: &Chunk<'a>| {
        let span = Span { row: *row, tokens: chunk.tokens.len(), start: chunk.start, table: chunk.table };
        *row += span.tokens;
        Some(span)
    };
    chunks.iter().scan(0, place).collect()
}

impl Scratch {
    /// Makes room for `rows` rows and one more: products of a single row read a second one.
    fn make_room(&mut self, config: &Config, rows: usize) {
        let Config { hidden, heads, kv_heads, head_dim, intermediate, .. } = *config;
        for (buffer, width) in [
            (&mut self.stream, hidden),
            (&mut self.normed, hidden),
            (&mut self.qkv, (heads + 2 * kv_heads) * head_dim),
            (&mut self.attended, heads * head_dim),
            (&mut self.gate_up, 2 * intermediate),
            (&mut self.gated, intermediate),
            (&mut self.angles, head_dim),
        ] {
            // Never shrinks: chunks mostly have one size, and the scheduler bounds the largest.
            buffer.resize(buffer.len().max((rows + 1) * width), 0.0);
        }
    }

    /// Keeps only the rows of the spans in the stream, in order.
    fn keep_rows(&mut self, spans: &[Span<'_>], hidden: usize) {
        // Rows only move down, so none is overwritten before it has moved.
        let mut to = 0;
        for span in spans {
            self.stream.copy_within(span.row * hidden..(span.row + span.tokens) * hidden, to * hidden);
            to += span.tokens;
        }
    }
}

/// `x / sqrt(mean(x²) + eps) · gain`.
#[inline(always)]
fn rms_norm(x: &mut [f32], gain: &[f32], eps: f32) {
    let scale = 1.0 / (sum_of_squares(x) / x.len() as f32 + eps).sqrt();
    x.iter_mut().zip(gain).for_each(|(x, gain)| *x = *x * scale * gain);
}

/// Applies RMS norm to each head where the model has a gain for it, and rotates the head to its position.
#[inline(always)]
fn place_heads(heads: &mut [f32], gain: Option<&[f32]>, eps: f32, angles: &[f32]) {
    for head in heads.chunks_exact_mut(angles.len()) {
        if let Some(gain) = gain {
            rms_norm(head, gain, eps);
        }
        rope::rotate(head, angles);
    }
}

/// `silu(gate) · up`, of a row that holds gates and then ups.
#[inline(always)]
fn gate(gated: &mut [f32], gate_up: &[f32]) {
    let (gate, up) = gate_up.split_at(gated.len());
    for ((out, gate), up) in gated.iter_mut().zip(gate).zip(up) {
        *out = silu(*gate) * up;
    }
}

#[cfg(test)]
mod tests;
