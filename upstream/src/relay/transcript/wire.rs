//! The chunks of a stream of chat or completions as vLLM writes them: the members that are read and replaced.

use crate::relay::chunk::Usage;
use crate::relay::splice::Splice;
use bytes::Bytes;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use std::ops::Range;

/// A chunk. Null counts as absent.
#[derive(Deserialize)]
pub(super) struct Chunk<'a> {
    #[serde(borrow, default)]
    pub(super) id: Option<&'a RawValue>,
    #[serde(borrow, default)]
    pub(super) created: Option<&'a RawValue>,
    #[serde(borrow, default)]
    pub(super) model: Option<&'a RawValue>,
    #[serde(borrow)]
    pub(super) choices: Vec<Choice<'a>>,
    #[serde(borrow, default)]
    pub(super) usage: Option<&'a RawValue>,
    #[serde(borrow, default)]
    pub(super) system_fingerprint: Option<&'a RawValue>,
    /// Chat has them here, in its first chunk.
    #[serde(borrow, default)]
    pub(super) prompt_token_ids: Option<&'a RawValue>,
}

/// A choice of a chunk.
#[derive(Deserialize)]
pub(super) struct Choice<'a> {
    #[serde(default)]
    pub(super) index: u64,
    /// Of completions.
    #[serde(borrow, default)]
    pub(super) text: Option<&'a RawValue>,
    /// Of chat.
    #[serde(borrow, default)]
    pub(super) delta: Option<&'a RawValue>,
    #[serde(borrow, default)]
    pub(super) logprobs: Option<&'a RawValue>,
    #[serde(borrow, default)]
    pub(super) finish_reason: Option<&'a RawValue>,
    #[serde(borrow, default)]
    pub(super) stop_reason: Option<&'a RawValue>,
    /// Completions have them here, in their first chunk.
    #[serde(borrow, default)]
    pub(super) prompt_token_ids: Option<&'a RawValue>,
    #[serde(borrow, default)]
    pub(super) token_ids: Option<&'a RawValue>,
}

/// What a chunk adds to the message of a chat.
#[derive(Deserialize)]
struct Delta<'a> {
    #[serde(borrow, default)]
    content: Option<&'a RawValue>,
    #[serde(borrow, default)]
    reasoning: Option<&'a RawValue>,
    #[serde(borrow, default)]
    reasoning_content: Option<&'a RawValue>,
    #[serde(borrow, default)]
    tool_calls: Option<&'a RawValue>,
    #[serde(borrow, default)]
    function_call: Option<&'a RawValue>,
}

/// The members that all chunks of a stream have alike, each as its JSON.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(super) struct Head {
    id: String,
    created: String,
    model: String,
}

/// Parts of a text, and what takes their place.
pub(super) type Edits = Vec<(Range<usize>, String)>;

pub(super) const NULL: &str = "null";

impl<'a> Choice<'a> {
    /// The text as JSON. `Err`: a parser of the server takes the output apart, so that the text is not all of it.
    pub(super) fn text(&self) -> Result<Option<&'a RawValue>, ()> {
        let Some(delta) = self.delta else { return Ok(self.text) };
        let delta: Delta<'a> = serde_json::from_str(delta.get()).map_err(drop)?;
        let Delta { content, reasoning, reasoning_content, tool_calls, function_call } = delta;
        let is_parsed = [reasoning, reasoning_content, tool_calls, function_call].iter().any(Option::is_some);
        // Without a parser every chunk has a content, if only an empty one.
        if is_parsed || content.is_none() { Err(()) } else { Ok(content) }
    }

    /// The server sends such a chunk only because its request asks for token ids: a parser has not decided yet what
    /// the tokens belong to.
    pub(super) fn is_of_ids_only(&self) -> bool {
        self.delta.is_some_and(|delta| delta.get() == "{}") && self.token_ids.is_some() && self.finish_reason.is_none()
    }
}

impl Head {
    pub(super) fn of(chunk: &Chunk<'_>) -> Option<Self> {
        let text = |value: Option<&RawValue>| value.map(|value| value.get().to_owned());
        Some(Self { id: text(chunk.id)?, created: text(chunk.created)?, model: text(chunk.model)? })
    }

    /// What makes a chunk of another stream one of this stream.
    pub(super) fn edits(&self, data: &[u8], chunk: &Chunk<'_>) -> Edits {
        let Self { id, created, model } = self;
        let members = [(chunk.id, id), (chunk.created, created), (chunk.model, model)];
        members.into_iter().filter_map(|(value, own)| Some((range_in(data, value?), own.clone()))).collect()
    }

    /// A chunk of chat with these choices and the rest of its members, as JSON.
    pub(super) fn chat_chunk(&self, choices: &str, usage: Option<&str>, fingerprint: Option<&RawValue>) -> String {
        let Self { id, created, model } = self;
        let start = format!(r#""id":{id},"object":"chat.completion.chunk","created":{created},"model":{model}"#);
        let usage = usage.map(|usage| format!(r#","usage":{usage}"#)).unwrap_or_default();
        let fingerprint = fingerprint.map(|text| format!(r#","system_fingerprint":{text}"#)).unwrap_or_default();
        format!(r#"{{{start},"choices":[{choices}]{usage}{fingerprint}}}"#)
    }
}

/// The choice of a completion as one of chat. `text`, `ids`: JSON.
pub(super) fn chat_choice(choice: &Choice<'_>, text: &str, ids: &str) -> String {
    let finish = choice.finish_reason.map_or(NULL, RawValue::get);
    // Only the last chunk has it.
    let stop = choice.finish_reason.map(|_| choice.stop_reason.map_or(NULL, RawValue::get));
    let stop = stop.map(|reason| format!(r#","stop_reason":{reason}"#)).unwrap_or_default();
    let start = format!(r#""index":0,"delta":{{"content":{text}}},"logprobs":null"#);
    format!(r#"{{{start},"finish_reason":{finish}{stop},"token_ids":{ids}}}"#)
}

/// The usage of a stream, of that of the server which has continued it. `before`: tokens of the prompt of that server
/// which another one had generated.
pub(super) fn whole_usage(usage: &RawValue, before: usize) -> Option<String> {
    let json = usage.get();
    let Usage { prompt_tokens, completion_tokens, cached_tokens } = Usage::read(json.as_bytes())?;
    let prompt = prompt_tokens?.saturating_sub(before as u64);
    let mut splice = Splice::scan(Bytes::copy_from_slice(json.as_bytes())).ok()?;
    splice.set("prompt_tokens", prompt.to_string());
    if let Some(tokens) = completion_tokens {
        splice.set("completion_tokens", tokens.saturating_add(before as u64).to_string());
    }
    if cached_tokens.is_some_and(|cached| cached > prompt) {
        splice.set_in("prompt_tokens_details", "cached_tokens", prompt.to_string()).ok()?;
    }
    String::from_utf8(splice.finish().to_vec()).ok()
}

/// Where a value that was read from `data` is in it.
pub(super) fn range_in(data: &[u8], value: &RawValue) -> Range<usize> {
    let start = value.get().as_ptr().addr() - data.as_ptr().addr();
    start..start + value.get().len()
}

/// The event `raw` with these edits of the payload that starts at `offset`.
pub(super) fn edited(raw: &[u8], offset: usize, mut edits: Edits) -> Bytes {
    edits.sort_by_key(|(range, _)| range.start);
    let added: usize = edits.iter().map(|(_, text)| text.len()).sum();
    let mut out = Vec::with_capacity(raw.len() + added);
    let mut at = 0;
    for (range, text) in edits {
        out.extend_from_slice(&raw[at..offset + range.start]);
        out.extend_from_slice(text.as_bytes());
        at = offset + range.end;
    }
    out.extend_from_slice(&raw[at..]);
    out.into()
}
