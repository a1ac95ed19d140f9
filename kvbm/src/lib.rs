//! The KV block manager: names blocks, keeps them, moves them between tiers.
//!
//! ```text
//!   engine ── PartialBlock → FullBlock → CachedBlock ──┐
//!                                                      ▼
//!            G1 device pool  ⇄  G2 host  ⇄  G3 SSD log  ⇄  G4 object store
//!                 │                │            │               │
//!                 └────── numbered BlockEvents, one log per owner ┘
//! ```
//!
//! A block is the KV of a fixed number of consecutive tokens. Its [`SequenceHash`] names the *content* (these tokens after
//! exactly those tokens, in this cache domain, for this model); its [`Fingerprint`] says which engine's bytes they are.
//! What a tier hands back is served only after both, and a checksum, were verified.
//!
//! This crate knows no worker, no model and no request: tokens go in as numbers, bytes stay opaque.

pub mod block;
#[cfg(test)]
mod contract;
pub mod device;
pub mod disk;
pub mod event;
mod evict;
pub mod faulty;
mod host;
mod index;
mod manager;
mod metrics;
pub mod name;
mod peer;
mod plan;
mod pool;
mod run;
pub mod tier;

pub use block::{Block, Codec, Corrupt, Header, KeyId, Verified};
pub use device::{BlockId, DeviceBlocks};
pub use disk::DiskTier;
pub use event::{BlockEvent, Epoch, EventLog, Gap, Level, Numbered, Snapshot};
pub use faulty::{Faults, Faulty};
pub use host::HostTier;
pub use manager::{BlockManager, Onboarded, Recompute, Speed};
pub use metrics::Metrics;
pub use name::{ChainKey, Domain, DomainId, Fingerprint, SequenceHash};
pub use pool::{CachedBlock, FullBlock, PartialBlock, WeakBlock};
pub use tier::{LoadError, Loaded, StoreError, Tier, Usage};
