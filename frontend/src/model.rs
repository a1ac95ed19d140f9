//! A model as the front door uses it: tokenizer, table of bytes and chat template, made from its card once and kept.

use crate::error::Error;
use crate::template::Template;
use crate::vocabulary::Vocabulary;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use tokenizers::Tokenizer;
use tokio::sync::{OnceCell, Semaphore};
use worker::engine::{Engine, ModelCard, Readiness};

/// Below this much text, work is done on the spot: about a millisecond.
const ASIDE_BYTES_MIN: usize = 8 << 10;

/// Text to tokens and back.
pub(crate) struct Model {
    pub(crate) card: Arc<ModelCard>,
    pub(crate) vocabulary: Arc<Vocabulary>,
    tokenizer: Tokenizer,
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
        Ok(Self { card, vocabulary, tokenizer, template })
    }

    /// The model's template.
    pub(crate) fn template(&self) -> Result<&Template, Error> {
        self.template.as_ref().ok_or_else(|| {
            let id = &self.card.id;
            Error::unsupported("model", format!("The model `{id}` has no chat template. Use /v1/completions."))
        })
    }

    /// Text to tokens. With `special`, the tokenizer adds what it opens every sequence with.
    pub(crate) fn encode(&self, text: &str, special: bool) -> Result<Vec<u32>, Error> {
        let encoding = self.tokenizer.encode_fast(text, special).map_err(|e| Error::Failed(e.to_string()))?;
        Ok(encoding.get_ids().to_vec())
    }
}

/// The models that were asked for, made from their cards.
pub(crate) struct Models {
    made: Mutex<HashMap<String, Entry>>,
    /// How many long texts are worked on at once; more would only take the processor from the engine.
    aside: Arc<Semaphore>,
}

#[derive(Clone)]
struct Entry {
    card: Arc<ModelCard>,
    model: Arc<OnceCell<Arc<Model>>>,
}

impl Default for Models {
    fn default() -> Self {
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        Self { made: Mutex::default(), aside: Arc::new(Semaphore::new(threads)) }
    }
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
        let make = || self.aside(usize::MAX, move || Ok(Arc::new(Model::new(entry.card)?)));
        entry.model.get_or_try_init(make).await.cloned()
    }

    /// Does `work` on `bytes` of text: off the async threads unless it is short.
    pub(crate) async fn aside<T: Send + 'static>(
        &self,
        bytes: usize,
        work: impl FnOnce() -> Result<T, Error> + Send + 'static,
    ) -> Result<T, Error> {
        if bytes < ASIDE_BYTES_MIN {
            return work();
        }
        let permit = self.aside.clone().acquire_owned().await.map_err(|e| Error::Failed(e.to_string()))?;
        let work = move || {
            let _permit = permit;
            work()
        };
        tokio::task::spawn_blocking(work).await.map_err(|e| Error::Failed(e.to_string()))?
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
