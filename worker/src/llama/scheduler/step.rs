//! One step of the engine: rows of several sequences through the model, and the next token of each sequence whose known
//! tokens are computed.

use crate::engine::Logprobs;
use crate::llama::model::{self, Chunk, KvCache, Logits, LogitsVisitor, Model, Sampler};
use kvbm::BlockId;
use rayon::prelude::*;
use std::ops::Range;

/// The work of one sequence in a step.
pub(super) struct StepInput {
    /// The tokens to compute.
    pub(super) tokens: Vec<u32>,
    /// The position of the first of them.
    pub(super) start: usize,
    /// The slots of positions 0 to `start + tokens.len()`.
    pub(super) table: Vec<BlockId>,
    /// Chooses the next token; `None` when more of the prompt follows.
    pub(super) sampler: Option<Sampler>,
    /// The position of the token that is chosen.
    pub(super) position: usize,
    /// Tokens that must not be chosen at this position.
    pub(super) banned: Vec<u32>,
    /// Prompt tokens whose log-probabilities are requested.
    pub(super) scored: PromptScores,
}

/// Prompt tokens whose log-probabilities are requested.
#[derive(Default)]
pub(super) struct PromptScores {
    /// Rows of the step whose logits are used, each one position before its token: `rows[0]` gives the log-probability
    /// of `tokens[0]`.
    pub(super) rows: Range<usize>,
    pub(super) tokens: Vec<u32>,
    /// How many of the likeliest tokens are reported at each position.
    pub(super) alternatives: u8,
}

/// The sampler, returned, and the token that it chose.
type Sampled = (Sampler, u32, Option<Logprobs>);

/// The result of a step for one sequence.
pub(super) struct StepOutput {
    pub(super) next: Option<Sampled>,
    /// Log-probabilities of the requested prompt tokens.
    pub(super) scored: Vec<Logprobs>,
}

/// The model computed logits that are NaN or infinite, which have no distribution.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error(
    "the model computed logits that are not finite (NaN or infinite): its weights are damaged, or their values overflow"
)]
pub(super) struct NotFinite;

/// Computes a step. Blocks the calling thread.
pub(super) fn compute(
    model: &Model,
    kv_cache: &KvCache,
    mut inputs: Vec<StepInput>,
) -> Vec<Result<StepOutput, NotFinite>> {
    let samples: Vec<bool> = inputs.iter().map(|input| input.sampler.is_some()).collect();
    let choices: Vec<(Sampler, usize, Vec<u32>)> = inputs
        .iter_mut()
        .filter_map(|input| Some((input.sampler.take()?, input.position, std::mem::take(&mut input.banned))))
        .collect();
    let chunks: Vec<Chunk<'_>> = inputs
        .iter()
        .zip(&samples)
        .map(|(input, samples)| Chunk {
            tokens: &input.tokens,
            start: input.start,
            table: &input.table,
            logits: *samples,
        })
        .collect();
    // Each row is sampled independently, so the assignment to threads does not matter.
    let sample = |mut logits: Logits<'_>| -> Vec<Result<Sampled, NotFinite>> {
        let rows = choices.into_par_iter().zip(logits.rows());
        rows.map(|((mut sampler, position, banned), row)| {
            if !model::are_finite(row) {
                return Err(NotFinite);
            }
            let (token, logprobs) = sampler.next(row, position, &banned);
            Ok((sampler, token, logprobs))
        })
        .collect()
    };
    let rows: Vec<Range<usize>> = inputs.iter().map(|input| input.scored.rows.clone()).collect();
    let score = |input: usize, row: usize, logits: &[f32]| {
        let scored = &inputs[input].scored;
        let token = scored.tokens[row - scored.rows.start];
        model::are_finite(logits).then(|| model::logprobs(logits, token, scored.alternatives)).ok_or(NotFinite)
    };
    let visit = LogitsVisitor { tokens: &rows, each: &score };
    let (chosen, scored) = model.forward_visiting(&chunks, kv_cache, &visit, sample);
    let mut chosen = chosen.into_iter();
    let next = |(samples, scored): (bool, Vec<Result<Logprobs, NotFinite>>)| {
        let next = if samples { chosen.next().transpose()? } else { None };
        Ok(StepOutput { next, scored: scored.into_iter().collect::<Result<_, _>>()? })
    };
    samples.into_iter().zip(scored).map(next).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::Sampling;
    use crate::llama::loader::{Builtin, LoadedModel};

    fn input(of: u32, seed: Option<u64>) -> StepInput {
        let tokens = vec![of + 10; 20];
        let sampling = Sampling { temperature: 1.0, top_p: 0.9, logprobs: Some(3), ..Sampling::default() };
        let sampler = seed.map(|seed| Sampler::new(&sampling, seed, &tokens));
        let table = vec![BlockId(2 * of), BlockId(2 * of + 1)];
        StepInput { tokens, start: 0, table, sampler, position: 20, banned: vec![of], scored: PromptScores::default() }
    }

    #[test]
    fn sampled_tokens_do_not_depend_on_the_number_of_threads() {
        let folder = tempfile::tempdir().unwrap();
        let path = Builtin::Tiny.ensure(folder.path(), &|_, _| ()).unwrap();
        let run = |threads| {
            let LoadedModel { config, weights, .. } = LoadedModel::open(&path, Some("tiny")).unwrap();
            let model = Model::new(config, weights, threads).unwrap();
            let kv_cache = model.kv_cache(16, 64).unwrap();
            // Every third sequence computes only a part of its prompt.
            let inputs = (0..24).map(|of| input(of, (of % 3 != 0).then_some(u64::from(of)))).collect();
            let outputs = compute(&model, &kv_cache, inputs);
            outputs
                .into_iter()
                .map(|output| output.unwrap().next.map(|(_, token, logprobs)| (token, logprobs)))
                .collect::<Vec<_>>()
        };
        let alone = run(1);
        assert!(alone.iter().enumerate().all(|(of, done)| done.is_some() == (of % 3 != 0)));
        assert_eq!(run(4), alone);
    }
}
