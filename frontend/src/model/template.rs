//! Chat templates: the Jinja template of a model's folder, compiled once, with the functions of Hugging Face's renderer
//! (`raise_exception`, `strftime_now`, `tojson`, Python's methods).
//!
//! A template is trusted like the model: it can compute, but it has no access to files or the network. Its instructions
//! and its output are limited, so that one that loops fails the request only. Not here: a limit of the memory or time
//! of a single instruction, like one that joins two long strings.

mod python_json;
mod strftime;

use crate::error::Error;
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Serde, Value};
use minijinja::{Environment, ErrorKind};
use serde_json::Map;
use std::io;
use std::time::{SystemTime, UNIX_EPOCH};

const NAME: &str = "chat template";

/// Maximum instructions of one rendering. A template that looks at all later messages for each call of a tool, as that
/// of gpt-oss does, needs 26 million for 2,000 messages with a call each and 200 tools (the one in the tests). 100
/// million take some seconds.
const MAX_INSTRUCTIONS: u64 = 100_000_000;

/// Maximum bytes of a prompt: more tokens than the context of any model, and little enough memory for a server.
const MAX_OUTPUT: usize = 256 << 20;

/// A compiled chat template.
pub(crate) struct Template(Environment<'static>);

/// The variables with which a template renders a conversation.
#[derive(Default)]
pub(crate) struct Conversation {
    /// Messages, each with a `role` and its content as a string.
    pub(crate) messages: Vec<serde_json::Value>,
    /// Tools as the client sent them.
    pub(crate) tools: Option<serde_json::Value>,
    /// End the prompt with the start of the assistant's turn.
    pub(crate) add_generation_prompt: bool,
    /// End the prompt inside the last message, which the model continues.
    pub(crate) continue_final_message: bool,
    /// Further variables of the client.
    pub(crate) variables: Map<String, serde_json::Value>,
}

impl Conversation {
    /// All values that a client wrote.
    pub(crate) fn values_mut(&mut self) -> impl Iterator<Item = &mut serde_json::Value> {
        self.messages.iter_mut().chain(&mut self.tools).chain(self.variables.values_mut())
    }
}

impl Template {
    /// Compiles a template. `special` are names and texts of tokens, like `bos_token`. The error is a phrase that
    /// follows the model's name.
    pub(crate) fn new(source: &str, special: &[(String, String)]) -> Result<Self, String> {
        let broken = |error: minijinja::Error| format!("has a chat template that does not compile: {error}");
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build().map_err(broken)?;
        environment.set_syntax(syntax);
        environment.set_fuel(Some(MAX_INSTRUCTIONS));
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_function("raise_exception", raise_exception);
        environment.add_function("strftime_now", strftime_now);
        environment.add_filter("tojson", python_json::tojson);
        for (name, text) in special {
            environment.add_global(name.clone(), text.clone());
        }
        // Marks for training, which render to nothing.
        let source = ["{% generation %}", "{% endgeneration %}", "{%- generation %}", "{%- endgeneration %}"]
            .into_iter()
            .chain(["{% generation -%}", "{% endgeneration -%}", "{%- generation -%}", "{%- endgeneration -%}"])
            .fold(
                source.to_owned(),
                |source, mark| if source.contains(mark) { source.replace(mark, "") } else { source },
            );
        environment.add_template_owned(NAME, source).map_err(broken)?;
        Ok(Self(environment))
    }

    /// Renders the prompt of a conversation. An error that the template raises is the client's, in the template's
    /// words.
    pub(crate) fn render(&self, conversation: Conversation) -> Result<String, Error> {
        let render_error = |error: minijinja::Error| {
            let message = match (error.kind(), error.detail()) {
                _ if let Some(problem) = exceeded_limit(&error) => format!("The chat template {problem}."),
                (ErrorKind::InvalidOperation, Some(detail)) => {
                    format!("The chat template refused the conversation: {detail}")
                }
                _ => format!("The chat template refused the conversation: {error}"),
            };
            Error::invalid("messages", "invalid_value", message)
        };
        let last = conversation.continue_final_message.then(|| last_content(&conversation.messages)).transpose()?;
        let mut variables: Map<String, serde_json::Value> = conversation.variables;
        let has_tools = conversation.tools.is_some();
        variables.insert("messages".into(), conversation.messages.into());
        variables.insert("tools".into(), conversation.tools.unwrap_or_default());
        variables.entry("documents").or_insert(serde_json::Value::Null);
        variables.insert("add_generation_prompt".into(), conversation.add_generation_prompt.into());
        let mut prompt = self.render_variables(&variables).map_err(render_error)?;
        if has_tools {
            variables.insert("tools".into(), serde_json::Value::Null);
            if self.render_variables(&variables).is_ok_and(|without| without == prompt) {
                let message = "Unsupported parameter: the model's chat template ignores 'tools', so the model would \
                               not see them.";
                return Err(Error::invalid("tools", "unsupported_parameter", message));
            }
        }
        if let Some(last) = last {
            let end = prompt.rfind(&last).map(|at| at + last.len()).ok_or_else(|| {
                let message = "The model's chat template changes the last message, so it cannot be continued.";
                Error::unsupported("continue_final_message", message)
            })?;
            prompt.truncate(end);
        }
        Ok(prompt)
    }

    /// Renders the template with these variables.
    pub(crate) fn render_variables(
        &self,
        variables: &Map<String, serde_json::Value>,
    ) -> Result<String, minijinja::Error> {
        let mut prompt = Prompt::default();
        self.0.get_template(NAME)?.render_captured_to(Value::from(Serde(variables)), &mut prompt)?;
        Ok(String::from_utf8(prompt.0).expect("a template writes whole strings"))
    }
}

/// How a template exceeded a limit: words that follow "the chat template". `None` for other errors.
pub(crate) fn exceeded_limit(error: &minijinja::Error) -> Option<String> {
    match error.kind() {
        ErrorKind::OutOfFuel => {
            Some(format!("was stopped: it does not end within {MAX_INSTRUCTIONS} instructions on this conversation"))
        }
        ErrorKind::WriteFailure => {
            Some(format!("was stopped: it writes more than {} MiB for this conversation", MAX_OUTPUT >> 20))
        }
        _ => None,
    }
}

/// The output of a template, up to the limit.
#[derive(Default)]
struct Prompt(Vec<u8>);

impl io::Write for Prompt {
    fn write(&mut self, text: &[u8]) -> io::Result<usize> {
        if self.0.len() + text.len() > MAX_OUTPUT {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        self.0.extend_from_slice(text);
        Ok(text.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The last message's text, trimmed, because templates trim it.
fn last_content(messages: &[serde_json::Value]) -> Result<String, Error> {
    let text = messages.last().and_then(|message| message["content"].as_str()).unwrap_or_default().trim();
    if text.is_empty() {
        let message = "Invalid 'continue_final_message': the last message has no text to continue.";
        return Err(Error::invalid("continue_final_message", "invalid_value", message));
    }
    Ok(text.to_owned())
}

fn raise_exception(message: String) -> Result<Value, minijinja::Error> {
    Err(minijinja::Error::new(ErrorKind::InvalidOperation, message))
}

#[expect(clippy::needless_pass_by_value, reason = "minijinja hands arguments over")]
fn strftime_now(format: String) -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    strftime::utc(now.as_secs(), &format)
}

#[cfg(test)]
mod tests;
