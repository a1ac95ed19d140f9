//! A model as the front door uses it: tokenizer, table of bytes and chat template, made from its card once and kept.

use super::encode::{Encoder, Refused};
use super::special::{Literals, SpecialText};
use super::template::{Conversation, Template};
use super::vocabulary::Vocabulary;
use crate::error::{CONTEXT, Error};
use std::sync::Arc;
use tokenizers::Tokenizer;
use tokio_util::sync::CancellationToken;
use worker::engine::{ModelCard, SamplingDefaults};

/// Text to tokens and back.
pub(crate) struct Model {
    pub(crate) card: Arc<ModelCard>,
    pub(crate) vocabulary: Arc<Vocabulary>,
    encoder: Encoder,
    special: SpecialText,
    /// The chat template, or why there is none.
    template: Result<Template, String>,
    options: Options,
}

/// What settings say about every model.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Options {
    /// Text of special tokens in messages becomes these tokens.
    pub(crate) parse_special_tokens: bool,
    /// Models' own sampling defaults do not hold.
    pub(crate) ignore_generation_config: bool,
}

impl Model {
    /// From a card. A chat template that does not compile concerns chats only.
    pub(crate) fn new(card: Arc<ModelCard>, options: Options) -> Result<Self, Error> {
        let broken = |error: tokenizers::Error| Error::Failed(format!("{}: tokenizer.json: {error}", card.id));
        let mut tokenizer = Tokenizer::from_bytes(card.tokenizer.as_bytes()).map_err(broken)?;
        // What is too long is refused with its length, not cut.
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

    /// How tokens are sampled where a request does not say.
    pub(crate) fn sampling_defaults(&self) -> SamplingDefaults {
        if self.options.ignore_generation_config { SamplingDefaults::default() } else { self.card.sampling }
    }

    /// Tokens to text, special tokens included.
    pub(crate) fn decode(&self, tokens: &[u32]) -> Result<String, Error> {
        self.encoder.tokenizer().decode(tokens, false).map_err(|e| Error::Failed(e.to_string()))
    }

    /// What the tokenizer calls a token.
    pub(crate) fn token_name(&self, token: u32) -> String {
        self.encoder.tokenizer().id_to_token(token).unwrap_or_default()
    }

    /// Why the model cannot serve chats, if it cannot.
    pub(crate) fn template_problem(&self) -> Option<&str> {
        self.template.as_ref().err().map(String::as_str)
    }

    /// A conversation as tokens, if they fit the context. With `add_special`, the tokenizer adds what it opens every sequence with.
    pub(crate) fn encode_chat(
        &self,
        mut conversation: Conversation,
        add_special: bool,
        gone: &CancellationToken,
    ) -> Result<Vec<u32>, Error> {
        let template = self.template.as_ref().map_err(|problem| {
            let id = &self.card.id;
            Error::unsupported("model", format!("The model `{id}` {problem}. Use /v1/completions."))
        })?;
        let mut literals = Literals::default();
        if !self.options.parse_special_tokens {
            conversation.values_mut().for_each(|value| self.special.take_out(value, &mut literals));
        }
        let prompt = template.render(conversation).map_err(|error| error.map_message(|said| literals.restore(said)))?;
        let tokens = self.special.encode(&self.encoder, &prompt, &literals, add_special, self.card.context, gone);
        tokens.map_err(|refused| self.refusal("messages", refused))
    }

    /// The text of `param` as tokens, if they fit the context. With `special`, the tokenizer adds what it opens every sequence with.
    pub(crate) fn encode(
        &self,
        param: &str,
        text: &str,
        special: bool,
        gone: &CancellationToken,
    ) -> Result<Vec<u32>, Error> {
        let tokens = self.encoder.encode(text, special, self.card.context, gone);
        tokens.map_err(|refused| self.refusal(param, refused))
    }

    fn refusal(&self, param: &str, refused: Refused) -> Error {
        match refused {
            Refused::TooLong(tokens) => too_long(param, self.card.context, &format!("at least {tokens}")),
            Refused::Word(bytes) => {
                let message =
                    format!("Invalid '{param}': it has more than {bytes} bytes on end that are not split into words.");
                Error::invalid(param, "invalid_value", message)
            }
            Refused::Gone => Error::Gone,
            Refused::Failed(why) => Error::Failed(why),
        }
    }
}

/// A prompt of so many tokens does not fit, in OpenAI's words.
pub(crate) fn too_long(param: &str, context: usize, tokens: &str) -> Error {
    let message = format!(
        "This model's maximum context length is {context} tokens. However, your {param} resulted in {tokens} tokens. Please \
         reduce the length of the {param}."
    );
    Error::invalid(param, CONTEXT, message)
}

/// Logs what about a model will make requests fail, so that it is seen at the start and not with the first request.
pub fn check_model(card: &Arc<ModelCard>) {
    let model = card.id.as_str();
    match Model::new(Arc::clone(card), Options::default()) {
        Ok(made) => {
            if let Some(problem) = made.template_problem() {
                tracing::warn!(model, problem, "chat requests will be rejected; completion requests are served");
            }
        }
        Err(error) => tracing::warn!(model, %error, "requests for this model will fail"),
    }
}
