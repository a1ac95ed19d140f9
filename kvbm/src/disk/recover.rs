//! Opening a log that another process left, orderly or not: footers where they are sound, a scan where they are not.

use super::direct::Access;
use super::listing::{Entry, Listing};
use super::log::{Log, Place};
use super::record::{self, Found};
use super::segment::{self, Segment, path, seal};
use crate::index::Resting;
use crate::names::NameHasher;
use crate::{Fingerprint, SequenceHash};
use std::collections::{BTreeMap, HashMap};
use std::fs::{self, File, OpenOptions};
use std::hash::BuildHasherDefault;
use std::io;
use std::num::NonZero;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Instant;

/// Bytes that are looked at together while a segment without a footer is scanned.
const WINDOW: usize = 4 << 20;

/// Footers read at once: the device answers several quickly, and checking them takes a core each.
const READERS: usize = 8;

impl Log {
    /// Finds what the last process left, newest record of each block wins, and announces it. Blocks meanwhile find what was
    /// announced so far; writers wait.
    pub(super) fn recover(&self) -> io::Result<()> {
        let started = Instant::now();
        let mut state = self.lock();
        let mut found = self.segments();
        if let Ok(segments) = &mut found {
            self.announce(segments);
            state.segments = segments.iter().map(|segment| (segment.number(), segment.clone())).collect();
        }
        self.finish_recovery(&mut state);
        let blocks: usize = found?.iter().map(|segment| segment.listing().len()).sum();
        tracing::info!(
            folder = %self.folder.display(), access = ?self.access, blocks, bytes = self.taken(), took = ?started.elapsed(),
            "disk tier open"
        );
        Ok(())
    }

    /// Every segment in which something sound is, oldest first.
    fn segments(&self) -> io::Result<Vec<Arc<Segment>>> {
        #[cfg(test)]
        self.shared.rig.read(self.volume)?;
        let numbers = segment::numbers(&self.folder)?;
        let next = AtomicUsize::new(0);
        let read = || {
            let mut found = Vec::new();
            while let Some(&number) = numbers.get(next.fetch_add(1, Ordering::Relaxed)) {
                match self.segment(number) {
                    Ok(segment) => found.extend(segment),
                    Err(error) => {
                        tracing::warn!(folder = %self.folder.display(), number, %error, "segment unreadable");
                    }
                }
            }
            found
        };
        let readers = std::thread::available_parallelism().map_or(1, NonZero::get).min(READERS);
        let mut segments = thread::scope(|scope| {
            let others: Vec<_> = (1..readers).map(|_| scope.spawn(read)).collect();
            let mut found = read();
            for other in others {
                found.extend(other.join().expect("reading a footer does not panic"));
            }
            found
        });
        segments.sort_unstable_by_key(|segment| segment.number());
        Ok(segments)
    }

    /// Announces what rests in them. One of discards alone belongs to whose blocks those are about: it must not go before they do.
    /// Where a discard's segment is another group's, it is noted again among its block's.
    fn announce(&self, segments: &mut [Arc<Segment>]) {
        // Where each block was discarded last. These are few, so that they are looked up for nearly nothing.
        let mut gone: HashMap<(Fingerprint, SequenceHash), (u32, u32), BuildHasherDefault<NameHasher>> =
            HashMap::default();
        for segment in &*segments {
            let listing = segment.listing();
            let discards = listing.iter().filter(|(_, entry)| entry.gone);
            gone.extend(discards.map(|(space, entry)| ((space, entry.name), (segment.number(), entry.offset))));
        }
        let mut about = Vec::new();
        for segment in &*segments {
            let (number, listing) = (segment.number(), segment.listing());
            let rests = |(space, entry): &(Fingerprint, &Entry)| {
                let later = gone.get(&(*space, entry.name)).filter(|at| **at > (number, entry.offset));
                about.extend(later.map(|(discards, _)| (*discards, segment.group(), *space, entry.name)));
                later.is_none()
            };
            let blocks = listing.iter().filter(|(_, entry)| !entry.gone).filter(rests);
            self.index_blocks(blocks.map(|(fingerprint, entry)| Resting {
                fingerprint,
                name: entry.name,
                parent: entry.parent,
                keep: entry.keep(),
                place: Place {
                    segment: number,
                    offset: entry.offset,
                    length: entry.length,
                    group: segment.group(),
                    volume: self.volume,
                    hot: false,
                },
            }));
        }
        for segment in segments.iter_mut().filter(|segment| segment.listing().iter().all(|(_, entry)| entry.gone)) {
            let first = about.iter().find(|(discards, ..)| *discards == segment.number());
            segment.give(first.map_or(0, |(_, group, ..)| *group));
        }
        let groups: BTreeMap<u32, u16> = segments.iter().map(|segment| (segment.number(), segment.group())).collect();
        for (discards, group, space, name) in about {
            // One that rests again is newer than its discard.
            if groups.get(&discards) != Some(&group) && self.shared.index.get(space, name).is_none() {
                self.queue.discard(group, space, name);
            }
        }
    }
}

impl Log {
    /// A segment as the last process left it; `None` when nothing sound was in it, and it is removed.
    fn segment(&self, number: u32) -> io::Result<Option<Arc<Segment>>> {
        let (path, damaged) = (path(&self.folder, number), &self.shared.damaged);
        let file = OpenOptions::new().read(true).write(true).open(&path)?;
        let length = file.metadata()?.len();
        let footer = footer(&file, length)?;
        let (listing, length) = if let Footer::Sound(listing) = footer {
            (listing, length)
        } else {
            let Scanned { mut listing, stretches, footer: remains } = scan(&file, length)?;
            if remains || matches!(footer, Footer::Damaged) {
                damaged.footers.fetch_add(1, Ordering::Relaxed);
                tracing::warn!(segment = %path.display(), "damaged footer: the segment was scanned");
            }
            if stretches > 0 {
                damaged.stretches.fetch_add(stretches, Ordering::Relaxed);
                tracing::warn!(segment = %path.display(), stretches, "damaged: what is not sound is left out");
            }
            tracing::info!(segment = %path.display(), records = listing.len(), "scanned a segment without a footer");
            let sealed = if listing.len() == 0 { Ok(0) } else { seal(&file, &mut listing) };
            (listing, sealed.unwrap_or(length))
        };
        if listing.len() == 0 {
            fs::remove_file(&path)?;
            return Ok(None);
        }
        // One that was written when domains were told apart otherwise counts as its first block's.
        let group = listing.records().find(|(.., entry)| !entry.gone);
        let group = group.map_or(0, |(domain, ..)| self.division.group(domain));
        Ok(Some(Segment::new((number, group), listing, length, true, &self.taken)))
    }
}

/// What stands at the end of a segment.
pub(super) enum Footer {
    Sound(Listing),
    /// There is none: the segment was never sealed.
    Missing,
    /// There is one, and it is not what it was.
    Damaged,
}

pub(super) fn footer(file: &File, length: u64) -> io::Result<Footer> {
    let tail_at = length.saturating_sub(Access::UNIT);
    let mut tail = vec![0; (length - tail_at) as usize];
    file.read_exact_at(&mut tail, tail_at)?;
    let Some(at) = Listing::locate(&tail, length) else { return Ok(Footer::Missing) };
    let mut footer = vec![0; (length - at) as usize];
    file.read_exact_at(&mut footer, at)?;
    Ok(Listing::decode(&footer).map_or(Footer::Damaged, Footer::Sound))
}

/// What was found in a segment without a footer.
pub(super) struct Scanned {
    pub(super) listing: Listing,
    /// Stretches between sound records that should have been some.
    pub(super) stretches: u64,
    /// What follows the records is a footer that is not what it was.
    pub(super) footer: bool,
}

/// Finds every sound record, whatever lies between them: a hole of a write that never happened, which is zeros, or damage,
/// whose stretches are counted. What follows the last sound record was being written when the process died, or is a footer
/// whose trailer does not say so any more.
pub(super) fn scan(file: &File, length: u64) -> io::Result<Scanned> {
    let mut listing = Listing::default();
    let (mut stretches, mut unsound, mut footer) = (0, false, None);
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
        at += if let Ok(Some(found)) = verdict {
            listing.push(&found, at);
            stretches += u64::from(std::mem::take(&mut unsound));
            footer = None;
            let payload = if let Found::Block(header) = &found { header.length } else { 0 };
            record::span(payload, Access::UNIT)
        } else {
            let unit = (length - at).min(Access::UNIT) as usize;
            let bytes = &window.bytes(at, unit)?[..unit];
            unsound |= bytes.iter().any(|byte| *byte != 0);
            if footer.is_none() && at.is_multiple_of(Access::BLOCK) && listing.begins(bytes) {
                footer = Some(at);
            }
            Access::UNIT
        };
    }
    let footer = match footer {
        Some(at) => !is_interrupted(&mut window, at, &listing)?,
        None => false,
    };
    Ok(Scanned { listing, stretches, footer })
}

/// Whether what lies at byte `at` is a footer as far as it goes, with zeros after it: the process died before all of it was
/// written, or before the file was cut behind it.
fn is_interrupted(window: &mut Window<'_>, at: u64, listing: &Listing) -> io::Result<bool> {
    let right = listing.encode(at);
    let found = window.bytes(at, (window.length - at) as usize)?;
    let same = right.iter().zip(found).take_while(|(right, found)| right == found).count();
    Ok(found.len() >= right.len() && found[same..].iter().all(|byte| *byte == 0))
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
