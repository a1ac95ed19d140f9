//! Engines that are servers with OpenAI's API: vLLM, SGLang and others, unchanged.
//!
//! ```text
//!   Engine::generate(Work::Relay) ─▶ engine ─▶ relay: body and headers, connection, response
//!                                       │  └─ continuation: the rest of a stream that another server has broken off
//!   models: what the server serves ─────┼─▶ load: what was sent to it and has not ended
//!                                       └─▶ probe: whether it is healthy
//!   resolve: which servers a name stands for
//!     └── ask, tokenize: requests of this program itself
//!
//!   server ── ZMQ ──▶ kv_events ──▶ cache_events ──▶ kvbm::EventLog of each model
//!                kv_sources: where      └── salts: cache domains of the requests that engine has sent
//! ```
//!
//! The client's request and the server's response pass as bytes. Not here: which server gets a request (the router),
//! and what is read of a request for that (the frontend).

#![forbid(unsafe_code)]

mod api_description;
pub mod ask;
mod cache_events;
mod certificates;
mod continuation;
pub mod conversation;
mod engine;
pub mod kv_events;
mod kv_sources;
mod load;
mod load_reports;
mod metrics;
mod models;
mod probe;
mod program;
pub mod relay;
pub mod resolve;
mod salts;
mod tokenize;

pub use api_description::ApiDescription;
pub use cache_events::{CacheEvents, ModelLog};
pub use certificates::{Authorities, certificates};
pub use engine::{Rank, UpstreamEngine, UpstreamSettings};
pub use kv_sources::KvSources;
pub use load_reports::{LoadReports, ReportedLoad};
pub use metrics::Metrics;
pub use models::{DEFAULT_BLOCK_SIZE, DiscoverError, ListedModel, discover};
pub use program::Program;
pub use salts::{SaltedEndpoints, Salts};
pub use tokenize::TokenizeClient;
