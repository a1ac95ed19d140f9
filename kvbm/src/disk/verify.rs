//! Verifies the checksums of all records of a log that no process uses. Changes no segment.
//!
//! Sealed segments are read record by record as the footer lists them; a segment without a valid footer is scanned.
//! The folder is locked meanwhile, so that no process starts to write to it.

use super::direct::Access;
use super::file_io::FileIo;
use super::footer::{Entry, RecordList};
use super::lock::{self, FolderLock};
use super::recover::{Footer, footer, scan};
use super::{OpenError, record, segment};
use crate::block::{DomainId, Fingerprint, Header, KeyId};
use bytes::Bytes;
use serde::Serialize;
use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// Result of reading a whole log.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize)]
pub struct Verification {
    /// Folder of the log.
    pub folder: PathBuf,
    /// Number of segments that were read.
    pub segments: u64,
    /// Bytes of these segments.
    pub bytes: u64,
    /// Segments without a footer, because their process was killed while it wrote to them; this is not corruption.
    pub unsealed_segments: u64,
    /// Blocks that match their checksums.
    pub valid_blocks: u64,
    /// Blocks that a footer lists and that do not match their checksums.
    pub corrupt_blocks: u64,
    /// Corrupt byte ranges between the records of segments without a valid footer.
    pub corrupt_ranges: u64,
    /// Footers that do not match their checksums.
    pub corrupt_footers: u64,
    /// Segments that could not be read, or not to their end.
    pub unreadable_segments: u64,
    /// Number of valid blocks by data key.
    #[serde(skip)]
    pub keys: BTreeMap<(DomainId, KeyId), u64>,
}

impl Verification {
    /// Whether the log has no corruption.
    pub fn is_intact(&self) -> bool {
        self.corrupt_blocks + self.corrupt_ranges + self.corrupt_footers + self.unreadable_segments == 0
    }
}

/// Verifies all segments of the log in a folder; `None` when there is no log. `progress` gets the number of segments
/// that were read and the total. Blocks the calling thread.
///
/// # Errors
/// [`OpenError::Owned`] while a process serves from the folder, [`OpenError::Io`] when the folder cannot be used.
pub fn verify(folder: &Path, progress: impl Fn(u64, u64)) -> Result<Option<Verification>, OpenError> {
    let failed = |source| OpenError::Io { path: folder.to_owned(), source };
    if lock::inspect(folder).map_err(failed)?.is_none() {
        return Ok(None);
    }
    let _owner = FolderLock::acquire(folder)?;
    let mut report = Verification { folder: folder.to_owned(), ..Verification::default() };
    let numbers = segment::numbers(folder).map_err(failed)?;
    for &number in &numbers {
        let path = segment::path(folder, number);
        if let Err(error) = read(&path, number, &mut report) {
            report.unreadable_segments += 1;
            tracing::warn!(segment = %path.display(), %error, "cannot read a segment");
        }
        report.segments += 1;
        progress(report.segments, numbers.len() as u64);
    }
    Ok(Some(report))
}

fn read(path: &Path, number: u32, report: &mut Verification) -> io::Result<()> {
    let (io, file) = (FileIo::default(), File::open(path)?);
    let length = file.metadata()?.len();
    report.bytes += length;
    let record_list = match footer(&io, &file, length, number, None)? {
        Footer::Valid(record_list) => record_list,
        other => {
            // The scan has verified these records; reading them again collects the data keys.
            let scanned = scan(&io, &file, length, number, None)?;
            if scanned.has_corrupt_footer || matches!(other, Footer::Corrupt) {
                report.corrupt_footers += 1;
                tracing::warn!(segment = %path.display(), "footer is corrupt");
            } else {
                report.unsealed_segments += 1;
            }
            if scanned.corrupt_ranges > 0 {
                report.corrupt_ranges += scanned.corrupt_ranges;
                tracing::warn!(
                    segment = %path.display(), corrupt_ranges = scanned.corrupt_ranges, "segment is corrupt"
                );
            }
            scanned.record_list
        }
    };
    records(&file, length, &record_list, path, report)
}

fn records(
    file: &File,
    length: u64,
    record_list: &RecordList,
    path: &Path,
    report: &mut Verification,
) -> io::Result<()> {
    let mut corrupt = 0;
    for (domain, fingerprint, entry) in record_list.records().filter(|(.., entry)| !entry.is_tombstone) {
        match block(file, length, fingerprint, entry)? {
            Some(header) => {
                report.valid_blocks += 1;
                if let Some(key) = header.key {
                    *report.keys.entry((domain, key)).or_default() += 1;
                }
            }
            None => corrupt += 1,
        }
    }
    if corrupt > 0 {
        report.corrupt_blocks += corrupt;
        tracing::warn!(segment = %path.display(), corrupt_blocks = corrupt, "blocks are corrupt");
    }
    Ok(())
}

/// Reads and verifies one block. Returns its header, or `None` when the block is corrupt.
fn block(file: &File, length: u64, fingerprint: Fingerprint, entry: &Entry) -> io::Result<Option<Header>> {
    let at = u64::from(entry.offset) * Access::UNIT;
    let span = record::span(u64::from(entry.length), Access::UNIT);
    // Checked before memory is allocated: a footer may claim any length.
    let Some(span) = at.checked_add(span).filter(|end| *end <= length).and(usize::try_from(span).ok()) else {
        return Ok(None);
    };
    let mut bytes = vec![0; span];
    file.read_exact_at(&mut bytes, at)?;
    let block = record::block(&Bytes::from(bytes)).ok();
    let block = block.filter(|block| block.header.length == u64::from(entry.length));
    let valid = block.filter(|block| block.check(entry.hash, fingerprint).is_ok());
    Ok(valid.map(|block| block.header))
}
