//! Tier G3: blocks on local SSDs. Each path (folder) holds one log of large segments, owned by exactly one process.
//!
//! ```text
//!   store ─▶ striping chooses a path ─▶ queue ─▶ writers ─▶ head segment ─▶ index, event, answer
//!   load  ─▶ index ─▶ per path: runs of adjacent records ─▶ up to eight readers ─▶ one stream
//!   full  ─▶ the oldest segment is reclaimed, blocks in use are carried over
//!   open  ─▶ footers of sealed segments, a scan of unsealed ones ─▶ index, events
//! ```
//!
//! A stored block survives the death of the process. A power cut may lose blocks; it causes no wrong answers, because
//! every load is verified. A failed write loses its blocks; the tier continues to read, and writes again after a
//! second. Each path has its own log, capacity and lock; one index covers all paths. A path that fails loses its
//! blocks only, and is reopened automatically (`path`). Not here: eviction of single blocks, and `fsync`.

mod direct;
mod file_io;
mod footer;
mod inspect;
mod load;
mod lock;
mod log;
mod open;
mod path;
mod queue;
mod reclaim;
mod record;
mod recover;
mod segment;
mod settings;
mod space;
mod store;
mod striping;
#[cfg(test)]
mod tests;
mod tier;
mod verify;
mod victim;
mod write;

pub use inspect::{DomainBlocks, LogContents, inspect};
pub use lock::{check_owner, wait_for_owner};
pub use settings::{OpenError, Settings};
pub use tier::{DiskTier, PathState};
pub use verify::{Verification, verify};
