//! How large a log may grow, and why one cannot be opened.

use super::direct::Access;
use crate::block::Level;
use crate::tier::Shares;
use serde::{Deserialize, Serialize};
use std::io;
use std::path::PathBuf;

/// How large the log may grow.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Settings {
    /// Bytes that the log may take. Default 16 GiB.
    pub capacity_bytes: u64,
    /// Bytes of one segment, the unit of reclaiming; at most a quarter of the capacity is used, and an eighth of what each
    /// domain would have where they are told apart. Default 128 MiB: writes stay
    /// sequential for long, and what is scanned after a crash takes a tenth of a second.
    pub segment_bytes: u64,
    /// Bytes that the filesystem keeps free; the log shrinks rather than take them. Default 1 GiB.
    pub min_free_bytes: u64,
}

impl Default for Settings {
    fn default() -> Self {
        Self { capacity_bytes: 16 << 30, segment_bytes: 128 << 20, min_free_bytes: 1 << 30 }
    }
}

impl Settings {
    /// A log has at least four segments: one being written, one in reserve, and some that rest. Where domains are told apart,
    /// each of them has one that is being written, and these must not take what was promised.
    const SEGMENTS_MIN: u64 = 4;
    const SEGMENTS_EACH: u64 = 8;
    /// Below this, footers would outweigh blocks.
    pub(super) const SEGMENT_BYTES_MIN: u64 = 64 << 10;

    /// Whether a log of this capacity can be opened.
    pub fn check(self, shares: &Shares) -> Result<(), OpenError> {
        self.in_blocks(shares.at(Level::G3, 1).bounds.len()).map(drop)
    }

    pub(super) fn in_blocks(self, groups: usize) -> Result<Self, OpenError> {
        let segments = if groups > 1 { Self::SEGMENTS_EACH * groups as u64 } else { Self::SEGMENTS_MIN };
        let segment = self.segment_bytes.min(self.capacity_bytes / segments);
        let segment_bytes = segment / Access::BLOCK * Access::BLOCK;
        if segment_bytes < Self::SEGMENT_BYTES_MIN {
            let least = segments * Self::SEGMENT_BYTES_MIN;
            return Err(OpenError::TooSmall { capacity_bytes: self.capacity_bytes, least });
        }
        Ok(Self { segment_bytes, ..self })
    }
}

/// The log was not opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// Another process has it; give this one a folder of its own.
    #[error("folder {folder:?} belongs to {}", pid.map_or_else(|| "another process".into(), |pid| format!("process {pid}")))]
    Owned {
        /// Which folder.
        folder: PathBuf,
        /// Whose, if it said so.
        pid: Option<u32>,
    },
    /// The settings leave no room for a log.
    #[error("a capacity of {capacity_bytes} bytes is too small for G3, which needs at least {least}")]
    TooSmall {
        /// What was asked for.
        capacity_bytes: u64,
        /// What would do, for segments that are not smaller than this allows either.
        least: u64,
    },
    /// The folder cannot be used.
    #[error("{path:?}: {source}")]
    Io {
        /// Which file or folder.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}
