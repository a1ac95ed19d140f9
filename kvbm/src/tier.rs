//! The interface of the tiers below G1, and parts that several tiers share.
//!
//! This room owns the trait [`Tier`] with its contract and the test suite that checks it (`conformance`). Its parts are
//! the index of stored blocks, quotas and fair queueing between cache domains, claims of blocks that are being written,
//! coalescing of adjacent reads, the health of writes, and delegation for tiers that wrap another tier. [`Faulty`]
//! injects faults into any tier.
//! Not here: implementations of tiers. Those are in `pool`, `disk` and `object`.

pub(crate) mod coalesce;
#[cfg(test)]
pub(crate) mod conformance;
mod delegate;
mod drr;
mod fault_injection;
mod index;
mod io_health;
mod quota;
mod write_claims;

pub(crate) use delegate::delegate;
pub(crate) use drr::{DrrQueue, FairSemaphore, Permit};
pub use fault_injection::{Faults, Faulty};
pub(crate) use index::{Index, IndexEntry};
pub(crate) use io_health::{Change, IoHealth};
pub(crate) use quota::{Bounds, TierQuotas, victim_group};
pub use quota::{Quota, Quotas};
pub(crate) use write_claims::{WriteClaim, WriteClaims};

use crate::block::{Block, Date, Fingerprint, Header, Level, SequenceHash};
use futures::future::BoxFuture;
use futures::stream::BoxStream;
use std::io;
use std::sync::Arc;

/// A tier that stores blocks: host memory, a log on SSD, an object store, a peer's memory.
///
/// # Contract
/// - `holds` MUST NOT wait or access a device. It is a hint: a block that it counts may be missing when it is loaded.
/// - `load` MUST yield every index of `hashes` exactly once, in any order, and end. A missing block is `Ok(None)`,
///   never an error. Dropping the stream MUST stop the work. It need not verify payloads; the caller does.
/// - `load_into` MUST do what `load` does, except that it does not yield the indexes of blocks that its receiver has
///   taken. It MUST offer a block at most once, as a whole or in pieces; a block that ends in the middle of its pieces
///   is an error, as if it had not been offered.
/// - `store` MUST resolve only when the bytes are as durable as the tier specifies, and only then announce them.
///   Storing a block again is `Ok`. A full tier evicts older blocks, children before parents. A tier that cannot
///   accept a block now MUST answer [`StoreError::Busy`] or [`StoreError::Unavailable`] soon instead of waiting.
/// - After `discard`, `holds` and `load` MUST miss the block, and its removal MUST be announced. A tier with several
///   copies of the block may continue with another one, and may treat further calls as repetitions of the first for
///   some time.
/// - After `withdraw`, the same holds as after `discard`, but the stored bytes MUST stay where the tier outlives the
///   process: another process, or this one after a restart, may have the block's key.
/// - After `expire`, `holds` and `load` MUST miss every block that the tier knows to be expired, and the removals MUST
///   be announced. A tier that learns a block's dates only when it reads the block may miss some; callers of `load`
///   check the dates.
/// - A block's header MUST come back as it was stored, except for the fields that describe the payload's encoding.
/// - Every change of what `holds` would answer MUST be announced once, in the tier's event log.
/// - A tier does not depend on other tiers.
pub trait Tier: Send + Sync + 'static {
    /// Position in the order of tiers, and label in metrics.
    fn level(&self) -> Level;

    /// Length of the longest prefix of `hashes` whose blocks are all stored.
    fn holds(&self, fingerprint: Fingerprint, hashes: &[SequenceHash]) -> usize;

    /// Reads blocks.
    fn load(&self, fingerprint: Fingerprint, hashes: Vec<SequenceHash>) -> BoxStream<'static, Loaded>;

    /// Reads blocks, and offers each one to `receiver` first. For tiers that read on several threads, where the bytes
    /// of a block that has just arrived are in the cache of a processor. By default nothing is offered.
    fn load_into(
        &self,
        fingerprint: Fingerprint,
        hashes: Vec<SequenceHash>,
        receiver: Arc<dyn BlockReceiver>,
    ) -> BoxStream<'static, Loaded> {
        drop(receiver);
        self.load(fingerprint, hashes)
    }

    /// Writes blocks. The results are in the order of the blocks.
    fn store(&self, blocks: Vec<Block>) -> BoxFuture<'_, Vec<Result<(), StoreError>>>;

    /// Removes a block that was found corrupt.
    fn discard(&self, fingerprint: Fingerprint, hash: SequenceHash);

    /// Removes a block that this process cannot decrypt, so that a copy that it can decrypt is stored. A tier that
    /// keeps no blocks of other processes can discard it.
    fn withdraw(&self, fingerprint: Fingerprint, hash: SequenceHash) {
        self.discard(fingerprint, hash);
    }

    /// Removes a block that was found expired when it was read. Returns the number of removed blocks: 0 if it was
    /// removed already.
    fn expire_one(&self, fingerprint: Fingerprint, hash: SequenceHash) -> usize {
        let held = self.holds(fingerprint, &[hash]);
        self.discard(fingerprint, hash);
        held
    }

    /// Removes blocks that are expired at `now`, and returns their number. Cheap if there are none.
    fn expire(&self, now: Date) -> usize;

    /// Current fill level.
    fn usage(&self) -> Usage;
}

/// Takes blocks on the threads that read them: [`Tier::load_into`].
pub trait BlockReceiver: Send + Sync + 'static {
    /// Takes a block that was not verified, by its index in the load, or returns it, to be yielded. It is called on an
    /// async thread, so it MUST take no longer than copying the block does.
    fn take(&self, index: usize, block: Block) -> Option<Block>;

    /// Takes a large block whose payload is about to arrive, by its index in the load, or returns `None`: then the
    /// block is offered to [`take`](Self::take) once it is there. By default none is taken.
    fn begin(&self, _index: usize, _header: &Header) -> Option<Box<dyn PieceReceiver>> {
        None
    }
}

/// Takes the payload of one block as it arrives, so that its bytes are read while they are in the processor's cache:
/// [`BlockReceiver::begin`]. When it is dropped before its end, the block was not taken.
pub trait PieceReceiver: Send {
    /// Takes the next bytes, like [`BlockReceiver::take`] in no longer than copying them takes. `false`: the load was
    /// dropped, and nothing more of it is needed.
    fn write(&mut self, bytes: &[u8]) -> bool;

    /// All bytes of the payload were taken. They are not verified by the tier.
    fn end(self: Box<Self>);
}

/// One item of [`Tier::load`]: index of a requested hash, and the result for it.
pub type Loaded = (usize, Result<Option<Block>, LoadError>);

/// Fill level of a tier.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Usage {
    /// Number of stored blocks.
    pub blocks: u64,
    /// Bytes that the blocks occupy, headers and padding included.
    pub bytes: u64,
    /// Maximum number of bytes; `None` without a limit.
    pub capacity: Option<u64>,
}

/// A block could not be read.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The device or store failed.
    #[error("read failed: {0}")]
    Io(#[from] io::Error),
    /// The bytes are not those of the block.
    #[error("corrupt block: {0}")]
    Corrupt(#[from] crate::block::Corrupt),
}

/// A block was not stored.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The tier is overloaded; the caller may retry or give up.
    #[error("tier is busy")]
    Busy,
    /// The tier cannot be used now, for this reason; the caller may retry or give up.
    #[error("tier is down: {0}")]
    Unavailable(String),
    /// The tier is full and cannot evict anything.
    #[error("tier is full")]
    Full,
    /// The tier takes no block of this payload length in bytes.
    #[error("a block of {0} bytes is too large for the capacity of the tier")]
    TooLarge(u64),
    /// The device or store failed.
    #[error("write failed: {0}")]
    Io(#[from] io::Error),
}
