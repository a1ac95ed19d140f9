//! Prompts of a server behind this gateway, rendered and tokenized as vLLM does, from the files of its model.
//!
//! What cannot be rendered exactly as the server does has no tokens here; the server is asked instead. A wrong token
//! costs a cache hit, since the server tokenizes the prompt itself.
//!
//! Differences to the models of the native engine: text of special tokens in messages becomes these tokens, and no
//! request is refused.

mod messages;

use super::encode::{EncodeJob, Encoder};
use super::template::{Template, exceeded_limit};
use super::vocabulary::Vocabulary;
use crate::error::Error;
use serde_json::{Map, Value};
use spans::LogLimit;
use tokenizers::Tokenizer;

/// Put at the end of the last message, and searched in the rendered prompt, if the model continues that message. The
/// space shows whether the template trims messages.
const CONTINUED: &str = "\u{FDD0}continued\u{FDD1} ";
/// Variables of the renderer itself, or arguments of the function of `transformers` that calls it.
const RESERVED: [&str; 12] = [
    "add_generation_prompt",
    "chat_template",
    "continue_final_message",
    "conversation",
    "max_length",
    "messages",
    "padding",
    "return_dict",
    "return_tensors",
    "tokenize",
    "tools",
    "truncation",
];

/// The text of a model's files.
#[derive(Clone, Copy, Debug)]
pub struct TokenizerText<'a> {
    /// `tokenizer.json`.
    pub tokenizer: &'a str,
    /// The chat template, if there is one.
    pub chat_template: Option<&'a str>,
    /// Names and texts of the special tokens that templates name, like `bos_token`.
    pub special_tokens: &'a [(String, String)],
}

/// Renders and tokenizes the prompts of one model.
pub struct LocalTokenizer {
    encoder: Encoder,
    template: Option<Template>,
    /// Texts of the added tokens.
    added: Vec<String>,
    /// The limit of the log lines about a template that was stopped.
    stopped: LogLimit,
}

/// A prompt as text.
pub(crate) struct PromptText {
    text: String,
    /// The tokenizer adds its tokens around the text.
    special: bool,
}

/// A prompt has more text that must be tokenized than is allowed.
#[derive(Debug)]
pub(crate) struct TooMuchNewText;

/// Kinds of prompts, which a server may tokenize in ways of its own.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum PromptKind {
    /// The text of a completion.
    Completion,
    /// Messages.
    Chat,
    /// Messages with tools or calls of tools.
    Tools,
}

/// How the texts of messages are given to the template. vLLM and SGLang find it in the template's source.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum ContentFormat {
    /// As one string.
    Text,
    /// As a list of parts.
    Parts,
}

impl PromptKind {
    pub(crate) const ALL: [Self; 3] = [Self::Completion, Self::Chat, Self::Tools];

    /// The kind of the prompt in these fields of a request.
    pub(crate) fn of(fields: &Map<String, Value>) -> Self {
        let calls = |message: &Value| !message["tool_calls"].is_null() || message["role"] == "tool";
        match fields.get("messages").and_then(Value::as_array) {
            None => Self::Completion,
            Some(messages) if fields.contains_key("tools") || messages.iter().any(calls) => Self::Tools,
            Some(_) => Self::Chat,
        }
    }

    /// Its name as the label of a metric.
    pub(crate) fn label(self) -> &'static str {
        match self {
            Self::Completion => "completion",
            Self::Chat => "chat",
            Self::Tools => "tools",
        }
    }
}

impl LocalTokenizer {
    /// A tokenizer of these files.
    pub fn new(files: TokenizerText<'_>) -> Result<Self, String> {
        let broken = |error: tokenizers::Error| format!("tokenizer.json: {error}");
        let mut tokenizer = Tokenizer::from_bytes(files.tokenizer).map_err(broken)?;
        // The server refuses prompts that are too long.
        tokenizer.with_truncation(None).map_err(broken)?.with_padding(None);
        let template = files.chat_template.map(|source| Template::new(source, files.special_tokens)).transpose();
        let template = template.map_err(|problem| format!("the model {problem}"))?;
        let vocabulary = Vocabulary::new(&tokenizer).map_err(|error: Error| error.to_string())?;
        let mut added: Vec<_> = tokenizer.get_added_tokens_decoder().into_iter().collect();
        added.sort_unstable_by_key(|(id, _)| *id);
        let encoder = Encoder::new(tokenizer, &vocabulary).map_err(|error| error.to_string())?;
        let added = added.into_iter().map(|(_, token)| token.content).collect();
        Ok(Self { encoder, template, added, stopped: LogLimit::default() })
    }

    /// The tokens of a text, without those that the tokenizer adds around it.
    pub fn text_tokens(&self, text: &str) -> Result<Vec<u32>, String> {
        self.encoder.encode(text, false, usize::MAX, &EncodeJob::default()).map_err(|error| error.to_string())
    }

    /// Texts of the added tokens, by their ids.
    pub(crate) fn added_tokens(&self) -> &[String] {
        &self.added
    }

    /// Whether it is that of gpt-oss, by a token of its format of messages, Harmony.
    pub(crate) fn is_of_gpt_oss(&self) -> bool {
        self.added.iter().any(|token| token == "<|constrain|>")
    }

    /// A token's string, for log lines.
    pub(crate) fn token_name(&self, token: u32) -> String {
        self.encoder.tokenizer().id_to_token(token).unwrap_or_default()
    }

    /// The prompt in these fields of a request: `prompt`, or `messages` with what belongs to them. `None` if the server
    /// would render it in a way that is not known here, would refuse it, or has other tokens than text.
    pub(crate) fn prompt(&self, fields: Map<String, Value>, format: ContentFormat) -> Option<PromptText> {
        let is_chat = fields.contains_key("messages");
        let special = match fields.get("add_special_tokens") {
            None => !is_chat,
            Some(special) => special.as_bool()?,
        };
        let text = if is_chat { self.render(fields, format)? } else { text_prompt(fields)? };
        Some(PromptText { text, special })
    }

    /// The tokens of a prompt, unless more than `max_new` bytes of its text would have to be tokenized.
    pub(crate) fn tokens(
        &self,
        prompt: &PromptText,
        max_new: usize,
        job: &EncodeJob,
    ) -> Result<Option<Vec<u32>>, TooMuchNewText> {
        match self.encoder.encode_known(&prompt.text, prompt.special, max_new, job) {
            Ok(tokens) => tokens.map(Some).ok_or(TooMuchNewText),
            // The server is asked instead.
            Err(_) => Ok(None),
        }
    }

    fn render(&self, mut fields: Map<String, Value>, format: ContentFormat) -> Option<String> {
        let template = self.template.as_ref()?;
        let flag = |fields: &Map<String, Value>, name: &str, default: bool| match fields.get(name) {
            None => Some(default),
            Some(value) => value.as_bool(),
        };
        let add_generation_prompt = flag(&fields, "add_generation_prompt", true)?;
        let continues = flag(&fields, "continue_final_message", false)?;
        // With both the server refuses the request.
        if continues && add_generation_prompt || fields.contains_key("chat_template") {
            return None;
        }
        let Some(Value::Array(messages)) = fields.remove("messages") else { return None };
        let mut messages = messages::as_rendered(messages, format)?;
        if continues {
            mark(messages.last_mut()?)?;
        }
        let tools = fields.remove("tools").map(messages::tools_as_rendered);
        let tools = if let Some(tools) = tools { tools? } else { Value::Null };
        let mut variables = match fields.remove("chat_template_kwargs") {
            None => Map::new(),
            Some(Value::Object(variables)) if !variables.keys().any(|name| RESERVED.contains(&name.as_str())) => {
                variables
            }
            Some(_) => return None,
        };
        if let Some(effort) = fields.remove("reasoning_effort") {
            let thinks = effort != "none";
            variables.entry("enable_thinking").or_insert(thinks.into());
            variables.insert("reasoning_effort".into(), effort);
        }
        if let Some(documents) = fields.remove("documents") {
            variables.insert("documents".into(), documents);
        }
        variables.entry("documents").or_insert(Value::Null);
        variables.insert("messages".into(), messages.into());
        variables.insert("tools".into(), tools);
        variables.insert("add_generation_prompt".into(), add_generation_prompt.into());
        let rendered = template.render_variables(&variables);
        if let Some(problem) = rendered.as_ref().err().and_then(exceeded_limit)
            && self.stopped.admit().is_some()
        {
            tracing::warn!("a local chat template {problem}; the server is asked for the tokens");
        }
        let mut prompt = rendered.ok()?;
        if continues {
            let at = prompt.rfind(CONTINUED.trim_end())?;
            let is_trimmed = !prompt[at..].starts_with(CONTINUED);
            prompt.truncate(at);
            if is_trimmed {
                prompt.truncate(prompt.trim_end().len());
            }
        }
        Some(prompt)
    }
}

/// The text of a completion, also as the only one of several.
fn text_prompt(mut fields: Map<String, Value>) -> Option<String> {
    match fields.remove("prompt")? {
        Value::String(text) => Some(text),
        Value::Array(mut texts) if texts.len() == 1 => match texts.pop()? {
            Value::String(text) => Some(text),
            _ => None,
        },
        _ => None,
    }
}

/// Marks the end of a message's text.
fn mark(message: &mut Value) -> Option<()> {
    let content = message.get_mut("content")?;
    let text = match content {
        Value::Array(parts) => parts.last_mut()?.get_mut("text")?,
        text => text,
    };
    *text = format!("{}{CONTINUED}", text.as_str()?).into();
    Some(())
}

#[cfg(test)]
mod tests;
