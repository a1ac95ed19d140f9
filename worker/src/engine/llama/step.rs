//! One step of the engine: rows of several sequences through the model, and a token for each that has come to its end.

use super::arena::Arena;
use super::model::{Chunk, Model};
use super::sampling::Sampler;
use crate::engine::Logprobs;
use kvbm::BlockId;

/// What one sequence brings to a step.
pub(super) struct Part {
    /// The tokens to compute.
    pub(super) tokens: Vec<u32>,
    /// The position of the first of them.
    pub(super) start: usize,
    /// The slots of positions 0 to `start + tokens.len()`.
    pub(super) table: Vec<BlockId>,
    /// Chooses the next token; `None` when more of the prompt is to come.
    pub(super) sampler: Option<Sampler>,
    /// The position of the token to be chosen.
    pub(super) position: usize,
    /// Tokens that must not be chosen yet.
    pub(super) banned: Vec<u32>,
}

/// What a step makes of one sequence: the sampler given back, and what it chose.
pub(super) type Done = Option<(Sampler, u32, Option<Logprobs>)>;

/// Computes a step. Blocks for the time of it.
pub(super) fn compute(model: &Model, arena: &Arena, parts: Vec<Part>) -> Vec<Done> {
    let chunks: Vec<Chunk<'_>> = parts
        .iter()
        .map(|part| Chunk {
            tokens: &part.tokens,
            start: part.start,
            table: &part.table,
            logits: part.sampler.is_some(),
        })
        .collect();
    let mut logits = model.forward(&chunks, arena);
    drop(chunks);
    let mut row = 0;
    let choose = |part: Part| {
        let mut sampler = part.sampler?;
        let (token, logprobs) = sampler.next(logits.row(row), part.position, &part.banned);
        row += 1;
        Some((sampler, token, logprobs))
    };
    parts.into_iter().map(choose).collect()
}
