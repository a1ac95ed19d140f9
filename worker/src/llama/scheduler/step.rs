//! One step of the engine: rows of several sequences through the model, and a token for each that has come to its end.

use crate::engine::Logprobs;
use crate::llama::model::{self, Arena, Chunk, Logits, Model, Sampler, Visit};
use kvbm::BlockId;
use rayon::prelude::*;
use std::ops::Range;

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
    /// Tokens of the prompt whose log-probabilities are wanted.
    pub(super) scored: Scored,
}

/// Tokens of a prompt whose log-probabilities are wanted.
#[derive(Default)]
pub(super) struct Scored {
    /// Where they stand in the part, each right after the token with which it is judged: `rows[0]` judges `tokens[0]`.
    pub(super) rows: Range<usize>,
    pub(super) tokens: Vec<u32>,
    /// How many alternatives are reported.
    pub(super) alternatives: u8,
}

/// What a step makes of one sequence.
pub(super) struct Done {
    /// The sampler given back, and what it chose.
    pub(super) next: Option<(Sampler, u32, Option<Logprobs>)>,
    /// Of the prompt's tokens that were asked for.
    pub(super) scored: Vec<Logprobs>,
}

/// Computes a step. Blocks for the time of it.
pub(super) fn compute(model: &Model, arena: &Arena, mut parts: Vec<Part>) -> Vec<Done> {
    let asks: Vec<bool> = parts.iter().map(|part| part.sampler.is_some()).collect();
    let choices: Vec<(Sampler, usize, Vec<u32>)> = parts
        .iter_mut()
        .filter_map(|part| Some((part.sampler.take()?, part.position, std::mem::take(&mut part.banned))))
        .collect();
    let chunks: Vec<Chunk<'_>> = parts
        .iter()
        .zip(&asks)
        .map(|(part, asks)| Chunk { tokens: &part.tokens, start: part.start, table: &part.table, logits: *asks })
        .collect();
    // Each row is sampled by itself, so the thread that does it changes nothing.
    let sample = |mut logits: Logits<'_>| -> Vec<(Sampler, u32, Option<Logprobs>)> {
        let rows = choices.into_par_iter().zip(logits.rows());
        rows.map(|((mut sampler, position, banned), row)| {
            let (token, logprobs) = sampler.next(row, position, &banned);
            (sampler, token, logprobs)
        })
        .collect()
    };
    let rows: Vec<Range<usize>> = parts.iter().map(|part| part.scored.rows.clone()).collect();
    let score = |part: usize, row: usize, logits: &[f32]| {
        let scored = &parts[part].scored;
        model::logprobs(logits, scored.tokens[row - scored.rows.start], scored.alternatives)
    };
    let visit = Visit { tokens: &rows, each: &score };
    let (chosen, scored) = model.forward_visiting(&chunks, arena, &visit, sample);
    let mut chosen = chosen.into_iter();
    let next = |(asks, scored)| Done { next: if asks { chosen.next() } else { None }, scored };
    asks.into_iter().zip(scored).map(next).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::Sampling;
    use crate::llama::loader::{Builtin, Folder};

    fn part(of: u32, seed: Option<u64>) -> Part {
        let tokens = vec![of + 10; 20];
        let sampling = Sampling { temperature: 1.0, top_p: 0.9, logprobs: Some(3), ..Sampling::default() };
        let sampler = seed.map(|seed| Sampler::new(&sampling, seed, &tokens));
        let table = vec![BlockId(2 * of), BlockId(2 * of + 1)];
        Part { tokens, start: 0, table, sampler, position: 20, banned: vec![of], scored: Scored::default() }
    }

    #[test]
    fn sampled_tokens_do_not_depend_on_the_number_of_threads() {
        let folder = tempfile::tempdir().unwrap();
        let path = Builtin::Tiny.ensure(folder.path(), &|_, _| ()).unwrap();
        let run = |threads| {
            let Folder { config, weights, .. } = Folder::open(&path, Some("tiny")).unwrap();
            let model = Model::new(config, weights, threads);
            let arena = model.arena(16, 64).unwrap();
            // Every third only computes a part of its prompt.
            let parts = (0..24).map(|of| part(of, (of % 3 != 0).then_some(u64::from(of)))).collect();
            let done = compute(&model, &arena, parts);
            done.into_iter().map(|done| done.next.map(|(_, token, logprobs)| (token, logprobs))).collect::<Vec<_>>()
        };
        let alone = run(1);
        assert!(alone.iter().enumerate().all(|(of, done)| done.is_some() == (of % 3 != 0)));
        assert_eq!(run(4), alone);
    }
}
