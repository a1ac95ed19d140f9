//! Settings of a log, and the errors of opening one.

use super::direct::Access;
use super::footer::RecordList;
use super::record;
use crate::block::{Header, Level};
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
    pub(super) const MIN_SEGMENTS: u64 = 4;
    const SEGMENTS_PER_GROUP: u64 = 8;
    /// Minimum size of a segment in bytes; with less, footers would outweigh blocks.
    pub(super) const MIN_SEGMENT_BYTES: u64 = 64 << 10;

    /// Checks that a log of this capacity can be opened.
    pub fn check(self, quotas: &Quotas) -> Result<(), OpenError> {
        self.in_blocks(groups_of(quotas)).map(drop)
    }

    /// Checks that a log of this capacity takes blocks with payloads of `block_bytes`: a block has to fit into one
    /// segment.
    pub fn check_block(self, quotas: &Quotas, block_bytes: u64) -> Result<(), OpenError> {
        let groups = groups_of(quotas);
        let Self { capacity_bytes, segment_bytes, .. } = self.in_blocks(groups)?;
        let wanted = segment_of(block_bytes.min(Header::MAX_LENGTH) + ENCRYPTION_BYTES);
        if wanted <= segment_bytes {
            return Ok(());
        }
        let least = Self::segments(groups).saturating_mul(wanted);
        Err(OpenError::BlockTooLarge { capacity_bytes, block_bytes, least })
    }

    const fn segments(groups: usize) -> u64 {
        if groups > 1 { Self::SEGMENTS_PER_GROUP * groups as u64 } else { Self::MIN_SEGMENTS }
    }

    pub(super) fn in_blocks(self, groups: usize) -> Result<Self, OpenError> {
        let segments = Self::segments(groups);
        let segment = self.segment_bytes.min(self.capacity_bytes / segments);
        let segment_bytes = segment / Access::BLOCK * Access::BLOCK;
        if segment_bytes < Self::MIN_SEGMENT_BYTES {
            let least = segments * Self::MIN_SEGMENT_BYTES;
            return Err(OpenError::TooSmall { capacity_bytes: self.capacity_bytes, least });
        }
        Ok(Self { segment_bytes, ..self })
    }
}

/// Limit of the bytes that encryption adds to a block.
const ENCRYPTION_BYTES: u64 = 64;

/// Number of groups of segments.
fn groups_of(quotas: &Quotas) -> usize {
    quotas.for_tier(Level::G3, 1).bounds.len()
}

/// Length in bytes of a segment that has one block with such a payload.
pub(super) fn segment_of(payload: u64) -> u64 {
    record::span(payload, Access::BLOCK) + RecordList::footer_bytes(1, 1)
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
    /// The capacity is too small for blocks of this size.
    #[error(
        "a capacity of {capacity_bytes} bytes is too small for G3: with blocks of {block_bytes} bytes it needs at \
         least {least}"
    )]
    BlockTooLarge {
        /// The configured capacity in bytes.
        capacity_bytes: u64,
        /// Payload of a block in bytes.
        block_bytes: u64,
        /// The minimum capacity in bytes for such blocks.
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
