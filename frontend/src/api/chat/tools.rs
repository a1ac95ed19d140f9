//! Tools: checked and passed to the template. The client finds tool calls in the model's text. Forcing a call would
//! need constrained decoding, so such a `tool_choice` is rejected.

use crate::error::Error;
use crate::params::{Fields, mistyped, too_long};
use serde_json::Value;

/// Maximum number of tools: OpenAI's limit.
const MAX_TOOLS: usize = 128;

/// Takes `tools` and `tool_choice`.
pub(super) fn take(fields: &mut Fields) -> Result<Option<Value>, Error> {
    let tools = fields.array("tools")?.filter(|tools| !tools.is_empty());
    let offered = match fields.value("tool_choice")? {
        None => true,
        Some(Value::String(choice)) if choice == "auto" => true,
        Some(Value::String(choice)) if choice == "none" => false,
        Some(choice @ (Value::String(_) | Value::Object(_))) => {
            let message = format!("Unsupported value: 'tool_choice' {choice}. Supported here: 'none' and 'auto'.");
            return Err(Error::unsupported("tool_choice", message));
        }
        Some(other) => return Err(mistyped("tool_choice", "a string or an object", &other)),
    };
    let Some(tools) = tools else { return Ok(None) };
    if tools.len() > MAX_TOOLS {
        return Err(too_long("tools", MAX_TOOLS, tools.len()));
    }
    for (i, tool) in tools.iter().enumerate() {
        check(fields, format!("tools[{i}]"), tool.clone())?;
    }
    Ok(offered.then_some(tools.into()))
}

fn check(fields: &Fields, path: String, tool: Value) -> Result<(), Error> {
    let mut tool = fields.within(path, tool)?;
    let kind = tool.text("type")?.ok_or_else(|| tool.missing("type"))?;
    if kind != "function" {
        let message = format!("Unsupported value: '{}' '{kind}'. Supported here: 'function'.", tool.path("type"));
        return Err(Error::unsupported(tool.path("type"), message));
    }
    let mut function = tool.object("function")?.ok_or_else(|| tool.missing("function"))?;
    function.text("name")?.map(drop).ok_or_else(|| function.missing("name"))
}
