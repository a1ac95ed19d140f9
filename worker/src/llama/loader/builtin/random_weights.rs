//! Random weights: a function of seed and position, computed with integers and single multiplications only, so that
//! every machine generates the same bits.
//!
//! Three choices make random weights behave like those of a model:
//! - Matrices keep the scale of their inputs; queries and keys are [`QUERY_KEY_DEVIATION`] times larger, so that
//!   attention selects tokens instead of averaging all, and the text depends on its whole past.
//! - Embeddings are small compared with what the layers add. With the head tied to them, the likeliest next token
//!   would otherwise be the last one again.
//! - The head favours words (see [`Vocabulary::words`]): the rows of other tokens are scaled by [`OTHER_TOKEN_SCALE`],
//!   so that generated text is readable and tokenizes to the same tokens in the next turn's prompt.

use super::tokenizer::{END, Vocabulary};
use crate::llama::loader::config::Config;
use crate::llama::loader::weights::tensors;
use half::bf16;
use kvbm::splitmix;
use rayon::prelude::*;
use safetensors::{Dtype, View};
use std::borrow::Cow;
use std::cell::Cell;
use std::io;
use std::path::Path;

/// Standard deviation of queries and keys; that of the scores is its square.
const QUERY_KEY_DEVIATION: f32 = 2.0;
/// Standard deviation of the embedding of a word.
const WORD_EMBEDDING_DEVIATION: f32 = 0.04;
/// Standard deviation of the embedding of any other token, relative to a word's. Even an embedding this small is far
/// above the norm's epsilon.
const OTHER_TOKEN_SCALE: f32 = 0.1;
/// Standard deviation of the embedding of the end token, relative to a word's: a normal variable of this deviation
/// exceeds the largest of 7,600 variables of deviation 1 (about 3.8) in one of 180 draws, which gives texts of that
/// mean length.
const END_TOKEN_SCALE: f32 = 1.5;
/// Standard deviation of a word's logits: the likeliest token then has a probability of a third or more, as in real
/// text.
const LOGIT_DEVIATION: f32 = 5.0;

/// Which random weights to generate.
pub(super) struct RandomWeights {
    /// Seed of the weights: the model's name and version.
    pub(super) seed: String,
    /// The shape.
    pub(super) config: Config,
    /// Whether the end token is never chosen.
    pub(super) never_ends: bool,
}

impl RandomWeights {
    /// Writes all tensors to a safetensors file; each is generated when it is written.
    pub(super) fn write(&self, vocabulary: &Vocabulary, path: &Path, progress: &dyn Fn(u64, u64)) -> io::Result<()> {
        let tensors = tensors(&self.config);
        let total = tensors.iter().map(|(_, shape)| 2 * shape.iter().product::<usize>() as u64).sum();
        let written = Cell::new(0);
        let report = |bytes: u64| {
            written.set(written.get() + bytes);
            progress(written.get(), total);
        };
        let tensors = tensors.into_iter().map(|(name, shape)| {
            let digest = blake3::hash(format!("{} {name}", self.seed).as_bytes());
            let seed = u64::from_le_bytes(digest.as_bytes()[..8].try_into().expect("eight bytes"));
            let scales = self.scales(&name, &shape, vocabulary);
            (name, Tensor { shape, seed, scales, report: &report })
        });
        let format = [("format".to_owned(), "pt".to_owned())].into();
        safetensors::serialize_to_file(tensors, Some(format), path).map_err(io::Error::other)
    }

    fn scales(&self, name: &str, shape: &[usize], vocabulary: &Vocabulary) -> Scales {
        let hidden = self.config.hidden as f32;
        match shape {
            [_] if name == "model.norm.weight" => {
                Scales::Constant(LOGIT_DEVIATION / (WORD_EMBEDDING_DEVIATION * hidden.sqrt()))
            }
            [_] => Scales::Constant(1.0),
            _ if name == "model.embed_tokens.weight" => Scales::Rows(self.embedding(vocabulary)),
            [.., inputs] => {
                let is_query_or_key = name.ends_with("q_proj.weight") || name.ends_with("k_proj.weight");
                Scales::All(if is_query_or_key { QUERY_KEY_DEVIATION } else { 1.0 } / (*inputs as f32).sqrt())
            }
            [] => unreachable!("no tensor of a model is a scalar"),
        }
    }

    fn embedding(&self, vocabulary: &Vocabulary) -> Vec<f32> {
        let mut rows = vec![WORD_EMBEDDING_DEVIATION * OTHER_TOKEN_SCALE; vocabulary.size()];
        for word in vocabulary.words() {
            rows[word] = WORD_EMBEDDING_DEVIATION;
        }
        if !self.never_ends {
            rows[END.id(vocabulary.size()) as usize] = WORD_EMBEDDING_DEVIATION * END_TOKEN_SCALE;
        }
        rows
    }
}

/// The standard deviations of a tensor's values.
enum Scales {
    /// No deviation: every value equals this one.
    Constant(f32),
    All(f32),
    Rows(Vec<f32>),
}

/// A tensor that is generated when it is written.
struct Tensor<'a> {
    shape: Vec<usize>,
    seed: u64,
    scales: Scales,
    report: &'a dyn Fn(u64),
}

impl Tensor<'_> {
    fn values(&self) -> Vec<bf16> {
        let (seed, scales) = (self.seed, &self.scales);
        let row_length = *self.shape.last().expect("no tensor of a model is a scalar");
        let mut values = vec![bf16::ZERO; self.shape.iter().product()];
        values.par_chunks_mut(row_length).enumerate().for_each(|(row, values)| {
            let scale = match scales {
                Scales::Constant(value) => return values.fill(bf16::from_f32(*value)),
                Scales::All(scale) => *scale,
                Scales::Rows(scales) => scales[row],
            };
            for (column, value) in values.iter_mut().enumerate() {
                *value = bf16::from_f32(normal(seed, (row * row_length + column) as u64) * scale);
            }
        });
        values
    }
}

impl View for Tensor<'_> {
    fn dtype(&self) -> Dtype {
        Dtype::BF16
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        let values = self.values();
        (self.report)(self.data_len() as u64);
        Cow::Owned(bytemuck::cast_slice(&values).to_vec())
    }

    fn data_len(&self) -> usize {
        2 * self.shape.iter().product::<usize>()
    }
}

/// A nearly normal variable of deviation 1: the sum of four uniform variables of 16 bits. The usual methods need
/// logarithms and cosines, which differ between machines.
fn normal(seed: u64, index: u64) -> f32 {
    /// A uniform variable of n values has deviation n / √12, the sum of four of them n / √3.
    const DEVIATION: f32 = 65_536.0 / 1.732_050_8;
    let bits = splitmix::mix(seed.wrapping_add(index.wrapping_mul(splitmix::INCREMENT)));
    let sum: i32 = (0..4).map(|lane| (bits >> (16 * lane)) as u16 as i32).sum();
    (sum - 2 * 65_535) as f32 / DEVIATION
}
