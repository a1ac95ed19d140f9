//! Opening a log that another process left, orderly or not: footers where they are sound, a scan where they are not.

use super::direct::Access;
use super::listing::Listing;
use super::log::{Log, Place, built_upon};
use super::record::{self, Found};
use super::segment::{self, Segment, path, seal};
use crate::index::Resting;
use crate::names::NameHasher;
use crate::{Fingerprint, SequenceHash};
use std::collections::{BTreeMap, HashMap};
use std::fs::{self, File, OpenOptions};
use std::hash::BuildHasherDefault;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

/// Bytes that are looked at together while a segment without a footer is scanned.
const WINDOW: usize = 4 << 20;

impl Log {
    /// Finds what the last process left, newest record of each block wins, and announces it.
    pub(super) fn recover(&mut self) -> io::Result<()> {
        let mut segments = BTreeMap::new();
        for number in segment::numbers(&self.folder)? {
            match segment(&self.folder, number, &self.taken) {
                Ok(found) => segments.extend(found.map(|segment| (number, segment))),
                Err(error) => tracing::warn!(folder = %self.folder.display(), number, %error, "segment unreadable"),
            }
        }
        let records = segments.values().map(|segment| segment.listing().len()).sum();
        let mut newest: HashMap<(Fingerprint, SequenceHash), (u32, u32), BuildHasherDefault<NameHasher>> =
            HashMap::with_capacity_and_hasher(records, BuildHasherDefault::default());
        for segment in segments.values() {
            for (fingerprint, entry) in segment.listing().iter() {
                if entry.gone {
                    newest.remove(&(fingerprint, entry.name));
                } else {
                    newest.insert((fingerprint, entry.name), (segment.number(), entry.offset));
                }
            }
        }
        for segment in segments.values() {
            let number = segment.number();
            let listing = segment.listing();
            let blocks = listing.iter().filter(|(_, entry)| !entry.gone).filter(|(fingerprint, entry)| {
                newest.get(&(*fingerprint, entry.name)) == Some(&(number, entry.offset))
            });
            let resting = blocks.map(|(fingerprint, entry)| Resting {
                fingerprint,
                name: entry.name,
                parent: entry.parent,
                place: Place { segment: number, offset: entry.offset, length: entry.length, hot: false },
            });
            self.index.insert(resting, built_upon);
        }
        let state = self.state.get_mut().expect("nobody else has the log yet");
        state.next = segments.keys().next_back().map_or(0, |last| last + 1);
        state.segments = segments;
        Ok(())
    }
}

/// A segment as the last process left it; `None` when nothing sound was in it, and it is removed.
fn segment(folder: &Path, number: u32, taken: &Arc<AtomicU64>) -> io::Result<Option<Arc<Segment>>> {
    let path = path(folder, number);
    let file = OpenOptions::new().read(true).write(true).open(&path)?;
    let length = file.metadata()?.len();
    let (listing, length) = if let Some(listing) = footer(&file, length)? {
        (listing, length)
    } else {
        let mut listing = scan(&file, length)?;
        tracing::info!(segment = %path.display(), records = listing.len(), "scanned a segment without a footer");
        // Recovery goes through the page cache, which takes any grain.
        let sealed = if listing.len() == 0 { Ok(0) } else { seal(&file, &mut listing, Access::UNIT) };
        (listing, sealed.unwrap_or(length))
    };
    if listing.len() == 0 {
        fs::remove_file(&path)?;
        return Ok(None);
    }
    Ok(Some(Segment::new(number, listing, length, true, taken)))
}

fn footer(file: &File, length: u64) -> io::Result<Option<Listing>> {
    let tail_at = length.saturating_sub(Access::UNIT);
    let mut tail = vec![0; (length - tail_at) as usize];
    file.read_exact_at(&mut tail, tail_at)?;
    let Some(at) = Listing::locate(&tail, length) else { return Ok(None) };
    let mut footer = vec![0; (length - at) as usize];
    file.read_exact_at(&mut footer, at)?;
    Ok(Listing::decode(&footer))
}

/// Finds every sound record, whatever lies between them: a hole of a write that never happened, a torn tail, damage.
fn scan(file: &File, length: u64) -> io::Result<Listing> {
    let mut listing = Listing::default();
    let mut window = Window { file, length, start: 0, bytes: Vec::new() };
    let mut at = 0;
    while at < length {
        let mut verdict = record::judge(window.bytes(at, 1)?);
        if let Err(needed) = verdict {
            verdict = match length - at {
                left if left >= needed as u64 => record::judge(window.bytes(at, needed)?),
                _ => Ok(None),
            };
        }
        at = match verdict {
            Ok(Some(found)) => {
                listing.push(&found, at);
                let payload = if let Found::Block(header) = &found { header.length } else { 0 };
                at + record::span(payload, Access::UNIT)
            }
            _ => at + Access::UNIT,
        };
    }
    Ok(listing)
}

/// A stretch of the file in memory.
struct Window<'a> {
    file: &'a File,
    length: u64,
    start: u64,
    bytes: Vec<u8>,
}

impl Window<'_> {
    /// What is in memory from byte `at` on: at least `needed` bytes, which the file must have.
    fn bytes(&mut self, at: u64, needed: usize) -> io::Result<&[u8]> {
        if at + needed as u64 > self.start + self.bytes.len() as u64 {
            self.start = at;
            self.bytes.resize((self.length - at).min(needed.max(WINDOW) as u64) as usize, 0);
            self.file.read_exact_at(&mut self.bytes, at)?;
        }
        Ok(&self.bytes[(at - self.start) as usize..])
    }
}
