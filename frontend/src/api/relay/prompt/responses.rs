//! Requests of OpenAI's Responses API as vLLM 0.32 makes chats of them, before it renders the template.
//!
//! `None` is what needs more than the request (a response that is stored at the server), what it converts in a way that
//! depends on its release, and what has other tokens than text: items of reasoning, files, tools other than functions.

use super::{ChatFields, function_tool, parsed, present};
use crate::params::Fields;
use serde_json::{Map, Value, json};

/// Fields with which the prompt has more than this request, or is made in another way.
const UNSUPPORTED: [&str; 6] = [
    "previous_response_id",
    "previous_input_messages",
    "conversation",
    "prompt",
    "mm_processor_kwargs",
    "media_io_kwargs",
];

/// The fields of the chat.
pub(super) fn chat_fields(fields: &Fields) -> Option<ChatFields> {
    let is_truncated = present(fields, "truncation").is_some_and(|raw| raw.bytes() != br#""disabled""#);
    if is_truncated || UNSUPPORTED.iter().any(|name| present(fields, name).is_some()) {
        return None;
    }
    let mut messages = Vec::new();
    match parsed(fields, "instructions")? {
        Value::Null => {}
        Value::String(text) if text.is_empty() => {}
        text @ Value::String(_) => messages.push(json!({ "role": "system", "content": text })),
        _ => return None,
    }
    match parsed(fields, "input")? {
        text @ Value::String(_) => messages.push(json!({ "role": "user", "content": text })),
        // The model would continue the last item.
        Value::Array(items) if items.last().is_some_and(is_partial) => return None,
        Value::Array(items) => items.into_iter().try_for_each(|item| push_item(item, &mut messages))?,
        _ => return None,
    }
    let tools = match parsed(fields, "tools")? {
        Value::Array(tools) if !tools.is_empty() => tools.into_iter().map(tool).collect::<Option<Value>>()?,
        Value::Array(_) | Value::Null => Value::Null,
        _ => return None,
    };
    let effort = parsed(fields, "reasoning")?.get("effort").cloned().unwrap_or_default();
    Some(vec![
        ("messages", messages.into()),
        ("tools", tools),
        ("reasoning_effort", effort),
        ("chat_template_kwargs", parsed(fields, "chat_template_kwargs")?),
        // Those of the tokenizer, beside those of the template: as for a completion, and other than for a chat.
        ("add_special_tokens", true.into()),
    ])
}

/// Whether an item is the beginning of an answer.
fn is_partial(item: &Value) -> bool {
    matches!(item["status"].as_str(), Some("in_progress" | "incomplete"))
}

/// Adds an item: a message, or a part of the assistant's last one.
fn push_item(item: Value, to: &mut Vec<Value>) -> Option<()> {
    let Value::Object(item) = item else { return None };
    let kind = match item.get("type") {
        None | Some(Value::Null) => "message",
        Some(kind) => kind.as_str()?,
    };
    match kind {
        "message" => push_message(item, to),
        "function_call" => push_call(item, to),
        "function_call_output" => push_output(item, to),
        _ => None,
    }
}

fn push_message(mut item: Map<String, Value>, to: &mut Vec<Value>) -> Option<()> {
    let Some(Value::String(role)) = item.remove("role") else { return None };
    let content = item.remove("content")?;
    match role.as_str() {
        "assistant" => {
            let text = match content {
                Value::String(text) => text,
                // Of several parts vLLM reads the first one only.
                Value::Array(mut parts) if parts.len() == 1 => text_of(parts.pop()?, "output_text")?,
                _ => return None,
            };
            // It belongs to the calls before it.
            if let Some(last) = assistant(to).filter(|last| !last.contains_key("content")) {
                last.insert("content".into(), text.into());
            } else {
                to.push(json!({ "role": role, "content": text }));
            }
        }
        "user" | "system" | "developer" => {
            if !item.iter().all(|(name, value)| value.is_null() || ["type", "status"].contains(&name.as_str())) {
                return None;
            }
            to.push(json!({ "role": role, "content": texts(content)? }));
        }
        _ => return None,
    }
    Some(())
}

/// Adds a call to the message of the assistant before it.
fn push_call(mut item: Map<String, Value>, to: &mut Vec<Value>) -> Option<()> {
    if item.get("namespace").is_some_and(|namespace| !namespace.is_null()) {
        return None;
    }
    let mut text = |name: &str| item.remove(name).filter(Value::is_string);
    let (id, name, arguments) = (text("call_id")?, text("name")?, text("arguments")?);
    let function = json!({ "name": name, "arguments": arguments });
    let call = json!({ "id": id, "type": "function", "function": function });
    if let Some(last) = assistant(to) {
        last.entry("tool_calls").or_insert_with(|| json!([])).as_array_mut()?.push(call);
    } else {
        to.push(json!({ "role": "assistant", "tool_calls": [call] }));
    }
    Some(())
}

fn push_output(mut item: Map<String, Value>, to: &mut Vec<Value>) -> Option<()> {
    let id = item.remove("call_id").filter(Value::is_string)?;
    to.push(json!({ "role": "tool", "tool_call_id": id, "content": texts(item.remove("output")?)? }));
    Some(())
}

/// The last message, if it is the assistant's.
fn assistant(messages: &mut [Value]) -> Option<&mut Map<String, Value>> {
    let last = messages.last_mut()?.as_object_mut()?;
    (last.get("role")? == "assistant").then_some(last)
}

/// A content as that of a chat: a text, or parts of text.
fn texts(content: Value) -> Option<Value> {
    let part = |part| text_of(part, "input_text").map(|text| json!({ "type": "text", "text": text }));
    match content {
        Value::Array(parts) => parts.into_iter().map(part).collect(),
        text @ Value::String(_) => Some(text),
        _ => None,
    }
}

/// The text of a part of this kind. Of an input, templates may read further fields; of an output there are always some.
fn text_of(part: Value, kind: &str) -> Option<String> {
    let Value::Object(mut part) = part else { return None };
    let is_known = kind == "output_text" || part.iter().filter(|(_, value)| !value.is_null()).count() == 2;
    if part.get("type")? != kind || !is_known {
        return None;
    }
    match part.remove("text")? {
        Value::String(text) => Some(text),
        _ => None,
    }
}

/// A function, in the form of a chat.
fn tool(tool: Value) -> Option<Value> {
    let Value::Object(mut tool) = tool else { return None };
    if tool.get("type")? != "function" {
        return None;
    }
    let parameters = tool.remove("parameters").unwrap_or_default();
    function_tool(tool, parameters)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chat(body: &Value) -> Option<Value> {
        let fields = Fields::parse(&body.to_string().into()).unwrap();
        chat_fields(&fields).map(|fields| fields.into_iter().filter(|(_, value)| !value.is_null()).collect())
    }

    /// The messages of a request with this input only.
    fn messages(input: &Value) -> Option<Value> {
        chat(&json!({ "model": "m", "input": input })).map(|mut chat| chat["messages"].take())
    }

    #[test]
    fn instructions_and_messages_become_messages() {
        let asked = chat(&json!({ "instructions": "Be brief.", "input": "Hi", "truncation": "disabled", "tools": [] }));
        let expected = json!([{ "role": "system", "content": "Be brief." }, { "role": "user", "content": "Hi" }]);
        assert_eq!(asked.unwrap(), json!({ "messages": expected, "add_special_tokens": true }));
        let input = json!([
            { "role": "developer", "content": "d" },
            { "type": "message", "role": "user", "status": "completed", "id": null,
                "content": [{ "type": "input_text", "text": "One" }, { "type": "input_text", "text": "Two" }] },
            { "type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
                "content": [{ "type": "output_text", "text": "Hello.", "annotations": [], "logprobs": null }] },
            { "role": "assistant", "content": "Again." },
            { "role": "user", "content": "Bye" },
        ]);
        let parts = json!([{ "type": "text", "text": "One" }, { "type": "text", "text": "Two" }]);
        let expected = json!([
            { "role": "developer", "content": "d" },
            { "role": "user", "content": parts },
            { "role": "assistant", "content": "Hello." },
            { "role": "assistant", "content": "Again." },
            { "role": "user", "content": "Bye" },
        ]);
        assert_eq!(messages(&input).unwrap(), expected);
    }

    #[test]
    fn calls_and_outputs_of_functions_become_those_of_a_chat() {
        let (kind, arguments) = ("function_call", r#"{"a":1}"#);
        let call = |id: &str| json!({ "type": kind, "id": "fc", "call_id": id, "name": "f", "arguments": arguments });
        let output = |id: &str, text: Value| json!({ "type": "function_call_output", "call_id": id, "output": text });
        let input = json!([
            { "role": "user", "content": "Go" },
            { "role": "assistant", "content": "I look." },
            call("c1"),
            call("c2"),
            output("c1", "1".into()),
            output("c2", json!([{ "type": "input_text", "text": "2" }])),
            call("c3"),
            { "role": "assistant", "content": "One more." },
            output("c3", "3".into()),
        ]);
        let call =
            |id: &str| json!({ "id": id, "type": "function", "function": { "name": "f", "arguments": "{\"a\":1}" } });
        let result = |id: &str, content: Value| json!({ "role": "tool", "tool_call_id": id, "content": content });
        let expected = json!([
            { "role": "user", "content": "Go" },
            { "role": "assistant", "content": "I look.", "tool_calls": [call("c1"), call("c2")] },
            result("c1", "1".into()),
            result("c2", json!([{ "type": "text", "text": "2" }])),
            { "role": "assistant", "tool_calls": [call("c3")], "content": "One more." },
            result("c3", "3".into()),
        ]);
        assert_eq!(messages(&input).unwrap(), expected);
        let tools = json!([
            { "type": "function", "name": "f", "parameters": { "z": 1, "a": 2 }, "strict": true },
            { "name": "g", "description": "d", "type": "function", "parameters": null, "strict": null },
        ]);
        let asked = chat(&json!({
            "input": "", "tools": tools, "reasoning": { "effort": "low" }, "chat_template_kwargs": { "a": 1 },
        }));
        let f = r#"{"name":"f","description":null,"parameters":{"z":1,"a":2},"strict":true}"#;
        let g = r#"{"name":"g","description":"d","parameters":null}"#;
        let tools = format!(r#"[{{"type":"function","function":{f}}},{{"type":"function","function":{g}}}]"#);
        let messages = r#"[{"role":"user","content":""}]"#;
        let rest = r#""reasoning_effort":"low","chat_template_kwargs":{"a":1},"add_special_tokens":true"#;
        assert_eq!(asked.unwrap().to_string(), format!(r#"{{"messages":{messages},"tools":{tools},{rest}}}"#));
    }

    #[test]
    fn what_is_not_known_to_be_converted_alike_is_not_converted() {
        let user = |part: Value| json!([{ "role": "user", "content": [part] }]);
        let assistant = |content: Value| json!([{ "role": "assistant", "content": content }]);
        let text = json!({ "type": "output_text", "text": "x", "annotations": [] });
        for input in [
            user(json!({ "type": "input_image", "image_url": "x" })),
            user(json!({ "type": "input_file", "file_id": "x" })),
            user(json!({ "type": "input_text", "text": "x", "further": 1 })),
            user(text.clone()),
            assistant(json!([])),
            assistant(json!([text, text])),
            assistant(json!([{ "type": "refusal", "refusal": "x" }])),
            json!([{ "role": "user", "content": "x", "id": "msg_1" }]),
            json!([{ "role": "assistant", "content": "x", "status": "incomplete" }]),
            json!([{ "role": "critic", "content": "x" }]),
            json!([{ "type": "reasoning", "summary": [] }]),
            json!([{ "type": "function_call", "call_id": "c", "name": "f", "arguments": "", "namespace": "n" }]),
            json!([{ "type": "function_call", "call_id": "c", "name": "f", "arguments": {} }]),
            json!([{ "type": "function_call_output", "call_id": "c", "output": [{ "type": "input_image" }] }]),
            json!([{ "type": "web_search_call", "id": "w" }]),
            json!([{ "type": "item_reference", "id": "msg_1" }]),
            json!(["x"]),
            json!({}),
            Value::Null,
        ] {
            assert_eq!(messages(&input), None, "{input}");
        }
        for (name, value) in [
            ("previous_response_id", json!("resp_1")),
            ("conversation", json!("conv_1")),
            ("truncation", json!("auto")),
            ("tools", json!([{ "type": "web_search" }])),
            ("tools", json!([{ "type": "function", "name": "f", "defer_loading": true }])),
            ("instructions", json!([])),
        ] {
            assert_eq!(chat(&json!({ "input": "x", name: value })), None, "{name}: {value}");
        }
    }
}
