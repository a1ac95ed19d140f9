//! The seam below G1: a place where blocks rest.
//!
//! This room owns the trait [`Tier`] with its contract and the suite that checks it (`conformance`), and the parts that
//! several tiers are made of: the index of what rests, quotas and fair queueing between cache domains, claims of blocks
//! that are being written, and reads of neighbouring blocks in one request. [`Faulty`] injects faults into any tier.
//! Not here: a tier itself. Those are `pool`, `disk` and `object`.

pub(crate) mod coalesce;
#[cfg(test)]
pub(crate) mod conformance;
mod drr;
mod fault_injection;
mod index;
mod quota;
mod write_claims;

pub(crate) use drr::{Fair, Gate, Pass};
pub use fault_injection::{Faults, Faulty};
pub(crate) use index::{Index, Resting};
pub(crate) use quota::{Bounds, Division, payer};
pub use quota::{Quota, Shares};
pub(crate) use write_claims::{Claim, Claims};

use crate::block::{Block, Date, Fingerprint, Level, SequenceHash};
use futures::future::BoxFuture;
use futures::stream::BoxStream;
use std::io;

/// A place where blocks rest: host memory, a log on SSD, an object store, a peer's memory.
///
/// # Contract
/// - `holds` MUST NOT wait or touch a device. It is a hint: a block that it names may be gone when it is loaded.
/// - `load` MUST yield every index of `names` exactly once, in any order, and end. A block that is not there is `Ok(None)`,
///   never an error. Dropping the stream MUST stop the work. It need not verify payloads; whoever serves them does.
/// - `store` MUST resolve only when the bytes rest as durably as the tier promises, and only then announce them. Storing a
///   block that is there already is an `Ok`. When the tier is full it gives up older blocks, leaves before parents; when
///   it cannot take a block now it MUST answer [`StoreError::Busy`] soon rather than wait for ever.
/// - `discard` MUST make `holds` and `load` deny the block from then on, and announce its removal. A tier that keeps several
///   copies of it may go on with another, and take what is said of that for a while for said of the first.
/// - `expire` MUST make `holds` and `load` deny every block that the tier knows to be over, and announce its removal. A tier
///   that learns only by reading a block that it is over need not know; whoever serves blocks looks at their dates.
/// - A block's whole header MUST come back as it was stored, but for what describes the payload's form.
/// - Every change of what `holds` would say MUST be announced, once, in the owner's event log.
/// - A tier knows no other tier.
pub trait Tier: Send + Sync + 'static {
    /// Where in the order of tiers it stands, and its label in metrics.
    fn level(&self) -> Level;

    /// How many of `names`, counted from the first, rest here.
    fn holds(&self, fingerprint: Fingerprint, names: &[SequenceHash]) -> usize;

    /// Reads blocks.
    fn load(&self, fingerprint: Fingerprint, names: Vec<SequenceHash>) -> BoxStream<'static, Loaded>;

    /// Writes blocks, answering for each in order.
    fn store(&self, blocks: Vec<Block>) -> BoxFuture<'_, Vec<Result<(), StoreError>>>;

    /// Drops a block that turned out not to be what it says.
    fn discard(&self, fingerprint: Fingerprint, name: SequenceHash);

    /// Drops a block that was read and is over, unless a sweep was before that, and says how many that makes.
    fn lapse(&self, fingerprint: Fingerprint, name: SequenceHash) -> usize {
        let held = self.holds(fingerprint, &[name]);
        self.discard(fingerprint, name);
        held
    }

    /// Forgets blocks that are over by `now`, and says how many. Cheap when there are none.
    fn expire(&self, now: Date) -> usize;

    /// How full it is.
    fn usage(&self) -> Usage;
}

/// One answer of [`Tier::load`]: the index into the names asked for, and what was found.
pub type Loaded = (usize, Result<Option<Block>, LoadError>);

/// How full a tier is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Usage {
    /// Blocks that rest there.
    pub blocks: u64,
    /// Bytes that they take, headers and padding included.
    pub bytes: u64,
    /// Bytes that the tier may take; `None` when nobody set a budget.
    pub capacity: Option<u64>,
}

/// A block could not be read.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The place failed.
    #[error("read failed: {0}")]
    Io(#[from] io::Error),
    /// What was read is not the block.
    #[error("corrupt block: {0}")]
    Corrupt(#[from] crate::block::Corrupt),
}

/// A block was not stored.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The tier has more to do than it can; offer the block again, or forget it.
    #[error("tier is busy")]
    Busy,
    /// The tier has no room and nothing to give up.
    #[error("tier is full")]
    Full,
    /// The place failed.
    #[error("write failed: {0}")]
    Io(#[from] io::Error),
}
