//! The prompt of a relayed request, for the tokens by which it is routed.

use crate::model::EncodeJob;
use crate::params::{Fields, Raw};
use crate::tokenizers::CheckedTokenizer;
use bytes::Bytes;
use memchr::memmem;
use serde::de::IgnoredAny;
use serde_json::{Map, Value};
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
/// Fields of a completion that change its prompt.
const COMPLETION: [&str; 2] = ["prompt", "add_special_tokens"];
/// Fields of a chat request that `/tokenize` takes as variables of the template.
const VARIABLES: [&str; 2] = ["documents", "reasoning_effort"];
/// Kinds of parts of messages that are no text, as they stand in JSON text. Within a string the quotes are escaped.
const MEDIA: [&str; 4] = [r#""image_url""#, r#""input_audio""#, r#""audio_url""#, r#""video_url""#];
/// Fields with which the prompt is other than rendered.
const UNSUPPORTED: [&str; 2] = ["truncate_prompt_tokens", "prompt_embeds"];

/// The fields of a request that its prompt is made of, as JSON text.
#[derive(Debug)]
pub(super) struct PromptFields(Vec<(&'static str, Raw)>);

impl PromptFields {
    /// The prompt of a request to this path, if it is one text or one conversation.
    pub(super) fn peek(path: &str, fields: &Fields) -> Option<Self> {
        let names = match path {
            "/v1/chat/completions" => &CHAT[..],
            "/v1/completions" => &COMPLETION[..],
            _ => return None,
        };
        let present = |name: &&str| fields.peek(name).is_some_and(|raw| !raw.is_null());
        if UNSUPPORTED.iter().any(present) || !present(&names[0]) {
            return None;
        }
        let prompt = names.iter().filter(|name| present(name));
        let mut prompt: Vec<_> = prompt.filter_map(|name| Some((*name, fields.peek(name)?.clone()))).collect();
        if names[0] == "prompt" {
            prompt[0].1 = only_text(&prompt[0].1)?;
        }
        Some(Self(prompt))
    }

    /// The tokens of the prompt, if the local tokenizer knows them.
    pub(super) fn tokens(&self, fields: &Fields, tokenizer: &CheckedTokenizer, job: &EncodeJob) -> Option<Vec<u32>> {
        // They may hold images, which a JSON value should not copy.
        if self.0.iter().any(|(name, _)| name.ends_with("_io_kwargs") || name.ends_with("_processor_kwargs")) {
            return None;
        }
        let parsed = self.0.iter().map(|(name, raw)| Some(((*name).to_owned(), fields.parsed(name, raw).ok()?)));
        tokenizer.tokens(parsed.collect::<Option<Map<String, Value>>>()?, job)
    }

    /// The body of a request to `/tokenize`, the same for the same prompt. `None` for a prompt with images or the like:
    /// its blocks are not known by their tokens, and the server would load the images for the answer.
    pub(super) fn tokenize_body(&self, model: &str) -> Option<Bytes> {
        let (_, prompt) = self.0.first()?;
        if MEDIA.iter().any(|kind| memmem::find(prompt.bytes(), kind.as_bytes()).is_some()) {
            return None;
        }
        let mut body = serde_json::to_vec(&Map::from_iter([("model".to_owned(), Value::from(model))])).ok()?;
        body.pop();
        let (mut moved, mut variables) = (Vec::new(), None);
        for (name, raw) in &self.0 {
            if *name == "chat_template_kwargs" {
                variables = Some(raw);
            } else if VARIABLES.contains(name) {
                moved.push((*name, raw));
            } else {
                push(&mut body, name, raw.bytes());
            }
        }
        let variables = match (variables, moved.is_empty()) {
            (variables, true) => variables.map(|raw| raw.bytes().to_vec()),
            (None, false) => Some(b"{}".to_vec()),
            (Some(raw), false) if raw.is_object() => Some(raw.bytes().to_vec()),
            (Some(_), false) => return None,
        };
        if let Some(mut variables) = variables {
            for (name, raw) in &moved {
                add(&mut variables, name, raw.bytes());
            }
            // Of a chat vLLM sets this variable by the effort, but not of a request to `/tokenize`.
            let effort = moved.iter().find(|(name, _)| *name == "reasoning_effort");
            if let Some((_, effort)) = effort
                && !has_member(&variables, "enable_thinking")
            {
                let thinks = effort.bytes() != br#""none""#;
                add(&mut variables, "enable_thinking", thinks.to_string().as_bytes());
            }
            push(&mut body, "chat_template_kwargs", &variables);
        }
        body.push(b'}');
        Some(body.into())
    }
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
        let body = PromptFields::peek(path, &fields)?.tokenize_body("m")?;
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
    fn a_request_without_one_text_has_no_tokenize_request() {
        for (path, body) in [
            ("/v1/completions", r#"{"prompt":["a","b"]}"#),
            ("/v1/completions", r#"{"prompt":[1,2]}"#),
            ("/v1/completions", r#"{"messages":[]}"#),
            ("/v1/completions", r#"{"prompt":"a","truncate_prompt_tokens":9}"#),
            ("/v1/chat/completions", r#"{"prompt":"a"}"#),
            ("/v1/chat/completions", r#"{"messages":[],"documents":[],"chat_template_kwargs":7}"#),
            ("/v1/responses", r#"{"input":"a","messages":[]}"#),
            ("/v1/chat/completions", r#"{"messages":[{"content":[{"type" : "image_url","image_url":{}}]}]}"#),
        ] {
            assert_eq!(tokenize_body(path, body), None, "{body}");
        }
    }
}
