//! KV events of vLLM and SGLang: which blocks an engine has, as its publisher announces them.
//!
//! ```text
//!   engine ── ZMQ PUB ──▶ zmq ──▶ follow ──▶ wire ──▶ Sink ── blocks::View ──▶ Change ──▶ event log
//!          ◀─ replay ───     (gaps, restarts) (bytes to events)  (engine hash to own hash)
//! ```
//!
//! An engine has one publisher per data-parallel rank, each with its own sequence numbers and its own cache. So there
//! is one [`run`] task, one [`Sink`] and one [`View`] per rank.
//!
//! A [`View`] supports one block size. An engine with another size is reported by [`View::engine_block_size`], so that
//! start-up can adopt the engine's size; until then its blocks are ignored and counted.
//!
//! Not here: the event log (`cache_events`). A [`Change`] has the shape of `kvbm::BlockEvent`.

mod blocks;
mod follow;
mod wire;
mod zmq;

pub use blocks::{Chain, Change, Ignored, Root, View};
pub use follow::{Action, Follower};
pub use wire::{Batch, EngineHash, Event, ExtraKey, GroupKind, Medium, Message, Removed, Replayed, Stored, WireError};
#[cfg(any(test, feature = "fake"))]
pub use zmq::fake;
pub use zmq::{Endpoint, EndpointError, ReachError, Sink, Source, reach, reach_replay, replays_batches, run};
