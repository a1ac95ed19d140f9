//! The messages of a conversation: checked, and converted to the form that chat templates expect.
//!
//! Fields beyond OpenAI's are kept, because templates may use them.

use crate::error::Error;
use crate::params::{Fields, empty, known_fields, mistyped, too_long};
use serde_json::Value;

const ROLES: [&str; 6] = ["system", "developer", "user", "assistant", "tool", "function"];
/// Maximum number of messages: OpenAI's limit.
const MAX_MESSAGES: usize = 2048;

/// Takes `messages`.
pub(super) fn take(fields: &mut Fields) -> Result<Vec<Value>, Error> {
    let messages = fields.array("messages")?.ok_or_else(|| known_fields::missing(fields, "messages"))?;
    match messages.len() {
        0 => Err(empty("messages")),
        n if n > MAX_MESSAGES => Err(too_long("messages", MAX_MESSAGES, n)),
        _ => messages
            .into_iter()
            .enumerate()
            .map(|(i, m)| message(fields.within(format!("messages[{i}]"), m)?))
            .collect(),
    }
}

fn message(mut fields: Fields) -> Result<Value, Error> {
    let role = fields.text("role")?.ok_or_else(|| fields.missing("role"))?;
    if !ROLES.contains(&role.as_str()) {
        let path = fields.path("role");
        let known = ROLES.map(|role| format!("'{role}'")).join(", ");
        return Err(Error::invalid(
            path,
            "invalid_value",
            format!("Invalid value: '{role}'. Supported values are: {known}."),
        ));
    }
    let calls = tool_calls(&mut fields)?;
    let path = fields.path("content");
    let content = match fields.value("content")? {
        Some(content) => text(&fields, &path, content)?,
        None if role == "assistant" => String::new(),
        None => return Err(fields.missing("content")),
    };
    fields.insert("content", content.into());
    if let Some(calls) = calls {
        fields.insert("tool_calls", calls.into());
    }
    // OpenAI renamed `system` to `developer`; the templates of open models know the older name.
    fields.insert("role", if role == "developer" { "system".into() } else { role.into() });
    Ok(fields.into_remaining().into())
}

/// The content as one string: a string as it is; text parts of an array joined by newlines.
fn text(fields: &Fields, path: &str, content: Value) -> Result<String, Error> {
    let parts = match content {
        Value::String(text) => return Ok(text),
        Value::Array(parts) => parts,
        other => return Err(mistyped(path, "a string or an array of content parts", &other)),
    };
    if parts.is_empty() {
        return Err(empty(path));
    }
    let lines = parts.into_iter().enumerate().map(|(i, part)| {
        let path = format!("{path}[{i}]");
        let mut part = fields.within(path.clone(), part)?;
        let kind = part.text("type")?.ok_or_else(|| part.missing("type"))?;
        match kind.as_str() {
            "text" => part.text("text")?.ok_or_else(|| part.missing("text")),
            "refusal" => part.text("refusal")?.ok_or_else(|| part.missing("refusal")),
            _ => {
                let message = format!("Invalid content part: '{kind}' is not supported with this model, only 'text'.");
                Err(Error::unsupported(path, message))
            }
        }
    });
    Ok(lines.collect::<Result<Vec<_>, _>>()?.join("\n"))
}

/// An assistant's tool calls. Their arguments, which clients send as a string, become the object that templates expect.
fn tool_calls(fields: &mut Fields) -> Result<Option<Vec<Value>>, Error> {
    let Some(mut calls) = fields.array("tool_calls")? else { return Ok(None) };
    let path = fields.path("tool_calls");
    for call in &mut calls {
        let Some(arguments) = call.pointer_mut("/function/arguments") else { continue };
        if let Some(text) = arguments.as_str().filter(|text| text.trim_ascii_start().starts_with('{'))
            && let Some(object) = fields.embedded(&path, text)?
        {
            *arguments = object;
        }
    }
    Ok(Some(calls))
}
