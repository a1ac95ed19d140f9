//! The table of request fields of OpenAI, vLLM and SGLang, and whether they are supported.
//!
//! A field that would change the response but is not supported is rejected, and so is a likely misspelling of a known
//! field. Other unknown fields are ignored and counted. `docs/api.md` contains this table; a test compares the two.

use super::fields::Fields;
use crate::error::Error;
use serde_json::Value;

/// An endpoint that generates.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum EndpointKind {
    /// `/v1/chat/completions`.
    Chat,
    /// `/v1/completions`.
    Completions,
}

/// Whether an endpoint supports a field.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Support {
    /// The field has its documented effect.
    Supported,
    /// A request with the field is rejected.
    Rejected,
    /// The field is accepted and has no effect.
    Ignored,
}

use Support::{Ignored, Rejected, Supported};

/// A request field.
#[derive(Clone, Copy)]
struct Field {
    name: &'static str,
    /// Its source, for the documentation.
    #[cfg_attr(not(test), expect(dead_code, reason = "only the test that compares the documentation reads it"))]
    from: &'static str,
    chat: Support,
    completions: Support,
    /// If rejected: the JSON value that has no effect and is accepted, beside null, false and empty values.
    neutral: &'static str,
    /// If rejected: the alternative.
    hint: &'static str,
}

const OPENAI: &str = "OpenAI";
const VLLM: &str = "vLLM";
const SGLANG: &str = "SGLang";
const BOTH: &str = "vLLM, SGLang";
const OTHERS: &str = "others";
const BLOCKYARD: &str = "Blockyard";

const fn field(chat: Support, completions: Support, from: &'static str, name: &'static str) -> Field {
    Field { name, from, chat, completions, neutral: "null", hint: "" }
}

const fn supported(from: &'static str, name: &'static str) -> Field {
    field(Supported, Supported, from, name)
}

const fn ignored(from: &'static str, name: &'static str) -> Field {
    field(Ignored, Ignored, from, name)
}

const fn rejected(from: &'static str, name: &'static str) -> Field {
    field(Rejected, Rejected, from, name)
}

impl Field {
    const fn neutral(self, neutral: &'static str) -> Self {
        Self { neutral, ..self }
    }

    const fn hint(self, hint: &'static str) -> Self {
        Self { hint, ..self }
    }

    fn support(&self, endpoint: EndpointKind) -> Support {
        match endpoint {
            EndpointKind::Chat => self.chat,
            EndpointKind::Completions => self.completions,
        }
    }

    /// Whether a value has no effect.
    fn is_neutral(&self, value: &Value) -> bool {
        let neutral: Value = serde_json::from_str(self.neutral).expect("the table holds JSON");
        match value {
            Value::Null | Value::Bool(false) => true,
            Value::String(text) if text.is_empty() => true,
            Value::Array(items) if items.is_empty() => true,
            Value::Object(fields) if fields.is_empty() => true,
            Value::Number(number) if neutral.is_number() => number.as_f64() == neutral.as_f64(),
            value => *value == neutral,
        }
    }
}

const FIELDS: &[Field] = &[
    supported(OPENAI, "model"),
    field(Supported, Rejected, OPENAI, "messages").hint("`prompt`, or /v1/chat/completions"),
    field(Rejected, Supported, OPENAI, "prompt").hint("`messages`, or /v1/completions"),
    supported(OPENAI, "max_tokens"),
    field(Supported, Rejected, OPENAI, "max_completion_tokens").hint("`max_tokens`"),
    supported(OPENAI, "stream"),
    supported(OPENAI, "stream_options"),
    supported(OPENAI, "n"),
    field(Rejected, Supported, OPENAI, "best_of").neutral("1").hint("`n`"),
    supported(OPENAI, "seed"),
    supported(OPENAI, "temperature"),
    supported(OPENAI, "top_p"),
    supported(OPENAI, "frequency_penalty"),
    supported(OPENAI, "presence_penalty"),
    supported(OPENAI, "logit_bias"),
    supported(OPENAI, "stop"),
    supported(OPENAI, "logprobs"),
    field(Supported, Rejected, OPENAI, "top_logprobs").neutral("0").hint("`logprobs`"),
    field(Rejected, Supported, OPENAI, "echo"),
    rejected(OPENAI, "suffix"),
    field(Supported, Rejected, OPENAI, "tools").hint("/v1/chat/completions"),
    field(Supported, Rejected, OPENAI, "tool_choice").neutral("\"none\"").hint("/v1/chat/completions"),
    ignored(OPENAI, "parallel_tool_calls"),
    rejected(OPENAI, "functions").hint("`tools`"),
    rejected(OPENAI, "function_call").neutral("\"none\"").hint("`tool_choice`"),
    supported(OPENAI, "response_format"),
    field(Supported, Rejected, OPENAI, "modalities").neutral("[\"text\"]"),
    rejected(OPENAI, "audio"),
    rejected(OPENAI, "web_search_options"),
    field(Supported, Ignored, OPENAI, "reasoning_effort"),
    rejected(OPENAI, "verbosity").neutral("\"medium\""),
    ignored(OPENAI, "prediction"),
    supported(OPENAI, "user"),
    supported(OPENAI, "prompt_cache_key"),
    ignored(OPENAI, "prompt_cache_retention"),
    ignored(OPENAI, "safety_identifier"),
    ignored(OPENAI, "service_tier"),
    ignored(OPENAI, "store"),
    ignored(OPENAI, "metadata"),
    supported(BOTH, "top_k"),
    supported(BOTH, "min_p"),
    supported(BOTH, "repetition_penalty"),
    supported(BOTH, "min_tokens"),
    supported(BOTH, "ignore_eos"),
    supported(BOTH, "stop_token_ids"),
    supported(BOTH, "skip_special_tokens"),
    supported(BOTH, "priority"),
    supported(VLLM, "include_stop_str_in_output"),
    supported(SGLANG, "no_stop_trim"),
    supported(VLLM, "add_special_tokens"),
    supported(VLLM, "prompt_logprobs"),
    supported(VLLM, "return_token_ids"),
    supported(BOTH, "cache_salt"),
    supported(SGLANG, "extra_key"),
    field(Supported, Ignored, BOTH, "chat_template_kwargs"),
    field(Supported, Ignored, VLLM, "add_generation_prompt"),
    field(Supported, Rejected, BOTH, "continue_final_message"),
    rejected(VLLM, "chat_template").hint("the model's own, and `chat_template_kwargs`"),
    rejected(VLLM, "documents"),
    rejected(VLLM, "use_beam_search").hint("`n`"),
    rejected(VLLM, "length_penalty").neutral("1"),
    rejected(VLLM, "early_stopping"),
    rejected(VLLM, "allowed_token_ids").hint("`logit_bias`"),
    rejected(VLLM, "bad_words").hint("`logit_bias`"),
    rejected(VLLM, "truncate_prompt_tokens"),
    rejected(VLLM, "truncation_side"),
    rejected(VLLM, "prompt_embeds"),
    rejected(VLLM, "logits_processors"),
    rejected(VLLM, "structured_outputs"),
    rejected(VLLM, "guided_json"),
    rejected(VLLM, "guided_regex"),
    rejected(VLLM, "guided_choice"),
    rejected(VLLM, "guided_grammar"),
    rejected(VLLM, "guided_decoding_backend"),
    rejected(VLLM, "guided_whitespace_pattern"),
    rejected(BOTH, "structural_tag"),
    rejected(VLLM, "return_tokens_as_token_ids").hint("`return_token_ids`"),
    rejected(VLLM, "thinking_token_budget"),
    rejected(VLLM, "vllm_xargs"),
    rejected(VLLM, "kv_transfer_params"),
    rejected(VLLM, "media_io_kwargs"),
    ignored(VLLM, "mm_processor_kwargs"),
    ignored(VLLM, "request_id"),
    ignored(VLLM, "include_reasoning"),
    ignored(BOTH, "spaces_between_special_tokens"),
    rejected(SGLANG, "regex"),
    rejected(SGLANG, "ebnf"),
    rejected(SGLANG, "json_schema"),
    rejected(SGLANG, "stop_regex"),
    rejected(SGLANG, "lora_path"),
    rejected(SGLANG, "session_params").hint("`prompt_cache_key`"),
    rejected(SGLANG, "input_ids"),
    rejected(SGLANG, "image_data"),
    rejected(SGLANG, "video_data"),
    rejected(SGLANG, "audio_data"),
    rejected(SGLANG, "return_hidden_states"),
    rejected(SGLANG, "custom_logit_processor"),
    rejected(SGLANG, "custom_params"),
    rejected(SGLANG, "bootstrap_host"),
    rejected(SGLANG, "bootstrap_port"),
    rejected(SGLANG, "bootstrap_room"),
    ignored(SGLANG, "rid"),
    ignored(SGLANG, "separate_reasoning"),
    ignored(SGLANG, "stream_reasoning"),
    ignored(SGLANG, "data_parallel_rank"),
    rejected(OTHERS, "grammar"),
    rejected(OTHERS, "max_new_tokens").hint("`max_tokens`"),
    rejected(OTHERS, "min_new_tokens").hint("`min_tokens`"),
    rejected(OTHERS, "n_predict").hint("`max_tokens`"),
    rejected(OTHERS, "n_probs").neutral("0").hint("`logprobs`"),
    rejected(OTHERS, "repeat_penalty").neutral("1").hint("`repetition_penalty`"),
    rejected(OTHERS, "typical_p").neutral("1"),
    rejected(OTHERS, "mirostat").neutral("0"),
    rejected(OTHERS, "do_sample").neutral("true").hint("`temperature`"),
    ignored(OTHERS, "cache_prompt"),
    supported(BLOCKYARD, "cache"),
    supported(BLOCKYARD, "deadline_ms"),
];

/// Minimum length of a known name whose misspellings are found. Shorter names resemble too many others.
const MIN_NAME_BYTES: usize = 3;
/// Maximum number of unknown names in a log line.
const MAX_LOGGED_NAMES: usize = 8;

/// Rejects remaining fields of a request that would change the response. Returns the number of unknown fields.
pub(crate) fn check(fields: &mut Fields, endpoint: EndpointKind) -> Result<u64, Error> {
    let left: Vec<String> = fields.remaining().map(str::to_owned).collect();
    let mut unknown = Vec::new();
    for name in left {
        if let Some(field) = FIELDS.iter().find(|field| field.name == name) {
            debug_assert!(
                field.support(endpoint) != Supported,
                "{name} is in the table as supported, but was not taken"
            );
            if field.support(endpoint) == Rejected
                && fields.value(&name)?.is_some_and(|value| !field.is_neutral(&value))
            {
                return Err(unsupported_field(field));
            }
            continue;
        }
        let known = FIELDS.iter().filter(|field| field.support(endpoint) != Ignored).map(|field| field.name);
        reject_misspelling(&name, known)?;
        unknown.push(name);
    }
    if !unknown.is_empty() {
        let shown: Vec<String> =
            unknown.iter().take(MAX_LOGGED_NAMES).map(|name| name.chars().take(64).collect()).collect();
        tracing::debug!(fields = ?shown, count = unknown.len(), "unknown request fields are ignored");
    }
    Ok(unknown.len() as u64)
}

/// The error of a required field that is missing: its misspelling, if one was not taken.
pub(crate) fn missing(fields: &Fields, name: &'static str) -> Error {
    let misspelt = fields.remaining().find_map(|other| reject_misspelling(other, [name].into_iter()).err());
    misspelt.unwrap_or_else(|| fields.missing(name))
}

/// Rejects a name that is a likely misspelling of one of `known`.
pub(crate) fn reject_misspelling<'a>(name: &str, mut known: impl Iterator<Item = &'a str>) -> Result<(), Error> {
    match known.find(|known| is_misspelling(name, known)) {
        Some(known) => {
            let message = format!("Unknown parameter: '{name}'. Did you mean '{known}'?");
            Err(Error::invalid(name, "unknown_parameter", message))
        }
        None => Ok(()),
    }
}

fn unsupported_field(field: &Field) -> Error {
    let Field { name, hint, .. } = field;
    let instead = if hint.is_empty() { String::new() } else { format!(" Use {hint} instead.") };
    let message = format!("Unsupported parameter: '{name}' is not supported here.{instead}");
    Error::invalid(*name, "unsupported_parameter", message)
}

/// Whether `name` is a likely misspelling of `known`: one character added, left out, replaced or swapped with its
/// neighbour, or another way to join words.
fn is_misspelling(name: &str, known: &str) -> bool {
    if known.len() < MIN_NAME_BYTES {
        return false;
    }
    let words = |text: &str| text.replace(['_', '-'], "").to_ascii_lowercase();
    // Bounds the work on very long names.
    if name.len() > known.len() + 8 {
        return false;
    }
    words(name) == words(known) || is_one_edit(name.as_bytes(), known.as_bytes())
}

/// Whether the Damerau-Levenshtein distance is one (optimal string alignment).
fn is_one_edit(a: &[u8], b: &[u8]) -> bool {
    let start = a.iter().zip(b).take_while(|(a, b)| a == b).count();
    let (a, b) = (&a[start..], &b[start..]);
    let end = a.iter().rev().zip(b.iter().rev()).take_while(|(a, b)| a == b).count();
    let (a, b) = (&a[..a.len() - end], &b[..b.len() - end]);
    match (a, b) {
        ([_], [] | [_]) | ([], [_]) => true,
        ([a, b], [c, d]) => (a, b) == (d, c),
        _ => false,
    }
}

#[cfg(test)]
mod tests;
