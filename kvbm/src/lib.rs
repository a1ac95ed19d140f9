//! The KV block manager: hashes KV blocks, caches them, and moves them between tiers.
//!
//! ```text
//!   engine ── PartialBlock → FullBlock → CachedBlock ──┐
//!                                                      ▼
//!            G1 device pool  ⇄  G2 host  ⇄  G3 SSD log  ⇄  G4 object store
//!                 │                │            │               │
//!                 └────── numbered BlockEvents, one log per owner ┘
//! ```
//!
//! A block is the KV of a fixed number of consecutive tokens. Its [`SequenceHash`] identifies the *content*: these
//! tokens after exactly the tokens before them, in this cache domain, for this model. Its [`Fingerprint`] identifies
//! the engine that computed the payload. A block that a tier returns is used only after both and a checksum were
//! verified.
//!
//! An example: compute blocks, cache, offload, evict and onboard them, and transfer them to another engine.
//!
//! ```
//! use kvbm::*;
//! use std::sync::{Arc, Mutex};
//!
//! /// Device memory: here four slots of plain memory; in an engine, its KV arena.
//! struct Device(Mutex<[[u8; 64]; 4]>);
//!
//! impl DeviceBlocks for Device {
//!     fn capacity(&self) -> usize {
//!         4
//!     }
//!     fn block_bytes(&self) -> usize {
//!         64
//!     }
//!     fn fingerprint(&self) -> Fingerprint {
//!         Fingerprint::of([("weights", &b"v1"[..]), ("dtype", b"f32")])
//!     }
//!     fn read(&self, slot: BlockId, into: &mut [u8]) {
//!         into.copy_from_slice(&self.0.lock().unwrap()[slot.0 as usize]);
//!     }
//!     fn write(&self, slot: BlockId, from: &[u8]) {
//!         self.0.lock().unwrap()[slot.0 as usize].copy_from_slice(from);
//!     }
//! }
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() {
//! let log = Arc::new(EventLog::new(Epoch(1)));
//! let metrics = Metrics::new(&prometheus::Registry::new()).unwrap();
//! let device: Arc<dyn DeviceBlocks> = Arc::new(Device(Mutex::new([[0; 64]; 4])));
//! let host = HostTier::new(64 * 1024, 64, device.fingerprint(), log.clone(), &metrics).unwrap();
//! let manager = BlockManager::new(device.clone(), Some(host), vec![], log.clone(), metrics.clone());
//!
//! // A prompt of 40 tokens has two full blocks of 16.
//! let hashes = ChainKey::root(&Domain::shared(), "model", None).hashes(&(0..40).collect::<Vec<_>>(), 16);
//! assert!(manager.lookup(&hashes).is_empty(), "a miss");
//!
//! // Compute them, and add them to the cache.
//! let slots = manager.allocate(2).expect("two free slots");
//! let parents = [None, Some(hashes[0])];
//! for ((slot, hash), parent) in slots.into_iter().zip(&hashes).zip(parents) {
//!     device.write(slot.slot(), &[7; 64]);
//!     drop(manager.register(slot.complete(*hash, parent, BlockAttrs::default())));
//! }
//! manager.flush().await; // Now they are also in G2.
//!
//! // Other work takes the whole device. Later the blocks are onboarded from G2, if that is faster than computing.
//! drop(manager.allocate(4));
//! assert_eq!(manager.count_in_tiers(&hashes), 2);
//! let recompute = Recompute { seconds_per_block: Some(0.1), deadline: None };
//! let onboarded = manager.onboard(&hashes, recompute).await;
//! assert_eq!(onboarded.from, [(Level::G2, 2)]);
//!
//! // Another engine onboards them from the memory of this one.
//! let other: Arc<dyn DeviceBlocks> = Arc::new(Device(Mutex::new([[0; 64]; 4])));
//! let decode = BlockManager::new(other, None, vec![], Arc::new(EventLog::new(Epoch(1))), metrics);
//! let untraced = spans::Context::none();
//! assert_eq!(decode.onboard_from(&manager.peer(), &hashes, recompute, &untraced).await.blocks.len(), 2);
//! # }
//! ```
//!
//! Not here: workers, models and requests. Tokens are numbers, and payloads are opaque.

pub mod block;
pub mod blocking;
pub mod disk;
pub mod event;
mod folder;
pub mod heap;
mod manager;
mod metrics;
pub mod object;
pub mod permissions;
mod pool;
mod table;
#[cfg(test)]
mod tests;
pub mod tier;
mod transform;

// For other crates. Inside this one, imports come from the room that owns the type.
pub use block::{Block, Codec, Corrupt, Header, KeyId, PieceVerifier, Verified};
pub use block::{
    BlockAttrs, BlockRetention, ChainKey, Clock, Date, Domain, DomainId, Fingerprint, Level, Priority, Retention,
    SequenceHash,
};
pub use disk::DiskTier;
pub use event::{BlockEvent, CacheDigest, Epoch, EventLog, Gap, Numbered, Run, SetDigest, Snapshot};
pub use manager::{
    BlockManager, Copied, NoRoom, Onboarded, Onboarding, Recompute, ReusedPrefix, ReusedPrefixes, Speed,
};
pub use metrics::Metrics;
pub use object::ObjectTier;
pub use pool::device;
pub use pool::{
    BlockId, BlockRef, CachedBlock, CachedBlocks, DeviceBlocks, FullBlock, HostTier, PartialBlock, WeakBlock,
};
pub use table::{HashIndex, Prefetcher, hugepages, lazy_lines, prefetch, splitmix, swar};
pub use tier::{
    BlockReceiver, Faults, Faulty, LoadError, Loaded, PieceReceiver, Quota, Quotas, StoreError, Tier, Usage,
};
pub use transform::{codec, crypt};
