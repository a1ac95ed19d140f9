//! The cache of served models. Each is loaded from its card once, by the first request for it.

use super::served::{ModelOptions, ServedModel};
use crate::error::Error;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::Arc;
use tokio::sync::OnceCell;
use worker::engine::{Engine, ModelCard, Readiness};

/// The models that were requested so far.
pub(crate) struct ModelCache {
    options: ModelOptions,
    models: Mutex<HashMap<String, Entry>>,
}

#[derive(Clone)]
struct Entry {
    card: Arc<ModelCard>,
    model: Arc<OnceCell<Arc<ServedModel>>>,
    /// Set after the first attempt to load it ahead of requests.
    preloaded: Arc<OnceCell<()>>,
}

/// The card of the model with this id, as served now.
pub(crate) fn find_card(engine: &dyn Engine, id: &str) -> Result<Arc<ModelCard>, Error> {
    let cards = engine.models();
    if let Some(card) = cards.iter().find(|card| card.id == id) {
        return Ok(Arc::clone(card));
    }
    // While models load, or without workers, it is not known whether the model exists.
    if let (true, Readiness::NotReady(why)) = (cards.is_empty(), engine.readiness()) {
        return Err(Error::Unavailable(why));
    }
    if let Some(why) = engine.absence(id) {
        return Err(Error::Unavailable(why));
    }
    let mut known: Vec<String> = cards.iter().map(|card| card.id.clone()).collect();
    known.sort_unstable();
    Err(Error::UnknownModel { model: id.into(), known })
}

/// The models whose requests are tokenized by this process.
fn tokenized(engine: &dyn Engine) -> impl Iterator<Item = Arc<ModelCard>> {
    engine.models().into_iter().filter(|card| !card.is_relayed)
}

impl ModelCache {
    /// An empty cache.
    pub(crate) fn new(options: ModelOptions) -> Self {
        Self { options, models: Mutex::default() }
    }

    /// The model of a card. The first request loads it while concurrent ones wait (single flight).
    pub(crate) async fn get(&self, engine: &dyn Engine, card: &Arc<ModelCard>) -> Result<Arc<ServedModel>, Error> {
        let entry = self.entry(engine, card);
        let options = self.options;
        // Loading takes about a second.
        let load = || async {
            let loaded = tokio::task::spawn_blocking(move || ServedModel::new(entry.card, options)).await;
            loaded.map_err(|e| Error::Failed(e.to_string()))?.map(Arc::new)
        };
        entry.model.get_or_try_init(load).await.cloned()
    }

    /// Whether [`preload`](Self::preload) has nothing to do.
    pub(crate) fn is_preloaded(&self, engine: &dyn Engine) -> bool {
        tokenized(engine).all(|card| self.entry(engine, &card).preloaded.initialized())
    }

    /// Loads all models that are tokenized here, once each, so that no request waits for that. An error is that of the
    /// requests for the model, which try again.
    pub(crate) async fn preload(&self, engine: &dyn Engine) {
        for card in tokenized(engine) {
            let attempt = async {
                if let Err(error) = self.get(engine, &card).await {
                    tracing::warn!(model = card.id, %error, "cannot load the tokenizer of the model");
                }
            };
            self.entry(engine, &card).preloaded.get_or_init(|| attempt).await;
        }
    }

    fn entry(&self, engine: &dyn Engine, card: &Arc<ModelCard>) -> Entry {
        let mut models = self.models.lock();
        if let Some(entry) = models.get(&card.id)
            && (Arc::ptr_eq(&entry.card, card) || entry.card == *card)
        {
            return entry.clone();
        }
        // The card is new or has changed: drop models that are no longer served.
        let served = engine.models();
        models.retain(|id, _| served.iter().any(|card| card.id == *id));
        let entry = Entry { card: card.clone(), model: Arc::default(), preloaded: Arc::default() };
        models.insert(card.id.clone(), entry.clone());
        entry
    }
}
