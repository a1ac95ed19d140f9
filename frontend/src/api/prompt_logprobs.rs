//! Log-probabilities of a prompt's tokens in vLLM's format: per token an object by token id; null for the first token.

use crate::model::Vocabulary;
use crate::output::{decimal, finite};
use serde::Serialize;
use serde_json::{Map, Value, json};
use worker::engine::Logprobs;

/// A token at a position of the prompt.
#[derive(Serialize)]
struct RankedToken {
    logprob: f64,
    /// 1 is the most likely token at the position.
    rank: u32,
    decoded_token: String,
}

/// The log-probabilities of a prompt's tokens, with `top` alternatives each. `scores` has those of all tokens but the
/// first.
pub(crate) fn by_id(vocabulary: &Vocabulary, tokens: &[u32], scores: &[Logprobs], top: u8) -> Value {
    let score = |token: u32, logprob: f32, rank: u32| {
        let decoded_token = String::from_utf8_lossy(vocabulary.bytes(token)).into_owned();
        (token.to_string(), json!(RankedToken { logprob: decimal(finite(logprob)), rank, decoded_token }))
    };
    let at_position = |(token, of): (&u32, &Logprobs)| {
        let mut all: Map<String, Value> = Map::new();
        all.extend([score(*token, of.chosen, of.rank)]);
        let alternatives = (1..).zip(&of.top).take(top.into()).filter(|(_, (alternative, _))| alternative != token);
        all.extend(alternatives.map(|(rank, (alternative, logprob))| score(*alternative, *logprob, rank)));
        Value::Object(all)
    };
    let rest = tokens.iter().skip(1).zip(scores).map(at_position);
    std::iter::once(Value::Null).chain(rest).collect()
}
