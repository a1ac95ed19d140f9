//! The list of workers, and what the router knows of each beside its load.
//!
//! Owns the list, which is replaced as a whole (read-copy-update), each worker's health (a circuit breaker), whether
//! its KV events are accurate, and, where they are not, an estimate of its cache from the prompts sent to it.
//! Guarantees that a reader uses one consistent snapshot of the list.
//!
//! Not here: the tasks that update it (`control`), and the load of the workers (`load`).

mod assumed_cache;
mod endpoints;
mod estimated_cache;
mod event_accuracy;
mod failed_requests;
mod health;
mod model_pool;
mod snapshot;
mod transition;
mod worker_state;

#[cfg(test)]
pub(crate) use assumed_cache::MAX_AGE as ASSUMED_MAX_AGE;
pub(crate) use estimated_cache::reachable_stores;
pub(crate) use event_accuracy::{CacheView, EstimateReason};
pub(crate) use failed_requests::FailedRequests;
pub(crate) use health::HealthSignal;
pub(crate) use model_pool::{ModelPool, Needs, PromptTokens, WorkerEntry};
pub(crate) use snapshot::{Fleet, FleetSnapshot};
pub(crate) use transition::{Cause, Transition};
pub(crate) use worker_state::{Worker, WorkerRun};
