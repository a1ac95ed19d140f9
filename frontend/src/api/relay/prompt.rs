//! The prompt of a relayed request, for the tokens by which it is routed.
//!
//! ```text
//!   chats and completions        as they are
//!   embeddings and the like      `input` as the prompt of a completion
//!   messages, responses          converted to chats, as vLLM does it before it renders them
//! ```
//! Not here: prompts of token ids, which need no tokenizer (`estimate`).

mod messages;
mod responses;

use crate::model::PromptText;
use crate::params::{Fields, Raw};
use crate::tokenizers::{CheckedTokenizer, ModelTokenizers};
use bytes::Bytes;
use memchr::memmem;
use serde::de::IgnoredAny;
use serde_json::{Map, Value, json};
use std::borrow::Cow;
use std::collections::HashMap;

/// Fields of a chat request that change its prompt.
const CHAT: [&str; 11] = [
    "messages",
    "tools",
    "documents",
    "chat_template",
    "chat_template_kwargs",
    "reasoning_effort",
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
    "mm_processor_kwargs",
    "media_io_kwargs",
];
/// Fields of a chat request that `/tokenize` takes as variables of the template.
const VARIABLES: [&str; 2] = ["documents", "reasoning_effort"];
/// Kinds of parts of messages that are no text, as they stand in JSON text. Within a string the quotes are escaped.
const MEDIA: [&str; 4] = [r#""image_url""#, r#""input_audio""#, r#""audio_url""#, r#""video_url""#];
/// Fields with which the prompt is other than rendered, or has blocks of its own: files and adapters of SGLang's
/// `/generate`.
const UNSUPPORTED: [&str; 9] = [
    "truncate_prompt_tokens",
    "prompt_embeds",
    "padding",
    "input_embeds",
    "image_data",
    "video_data",
    "audio_data",
    "lora_path",
    "session_params",
];

/// The fields of a request that its prompt is made of, with the messages or the text first.
#[derive(Debug)]
pub(super) struct PromptFields(Vec<(&'static str, Field)>);

/// The value of a field.
#[derive(Debug)]
enum Field {
    /// As the request has it: JSON text.
    Sent(Raw),
    /// Converted from fields of another API.
    Converted(Value),
}

/// The fields of a chat that another API's request was converted to. Null stands for an absent one.
type ChatFields = Vec<(&'static str, Value)>;

impl PromptFields {
    /// Whether the prompts of requests to this path are parsed and converted, which takes longer than reading them.
    pub(super) fn are_converted(path: &str) -> bool {
        matches!(path, "/v1/messages" | "/v1/responses")
    }

    /// The prompt of a request to this path, if it is one text or one conversation whose rendering is known.
    pub(super) fn peek(path: &str, fields: &Fields, tokenizers: &ModelTokenizers) -> Option<Self> {
        let fields = &fields.for_second_reader();
        if UNSUPPORTED.iter().any(|name| present(fields, name).is_some()) {
            return None;
        }
        match path {
            "/v1/chat/completions" => Self::of_chat(fields),
            "/v1/completions" => Self::of_text(fields, "prompt"),
            "/generate" => Self::of_text(fields, "text"),
            "/v1/embeddings" | "/pooling" | "/classify" => Self::of_pooling(fields),
            "/v1/messages" if tokenizers.convert_as_vllm() => messages::chat_fields(fields).map(Self::converted),
            "/v1/responses" if tokenizers.convert_as_vllm() => responses::chat_fields(fields).map(Self::converted),
            _ => None,
        }
    }

    fn of_chat(fields: &Fields) -> Option<Self> {
        present(fields, "messages")?;
        let sent = |name: &&'static str| Some((*name, Field::Sent(present(fields, name)?.clone())));
        Some(Self(CHAT.iter().filter_map(sent).collect()))
    }

    /// The text in the field of this name.
    fn of_text(fields: &Fields, name: &str) -> Option<Self> {
        let mut prompt = vec![("prompt", Field::Sent(only_text(present(fields, name)?)?))];
        let special = present(fields, "add_special_tokens").cloned();
        prompt.extend(special.map(|special| ("add_special_tokens", Field::Sent(special))));
        Some(Self(prompt))
    }

    /// The input of a vector or a score: a text, or a conversation, which ends without a prompt for an answer.
    fn of_pooling(fields: &Fields) -> Option<Self> {
        if present(fields, "input").is_some() {
            return Self::of_text(fields, "input");
        }
        let mut chat = Self::of_chat(fields)?;
        if present(fields, "add_generation_prompt").is_none() {
            chat.0.push(("add_generation_prompt", Field::Converted(false.into())));
        }
        Some(chat)
    }

    fn converted(fields: ChatFields) -> Self {
        let present = fields.into_iter().filter(|(_, value)| !value.is_null());
        Self(present.map(|(name, value)| (name, Field::Converted(value))).collect())
    }

    /// The prompt as text, if the local tokenizer knows its tokens.
    pub(super) fn text(&self, fields: &Fields, tokenizer: &CheckedTokenizer) -> Option<PromptText> {
        // They may hold images, which a JSON value should not copy.
        if self.0.iter().any(|(name, _)| name.ends_with("_io_kwargs") || name.ends_with("_processor_kwargs")) {
            return None;
        }
        let fields = fields.for_second_reader();
        let parsed = self.0.iter().map(|(name, field)| {
            let value = match field {
                Field::Sent(raw) => fields.parsed(name, raw).ok()?,
                Field::Converted(value) => value.clone(),
            };
            Some(((*name).to_owned(), value))
        });
        tokenizer.prompt(parsed.collect::<Option<Map<String, Value>>>()?)
    }

    /// The body of a request to `/tokenize`, the same for the same prompt. `None` for a prompt with images or the like:
    /// its blocks are not known by their tokens, and the server would load the images for the answer.
    pub(super) fn tokenize_body(&self, model: &str) -> Option<Bytes> {
        // A converted prompt has text only.
        if let (_, Field::Sent(prompt)) = self.0.first()?
            && MEDIA.iter().any(|kind| memmem::find(prompt.bytes(), kind.as_bytes()).is_some())
        {
            return None;
        }
        let mut body = serde_json::to_vec(&Map::from_iter([("model".to_owned(), Value::from(model))])).ok()?;
        body.pop();
        let (mut moved, mut variables) = (Vec::new(), None);
        for (name, field) in &self.0 {
            let json = field.json()?;
            if *name == "chat_template_kwargs" {
                variables = Some(json);
            } else if VARIABLES.contains(name) {
                moved.push((*name, json));
            } else {
                push(&mut body, name, &json);
            }
        }
        let variables = match (variables, moved.is_empty()) {
            (variables, true) => variables.map(Cow::into_owned),
            (None, false) => Some(b"{}".to_vec()),
            (Some(json), false) if json.starts_with(b"{") => Some(json.into_owned()),
            (Some(_), false) => return None,
        };
        if let Some(mut variables) = variables {
            for (name, json) in &moved {
                add(&mut variables, name, json);
            }
            // Of a chat vLLM sets this variable by the effort, but not of a request to `/tokenize`.
            let effort = moved.iter().find(|(name, _)| *name == "reasoning_effort");
            if let Some((_, effort)) = effort
                && !has_member(&variables, "enable_thinking")
            {
                let thinks = **effort != br#""none""#[..];
                add(&mut variables, "enable_thinking", thinks.to_string().as_bytes());
            }
            push(&mut body, "chat_template_kwargs", &variables);
        }
        body.push(b'}');
        Some(body.into())
    }
}

impl Field {
    /// The value as JSON text.
    fn json(&self) -> Option<Cow<'_, [u8]>> {
        match self {
            Self::Sent(raw) => Some(Cow::Borrowed(raw.bytes())),
            Self::Converted(value) => serde_json::to_vec(value).ok().map(Cow::Owned),
        }
    }
}

/// A field of a request that is not null.
fn present<'a>(fields: &'a Fields, name: &str) -> Option<&'a Raw> {
    fields.peek(name).filter(|raw| !raw.is_null())
}

/// The value of a field; null if it is absent. `None`: it cannot be parsed.
fn parsed(fields: &Fields, name: &str) -> Option<Value> {
    fields.peek(name).map_or(Some(Value::Null), |raw| fields.parsed(name, raw).ok())
}

/// A tool of a chat, from the name and the like of a tool of another API. `None`: it would be loaded later.
fn function_tool(mut tool: Map<String, Value>, parameters: Value) -> Option<Value> {
    let mut taken = |name: &str| tool.remove(name).filter(|value| !value.is_null());
    if taken("defer_loading").is_some() {
        return None;
    }
    let mut function = json!({ "name": taken("name")?, "description": taken("description") });
    function["parameters"] = parameters;
    if let Some(strict) = taken("strict") {
        function["strict"] = strict;
    }
    Some(json!({ "type": "function", "function": function }))
}

/// Adds a field to the text of an object without its last brace.
fn push(object: &mut Vec<u8>, name: &str, value: &[u8]) {
    if object.trim_ascii_end() != b"{" {
        object.push(b',');
    }
    object.extend_from_slice(format!("\"{name}\":").as_bytes());
    object.extend_from_slice(value);
}

/// Adds a member to the text of an object.
fn add(object: &mut Vec<u8>, name: &str, value: &[u8]) {
    object.pop();
    push(object, name, value);
    object.push(b'}');
}

/// Whether the text of an object has a member of this name.
#[expect(clippy::zero_sized_map_values, reason = "only the names count")]
fn has_member(object: &[u8], name: &str) -> bool {
    serde_json::from_slice(object).is_ok_and(|members: HashMap<String, IgnoredAny>| members.contains_key(name))
}

/// The prompt, if it is one text, also as the only one of several.
fn only_text(prompt: &Raw) -> Option<Raw> {
    if prompt.is_string() {
        return Some(prompt.clone());
    }
    let [text]: [String; 1] = serde_json::from_slice(prompt.bytes()).ok()?;
    Raw::new(&serde_json::to_vec(&text).ok()?.into()).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tokenize_body(path: &str, body: &str) -> Option<String> {
        let fields = Fields::parse(&body.to_owned().into()).unwrap();
        let body = PromptFields::peek(path, &fields, &ModelTokenizers::default())?.tokenize_body("m")?;
        Some(String::from_utf8(body.to_vec()).unwrap())
    }

    #[test]
    fn a_tokenize_request_has_the_fields_that_change_the_prompt() {
        let chat = |body: &str| tokenize_body("/v1/chat/completions", body);
        let asked =
            chat(r#"{"model":"x","n":1,"tools":[{}],"messages":[ {"a":1} ],"user":"u","add_generation_prompt":null}"#);
        assert_eq!(asked.unwrap(), r#"{"model":"m","messages":[ {"a":1} ],"tools":[{}]}"#);
        for variables in ["", r#","chat_template_kwargs":{ }"#] {
            let asked =
                chat(&format!(r#"{{"documents":[1],"messages":[],"reasoning_effort":"low"{variables}}}"#)).unwrap();
            let asked: serde_json::Value = serde_json::from_str(&asked).unwrap();
            let expected = serde_json::json!({ "documents": [1], "reasoning_effort": "low", "enable_thinking": true });
            assert_eq!(asked["chat_template_kwargs"], expected);
        }
        let asked = chat(r#"{"messages":[],"reasoning_effort":"none"}"#);
        let variables = r#"{"reasoning_effort":"none","enable_thinking":false}"#;
        assert_eq!(asked.unwrap(), format!(r#"{{"model":"m","messages":[],"chat_template_kwargs":{variables}}}"#));
        let asked = chat(r#"{"messages":[],"reasoning_effort":"low","chat_template_kwargs":{"enable_thinking":0}}"#);
        let variables = r#"{"enable_thinking":0,"reasoning_effort":"low"}"#;
        assert_eq!(asked.unwrap(), format!(r#"{{"model":"m","messages":[],"chat_template_kwargs":{variables}}}"#));
        let asked = chat(r#"{"messages":[],"documents":[],"chat_template_kwargs":{"a":{}}}"#);
        assert_eq!(asked.unwrap(), r#"{"model":"m","messages":[],"chat_template_kwargs":{"a":{},"documents":[]}}"#);
        assert!(chat(r#"{"messages":[{"content":"{\"type\":\"image_url\"}"}]}"#).is_some(), "it is a text");
        let text = |body: &str| tokenize_body("/v1/completions", body);
        let expected = r#"{"model":"m","prompt":"a\nb","add_special_tokens":false}"#;
        assert_eq!(text(r#"{"prompt":"a\nb","add_special_tokens":false,"n":2}"#).unwrap(), expected);
        assert_eq!(text(r#"{"prompt":["a\nb"],"add_special_tokens":false}"#).unwrap(), expected);
    }

    #[test]
    fn prompts_of_other_endpoints_are_asked_as_chats_and_texts() {
        let user = r#"{"role":"user","content":"a"}"#;
        let messages = format!(r#""messages":[{user}]"#);
        for (path, body, expected) in [
            ("/v1/embeddings", r#"{"input":"a","dimensions":9}"#.to_owned(), r#""prompt":"a""#),
            ("/classify", r#"{"input":["a"]}"#.to_owned(), r#""prompt":"a""#),
            ("/generate", r#"{"text":"a","sampling_params":{}}"#.to_owned(), r#""prompt":"a""#),
            ("/v1/embeddings", format!("{{{messages}}}"), &format!(r#"{messages},"add_generation_prompt":false"#)),
            (
                "/pooling",
                format!(r#"{{{messages},"add_generation_prompt":true}}"#),
                &format!(r#"{messages},"add_generation_prompt":true"#),
            ),
            ("/v1/messages", format!(r#"{{"max_tokens":9,{messages}}}"#), &messages),
            (
                "/v1/responses",
                r#"{"input":"a","store":false}"#.to_owned(),
                &format!(r#"{messages},"add_special_tokens":true"#),
            ),
            (
                "/v1/messages",
                format!(r#"{{"output_config":{{"effort":"low"}},{messages}}}"#),
                &format!(r#"{messages},"chat_template_kwargs":{{"reasoning_effort":"low","enable_thinking":true}}"#),
            ),
        ] {
            assert_eq!(tokenize_body(path, &body).unwrap(), format!(r#"{{"model":"m",{expected}}}"#), "{path} {body}");
        }
    }

    #[test]
    fn what_is_parsed_of_a_prompt_leaves_room_for_the_other_fields() {
        let blocks = vec![r#"{"type":"text","text":""}"#; 1 << 16].join(",");
        let body = format!(r#"{{"messages":[{{"role":"user","content":[{blocks}]}}],"stream":true}}"#);
        let mut fields = Fields::parse(&body.into()).unwrap();
        let prompt = PromptFields::peek("/v1/messages", &fields, &ModelTokenizers::default());
        assert!(prompt.is_none(), "it has more values than are parsed");
        assert_eq!(fields.value("stream").unwrap(), Some(true.into()));
    }

    #[test]
    fn a_request_without_one_text_has_no_tokenize_request() {
        for (path, body) in [
            ("/v1/completions", r#"{"prompt":["a","b"]}"#),
            ("/v1/completions", r#"{"prompt":[1,2]}"#),
            ("/v1/completions", r#"{"messages":[]}"#),
            ("/v1/completions", r#"{"prompt":"a","truncate_prompt_tokens":9}"#),
            ("/v1/chat/completions", r#"{"prompt":"a"}"#),
            ("/v1/chat/completions", r#"{"messages":[],"documents":[],"chat_template_kwargs":7}"#),
            ("/v1/responses", r#"{"messages":[]}"#),
            ("/v1/responses", r#"{"input":"a","previous_response_id":"r"}"#),
            ("/v1/messages", r#"{"input":"a"}"#),
            ("/v1/messages/count_tokens", r#"{"messages":[]}"#),
            ("/v1/embeddings", r#"{"input":["a","b"]}"#),
            ("/v1/embeddings", r#"{"input":[{"content":[]}]}"#),
            ("/pooling", r#"{"input":"a","padding":"max_length"}"#),
            ("/v1/score", r#"{"input":"a","text_1":"a","text_2":"b"}"#),
            ("/generate", r#"{"text":"a","image_data":"x"}"#),
            ("/generate", r#"{"text":["a","b"]}"#),
            ("/v1/chat/completions", r#"{"messages":[{"content":[{"type" : "image_url","image_url":{}}]}]}"#),
        ] {
            assert_eq!(tokenize_body(path, body), None, "{body}");
        }
    }
}
