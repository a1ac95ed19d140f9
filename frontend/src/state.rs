//! The state that all endpoints share.

use crate::http::{BodyMemory, Via};
use crate::keys::ApiKeys;
use crate::limits::{ChoiceLimits, StoredObjects, WorkQueues};
use crate::metrics::{Metrics, Scrapes};
use crate::model::ModelCache;
use crate::params::CacheDomains;
use crate::settings::Settings;
use crate::tokenizers::Tokenizers;
use std::sync::Arc;
use worker::engine::Engine;

/// The state that all endpoints share.
pub(crate) struct AppState {
    pub(crate) engine: Arc<dyn Engine>,
    /// All metrics of the process, which `/metrics` serves.
    pub(crate) scrapes: Scrapes,
    pub(crate) metrics: Metrics,
    pub(crate) models: ModelCache,
    /// Tokenizers of relayed models.
    pub(crate) tokenizers: Arc<Tokenizers>,
    pub(crate) work: WorkQueues,
    pub(crate) body_memory: BodyMemory,
    pub(crate) choices: ChoiceLimits,
    pub(crate) stored_objects: Arc<StoredObjects>,
    pub(crate) domains: CacheDomains,
    /// Keeps relayed requests out of loops.
    pub(crate) via: Via,
    /// `None`: requests need no key.
    pub(crate) keys: Option<Arc<ApiKeys>>,
    pub(crate) settings: Settings,
}
