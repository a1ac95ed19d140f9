//! Lists the blocks in a log from outside: it changes nothing and does not take the owner's lock.

use super::file_io::FileIo;
use super::footer::Entry;
use super::recover::{Footer, footer, scan};
use super::{lock, segment};
use crate::block::{Date, DomainId, Fingerprint, SequenceHash};
use serde::Serialize;
use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

/// The contents of a log.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Survey {
    /// Folder of the log.
    pub folder: PathBuf,
    /// Whether a process has it open.
    pub in_use: bool,
    /// Process id of the current or last owner, if known.
    pub owner_pid: Option<u32>,
    /// Number of segments.
    pub segments: u64,
    /// Number of segments without a footer: being written, or open when the process died.
    pub open_segments: u64,
    /// Bytes of all segments.
    pub bytes: u64,
    /// The blocks in them, by cache domain and engine.
    pub contents: Vec<Holding>,
    /// Hashes of the blocks, once for each engine that has such a block.
    #[serde(skip)]
    pub names: Vec<SequenceHash>,
}

/// The blocks of one domain and one fingerprint.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Holding {
    /// Id of the cache domain.
    pub domain: String,
    /// Fingerprint of the engine.
    pub fingerprint: String,
    /// Number of blocks.
    pub blocks: u64,
    /// Bytes of the blocks, without headers and padding.
    pub bytes: u64,
}

/// Looks at a folder; `None` when there is no log in it. What is expired by `now` does not count, and what is written
/// meanwhile may or may not.
pub fn survey(folder: &Path, now: Date) -> io::Result<Option<Survey>> {
    let Some((in_use, owner_pid)) = lock::look(folder)? else { return Ok(None) };
    let mut found = Survey {
        folder: folder.into(),
        in_use,
        owner_pid,
        segments: 0,
        open_segments: 0,
        bytes: 0,
        contents: vec![],
        names: vec![],
    };
    let mut blocks: HashMap<(Fingerprint, SequenceHash), (DomainId, u32)> = HashMap::new();
    let io = FileIo::default();
    for number in segment::numbers(folder)? {
        let file = match File::open(segment::path(folder, number)) {
            Ok(file) => file,
            // Given up meanwhile.
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            Err(error) => return Err(error),
        };
        let length = file.metadata()?.len();
        (found.segments, found.bytes) = (found.segments + 1, found.bytes + length);
        let listing = match footer(&io, &file, length, number, None)? {
            Footer::Sound(listing) => listing,
            Footer::Missing | Footer::Damaged => {
                found.open_segments += 1;
                scan(&io, &file, length, number, None)?.listing
            }
        };
        for (domain, fingerprint, entry) in listing.records() {
            match *entry {
                Entry { gone: true, name, .. } => blocks.remove(&(fingerprint, name)),
                Entry { name, .. } if entry.keep().is_over(now) => blocks.remove(&(fingerprint, name)),
                Entry { name, length, .. } => blocks.insert((fingerprint, name), (domain, length)),
            };
        }
    }
    let mut holdings: BTreeMap<(DomainId, Fingerprint), (u64, u64)> = BTreeMap::new();
    for ((fingerprint, name), (domain, length)) in blocks {
        found.names.push(name);
        let (count, bytes) = holdings.entry((domain, fingerprint)).or_default();
        (*count, *bytes) = (*count + 1, *bytes + u64::from(length));
    }
    let holding = |((domain, fingerprint), (blocks, bytes)): ((DomainId, Fingerprint), (u64, u64))| Holding {
        domain: domain.to_string(),
        fingerprint: fingerprint.to_string(),
        blocks,
        bytes,
    };
    found.contents = holdings.into_iter().map(holding).collect();
    Ok(Some(found))
}
