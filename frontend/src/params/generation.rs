//! The parameters that both endpoints share: how to sample, when to stop, how many choices, streamed or whole.

use super::fields::{Fields, integer, mistyped, too_long};
use super::{cache, known_fields, sampling, scheduling};
use crate::error::Error;
use serde_json::Value;
use std::sync::Arc;
use std::time::Duration;
use worker::engine::{Priority, Retention, Sampling, SamplingDefaults, StopRule};

/// OpenAI's limit.
pub(crate) const CHOICES_MAX: i64 = 128;
/// OpenAI allows 4; vendors more. Each costs a search per piece of text.
const STOP_STRINGS_MAX: usize = 16;
/// A stop string is held back while it may still be coming; nobody stops at a page.
const STOP_STRING_BYTES_MAX: usize = 1024;
/// Each costs an entry in every step.
pub(super) const BIASES_MAX: usize = 1024;
/// OpenAI's limit for chat; completions there allow 5, vendors as many as here.
pub(crate) const TOP_LOGPROBS_MAX: i64 = 20;

/// What both endpoints take.
#[derive(Clone, Debug)]
pub(crate) struct Controls {
    pub(crate) sampling: Sampling,
    pub(crate) stop: StopRule,
    /// Text at which to stop.
    pub(crate) stop_strings: Vec<String>,
    /// Leave the stop string (or the text of the stop token) in the output.
    pub(crate) include_stop: bool,
    /// Leave special tokens out of the text.
    pub(crate) skip_special: bool,
    /// Choices per prompt.
    pub(crate) n: u32,
    /// The answer has the tokens of prompt and output too.
    pub(crate) return_token_ids: bool,
    /// Only requests with the same salts share blocks.
    pub(crate) cache_salts: Vec<String>,
    pub(crate) delivery: Delivery,
    /// Whose turn it is when not all can be served at once.
    pub(crate) priority: Priority,
    /// What the request belongs together with.
    pub(crate) session: Option<Arc<str>>,
    /// From the request's arrival: when the first token is of no more use.
    pub(crate) deadline: Option<Duration>,
    /// How long its blocks are kept.
    pub(crate) retention: Retention,
}

/// How the answer is to come.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Delivery {
    /// In one piece.
    Whole,
    /// In pieces.
    Stream {
        /// Which of them have a usage.
        usage: StreamUsage,
    },
}

/// Which pieces of a stream have a usage.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum StreamUsage {
    /// None.
    Never,
    /// One after the last.
    Last,
    /// All, of what was generated so far.
    Each,
}

impl Delivery {
    /// Which pieces have a usage.
    pub(crate) fn usage(self) -> StreamUsage {
        match self {
            Self::Whole => StreamUsage::Never,
            Self::Stream { usage } => usage,
        }
    }
}

impl Controls {
    /// Takes the shared fields, for a model with so many tokens and these defaults. `max_tokens` goes in from outside: the
    /// endpoints name and default it differently.
    pub(crate) fn take(
        fields: &mut Fields,
        vocabulary: usize,
        defaults: SamplingDefaults,
        max_tokens: Option<i64>,
    ) -> Result<Self, Error> {
        refuse_response_format(fields)?;
        let max_tokens = max_tokens.map(|most| most as u32);
        let min_tokens = fields.integer("min_tokens", 0..=u32::MAX.into())?.unwrap_or(0) as u32;
        if max_tokens.is_some_and(|most| min_tokens > most) {
            let message =
                format!("Invalid 'min_tokens': {min_tokens} is more than the requested maximum number of tokens.");
            return Err(Error::invalid("min_tokens", "integer_above_max_value", message));
        }
        let delivery = delivery(fields)?;
        let sampling = sampling::take(fields, vocabulary, defaults)?;
        if sampling.prompt_logprobs.is_some() && delivery != Delivery::Whole {
            let message = "Unsupported value: 'prompt_logprobs' is not available with 'stream'.";
            return Err(Error::unsupported("prompt_logprobs", message));
        }
        let include_stop = fields.flag("include_stop_str_in_output")?.unwrap_or(false);
        let salts = [fields.text("cache_salt")?, fields.text("extra_key")?];
        Ok(Self {
            sampling,
            stop: StopRule {
                max_tokens,
                min_tokens,
                stop_tokens: stop_tokens(fields, vocabulary)?,
                ignore_eos: fields.flag("ignore_eos")?.unwrap_or(false),
            },
            stop_strings: stop_strings(fields)?,
            include_stop: include_stop | fields.flag("no_stop_trim")?.unwrap_or(false),
            skip_special: fields.flag("skip_special_tokens")?.unwrap_or(true),
            n: fields.integer("n", 1..=CHOICES_MAX)?.unwrap_or(1) as u32,
            delivery,
            return_token_ids: fields.flag("return_token_ids")?.unwrap_or(false),
            // Each salt is named by its field, so that one cannot pass for the other.
            cache_salts: ["cache_salt", "extra_key"]
                .iter()
                .zip(salts)
                .filter_map(|(name, salt)| Some(format!("{name}={}", salt.filter(|salt| !salt.is_empty())?)))
                .collect(),
            priority: urgency::take_priority(fields)?,
            session: urgency::take_session(fields)?,
            deadline: urgency::take_deadline(fields)?,
            retention: cache::take_retention(fields)?,
        })
    }
}

/// Text is the only format.
fn refuse_response_format(fields: &mut Fields) -> Result<(), Error> {
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
    if ids.len() > BIASES_MAX {
        return Err(too_long("stop_token_ids", BIASES_MAX, ids.len()));
    }
    token_ids("stop_token_ids", &ids, vocabulary)
}

/// An array of token ids, each of which exists.
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
    if strings.len() > STOP_STRINGS_MAX {
        return Err(too_long("stop", STOP_STRINGS_MAX, strings.len()));
    }
    if strings.iter().any(|text| text.is_empty() || text.len() > STOP_STRING_BYTES_MAX) {
        let message = format!("Invalid 'stop': expected strings of 1 to {STOP_STRING_BYTES_MAX} bytes.");
        return Err(Error::invalid("stop", "invalid_value", message));
    }
    Ok(strings)
}

fn delivery(fields: &mut Fields) -> Result<Delivery, Error> {
    let stream = fields.flag("stream")?.unwrap_or(false);
    let Some(mut options) = fields.object("stream_options")? else {
        return Ok(if stream { Delivery::Stream { usage: StreamUsage::Never } } else { Delivery::Whole });
    };
    if !stream {
        let message = "The 'stream_options' parameter is only allowed when 'stream' is enabled.";
        return Err(Error::invalid("stream_options", "invalid_value", message));
    }
    let last = options.flag("include_usage")?.unwrap_or(false);
    let each = options.flag("continuous_usage_stats")?.unwrap_or(false);
    for name in options.left() {
        known::refuse_slip(name, ["include_usage", "continuous_usage_stats"].into_iter())?;
    }
    // As vLLM has it, the second does nothing without the first.
    let usage = match (last, each) {
        (false, _) => StreamUsage::Never,
        (true, false) => StreamUsage::Last,
        (true, true) => StreamUsage::Each,
    };
    Ok(Delivery::Stream { usage })
}
