//! Messages and tools in the form in which vLLM gives them to the chat template: the fields that it knows, in its
//! order.
//!
//! `None` is what it renders in a way that depends on its release, or that has other tokens than text: images, audio,
//! the role `developer`, fields of reasoning under other names.

use super::ContentFormat;
use serde_json::{Map, Value, json};

/// The first line of a system message of Claude Code, which vLLM removes because it changes with each request.
const BILLING_HEADER: &str = "x-anthropic-billing-header";

/// Maximum size of the arguments of all calls, which are JSON in strings: parsed values take up to forty times the
/// bytes of their text.
const MAX_ARGUMENTS: usize = 1 << 20;

/// The messages as the template gets them.
pub(super) fn as_rendered(messages: Vec<Value>, format: ContentFormat) -> Option<Vec<Value>> {
    let mut left = MAX_ARGUMENTS;
    messages.into_iter().map(|message| message_as_rendered(message, format, &mut left)).collect()
}

/// `left`: bytes of arguments that may still be parsed.
fn message_as_rendered(message: Value, format: ContentFormat, left: &mut usize) -> Option<Value> {
    let Value::Object(mut fields) = message else { return None };
    fields.retain(|_, value| !value.is_null());
    let Some(Value::String(role)) = fields.remove("role") else { return None };
    let texts = texts(fields.remove("content"))?;
    let is_tool = match role.as_str() {
        "user" => false,
        "tool" => true,
        "system" if !texts.iter().any(|text| text.starts_with(BILLING_HEADER)) => false,
        "assistant"
            if !["reasoning_content", "function_call", "audio"].iter().any(|name| fields.contains_key(*name)) =>
        {
            false
        }
        _ => return None,
    };
    // The content of a tool is always one string.
    let content: Value = match format {
        ContentFormat::Parts if !is_tool => {
            texts.into_iter().map(|text| json!({ "type": "text", "text": text })).collect()
        }
        _ => Value::String(joined(texts)),
    };
    let mut rendered = Map::new();
    rendered.insert("role".into(), role.as_str().into());
    rendered.insert("content".into(), content);
    match role.as_str() {
        "assistant" => {
            if let Some(calls) = fields.remove("tool_calls") {
                let Value::Array(calls) = calls else { return None };
                let calls = calls.into_iter().map(|call| call_as_rendered(call, left)).collect::<Option<Vec<_>>>()?;
                // Without a call it is an ordinary message.
                if !calls.is_empty() {
                    rendered.insert("tool_calls".into(), calls.into());
                }
            }
            if let Some(reasoning) = fields.remove("reasoning") {
                rendered.insert("reasoning".into(), reasoning.clone());
                rendered.insert("reasoning_content".into(), reasoning);
            }
        }
        "tool" => {
            if let Some(id) = fields.remove("tool_call_id") {
                rendered.insert("tool_call_id".into(), id);
            }
        }
        _ => {}
    }
    if let Some(name @ Value::String(_)) = fields.remove("name") {
        rendered.insert("name".into(), name);
    }
    Some(rendered.into())
}

/// The texts of a message as one. That of most messages is one already, and it may be long.
fn joined(mut texts: Vec<String>) -> String {
    match texts.len() {
        1 => texts.pop().unwrap_or_default(),
        _ => texts.join("\n"),
    }
}

/// The texts of a message's content: a string, or parts of text without further fields.
fn texts(content: Option<Value>) -> Option<Vec<String>> {
    let part = |part: Value| match part {
        Value::String(text) => Some(text),
        Value::Object(mut part) if part.len() == 2 && part.get("type")? == "text" => match part.remove("text")? {
            Value::String(text) => Some(text),
            _ => None,
        },
        _ => None,
    };
    match content {
        None => Some(Vec::new()),
        Some(Value::String(text)) => Some(vec![text]),
        Some(Value::Array(parts)) => parts.into_iter().map(part).collect(),
        Some(_) => None,
    }
}

/// A call of a tool. Its arguments, which clients send as a string, become an object; an empty one where they are none.
fn call_as_rendered(call: Value, left: &mut usize) -> Option<Value> {
    let Value::Object(mut call) = call else { return None };
    let Some(Value::Object(mut function)) = call.remove("function") else { return None };
    let arguments = match function.remove("arguments") {
        Some(Value::String(text)) => {
            *left = left.checked_sub(text.len())?;
            serde_json::from_str(&text).unwrap_or_default()
        }
        arguments => arguments.unwrap_or_default(),
    };
    let arguments = if arguments.is_object() { arguments } else { Value::Object(Map::new()) };
    let (id, kind) = (call.remove("id")?, call.remove("type")?);
    let mut rendered =
        json!({ "id": id, "function": { "arguments": arguments, "name": function.remove("name")? }, "type": kind });
    // Clients repeat the number of the call, which they got in a stream.
    if let Some(index) = call.remove("index") {
        rendered["index"] = index;
    }
    (rendered["type"] == "function" && call.is_empty() && function.is_empty()).then_some(rendered)
}

/// The tools as the template gets them: all fields that vLLM knows, also if the client has not sent them.
pub(super) fn tools_as_rendered(tools: Value) -> Option<Value> {
    let Value::Array(tools) = tools else { return None };
    tools.into_iter().map(tool_as_rendered).collect()
}

fn tool_as_rendered(tool: Value) -> Option<Value> {
    let Value::Object(mut tool) = tool else { return None };
    let Some(Value::Object(mut function)) = tool.remove("function") else { return None };
    let kind = tool.remove("type").unwrap_or("function".into());
    let mut rendered = json!({
        "name": function.remove("name")?,
        "description": function.remove("description"),
        "parameters": function.remove("parameters"),
    });
    if let Some(strict) = function.remove("strict").filter(|strict| !strict.is_null()) {
        rendered["strict"] = strict;
    }
    // Other fields pass or not, by the release of vLLM.
    let known = kind == "function" && tool.is_empty() && function.is_empty();
    known.then(|| json!({ "type": "function", "function": rendered }))
}
