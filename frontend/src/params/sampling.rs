//! Sampling parameters: temperature, truncation, penalties, biases.

use super::fields::{Fields, number};
use super::generation::{MAX_TOKEN_IDS, TOP_LOGPROBS_MAX};
use crate::error::Error;
use worker::engine::{Sampling, SamplingDefaults};

pub(super) fn take(fields: &mut Fields, vocabulary: usize, defaults: SamplingDefaults) -> Result<Sampling, Error> {
    let off = Sampling::default();
    // 0 means greedy sampling; with the smallest positive value only the most likely token is left.
    let top_p = fields.number("top_p", 0.0..=1.0)?.or(defaults.top_p).unwrap_or(off.top_p).max(f32::MIN_POSITIVE);
    // vLLM and SGLang use -1 or 0 for "off".
    let top_k = fields.integer("top_k", -1..=u32::MAX.into())?.or(defaults.top_k.map(i64::from));
    let repetition_penalty = fields.number("repetition_penalty", 0.0..=100.0)?;
    let repetition_penalty = repetition_penalty.or(defaults.repetition_penalty).unwrap_or(off.repetition_penalty);
    if repetition_penalty == 0.0 {
        let message = "Invalid 'repetition_penalty': expected a value > 0, but got 0 instead.";
        return Err(Error::invalid("repetition_penalty", "decimal_below_min_value", message));
    }
    Ok(Sampling {
        temperature: fields.number("temperature", 0.0..=2.0)?.or(defaults.temperature).unwrap_or(off.temperature),
        top_p,
        top_k: top_k.filter(|k| *k > 0).map(|k| k as u32),
        min_p: fields.number("min_p", 0.0..=1.0)?.or(defaults.min_p).unwrap_or(off.min_p),
        seed: fields.integer("seed", i64::MIN..=i64::MAX)?.map(i64::cast_unsigned),
        frequency_penalty: fields.number("frequency_penalty", -2.0..=2.0)?.unwrap_or(off.frequency_penalty),
        presence_penalty: fields.number("presence_penalty", -2.0..=2.0)?.unwrap_or(off.presence_penalty),
        repetition_penalty,
        logit_bias: logit_bias(fields, vocabulary)?,
        logprobs: None,
        prompt_logprobs: fields.integer("prompt_logprobs", 0..=TOP_LOGPROBS_MAX)?.map(|top| top as u8),
    })
}

fn logit_bias(fields: &mut Fields, vocabulary: usize) -> Result<Vec<(u32, f32)>, Error> {
    let Some(biases) = fields.object("logit_bias")? else { return Ok(Vec::new()) };
    let biases = biases.into_remaining();
    if biases.len() > MAX_TOKEN_IDS {
        let (max, got) = (MAX_TOKEN_IDS, biases.len());
        let message = format!(
            "Invalid 'logit_bias': too many token ids. Expected an object with at most {max} token ids, but got {got}."
        );
        return Err(Error::invalid("logit_bias", "object_above_max_properties", message));
    }
    biases
        .iter()
        .map(|(token, bias)| {
            let path = format!("logit_bias.{token}");
            let id = token_id(token).filter(|id| (*id as usize) < vocabulary).ok_or_else(|| {
                let message = format!("Invalid key in 'logit_bias': '{token}' is not a token id below {vocabulary}.");
                Error::invalid("logit_bias", "invalid_value", message)
            })?;
            Ok((id, number(&path, bias, -100.0..=100.0)?))
        })
        .collect()
}

/// A key that is a token id in canonical decimal form, so that two keys never mean the same token.
fn token_id(key: &str) -> Option<u32> {
    key.parse().ok().filter(|id: &u32| id.to_string() == key)
}
