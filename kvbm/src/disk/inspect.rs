//! Lists the blocks of a log without locking or changing it.

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
pub struct LogContents {
    /// Folder of the log.
    pub folder: PathBuf,
    /// Whether a process has it open.
    pub in_use: bool,
    /// Id of the process that has it open, if known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub owner_pid: Option<u32>,
    /// Number of segments.
    pub segments: u64,
    /// Number of segments without a footer: being written, or open when the process died.
    pub open_segments: u64,
    /// Bytes of all segments.
    pub bytes: u64,
    /// The blocks in them, by cache domain and engine.
    pub contents: Vec<DomainBlocks>,
    /// Hashes of the blocks. A block that several engines have computed is listed once per engine.
    #[serde(skip)]
    pub hashes: Vec<SequenceHash>,
}

/// The blocks of one domain and one fingerprint.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct DomainBlocks {
    /// Id of the cache domain.
    pub domain: String,
    /// Fingerprint of the engine.
    pub fingerprint: String,
    /// Number of blocks.
    pub blocks: u64,
    /// Bytes of the blocks, without headers and padding.
    pub bytes: u64,
}

/// Lists the blocks of the log in a folder; `None` when there is no log. Blocks that have expired by `now` do not
/// count; blocks that are written meanwhile may or may not.
pub fn inspect(folder: &Path, now: Date) -> io::Result<Option<LogContents>> {
    let Some((in_use, owner_pid)) = lock::inspect(folder)? else { return Ok(None) };
    let mut found = LogContents {
        folder: folder.into(),
        in_use,
        // The file of the lock still names the last owner.
        owner_pid: owner_pid.filter(|_| in_use),
        segments: 0,
        open_segments: 0,
        bytes: 0,
        contents: vec![],
        hashes: vec![],
    };
    let mut blocks: HashMap<(Fingerprint, SequenceHash), (DomainId, u32)> = HashMap::new();
    let io = FileIo::default();
    for number in segment::numbers(folder)? {
        let file = match File::open(segment::path(folder, number)) {
            Ok(file) => file,
            // The segment was reclaimed meanwhile.
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            Err(error) => return Err(error),
        };
        let length = file.metadata()?.len();
        (found.segments, found.bytes) = (found.segments + 1, found.bytes + length);
        let record_list = match footer(&io, &file, length, number, None)? {
            Footer::Valid(record_list) => record_list,
            Footer::Missing | Footer::Unauthenticated | Footer::Corrupt => {
                found.open_segments += 1;
                scan(&io, &file, length, number, None)?.record_list
            }
        };
        for (domain, fingerprint, entry) in record_list.records() {
            match *entry {
                Entry { is_tombstone: true, hash, .. } => blocks.remove(&(fingerprint, hash)),
                Entry { hash, .. } if entry.retention().is_expired(now) => blocks.remove(&(fingerprint, hash)),
                Entry { hash, length, .. } => blocks.insert((fingerprint, hash), (domain, length)),
            };
        }
    }
    let mut contents: BTreeMap<(DomainId, Fingerprint), (u64, u64)> = BTreeMap::new();
    for ((fingerprint, hash), (domain, length)) in blocks {
        found.hashes.push(hash);
        let (count, bytes) = contents.entry((domain, fingerprint)).or_default();
        (*count, *bytes) = (*count + 1, *bytes + u64::from(length));
    }
    let domain_blocks = |((domain, fingerprint), (blocks, bytes)): ((DomainId, Fingerprint), (u64, u64))| {
        DomainBlocks { domain: domain.to_string(), fingerprint: fingerprint.to_string(), blocks, bytes }
    };
    found.contents = contents.into_iter().map(domain_blocks).collect();
    Ok(Some(found))
}
