//! The models that were asked for, each loaded from its card once and kept.

use super::served::{Model, Options};
use crate::error::Error;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use tokio::sync::OnceCell;
use worker::engine::{Engine, ModelCard, Readiness};

/// The models that were asked for, made from their cards.
pub(crate) struct Models {
    options: Options,
    made: Mutex<HashMap<String, Entry>>,
}

#[derive(Clone)]
struct Entry {
    card: Arc<ModelCard>,
    model: Arc<OnceCell<Arc<Model>>>,
}

impl Models {
    /// None yet.
    pub(crate) fn new(options: Options) -> Self {
        Self { options, made: Mutex::default() }
    }

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
        let options = self.options;
        // It takes a second, once.
        let make = || async {
            let made = tokio::task::spawn_blocking(move || Model::new(entry.card, options)).await;
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
