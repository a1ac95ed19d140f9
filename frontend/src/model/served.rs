//! A model as the frontend serves it: tokenizer, byte table and chat template, made from its model card.

use super::encode::{EncodeError, EncodeJob, Encoder};
use super::special::{Literals, SpecialText};
use super::template::{Conversation, Template};
use super::vocabulary::Vocabulary;
use crate::error::{CONTEXT, Error};
use std::sync::Arc;
use tokenizers::Tokenizer;
use worker::engine::{ModelCard, SamplingDefaults};

/// Converts conversations and text to tokens of one model.
pub(crate) struct ServedModel {
    pub(crate) card: Arc<ModelCard>,
    pub(crate) vocabulary: Arc<Vocabulary>,
    encoder: Encoder,
    special: SpecialText,
    /// The chat template, or why it cannot be used: words that follow "the model".
    template: Result<Template, String>,
    options: ModelOptions,
}

/// Settings that apply to every model.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ModelOptions {
    /// Text of special tokens in messages is encoded as these tokens.
    pub(crate) parse_special_tokens: bool,
    /// The sampling defaults of models are not used.
    pub(crate) ignore_generation_config: bool,
}

impl ServedModel {
    /// Loads a model from its card. A chat template that does not compile affects chat requests only.
    pub(crate) fn new(card: Arc<ModelCard>, options: ModelOptions) -> Result<Self, Error> {
        let broken = |error: tokenizers::Error| Error::Failed(format!("{}: tokenizer.json: {error}", card.id));
        let text = card.tokenizer.as_deref().ok_or_else(|| Error::Failed(format!("{} has no tokenizer", card.id)))?;
        let mut tokenizer = Tokenizer::from_bytes(text).map_err(broken)?;
        // Prompts that are too long are rejected with their length, not truncated.
        tokenizer.with_truncation(None).map_err(broken)?.with_padding(None);
        let template = match &card.chat_template {
            Some(source) => Template::new(source, &card.special_tokens),
            None => Err("has no chat template".to_owned()),
        };
        let vocabulary = Arc::new(Vocabulary::new(&tokenizer)?);
        let special = SpecialText::new(&tokenizer, Arc::clone(&vocabulary))?;
        let encoder = Encoder::new(tokenizer, &vocabulary)?;
        Ok(Self { card, vocabulary, encoder, special, template, options })
    }

    /// Sampling parameters for fields that a request does not set.
    pub(crate) fn sampling_defaults(&self) -> SamplingDefaults {
        if self.options.ignore_generation_config { SamplingDefaults::default() } else { self.card.sampling }
    }

    /// Tokens to text, special tokens included.
    pub(crate) fn decode(&self, tokens: &[u32]) -> Result<String, Error> {
        self.encoder.tokenizer().decode(tokens, false).map_err(|e| Error::Failed(e.to_string()))
    }

    /// A token's string in the tokenizer.
    pub(crate) fn token_name(&self, token: u32) -> String {
        self.encoder.tokenizer().id_to_token(token).unwrap_or_default()
    }

    /// Why the model cannot serve chat requests; `None` if it can.
    pub(crate) fn template_problem(&self) -> Option<&str> {
        self.template.as_ref().err().map(String::as_str)
    }

    /// Encodes a conversation, if it fits the context. With `add_special`, the tokenizer adds its tokens around the
    /// text.
    pub(crate) fn encode_chat(
        &self,
        mut conversation: Conversation,
        add_special: bool,
        job: &EncodeJob,
    ) -> Result<Vec<u32>, Error> {
        let template = self.template.as_ref().map_err(|problem| {
            let id = &self.card.id;
            Error::unsupported("model", format!("The model `{id}` {problem}. Use /v1/completions."))
        })?;
        let mut literals = Literals::default();
        if !self.options.parse_special_tokens {
            conversation.values_mut().for_each(|value| self.special.extract_literals(value, &mut literals));
        }
        let prompt =
            template.render(conversation).map_err(|error| error.map_message(|message| literals.restore(message)))?;
        let tokens = self.special.encode(&self.encoder, &prompt, &literals, add_special, self.card.context, job);
        tokens.map_err(|error| self.map_error("messages", error))
    }

    /// Encodes the text of `param`, if it fits the context. With `special`, the tokenizer adds its tokens around the
    /// text.
    pub(crate) fn encode(&self, param: &str, text: &str, special: bool, job: &EncodeJob) -> Result<Vec<u32>, Error> {
        let tokens = self.encoder.encode(text, special, self.card.context, job);
        tokens.map_err(|error| self.map_error(param, error))
    }

    fn map_error(&self, param: &str, error: EncodeError) -> Error {
        match error {
            EncodeError::TooLong(tokens) => prompt_too_long(param, self.card.context, &format!("at least {tokens}")),
            EncodeError::Unsplittable(bytes) => {
                let message =
                    format!("Invalid '{param}': it has more than {bytes} bytes on end that are not split into words.");
                Error::invalid(param, "invalid_value", message)
            }
            EncodeError::Cancelled => Error::ClientClosed,
            EncodeError::Failed(why) => Error::Failed(why),
        }
    }
}

/// The error of a prompt whose `tokens` exceed the context, in OpenAI's words.
pub(crate) fn prompt_too_long(param: &str, context: usize, tokens: &str) -> Error {
    let message = format!(
        "This model's maximum context length is {context} tokens. However, your {param} resulted in {tokens} tokens. \
         Please reduce the length of the {param}."
    );
    Error::invalid(param, CONTEXT, message)
}

/// Checks at the start that requests for a model can be served. A chat template that cannot be used is only logged,
/// because completions work without it.
pub fn check_model(card: &Arc<ModelCard>) -> Result<(), String> {
    let served = ServedModel::new(Arc::clone(card), ModelOptions::default()).map_err(|error| match error {
        Error::Failed(problem) => problem,
        other => other.to_string(),
    })?;
    if let Some(problem) = served.template_problem() {
        let model = card.id.as_str();
        tracing::warn!(model, problem, "chat requests will be rejected; completion requests are served");
    }
    Ok(())
}
