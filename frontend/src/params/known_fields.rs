//! Every request field of OpenAI, vLLM and SGLang, and what becomes of it here. A field that would change the answer and is not
//! done is refused by its name; so is a name one slip away from a known one. Other fields are ignored, and counted.
//!
//! `docs/api.md` has this table as a page, which a test compares.

use super::fields::Fields;
use crate::error::Error;
use serde_json::Value;

/// An endpoint that generates.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Shape {
    /// `/v1/chat/completions`.
    Chat,
    /// `/v1/completions`.
    Completions,
}

/// What becomes of a field.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Effect {
    /// It does what it says.
    Done,
    /// A request that has it is refused.
    Refused,
    /// It is accepted, and nothing would be different without it.
    Nothing,
}

use Effect::{Done, Nothing, Refused};

/// A request field.
#[derive(Clone, Copy)]
struct Field {
    name: &'static str,
    /// Who documents it, for the page.
    #[cfg_attr(not(test), expect(dead_code, reason = "only the page, which a test compares, says it"))]
    from: &'static str,
    chat: Effect,
    completions: Effect,
    /// Where it is refused: a value that asks for nothing, beside null, false and what is empty.
    neutral: &'static str,
    /// Where it is refused: what to do instead.
    hint: &'static str,
}

const OPENAI: &str = "OpenAI";
const VLLM: &str = "vLLM";
const SGLANG: &str = "SGLang";
const BOTH: &str = "vLLM, SGLang";
const OTHERS: &str = "others";
const OURS: &str = "Blockyard";

const fn on(chat: Effect, completions: Effect, from: &'static str, name: &'static str) -> Field {
    Field { name, from, chat, completions, neutral: "null", hint: "" }
}

const fn done(from: &'static str, name: &'static str) -> Field {
    on(Done, Done, from, name)
}

const fn nothing(from: &'static str, name: &'static str) -> Field {
    on(Nothing, Nothing, from, name)
}

const fn refused(from: &'static str, name: &'static str) -> Field {
    on(Refused, Refused, from, name)
}

impl Field {
    const fn neutral(self, neutral: &'static str) -> Self {
        Self { neutral, ..self }
    }

    const fn hint(self, hint: &'static str) -> Self {
        Self { hint, ..self }
    }

    fn effect(&self, shape: Shape) -> Effect {
        match shape {
            Shape::Chat => self.chat,
            Shape::Completions => self.completions,
        }
    }

    /// Whether a value asks for nothing.
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
    done(OPENAI, "model"),
    on(Done, Refused, OPENAI, "messages").hint("`prompt`, or /v1/chat/completions"),
    on(Refused, Done, OPENAI, "prompt").hint("`messages`, or /v1/completions"),
    done(OPENAI, "max_tokens"),
    on(Done, Refused, OPENAI, "max_completion_tokens").hint("`max_tokens`"),
    done(OPENAI, "stream"),
    done(OPENAI, "stream_options"),
    done(OPENAI, "n"),
    on(Refused, Done, OPENAI, "best_of").neutral("1").hint("`n`"),
    done(OPENAI, "seed"),
    done(OPENAI, "temperature"),
    done(OPENAI, "top_p"),
    done(OPENAI, "frequency_penalty"),
    done(OPENAI, "presence_penalty"),
    done(OPENAI, "logit_bias"),
    done(OPENAI, "stop"),
    done(OPENAI, "logprobs"),
    on(Done, Refused, OPENAI, "top_logprobs").neutral("0").hint("`logprobs`"),
    on(Refused, Done, OPENAI, "echo"),
    refused(OPENAI, "suffix"),
    on(Done, Refused, OPENAI, "tools").hint("/v1/chat/completions"),
    on(Done, Refused, OPENAI, "tool_choice").neutral("\"none\"").hint("/v1/chat/completions"),
    nothing(OPENAI, "parallel_tool_calls"),
    refused(OPENAI, "functions").hint("`tools`"),
    refused(OPENAI, "function_call").neutral("\"none\"").hint("`tool_choice`"),
    done(OPENAI, "response_format"),
    on(Done, Refused, OPENAI, "modalities").neutral("[\"text\"]"),
    refused(OPENAI, "audio"),
    refused(OPENAI, "web_search_options"),
    on(Done, Nothing, OPENAI, "reasoning_effort"),
    refused(OPENAI, "verbosity").neutral("\"medium\""),
    nothing(OPENAI, "prediction"),
    done(OPENAI, "user"),
    done(OPENAI, "prompt_cache_key"),
    nothing(OPENAI, "prompt_cache_retention"),
    nothing(OPENAI, "safety_identifier"),
    nothing(OPENAI, "service_tier"),
    nothing(OPENAI, "store"),
    nothing(OPENAI, "metadata"),
    done(BOTH, "top_k"),
    done(BOTH, "min_p"),
    done(BOTH, "repetition_penalty"),
    done(BOTH, "min_tokens"),
    done(BOTH, "ignore_eos"),
    done(BOTH, "stop_token_ids"),
    done(BOTH, "skip_special_tokens"),
    done(BOTH, "priority"),
    done(VLLM, "include_stop_str_in_output"),
    done(SGLANG, "no_stop_trim"),
    done(VLLM, "add_special_tokens"),
    done(VLLM, "prompt_logprobs"),
    done(VLLM, "return_token_ids"),
    done(BOTH, "cache_salt"),
    done(SGLANG, "extra_key"),
    on(Done, Nothing, BOTH, "chat_template_kwargs"),
    on(Done, Nothing, VLLM, "add_generation_prompt"),
    on(Done, Refused, BOTH, "continue_final_message"),
    refused(VLLM, "chat_template").hint("the model's own, and `chat_template_kwargs`"),
    refused(VLLM, "documents"),
    refused(VLLM, "use_beam_search").hint("`n`"),
    refused(VLLM, "length_penalty").neutral("1"),
    refused(VLLM, "early_stopping"),
    refused(VLLM, "allowed_token_ids").hint("`logit_bias`"),
    refused(VLLM, "bad_words").hint("`logit_bias`"),
    refused(VLLM, "truncate_prompt_tokens"),
    refused(VLLM, "truncation_side"),
    refused(VLLM, "prompt_embeds"),
    refused(VLLM, "logits_processors"),
    refused(VLLM, "structured_outputs"),
    refused(VLLM, "guided_json"),
    refused(VLLM, "guided_regex"),
    refused(VLLM, "guided_choice"),
    refused(VLLM, "guided_grammar"),
    refused(VLLM, "guided_decoding_backend"),
    refused(VLLM, "guided_whitespace_pattern"),
    refused(BOTH, "structural_tag"),
    refused(VLLM, "return_tokens_as_token_ids").hint("`return_token_ids`"),
    refused(VLLM, "thinking_token_budget"),
    refused(VLLM, "vllm_xargs"),
    refused(VLLM, "kv_transfer_params"),
    refused(VLLM, "media_io_kwargs"),
    nothing(VLLM, "mm_processor_kwargs"),
    nothing(VLLM, "request_id"),
    nothing(VLLM, "include_reasoning"),
    nothing(BOTH, "spaces_between_special_tokens"),
    refused(SGLANG, "regex"),
    refused(SGLANG, "ebnf"),
    refused(SGLANG, "json_schema"),
    refused(SGLANG, "stop_regex"),
    refused(SGLANG, "lora_path"),
    refused(SGLANG, "session_params").hint("`prompt_cache_key`"),
    refused(SGLANG, "input_ids"),
    refused(SGLANG, "image_data"),
    refused(SGLANG, "video_data"),
    refused(SGLANG, "audio_data"),
    refused(SGLANG, "return_hidden_states"),
    refused(SGLANG, "custom_logit_processor"),
    refused(SGLANG, "custom_params"),
    refused(SGLANG, "bootstrap_host"),
    refused(SGLANG, "bootstrap_port"),
    refused(SGLANG, "bootstrap_room"),
    nothing(SGLANG, "rid"),
    nothing(SGLANG, "separate_reasoning"),
    nothing(SGLANG, "stream_reasoning"),
    nothing(SGLANG, "data_parallel_rank"),
    refused(OTHERS, "grammar"),
    refused(OTHERS, "max_new_tokens").hint("`max_tokens`"),
    refused(OTHERS, "min_new_tokens").hint("`min_tokens`"),
    refused(OTHERS, "n_predict").hint("`max_tokens`"),
    refused(OTHERS, "n_probs").neutral("0").hint("`logprobs`"),
    refused(OTHERS, "repeat_penalty").neutral("1").hint("`repetition_penalty`"),
    refused(OTHERS, "typical_p").neutral("1"),
    refused(OTHERS, "mirostat").neutral("0"),
    refused(OTHERS, "do_sample").neutral("true").hint("`temperature`"),
    nothing(OTHERS, "cache_prompt"),
    done(OURS, "cache"),
    done(OURS, "deadline_ms"),
];

/// Shorter names are close to anything.
const NAME_MIN: usize = 3;
/// Names of unknown fields are a client's; a log line has room for a few.
const NAMES_LOGGED: usize = 8;

/// Refuses what is left of a request's fields and would change the answer. Returns how many are left that are not known.
pub(crate) fn check(fields: &mut Fields, shape: Shape) -> Result<u64, Error> {
    let left: Vec<String> = fields.left().map(str::to_owned).collect();
    let mut unknown = Vec::new();
    for name in left {
        if let Some(field) = FIELDS.iter().find(|field| field.name == name) {
            debug_assert!(field.effect(shape) != Done, "{name} is in the table as done, and was not taken");
            if field.effect(shape) == Refused && fields.value(&name)?.is_some_and(|value| !field.is_neutral(&value)) {
                return Err(refusal(field));
            }
            continue;
        }
        let known = FIELDS.iter().filter(|field| field.effect(shape) != Nothing).map(|field| field.name);
        refuse_slip(&name, known)?;
        unknown.push(name);
    }
    if !unknown.is_empty() {
        let shown: Vec<String> =
            unknown.iter().take(NAMES_LOGGED).map(|name| name.chars().take(64).collect()).collect();
        tracing::debug!(fields = ?shown, count = unknown.len(), "unknown request fields are ignored");
    }
    Ok(unknown.len() as u64)
}

/// Refuses a name that is one slip away from one of `known`.
pub(crate) fn refuse_slip<'a>(name: &str, mut known: impl Iterator<Item = &'a str>) -> Result<(), Error> {
    match known.find(|known| is_slip(name, known)) {
        Some(known) => {
            let message = format!("Unknown parameter: '{name}'. Did you mean '{known}'?");
            Err(Error::invalid(name, "unknown_parameter", message))
        }
        None => Ok(()),
    }
}

fn refusal(field: &Field) -> Error {
    let Field { name, hint, .. } = field;
    let instead = if hint.is_empty() { String::new() } else { format!(" Use {hint} instead.") };
    let message = format!("Unsupported parameter: '{name}' is not supported here.{instead}");
    Error::invalid(*name, "unsupported_parameter", message)
}

/// Whether one name became the other by one slip: a character too many, too few or wrong, two neighbours swapped, or another
/// way of writing several words as one.
fn is_slip(name: &str, known: &str) -> bool {
    if known.len() < NAME_MIN {
        return false;
    }
    let words = |text: &str| text.replace(['_', '-'], "").to_ascii_lowercase();
    // Of names that long only one that is about as long can be meant.
    if name.len() > known.len() + 8 {
        return false;
    }
    words(name) == words(known) || is_one_edit(name.as_bytes(), known.as_bytes())
}

/// Damerau and Levenshtein's distance is one (optimal string alignment).
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
