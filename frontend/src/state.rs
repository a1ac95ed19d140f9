//! The state that all endpoints share.

use crate::http::BodyMemory;
use crate::limits::{Choices, Lanes};
use crate::metrics::Metrics;
use crate::model::Models;
use crate::params::Domains;
use crate::settings::Settings;
use prometheus::Registry;
use std::sync::Arc;
use worker::engine::Engine;

/// The state that all endpoints share.
pub(crate) struct Gate {
    pub(crate) engine: Arc<dyn Engine>,
    pub(crate) registry: Registry,
    pub(crate) metrics: Metrics,
    pub(crate) models: Models,
    pub(crate) lanes: Lanes,
    pub(crate) bodies: BodyMemory,
    pub(crate) choices: Choices,
    pub(crate) domains: Domains,
    pub(crate) settings: Settings,
}
