//! The memory tiers: G1, the device's memory, and G2, the host's.
//!
//! This room owns the slots of such a tier and the states of the blocks in them (`block_pool`, `slot`, `handles`), the
//! choice of eviction victims (`evict`), expiry and pins (`retention`), the interface to the engine's memory
//! ([`device`]) and the host tier ([`HostTier`]). Not here: when blocks move between tiers ([`crate::manager`]).
//!
//! ```text
//!   allocate ──▶ PartialBlock ──complete──▶ FullBlock ──register──▶ CachedBlock ──downgrade──▶ WeakBlock
//!                    │ drop                    │ drop                 │ last drop                 │ upgrade, while
//!                    ▼                         ▼                      ▼                           ▼ still resident
//!                  free                      free              stays cached, evictable        CachedBlock
//! ```
//!
//! A transition consumes the value of the state before it, and dropping is the only release. `allocate` takes free
//! slots first, then the slots of cached blocks that no guard holds, leaves before parents. Events are queued under the
//! pool's lock, so their order is the order of the changes. Blocks expire, and pins end, at the next call that looks at
//! the pool.
//!
//! A pool decides which owner may access a slot. It does not touch the bytes itself.

mod block_pool;
pub mod device;
mod evict;
mod handles;
mod host;
mod lookup;
mod retention;
mod slot;
mod state;

pub(crate) use block_pool::BlockPool;
pub use device::{BlockId, DeviceBlocks};
pub(crate) use evict::BlockUse;
pub use handles::{BlockRef, CachedBlock, CachedBlocks, WeakBlock};
pub use host::HostTier;
pub use slot::{FullBlock, PartialBlock};

#[cfg(test)]
mod tests;
