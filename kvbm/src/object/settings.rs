//! Settings of an object tier, and the errors of opening one.

use crate::block::Level;
use serde::{Deserialize, Serialize};
use std::io;
use std::time::Duration;

/// Size above which an object of large blocks is written: takes some seconds, and half of the write queue.
const MAX_PACK_BYTES: u64 = 128 << 20;

/// How objects are made, and how much of the store the catalog holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Settings {
    /// The level of the tier. Default G4.
    pub level: Level,
    /// Bytes at which an object is written. Default 8 MiB: far less than one request per block.
    pub object_bytes: u64,
    /// Minimum number of blocks in an object, up to 128 MiB: keeps the requests per block low when blocks are large.
    /// Default 64.
    pub object_blocks: usize,
    /// Maximum number of blocks in the catalog, about 100 bytes of memory each; beyond it the oldest objects are
    /// dropped from the catalog. Default 4 million.
    pub known_blocks: usize,
    /// Maximum bytes in the store, including marked objects and objects being written. At the limit no block is stored
    /// until garbage collection has deleted some. Each process uses at most its share of the free bytes among the
    /// active writers, because it learns only after a second what the others wrote. Default: no limit.
    pub capacity: Option<u64>,
    /// Timeout of one request, after which it is retried. Default 10 s: with 4 MiB in that time, recomputing is faster.
    pub request_timeout: Duration,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            level: Level::G4,
            object_bytes: 8 << 20,
            object_blocks: 64,
            known_blocks: 4_000_000,
            capacity: None,
            request_timeout: Duration::from_secs(10),
        }
    }
}

impl Settings {
    /// Whether a pack of `blocks` and `bytes` is to be written.
    pub(super) fn is_full(&self, blocks: usize, bytes: u64) -> bool {
        bytes >= self.object_bytes && (blocks >= self.object_blocks || bytes >= MAX_PACK_BYTES)
    }
}

/// A store cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The folder cannot be created or read.
    #[error(transparent)]
    Folder(#[from] io::Error),
    /// The client cannot be created.
    #[error("{why}; {advice}")]
    Client {
        /// The error of the client.
        why: String,
        /// What an operator can do.
        advice: &'static str,
    },
}
