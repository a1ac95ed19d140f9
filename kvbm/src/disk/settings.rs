//! Settings of a log, and the errors of opening one.

use super::direct::Access;
use crate::block::Level;
use crate::tier::Quotas;
use serde::{Deserialize, Serialize};
use std::io;
use std::path::PathBuf;

/// Size limits of a log.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Settings {
    /// Maximum size of the log in bytes. Default 16 GiB.
    pub capacity_bytes: u64,
    /// Size of a segment in bytes, the unit of reclamation. At most a quarter of the capacity is used; with quotas,
    /// at most an eighth of each group's part. Default 128 MiB, which keeps writes sequential and makes the scan
    /// after a crash take a tenth of a second.
    pub segment_bytes: u64,
    /// Bytes that the filesystem keeps free; the log shrinks rather than use them. Default 1 GiB.
    pub min_free_bytes: u64,
}

impl Default for Settings {
    fn default() -> Self {
        Self { capacity_bytes: 16 << 30, segment_bytes: 128 << 20, min_free_bytes: 1 << 30 }
    }
}

impl Settings {
    /// A log has at least four segments: the head, one in reserve, and some sealed ones. With quotas every group has
    /// a head, and these must not take guaranteed space.
    const MIN_SEGMENTS: u64 = 4;
    const SEGMENTS_PER_GROUP: u64 = 8;
    /// Minimum size of a segment in bytes; with less, footers would outweigh blocks.
    pub(super) const MIN_SEGMENT_BYTES: u64 = 64 << 10;

    /// Checks that a log of this capacity can be opened.
    pub fn check(self, quotas: &Quotas) -> Result<(), OpenError> {
        self.in_blocks(quotas.for_tier(Level::G3, 1).bounds.len()).map(drop)
    }

    pub(super) fn in_blocks(self, groups: usize) -> Result<Self, OpenError> {
        let segments = if groups > 1 { Self::SEGMENTS_PER_GROUP * groups as u64 } else { Self::MIN_SEGMENTS };
        let segment = self.segment_bytes.min(self.capacity_bytes / segments);
        let segment_bytes = segment / Access::BLOCK * Access::BLOCK;
        if segment_bytes < Self::MIN_SEGMENT_BYTES {
            let least = segments * Self::MIN_SEGMENT_BYTES;
            return Err(OpenError::TooSmall { capacity_bytes: self.capacity_bytes, least });
        }
        Ok(Self { segment_bytes, ..self })
    }
}

/// Why a log was not opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// Another process owns the folder; each process needs its own.
    #[error(
        "folder {folder:?} belongs to {}",
        pid.map_or_else(|| "another process".into(), |pid| format!("process {pid}"))
    )]
    Owned {
        /// The folder.
        folder: PathBuf,
        /// Process id of the owner, if known.
        pid: Option<u32>,
    },
    /// The capacity is too small for the minimum number of segments.
    #[error("a capacity of {capacity_bytes} bytes is too small for G3, which needs at least {least}")]
    TooSmall {
        /// The configured capacity in bytes.
        capacity_bytes: u64,
        /// The minimum capacity in bytes, with segments of the minimum size.
        least: u64,
    },
    /// The folder cannot be used.
    #[error("{path:?}: {source}")]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
}
