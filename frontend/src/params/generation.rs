//! Parameters that both endpoints share: stop conditions, number of choices, streaming, and the other modules'
//! parameters.

use super::fields::{Fields, integer, mistyped, too_long};
use super::{cache, known_fields, sampling, scheduling};
use crate::error::Error;
use serde_json::Value;
use std::sync::Arc;
use std::time::Duration;
use worker::engine::{Priority, Retention, Sampling, SamplingDefaults, StopConditions};

/// Maximum number of choices of a request: OpenAI's limit.
pub(crate) const CHOICES_MAX: i64 = 128;
/// Maximum number of stop strings. OpenAI allows 4, vendors more. Each costs a search per token.
const MAX_STOP_STRINGS: usize = 16;
/// Maximum length of a stop string. Text that may begin one is withheld.
const MAX_STOP_STRING_BYTES: usize = 1024;
/// Maximum number of token ids in `logit_bias` and in `stop_token_ids`. Each costs work in every step.
pub(super) const MAX_TOKEN_IDS: usize = 1024;
/// Maximum number of alternatives per token: OpenAI's limit for chat. OpenAI allows 5 for completions, vendors more.
pub(crate) const TOP_LOGPROBS_MAX: i64 = 20;

/// Parameters that both endpoints share.
#[derive(Clone, Debug)]
pub(crate) struct GenerationParams {
    pub(crate) sampling: Sampling,
    pub(crate) stop: StopConditions,
    /// Strings that end a choice.
    pub(crate) stop_strings: Vec<String>,
    /// Keep the stop string, or the text of the stop token, in the output.
    pub(crate) include_stop: bool,
    /// Omit special tokens from the text.
    pub(crate) skip_special: bool,
    /// Choices per prompt.
    pub(crate) n: u32,
    /// The response contains the token ids of prompt and output.
    pub(crate) return_token_ids: bool,
    /// Salts of the cache domain: only requests with the same salts share blocks.
    pub(crate) cache_salts: Vec<String>,
    pub(crate) delivery: Delivery,
    /// Priority in the engine's queues.
    pub(crate) priority: Priority,
    /// The session, for routers with session affinity.
    pub(crate) session: Option<Arc<str>>,
    /// Time from the request's arrival within which the first token must be generated.
    pub(crate) deadline: Option<Duration>,
    /// How long blocks of the request are kept.
    pub(crate) retention: Retention,
}

/// How the response is delivered.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Delivery {
    /// One JSON object.
    Full,
    /// A stream of chunks.
    Stream {
        /// Which chunks have a `usage`.
        usage: StreamUsage,
    },
}

/// Which chunks of a stream have a `usage`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum StreamUsage {
    /// No chunk.
    Never,
    /// One additional chunk at the end.
    Last,
    /// All chunks, with the usage so far.
    Each,
}

impl Delivery {
    /// Which chunks have a `usage`.
    pub(crate) fn usage(self) -> StreamUsage {
        match self {
            Self::Full => StreamUsage::Never,
            Self::Stream { usage } => usage,
        }
    }
}

impl GenerationParams {
    /// Takes the shared fields. `vocabulary` is the number of tokens and `defaults` are the sampling defaults of the
    /// model. `max_tokens` is an argument because the endpoints name and default it differently.
    pub(crate) fn take(
        fields: &mut Fields,
        vocabulary: usize,
        defaults: SamplingDefaults,
        max_tokens: Option<i64>,
    ) -> Result<Self, Error> {
        reject_response_format(fields)?;
        let max_tokens = max_tokens.map(|max| max as u32);
        let min_tokens = fields.integer("min_tokens", 0..=u32::MAX.into())?.unwrap_or(0) as u32;
        if max_tokens.is_some_and(|max| min_tokens > max) {
            let message =
                format!("Invalid 'min_tokens': {min_tokens} is more than the requested maximum number of tokens.");
            return Err(Error::invalid("min_tokens", "integer_above_max_value", message));
        }
        let delivery = delivery(fields)?;
        let sampling = sampling::take(fields, vocabulary, defaults)?;
        if sampling.prompt_logprobs.is_some() && delivery != Delivery::Full {
            let message = "Unsupported value: 'prompt_logprobs' is not available with 'stream'.";
            return Err(Error::unsupported("prompt_logprobs", message));
        }
        let include_stop = fields.boolean("include_stop_str_in_output")?.unwrap_or(false);
        let salts = [fields.text("cache_salt")?, fields.text("extra_key")?];
        Ok(Self {
            sampling,
            stop: StopConditions {
                max_tokens,
                min_tokens,
                stop_tokens: stop_tokens(fields, vocabulary)?,
                ignore_eos: fields.boolean("ignore_eos")?.unwrap_or(false),
            },
            stop_strings: stop_strings(fields)?,
            include_stop: include_stop | fields.boolean("no_stop_trim")?.unwrap_or(false),
            skip_special: fields.boolean("skip_special_tokens")?.unwrap_or(true),
            n: fields.integer("n", 1..=CHOICES_MAX)?.unwrap_or(1) as u32,
            delivery,
            return_token_ids: fields.boolean("return_token_ids")?.unwrap_or(false),
            // The name of the field is part of the salt, so that equal values of the two fields differ.
            cache_salts: cache::SALTS
                .iter()
                .zip(salts)
                .filter_map(|(name, salt)| Some(format!("{name}={}", salt.filter(|salt| !salt.is_empty())?)))
                .collect(),
            priority: scheduling::take_priority(fields)?,
            session: scheduling::take_session(fields)?,
            deadline: scheduling::take_deadline(fields)?,
            retention: cache::take_retention(fields)?,
        })
    }
}

/// Rejects response formats other than text.
fn reject_response_format(fields: &mut Fields) -> Result<(), Error> {
    if let Some(mut format) = fields.object("response_format")?
        && let Some(kind) = format.text("type")?.filter(|kind| kind != "text")
    {
        let message = format!("Unsupported value: 'response_format.type' '{kind}'. Supported here: 'text'.");
        return Err(Error::unsupported("response_format", message));
    }
    Ok(())
}

fn stop_tokens(fields: &mut Fields, vocabulary: usize) -> Result<Vec<u32>, Error> {
    let ids = fields.array("stop_token_ids")?.unwrap_or_default();
    if ids.len() > MAX_TOKEN_IDS {
        return Err(too_long("stop_token_ids", MAX_TOKEN_IDS, ids.len()));
    }
    token_ids("stop_token_ids", &ids, vocabulary)
}

/// An array of token ids of the vocabulary.
fn token_ids(path: &str, ids: &[Value], vocabulary: usize) -> Result<Vec<u32>, Error> {
    let last = i64::try_from(vocabulary).unwrap_or(i64::MAX) - 1;
    let id = |(i, id)| integer(&format!("{path}[{i}]"), id, 0..=last).map(|id| id as u32);
    ids.iter().enumerate().map(id).collect()
}

fn stop_strings(fields: &mut Fields) -> Result<Vec<String>, Error> {
    let strings = match fields.value("stop")? {
        None => Vec::new(),
        Some(Value::String(one)) => vec![one],
        Some(Value::Array(many)) => many
            .into_iter()
            .enumerate()
            .map(|(i, item)| match item {
                Value::String(text) => Ok(text),
                other => Err(mistyped(&format!("stop[{i}]"), "a string", &other)),
            })
            .collect::<Result<_, _>>()?,
        Some(other) => return Err(mistyped("stop", "a string or an array of strings", &other)),
    };
    if strings.len() > MAX_STOP_STRINGS {
        return Err(too_long("stop", MAX_STOP_STRINGS, strings.len()));
    }
    if strings.iter().any(|text| text.is_empty() || text.len() > MAX_STOP_STRING_BYTES) {
        let message = format!("Invalid 'stop': expected strings of 1 to {MAX_STOP_STRING_BYTES} bytes.");
        return Err(Error::invalid("stop", "invalid_value", message));
    }
    Ok(strings)
}

fn delivery(fields: &mut Fields) -> Result<Delivery, Error> {
    let stream = fields.boolean("stream")?.unwrap_or(false);
    let Some(mut options) = fields.object("stream_options")? else {
        return Ok(if stream { Delivery::Stream { usage: StreamUsage::Never } } else { Delivery::Full });
    };
    if !stream {
        let message = "The 'stream_options' parameter is only allowed when 'stream' is enabled.";
        return Err(Error::invalid("stream_options", "invalid_value", message));
    }
    let last = options.boolean("include_usage")?.unwrap_or(false);
    let each = options.boolean("continuous_usage_stats")?.unwrap_or(false);
    for name in options.remaining() {
        known_fields::reject_misspelling(name, ["include_usage", "continuous_usage_stats"].into_iter())?;
    }
    // As in vLLM, `continuous_usage_stats` has no effect without `include_usage`.
    let usage = match (last, each) {
        (false, _) => StreamUsage::Never,
        (true, false) => StreamUsage::Last,
        (true, true) => StreamUsage::Each,
    };
    Ok(Delivery::Stream { usage })
}
