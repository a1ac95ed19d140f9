//! Reads every record of a log that no process uses, and compares each with its checksums. Changes no segment.
//!
//! A sealed segment is read record by record as its footer lists them; one without a sound footer is scanned, as recovery does.
//! The folder is owned meanwhile, so that no process starts to write to it.

use super::direct::Access;
use super::file_io::FileIo;
use super::footer::{Entry, Listing};
use super::lock::{self, Owner};
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
    /// Whether nothing is damaged.
    pub fn is_sound(&self) -> bool {
        self.corrupt_blocks + self.corrupt_ranges + self.corrupt_footers + self.unreadable_segments == 0
    }
}

/// Reads all segments of the log in a folder; `None` when there is no log. `progress` gets the number of segments that were
/// read and that of all. Blocks for the time that this takes.
///
/// # Errors
/// [`OpenError::Owned`] while a process serves from the folder, [`OpenError::Io`] when the folder cannot be used.
pub fn verify(folder: &Path, progress: impl Fn(u64, u64)) -> Result<Option<Verification>, OpenError> {
    let failed = |source| OpenError::Io { path: folder.to_owned(), source };
    if lock::look(folder).map_err(failed)?.is_none() {
        return Ok(None);
    }
    let _owner = Owner::claim(folder)?;
    let mut seen = Verification { folder: folder.to_owned(), ..Verification::default() };
    let numbers = segment::numbers(folder).map_err(failed)?;
    for &number in &numbers {
        let path = segment::path(folder, number);
        if let Err(error) = read(&path, number, &mut seen) {
            seen.unreadable_segments += 1;
            tracing::warn!(segment = %path.display(), %error, "cannot read a segment");
        }
        seen.segments += 1;
        progress(seen.segments, numbers.len() as u64);
    }
    Ok(Some(seen))
}

fn read(path: &Path, number: u32, seen: &mut Verification) -> io::Result<()> {
    let (io, file) = (FileIo::default(), File::open(path)?);
    let length = file.metadata()?.len();
    seen.bytes += length;
    let listing = match footer(&io, &file, length, number, None)? {
        Footer::Sound(listing) => listing,
        other => {
            // What the scan lists it has verified; reading it again costs little, and tells the keys.
            let scanned = scan(&io, &file, length, number, None)?;
            if scanned.footer || matches!(other, Footer::Damaged) {
                seen.corrupt_footers += 1;
                tracing::warn!(segment = %path.display(), "footer is corrupt");
            } else {
                seen.unsealed_segments += 1;
            }
            if scanned.stretches > 0 {
                seen.corrupt_ranges += scanned.stretches;
                tracing::warn!(segment = %path.display(), corrupt_ranges = scanned.stretches, "segment is corrupt");
            }
            scanned.listing
        }
    };
    records(&file, length, &listing, path, seen)
}

fn records(file: &File, length: u64, listing: &Listing, path: &Path, seen: &mut Verification) -> io::Result<()> {
    let mut unsound = 0;
    for (domain, fingerprint, entry) in listing.records().filter(|(.., entry)| !entry.gone) {
        match block(file, length, fingerprint, entry)? {
            Some(header) => {
                seen.valid_blocks += 1;
                if let Some(key) = header.key {
                    *seen.keys.entry((domain, key)).or_default() += 1;
                }
            }
            None => unsound += 1,
        }
    }
    if unsound > 0 {
        seen.corrupt_blocks += unsound;
        tracing::warn!(segment = %path.display(), corrupt_blocks = unsound, "blocks are corrupt");
    }
    Ok(())
}

/// Reads one block. Returns its header; `None` when the block is damaged.
fn block(file: &File, length: u64, fingerprint: Fingerprint, entry: &Entry) -> io::Result<Option<Header>> {
    let at = u64::from(entry.offset) * Access::UNIT;
    let span = record::span(u64::from(entry.length), Access::UNIT);
    // Checked before memory is taken: the file bounds what a footer may claim.
    let Some(span) = at.checked_add(span).filter(|end| *end <= length).and(usize::try_from(span).ok()) else {
        return Ok(None);
    };
    let mut bytes = vec![0; span];
    file.read_exact_at(&mut bytes, at)?;
    let block = record::block(&Bytes::from(bytes)).ok();
    let block = block.filter(|block| block.header.length == u64::from(entry.length));
    let sound = block.filter(|block| block.check(entry.name, fingerprint).is_ok());
    Ok(sound.map(|block| block.header))
}
