//! What the parts of the router share: the state of each, and the settings that hold.
//!
//! It uses none of the rooms that work on it: the tasks of `control` and the request path of `dispatch` take it, and not
//! each other's insides. What needs one thing of it takes that.

use crate::admission::Admission;
use crate::booking::{Herald, Promises};
use crate::fleet::Fleet;
use crate::hash::mix;
use crate::index::Index;
use crate::load::Traffic;
use crate::metrics::Metrics;
use crate::policy::Scratch;
use crate::settings::{Rules, Settings};
use crate::trace::Recorder;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock};
use worker::plane::RouterId;

/// What the parts of the router share.
pub(crate) struct Core {
    /// Has this router draw other lots than those that have the same settings, so that not all choose alike at the same time.
    pub(crate) lots: u64,
    /// What requests are placed by; a decision keeps what it began with.
    rules: RwLock<Arc<Rules>>,
    pub(crate) fleet: Fleet,
    pub(crate) index: Index,
    pub(crate) promises: Arc<Promises>,
    pub(crate) metrics: Metrics,
    /// Tells other routers what is booked here.
    pub(crate) herald: Arc<Herald>,
    /// Whether this router is the one, of all that serve the same workers, that plans for them.
    pub(crate) leading: AtomicBool,
    pub(crate) traffic: Traffic,
    pub(crate) admission: Arc<Admission>,
    pub(crate) recorder: Recorder,
    /// Decisions take turns, so that each sees the bookings of those before it.
    pub(crate) deciding: Mutex<Scratch>,
    /// Set when a part of the router died: it serves no more, and says so.
    pub(crate) dead: OnceLock<&'static str>,
}

/// The router could not be made.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A value in `[router]` is impossible.
    #[error("{0}")]
    Settings(String),
    /// A metric could not be registered.
    #[error("metrics: {0}")]
    Metrics(#[from] prometheus::Error),
}

impl Core {
    pub(crate) fn new(id: RouterId, settings: Settings, registry: &prometheus::Registry) -> Result<Self, Error> {
        let rules = Rules::new(settings).map_err(Error::Settings)?;
        let (metrics, recorder) = (Metrics::new(registry)?, Recorder::default());
        recorder.write_to(rules.settings.trace_file.as_deref(), &metrics).map_err(Error::Settings)?;
        Ok(Self {
            lots: mix(id.0),
            fleet: Fleet::default(),
            index: Index::with_budget(rules.settings.index_memory.as_usize()),
            rules: RwLock::new(Arc::new(rules)),
            promises: Arc::default(),
            admission: Admission::new(&metrics),
            metrics,
            herald: Herald::new(),
            leading: AtomicBool::new(true),
            traffic: Traffic::default(),
            recorder,
            deciding: Mutex::default(),
            dead: OnceLock::new(),
        })
    }

    /// What requests are placed by from now on.
    pub(crate) fn rules(&self) -> Arc<Rules> {
        self.rules.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Has other settings hold from now on. When they are wrong, nothing changes, and the error says what is.
    pub(crate) fn retune(&self, settings: Settings) -> Result<(), Error> {
        let rules = Arc::new(Rules::new(settings).map_err(Error::Settings)?);
        let record = rules.settings.trace_file.as_deref();
        self.recorder.write_to(record, &self.metrics).map_err(Error::Settings)?;
        self.index.set_budget(rules.settings.index_memory.as_usize());
        *self.rules.write().unwrap_or_else(PoisonError::into_inner) = rules;
        Ok(())
    }
}
