//! The messages of a conversation: checked, and brought into the form that chat templates know. Fields that are not OpenAI's
//! stay where they are; templates may know them.

use crate::error::Error;
use crate::params::{Fields, empty, mistyped, too_long};
use serde_json::Value;

const ROLES: [&str; 6] = ["system", "developer", "user", "assistant", "tool", "function"];
/// OpenAI's limit.
const MESSAGES_MAX: usize = 2048;

/// Takes `messages`.
pub(super) fn take(fields: &mut Fields) -> Result<Vec<Value>, Error> {
    let messages = fields.array("messages")?.ok_or_else(|| fields.missing("messages"))?;
    match messages.len() {
        0 => Err(empty("messages")),
        n if n > MESSAGES_MAX => Err(too_long("messages", MESSAGES_MAX, n)),
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
    fields.put("content", content.into());
    if let Some(calls) = calls {
        fields.put("tool_calls", calls.into());
    }
    // OpenAI renamed the role; the templates of open models know the older name.
    fields.put("role", if role == "developer" { "system".into() } else { role.into() });
    Ok(fields.rest().into())
}

/// A string, or the text parts of an array, one per line.
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

/// An assistant's calls, with their arguments as the object that templates expect; clients send it as a string.
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
