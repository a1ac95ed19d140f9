//! State that the background tasks of `control` and the request path of `dispatch` share, and the settings in effect.
//!
//! It uses neither of these rooms, and they do not use each other. What needs a few parts of it takes these parts.

mod settings;

pub(crate) use settings::ResolvedSettings;
pub use settings::{Overrides, Settings};

use crate::admission::Admission;
use crate::booking::{InflightPrefixes, PrefixCopies, ReplicaOutbox};
use crate::fleet::{FailedRequests, Fleet};
use crate::hash::{HashCache, splitmix64};
use crate::index::{Index, NoAddresses};
use crate::load::Traffic;
use crate::policy::Scratch;
use crate::policy::planner::PlanStatus;
use crate::telemetry::{Metrics, Recorder};
use parking_lot::{Mutex, RwLock};
use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};
use worker::plane::RouterId;

/// State that the parts of the router share.
pub(crate) struct Core {
    /// Differs between routers with the same settings, so that they do not all choose alike at the same time.
    pub(crate) rng_seed: u64,
    /// Settings in effect. A decision keeps those that it began with.
    resolved: RwLock<Arc<ResolvedSettings>>,
    pub(crate) fleet: Arc<Fleet>,
    pub(crate) failed_requests: FailedRequests,
    pub(crate) index: Arc<Index>,
    /// Block hashes of recent prompts.
    pub(crate) hash_cache: HashCache,
    pub(crate) inflight: Arc<InflightPrefixes>,
    /// Copies of shared prefixes that workers make ahead of demand.
    pub(crate) copies: Arc<PrefixCopies>,
    pub(crate) metrics: Arc<Metrics>,
    /// Changes of reservations for other routers.
    pub(crate) outbox: Arc<ReplicaOutbox>,
    pub(crate) traffic: Traffic,
    pub(crate) admission: Arc<Admission>,
    pub(crate) recorder: Recorder,
    /// Buffers of decisions. Their lock serializes decisions, so that each sees the reservations of those before it.
    pub(crate) scratch: Mutex<Scratch>,
    /// The planner's last plan for each model.
    pub(crate) plans: Mutex<BTreeMap<Arc<str>, PlanStatus>>,
    /// Why a component of the router has failed. The router then serves no more requests and is not ready.
    pub(crate) failure: OnceLock<&'static str>,
}

/// The router could not be created, or its settings not updated.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A value in `[router]` is invalid.
    #[error("{0}")]
    Settings(String),
    /// A metric could not be registered.
    #[error("metrics: {0}")]
    Metrics(#[from] prometheus::Error),
    /// The index has no memory.
    #[error("no memory for the index of the router: {0}")]
    Memory(#[from] NoAddresses),
}

impl Core {
    pub(crate) fn new(id: RouterId, settings: Settings, registry: &prometheus::Registry) -> Result<Self, Error> {
        let resolved = ResolvedSettings::new(settings).map_err(Error::Settings)?;
        let (metrics, recorder) = (Metrics::new(registry)?, Recorder::default());
        recorder.write_to(resolved.settings.trace_file.as_deref(), &metrics).map_err(Error::Settings)?;
        let index = Index::with_memory_limit(resolved.settings.index_memory.as_usize())?;
        Ok(Self {
            rng_seed: splitmix64(id.0),
            fleet: Arc::default(),
            failed_requests: FailedRequests::default(),
            index: Arc::new(index),
            hash_cache: HashCache::default(),
            resolved: RwLock::new(Arc::new(resolved)),
            inflight: Arc::default(),
            copies: Arc::default(),
            admission: Admission::new(&metrics),
            metrics: Arc::new(metrics),
            outbox: ReplicaOutbox::new(),
            traffic: Traffic::default(),
            recorder,
            scratch: Mutex::default(),
            plans: Mutex::default(),
            failure: OnceLock::new(),
        })
    }

    /// The settings in effect.
    pub(crate) fn settings(&self) -> Arc<ResolvedSettings> {
        self.resolved.read().clone()
    }

    /// Replaces the settings. Invalid settings change nothing and are an error.
    pub(crate) fn update_settings(&self, settings: Settings) -> Result<(), Error> {
        let resolved = Arc::new(ResolvedSettings::new(settings).map_err(Error::Settings)?);
        let trace_file = resolved.settings.trace_file.as_deref();
        self.recorder.write_to(trace_file, &self.metrics).map_err(Error::Settings)?;
        self.index.set_memory_limit(resolved.settings.index_memory.as_usize());
        *self.resolved.write() = resolved;
        Ok(())
    }
}
