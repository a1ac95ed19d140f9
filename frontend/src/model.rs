//! A model as the front door uses it: tokenizer, table of bytes and chat template, made from its card once and kept.

use crate::encode::{Encoder, Refused};
use crate::error::{CONTEXT, Error};
use crate::template::Template;
use crate::vocabulary::Vocabulary;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use tokenizers::Tokenizer;
use tokio::sync::OnceCell;
use tokio_util::sync::CancellationToken;
use worker::engine::{Engine, ModelCard, Readiness};

/// Text to tokens and back.
pub(crate) struct Model {
    pub(crate) card: Arc<ModelCard>,
    pub(crate) vocabulary: Arc<Vocabulary>,
    encoder: Encoder,
    template: Option<Template>,
}

impl Model {
    fn new(card: Arc<ModelCard>) -> Result<Self, Error> {
        let broken = |error: tokenizers::Error| Error::Failed(format!("{}: tokenizer.json: {error}", card.id));
        let mut tokenizer = Tokenizer::from_bytes(card.tokenizer.as_bytes()).map_err(broken)?;
        // What is too long is refused with its length, not cut.
        tokenizer.with_truncation(None).map_err(broken)?.with_padding(None);
        let template = card.chat_template.as_deref().map(|t| Template::new(t, &card.special_tokens)).transpose()?;
        let vocabulary = Arc::new(Vocabulary::new(&tokenizer)?);
        let encoder = Encoder::new(tokenizer, &vocabulary)?;
        Ok(Self { card, vocabulary, encoder, template })
    }

    /// The model's template.
    pub(crate) fn template(&self) -> Result<&Template, Error> {
        self.template.as_ref().ok_or_else(|| {
            let id = &self.card.id;
            Error::unsupported("model", format!("The model `{id}` has no chat template. Use /v1/completions."))
        })
    }

    /// The text of `param` as tokens, if they fit the context. With `special`, the tokenizer adds what it opens every sequence with.
    pub(crate) fn encode(
        &self,
        param: &str,
        text: &str,
        special: bool,
        gone: &CancellationToken,
    ) -> Result<Vec<u32>, Error> {
        let context = self.card.context;
        self.encoder.encode(text, special, context, gone).map_err(|refused| match refused {
            Refused::TooLong(tokens) => too_long(param, context, &format!("at least {tokens}")),
            Refused::Word(bytes) => {
                let message =
                    format!("Invalid '{param}': it has more than {bytes} bytes on end that are not split into words.");
                Error::invalid(param, "invalid_value", message)
            }
            Refused::Gone => Error::Gone,
            Refused::Failed(why) => Error::Failed(why),
        })
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

/// The models that were asked for, made from their cards.
#[derive(Default)]
pub(crate) struct Models {
    made: Mutex<HashMap<String, Entry>>,
}

#[derive(Clone)]
struct Entry {
    card: Arc<ModelCard>,
    model: Arc<OnceCell<Arc<Model>>>,
}

impl Models {
    /// The model of that id, as served now. Made by the first who asks, while others wait for it.
    pub(crate) async fn get(&self, engine: &dyn Engine, id: &str) -> Result<Arc<Model>, Error> {
        let cards = engine.models();
        let Some(card) = cards.iter().find(|card| card.id == id) else {
            // While a model loads, and while its workers are away, nobody can say that it does not exist.
            if let (true, Readiness::NotReady(why)) = (cards.is_empty(), engine.readiness()) {
                return Err(Error::Unavailable(why));
            }
            let known = cards.iter().map(|card| card.id.clone()).collect();
            return Err(Error::UnknownModel { model: id.into(), known });
        };
        let entry = self.entry(card, &cards);
        // It takes a second, once.
        let make = || async {
            let made = tokio::task::spawn_blocking(move || Model::new(entry.card)).await;
            made.map_err(|e| Error::Failed(e.to_string()))?.map(Arc::new)
        };
        entry.model.get_or_try_init(make).await.cloned()
    }

    fn entry(&self, card: &Arc<ModelCard>, served: &[Arc<ModelCard>]) -> Entry {
        let mut made = self.made.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(entry) = made.get(&card.id)
            && (Arc::ptr_eq(&entry.card, card) || entry.card == *card)
        {
            return entry.clone();
        }
        // Something changed: keep no more than is served.
        made.retain(|id, _| served.iter().any(|card| card.id == *id));
        let entry = Entry { card: card.clone(), model: Arc::default() };
        made.insert(card.id.clone(), entry.clone());
        entry
    }
}
