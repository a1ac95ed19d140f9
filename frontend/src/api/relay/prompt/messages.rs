//! Requests of Anthropic's Messages API as vLLM 0.32 makes chats of them, before it renders the template.
//!
//! `None` is what it converts in a way that depends on its release or on the template, and what has other tokens than
//! text: system messages within the conversation, blocks of thinking, images and documents, tools that are added or
//! loaded later, thinking that is disabled. Fields of blocks that it ignores are ignored here, such as `cache_control`.

use super::{ChatFields, function_tool, parsed};
use crate::params::Fields;
use serde_json::{Map, Value, json};

/// The first line of a block of Claude Code that changes with each request. vLLM removes the block.
const BILLING_HEADER: &str = "x-anthropic-billing-header";

/// The fields of the chat.
pub(super) fn chat_fields(fields: &Fields) -> Option<ChatFields> {
    let mut messages = Vec::new();
    let system = system_text(parsed(fields, "system")?)?;
    if !system.is_empty() {
        messages.push(json!({ "role": "system", "content": system }));
    }
    let Value::Array(turns) = parsed(fields, "messages")? else { return None };
    for turn in turns {
        push_turn(turn, &mut messages)?;
    }
    // Which effort it stands for depends on the template.
    if parsed(fields, "thinking")?["type"] == "disabled" {
        return None;
    }
    let tools = match parsed(fields, "tools")? {
        Value::Null => Value::Null,
        Value::Array(tools) => tools.into_iter().map(tool).collect::<Option<Value>>()?,
        _ => return None,
    };
    let effort = parsed(fields, "output_config")?.get("effort").cloned().unwrap_or_default();
    Some(vec![
        ("messages", messages.into()),
        ("tools", tools),
        ("reasoning_effort", effort),
        ("chat_template_kwargs", parsed(fields, "chat_template_kwargs")?),
    ])
}

/// The text of the field `system`; empty if there is none.
fn system_text(system: Value) -> Option<String> {
    match system {
        Value::Null => Some(String::new()),
        Value::String(text) => Some(text),
        Value::Array(blocks) => {
            let texts: Vec<String> = blocks.into_iter().map(text_of).collect::<Option<_>>()?;
            Some(texts.into_iter().filter(|text| !text.starts_with(BILLING_HEADER)).collect())
        }
        _ => None,
    }
}

/// The text of a block of text.
fn text_of(block: Value) -> Option<String> {
    let Value::Object(mut block) = block else { return None };
    if block.get("type")? != "text" {
        return None;
    }
    match block.remove("text")? {
        Value::String(text) => Some(text),
        _ => None,
    }
}

/// Adds a turn: the results of tools as messages of their own, then the rest as one message.
fn push_turn(turn: Value, to: &mut Vec<Value>) -> Option<()> {
    let Value::Object(mut turn) = turn else { return None };
    let Some(Value::String(role)) = turn.remove("role") else { return None };
    let is_user = match role.as_str() {
        "user" => true,
        "assistant" => false,
        _ => return None,
    };
    let blocks = match turn.remove("content")? {
        Value::Array(blocks) => blocks,
        text @ Value::String(_) => {
            to.push(json!({ "role": role, "content": text }));
            return Some(());
        }
        _ => return None,
    };
    let (mut texts, mut calls) = (Vec::new(), Vec::new());
    for block in blocks {
        match block.get("type")?.as_str()? {
            "text" => texts.push(text_of(block)?),
            "tool_use" if !is_user => calls.push(call(block)?),
            "tool_result" if is_user => to.push(result(block)?),
            _ => return None,
        }
    }
    texts.retain(|text| !text.is_empty());
    if texts.is_empty() && calls.is_empty() {
        // Whether the assistant has a message without content depends on the release.
        return is_user.then_some(());
    }
    let mut message = Map::from_iter([("role".to_owned(), role.into())]);
    let content = match texts.len() {
        0 => None,
        1 => texts.pop().map(Value::String),
        _ => Some(texts.into_iter().map(|text| json!({ "type": "text", "text": text })).collect()),
    };
    if let Some(content) = content {
        message.insert("content".into(), content);
    }
    if !calls.is_empty() {
        message.insert("tool_calls".into(), calls.into());
    }
    to.push(message.into());
    Some(())
}

/// The call of a tool. vLLM parses the arguments again, so their spelling does not matter.
fn call(block: Value) -> Option<Value> {
    let Value::Object(mut block) = block else { return None };
    let input = match block.remove("input") {
        None | Some(Value::Null) => Map::new(),
        Some(Value::Object(input)) => input,
        Some(_) => return None,
    };
    let (id, name) = (non_empty(block.remove("id"))?, non_empty(block.remove("name"))?);
    let function = json!({ "name": name, "arguments": Value::Object(input).to_string() });
    Some(json!({ "id": id, "type": "function", "function": function }))
}

/// The result of a tool, as a message.
fn result(block: Value) -> Option<Value> {
    let Value::Object(mut block) = block else { return None };
    let content = match block.remove("content") {
        None | Some(Value::Null) => String::new(),
        Some(Value::String(text)) => text,
        Some(Value::Array(items)) => items.into_iter().map(text_of).collect::<Option<Vec<_>>>()?.join("\n"),
        Some(_) => return None,
    };
    let id = non_empty(block.remove("tool_use_id"))?;
    Some(json!({ "role": "tool", "tool_call_id": id, "content": content }))
}

fn non_empty(value: Option<Value>) -> Option<Value> {
    value.filter(|value| value.as_str().is_some_and(|text| !text.is_empty()))
}

/// A tool of the client as a function. Tools of Anthropic's servers have no schema; vLLM refuses them.
fn tool(tool: Value) -> Option<Value> {
    let Value::Object(mut tool) = tool else { return None };
    let Some(Value::Object(mut schema)) = tool.remove("input_schema") else { return None };
    schema.entry("type").or_insert("object".into());
    function_tool(tool, schema.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chat(body: &Value) -> Option<Value> {
        let fields = Fields::parse(&body.to_string().into()).unwrap();
        chat_fields(&fields).map(|fields| fields.into_iter().filter(|(_, value)| !value.is_null()).collect())
    }

    /// The messages of a request with these messages only.
    fn messages(messages: &Value) -> Option<Value> {
        chat(&json!({ "model": "m", "max_tokens": 9, "messages": messages })).map(|mut chat| chat["messages"].take())
    }

    #[test]
    fn system_and_turns_become_messages() {
        let header = "x-anthropic-billing-header: cc_version=1; cch=2;";
        let system = json!([
            { "type": "text", "text": header },
            { "type": "text", "text": "Be ", "cache_control": { "type": "ephemeral" } },
            { "type": "text", "text": "brief." },
        ]);
        let turns = json!([
            { "role": "user", "content": "Hi" },
            { "role": "assistant", "content": [{ "type": "text", "text": "Hello.", "citations": null }] },
            { "role": "user", "content": [
                { "type": "text", "text": "One" }, { "type": "text", "text": "" }, { "type": "text", "text": "Two" },
            ] },
            { "role": "user", "content": [] },
            { "role": "assistant", "content": "Then" },
        ]);
        let rest = json!([
            { "role": "user", "content": "Hi" },
            { "role": "assistant", "content": "Hello." },
            { "role": "user", "content": [{ "type": "text", "text": "One" }, { "type": "text", "text": "Two" }] },
            { "role": "assistant", "content": "Then" },
        ]);
        for (system, text) in [(system, Some("Be brief.")), ("Be kind.".into(), Some("Be kind.")), ("".into(), None)] {
            let asked = chat(&json!({ "model": "m", "system": system, "messages": turns, "max_tokens": 9 })).unwrap();
            let mut expected: Vec<Value> =
                text.into_iter().map(|text| json!({ "role": "system", "content": text })).collect();
            expected.extend(rest.as_array().unwrap().clone());
            assert_eq!(asked, json!({ "messages": expected }));
        }
    }

    #[test]
    fn calls_and_results_of_tools_become_those_of_a_chat() {
        let turns = json!([
            { "role": "user", "content": "Weather?" },
            { "role": "assistant", "content": [
                { "type": "text", "text": "I look." },
                { "type": "tool_use", "id": "t1", "name": "weather", "input": { "city": "Ulm", "at": 1.5 } },
                { "type": "tool_use", "id": "t2", "name": "now", "input": {} },
            ] },
            { "role": "user", "content": [
                { "type": "text", "text": "Here." },
                { "type": "tool_result", "tool_use_id": "t1", "is_error": false, "content": "21" },
                { "type": "tool_result", "tool_use_id": "t2",
                    "content": [{ "type": "text", "text": "a" }, { "type": "text", "text": "b" }] },
            ] },
            { "role": "assistant", "content": [{ "type": "tool_use", "id": "t3", "name": "now" }] },
            { "role": "user", "content": [{ "type": "tool_result", "tool_use_id": "t3" }] },
        ]);
        let call = |id: &str, name: &str, arguments: &str| {
            let function = json!({ "name": name, "arguments": arguments });
            json!({ "id": id, "type": "function", "function": function })
        };
        let result = |id: &str, text: &str| json!({ "role": "tool", "tool_call_id": id, "content": text });
        let expected = json!([
            { "role": "user", "content": "Weather?" },
            { "role": "assistant", "content": "I look.",
                "tool_calls": [call("t1", "weather", r#"{"city":"Ulm","at":1.5}"#), call("t2", "now", "{}")] },
            result("t1", "21"),
            result("t2", "a\nb"),
            { "role": "user", "content": "Here." },
            { "role": "assistant", "tool_calls": [call("t3", "now", "{}")] },
            result("t3", ""),
        ]);
        assert_eq!(messages(&turns).unwrap(), expected);
        let tools = json!([
            { "name": "weather", "description": "d", "input_schema": { "properties": { "city": {} }, "required": [] },
                "cache_control": {}, "type": "custom" },
            { "name": "now", "input_schema": { "type": "object" }, "strict": true },
        ]);
        let asked = chat(&json!({
            "messages": [], "tools": tools, "tool_choice": { "type": "auto" }, "chat_template_kwargs": { "a": 1 },
            "thinking": { "type": "adaptive" }, "output_config": { "effort": "high" },
        }));
        // As text, because the order of the schema's members is that of the prompt.
        let schema = r#"{"properties":{"city":{}},"required":[],"type":"object"}"#;
        let weather = format!(r#"{{"name":"weather","description":"d","parameters":{schema}}}"#);
        let now = r#"{"name":"now","description":null,"parameters":{"type":"object"},"strict":true}"#;
        let tools = format!(r#"[{{"type":"function","function":{weather}}},{{"type":"function","function":{now}}}]"#);
        let expected =
            format!(r#"{{"messages":[],"tools":{tools},"reasoning_effort":"high","chat_template_kwargs":{{"a":1}}}}"#);
        assert_eq!(asked.unwrap().to_string(), expected);
    }

    #[test]
    fn what_is_not_known_to_be_converted_alike_is_not_converted() {
        let user = |block: Value| json!([{ "role": "user", "content": [block] }]);
        let assistant = |block: Value| json!([{ "role": "assistant", "content": [block] }]);
        let image = json!({ "type": "image", "source": { "type": "url", "url": "x" } });
        for turns in [
            user(image.clone()),
            user(json!({ "type": "document", "source": {} })),
            user(json!({ "type": "tool_result", "tool_use_id": "t", "content": [image] })),
            user(json!({ "type": "tool_result", "tool_use_id": "t", "content": [{ "type": "tool_reference" }] })),
            user(json!({ "type": "tool_result", "content": "x" })),
            user(json!({ "type": "tool_use", "id": "t", "name": "f", "input": {} })),
            user(json!({ "text": "no type" })),
            assistant(json!({ "type": "thinking", "thinking": "x", "signature": "s" })),
            assistant(json!({ "type": "redacted_thinking", "data": "x" })),
            assistant(json!({ "type": "tool_result", "tool_use_id": "t", "content": "x" })),
            assistant(json!({ "type": "tool_use", "name": "f", "input": {} })),
            assistant(json!({ "type": "tool_use", "id": "t", "name": "f", "input": [] })),
            assistant(json!({ "type": "server_tool_use", "id": "t", "name": "f", "input": {} })),
            assistant(json!({ "type": "text", "text": "" })),
            json!([{ "role": "system", "content": "x" }]),
            json!([{ "role": "user" }]),
            json!([7]),
            json!("x"),
        ] {
            assert_eq!(messages(&turns), None, "{turns}");
        }
        for (name, value) in [
            ("thinking", json!({ "type": "disabled" })),
            ("system", json!([image])),
            ("tools", json!([{ "type": "web_search_20250305", "name": "web_search" }])),
            ("tools", json!([{ "name": "f", "input_schema": {}, "defer_loading": true }])),
            ("tools", json!({})),
        ] {
            assert_eq!(chat(&json!({ "messages": [], name: value })), None, "{name}: {value}");
        }
        assert_eq!(chat(&json!({ "system": "x" })), None, "no messages");
    }
}
