//! Recovery: reads the footers of sealed segments, and scans segments without a valid footer.

use super::direct::{self, Access};
use super::file_io::FileIo;
use super::footer::{Entry, RecordList};
use super::log::{Location, Log};
use super::record::{self, ParsedRecord};
use super::segment::{self, Segment, path, seal};
use crate::block::{Fingerprint, SequenceHash};
use crate::folder::open_regular;
use crate::table::BlockHasher;
use crate::tier::IndexEntry;
use crate::transform::crypt::MetadataKeys;
use std::collections::{BTreeMap, HashMap};
use std::fs::{File, OpenOptions};
use std::hash::BuildHasherDefault;
use std::io;
use std::num::NonZero;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Instant;

/// Size in bytes of the window through which a segment is scanned.
const WINDOW_BYTES: usize = 4 << 20;

/// Maximum number of bytes in invalid records that a scan checks, as a multiple of the file's length.
const MAX_INVALID_BYTES_RATIO: u64 = 2;

/// Maximum number of footers read at once. The device answers several quickly, and each takes a core to verify.
const READERS: usize = 8;

/// Intermediate result of a recovery.
#[derive(Default)]
struct Recovery {
    segments: Vec<Arc<Segment>>,
    /// Position of the last tombstone of each block. There are few.
    discarded: HashMap<(Fingerprint, SequenceHash), Position, BuildHasherDefault<BlockHasher>>,
    /// Blocks that a later tombstone removes: the tombstone's segment, the block's group, and the block.
    affected: Vec<(u32, u16, Fingerprint, SequenceHash)>,
}

/// Position of a record in the log: segment and offset.
type Position = (u32, u32);

impl Log {
    /// Recovers the blocks of an earlier process and publishes events for them. The newest record of a block wins.
    /// Sealed segments come first, then scanned ones as they are completed. Loads find what is recovered so far;
    /// writers wait. Blocks beyond a capacity that is smaller than before are removed at the end. Returns the number
    /// of blocks that the log holds then.
    pub(super) fn recover(&self) -> io::Result<usize> {
        let started = Instant::now();
        // Counted before the writers add blocks.
        let held = self.find().map(|()| self.held_blocks());
        self.finish_recovery();
        let blocks = held?;
        let alignment = match self.access {
            Access::Direct { alignment } => Some(alignment),
            Access::Buffered => None,
        };
        tracing::info!(
            folder = %self.folder.display(), direct_io = alignment.is_some(), alignment, blocks,
            bytes = self.used_bytes(), duration_s = started.elapsed().as_secs_f64(), "G3 path opened"
        );
        Ok(blocks)
    }

    /// Runs the recovery.
    fn find(&self) -> io::Result<()> {
        #[cfg(test)]
        self.shared.hooks.read(self.path)?;
        let numbers = self.io.query(|| segment::numbers(&self.folder))?;
        let (mut recovery, mut sealed, mut unsealed) = (Recovery::default(), Vec::new(), Vec::new());
        self.read_all(
            &numbers,
            |number| self.sealed(number),
            |number, found| match found {
                Some(segment) => sealed.push(segment),
                None => unsealed.push(number),
            },
        );
        sealed.sort_unstable_by_key(|segment| segment.number());
        self.announce(&mut recovery, sealed);
        unsealed.sort_unstable();
        self.read_all(
            &unsealed,
            |number| self.scanned(number),
            |_, found| {
                self.announce(&mut recovery, found.into_iter().collect());
            },
        );
        self.assign_tombstones(&mut recovery);
        let segments = recovery.segments.into_iter().map(|segment| (segment.number(), segment));
        self.lock().segments.extend(segments);
        if !self.is_withdrawn() {
            self.shrink_to_capacity();
        }
        Ok(())
    }

    /// Reads segments on several threads, and passes each result to `take` on this one. Unreadable segments are
    /// skipped.
    fn read_all<T: Send>(
        &self,
        numbers: &[u32],
        read: impl Fn(u32) -> io::Result<T> + Sync,
        mut take: impl FnMut(u32, T),
    ) {
        let next = AtomicUsize::new(0);
        let read_some = |found: &mpsc::Sender<(u32, T)>| {
            while let Some(&number) = numbers.get(next.fetch_add(1, Ordering::Relaxed)) {
                // A panic affects one segment only.
                let panicked = |_| Err(io::Error::other("reading the segment panicked"));
                match catch_unwind(AssertUnwindSafe(|| read(number))).unwrap_or_else(panicked) {
                    Ok(read) => drop(found.send((number, read))),
                    Err(_) if self.io.scans_are_cancelled() => return,
                    Err(error) => {
                        tracing::warn!(
                            folder = %self.folder.display(), segment = number, %error,
                            "cannot read a segment"
                        );
                    }
                }
            }
        };
        let readers = thread::available_parallelism().map_or(1, NonZero::get).min(READERS).min(numbers.len());
        thread::scope(|scope| {
            let (found, read) = mpsc::channel();
            for _ in 0..readers {
                let found = found.clone();
                scope.spawn(|| {
                    let found = found;
                    read_some(&found);
                });
            }
            drop(found);
            for (number, read) in read {
                take(number, read);
            }
        });
    }

    /// Adds the blocks of segments to the index. Segments come in order, except that scanned ones come last.
    fn announce(&self, recovery: &mut Recovery, segments: Vec<Arc<Segment>>) {
        let late = !recovery.segments.is_empty();
        for segment in &segments {
            let record_list = segment.record_list();
            for (namespace, entry) in record_list.iter().filter(|(_, entry)| entry.is_tombstone) {
                let at = (segment.number(), entry.offset);
                let last = recovery.discarded.entry((namespace, entry.hash)).or_insert(at);
                *last = at.max(*last);
                let earlier =
                    |location: &Location| location.path == self.path && (location.segment, location.offset) < at;
                let known = if late { self.shared.index.get(namespace, entry.hash).filter(earlier) } else { None };
                if let Some(location) = known {
                    self.shared.index.remove([(namespace, entry.hash)], earlier);
                    recovery.affected.push((segment.number(), location.group, namespace, entry.hash));
                }
            }
        }
        for segment in &segments {
            let (number, record_list) = (segment.number(), segment.record_list());
            let is_stored = |(namespace, entry): &(Fingerprint, &Entry)| {
                let at = (number, entry.offset);
                let later = recovery.discarded.get(&(*namespace, entry.hash)).filter(|discard| **discard > at);
                recovery.affected.extend(
                    later.map(|(tombstone_segment, _)| (*tombstone_segment, segment.group(), *namespace, entry.hash)),
                );
                later.is_none()
            };
            let blocks = record_list.iter().filter(|(_, entry)| !entry.is_tombstone).filter(is_stored);
            let blocks = blocks.map(|(fingerprint, entry)| IndexEntry {
                fingerprint,
                hash: entry.hash,
                parent: entry.parent,
                retention: entry.retention(),
                location: Location {
                    segment: number,
                    offset: entry.offset,
                    length: entry.length,
                    group: segment.group(),
                    path: self.path,
                    hot: false,
                },
            });
            // Collected first, because the index is locked while it inserts.
            let blocks: Vec<IndexEntry<Location>> = blocks.collect();
            self.index_recovered(blocks);
        }
        recovery.segments.extend(segments);
        if self.is_withdrawn() {
            // The log was withdrawn meanwhile.
            self.shared.index.remove_all(|location| location.path == self.path);
        }
    }

    /// Assigns segments that contain only tombstones to the group of the blocks that these remove, so that a
    /// tombstone is not reclaimed before its block. Where a tombstone's segment is of another group, it is written
    /// again.
    fn assign_tombstones(&self, recovery: &mut Recovery) {
        let Recovery { segments, affected, .. } = recovery;
        for segment in
            segments.iter_mut().filter(|segment| segment.record_list().iter().all(|(_, entry)| entry.is_tombstone))
        {
            let first = affected.iter().find(|(tombstone_segment, ..)| *tombstone_segment == segment.number());
            segment.set_group(first.map_or(0, |(_, group, ..)| *group));
        }
        let groups: BTreeMap<u32, u16> = segments.iter().map(|segment| (segment.number(), segment.group())).collect();
        for (tombstone_segment, group, namespace, hash) in affected.drain(..) {
            // A block that is in the index again is newer than its tombstone.
            if groups.get(&tombstone_segment) != Some(&group) && self.shared.index.get(namespace, hash).is_none() {
                self.queue.push_tombstone(group, namespace, hash);
            }
        }
    }

    /// A segment with a valid footer; `None` when it must be scanned.
    fn sealed(&self, number: u32) -> io::Result<Option<Arc<Segment>>> {
        let path = path(&self.folder, number);
        let file = self.io.query(|| open_regular(&path, OpenOptions::new().read(true)))?;
        let length = self.io.query(|| file.metadata())?.len();
        let record_list = match footer(&self.io, &file, length, number, self.shared.keys.as_deref())? {
            Footer::Valid(record_list) => record_list,
            Footer::Missing | Footer::Unauthenticated | Footer::Corrupt => return Ok(None),
        };
        Ok(Some(self.new_segment(number, record_list, length)))
    }

    /// Scans a segment and seals it. Returns `None` when it has no valid record, and deletes it.
    fn scanned(&self, number: u32) -> io::Result<Option<Arc<Segment>>> {
        let path = path(&self.folder, number);
        let file = self.io.query(|| open_regular(&path, OpenOptions::new().read(true).write(true)))?;
        let length = self.io.query(|| file.metadata())?.len();
        let keys = self.shared.keys.as_deref();
        let footer = footer(&self.io, &file, length, number, keys)?;
        let Scanned { mut record_list, corrupt_ranges, has_corrupt_footer } =
            scan(&self.io, &file, length, number, keys)?;
        if matches!(footer, Footer::Unauthenticated) {
            // After encryption was turned on or its keys were replaced, this concerns every segment.
            tracing::info!(segment = %path.display(), "segment footer has no valid tag; the segment was scanned");
        } else if has_corrupt_footer || matches!(footer, Footer::Corrupt) {
            self.shared.corruption.footers.fetch_add(1, Ordering::Relaxed);
            tracing::warn!(segment = %path.display(), "segment footer is corrupt; the segment was scanned");
        }
        if corrupt_ranges > 0 {
            self.shared.corruption.ranges.fetch_add(corrupt_ranges, Ordering::Relaxed);
            tracing::warn!(
                segment = %path.display(), corrupt_ranges,
                "segment is corrupt; its corrupt ranges are skipped"
            );
        }
        tracing::info!(
            segment = %path.display(), records = record_list.len(),
            "scanned a segment without a valid footer"
        );
        if record_list.len() == 0 {
            let segment = path.display();
            if corrupt_ranges > 0 {
                tracing::warn!(%segment, bytes = length, "removing a corrupt segment that has no valid record");
            } else {
                tracing::info!(%segment, bytes = length, "removing a segment that has no valid record");
            }
            self.io.remove(&path)?;
            return Ok(None);
        }
        let length = seal(&self.io, &file, &mut record_list, number, keys).unwrap_or(length);
        Ok(Some(self.new_segment(number, record_list, length)))
    }

    /// A segment that is not empty.
    fn new_segment(&self, number: u32, record_list: RecordList, length: u64) -> Arc<Segment> {
        // A segment that was written with other quota groups counts as its first block's.
        let group = record_list.records().find(|(.., entry)| !entry.is_tombstone);
        let group = group.map_or(0, |(domain, ..)| self.quotas.group(domain));
        Segment::new((number, group), record_list, length, true, &self.used_bytes)
    }
}

/// Result of reading the footer of a segment.
pub(super) enum Footer {
    Valid(RecordList),
    /// There is no footer: the segment was never sealed.
    Missing,
    /// There is a footer without a tag of a known key.
    Unauthenticated,
    /// There is a footer, and it is invalid.
    Corrupt,
}

pub(super) fn footer(
    io: &FileIo,
    file: &File,
    length: u64,
    number: u32,
    keys: Option<&MetadataKeys>,
) -> io::Result<Footer> {
    let tail_at = length.saturating_sub(Access::UNIT);
    let mut tail = vec![0; (length - tail_at) as usize];
    io.read_exact(file, &mut tail, tail_at)?;
    let Some(trailer) = RecordList::locate(&tail, length) else { return Ok(Footer::Missing) };
    // Checked before memory is allocated for the footer.
    let Some(at) = trailer.start() else { return Ok(Footer::Corrupt) };
    let mut footer = vec![0; (length - at) as usize];
    io.read_exact(file, &mut footer, at)?;
    Ok(match RecordList::decode(&footer, number, keys) {
        Some(record_list) => Footer::Valid(record_list),
        None if keys.is_some_and(|keys| RecordList::lacks_known_tag(&footer, number, keys)) => Footer::Unauthenticated,
        None => Footer::Corrupt,
    })
}

/// Result of a scan.
pub(super) struct Scanned {
    pub(super) record_list: RecordList,
    /// Number of corrupt byte ranges between valid records; 1 for a file that does not begin with a record.
    pub(super) corrupt_ranges: u64,
    /// Whether the bytes behind the records are a corrupt footer.
    pub(super) has_corrupt_footer: bool,
}

/// Finds every valid record of a segment without a footer. Between records there may be zeros, where a write never
/// happened, or corrupt ranges, which are counted. The bytes behind the last valid record are an unfinished write, or
/// a footer with a corrupt trailer. Without any valid record, bytes that do not begin like a record are corrupt: an
/// unfinished write has written its first bytes.
pub(super) fn scan(
    io: &FileIo,
    file: &File,
    length: u64,
    number: u32,
    keys: Option<&MetadataKeys>,
) -> io::Result<Scanned> {
    let mut record_list = RecordList::default();
    let (mut corrupt_ranges, mut corrupt, mut footer) = (0, false, None);
    let mut begins_as_record = None;
    // Invalid records rarely overlap by accident; the limit bounds the work on a file in which they do.
    let mut invalid_bytes_left = MAX_INVALID_BYTES_RATIO * length;
    let mut window = Window { io, file, length, start: 0, bytes: Vec::new() };
    let mut at = 0;
    while at < length {
        at = window.skip_hole(at)?;
        if at == length {
            break;
        }
        let mut parsed = record::parse(window.bytes(at, 1)?, invalid_bytes_left);
        if let Err(needed) = parsed {
            parsed = match length - at {
                left if left >= needed as u64 => record::parse(window.bytes(at, needed)?, invalid_bytes_left),
                _ => Ok(None),
            };
        }
        if let Ok(None) = parsed {
            invalid_bytes_left -= record::claimed_bytes(window.bytes(at, 1)?)
                .filter(|claimed| *claimed <= invalid_bytes_left)
                .unwrap_or(0);
        }
        at += if let Ok(Some(found)) = parsed {
            record_list.push(&found, at);
            corrupt_ranges += u64::from(std::mem::take(&mut corrupt));
            footer = None;
            let payload = if let ParsedRecord::Block(header) = &found { header.length } else { 0 };
            record::span(payload, Access::UNIT)
        } else {
            let unit = (length - at).min(Access::UNIT) as usize;
            let bytes = &window.bytes(at, unit)?[..unit];
            if !is_zero(bytes) {
                corrupt = true;
                begins_as_record.get_or_insert_with(|| record::begins(bytes));
            }
            if footer.is_none() && at.is_multiple_of(Access::BLOCK) && record_list.begins(bytes) {
                footer = Some(at);
            }
            Access::UNIT
        };
    }
    if record_list.len() == 0 && begins_as_record == Some(false) {
        corrupt_ranges = 1;
    }
    let has_corrupt_footer = match footer {
        Some(at) => !is_interrupted(&mut window, at, &record_list.encode(at, number, keys))?,
        None => false,
    };
    Ok(Scanned { record_list, corrupt_ranges, has_corrupt_footer })
}

/// Whether the bytes at `at` are a prefix of the footer `right`, followed by zeros: the process died before it had
/// written the footer, or before it had truncated the file.
fn is_interrupted(window: &mut Window<'_>, at: u64, right: &[u8]) -> io::Result<bool> {
    if window.length - at < right.len() as u64 {
        return Ok(false);
    }
    let found = &window.bytes(at, right.len())?[..right.len()];
    let same = right.iter().zip(found).take_while(|(right, found)| right == found).count();
    Ok(is_zero(&found[same..]) && window.is_zero_from(at + right.len() as u64)?)
}

fn is_zero(bytes: &[u8]) -> bool {
    bytes.iter().all(|byte| *byte == 0)
}

/// The part of the file that is in memory. It moves to any offset that is read.
struct Window<'a> {
    io: &'a FileIo,
    file: &'a File,
    length: u64,
    start: u64,
    bytes: Vec<u8>,
}

impl Window<'_> {
    /// The bytes in memory from `at` on: at least `needed` bytes, which the file must have.
    fn bytes(&mut self, at: u64, needed: usize) -> io::Result<&[u8]> {
        if at < self.start || at + needed as u64 > self.start + self.bytes.len() as u64 {
            self.start = at;
            self.bytes.resize((self.length - at).min(needed.max(WINDOW_BYTES) as u64) as usize, 0);
            if let Err(error) = self.io.read_exact(self.file, &mut self.bytes, at) {
                // The window does not contain what it claims after a failed read.
                self.bytes.clear();
                return Err(error);
            }
        }
        Ok(&self.bytes[(at - self.start) as usize..])
    }

    /// Whether the file has only zeros from byte `at` on. Reads it piece by piece.
    fn is_zero_from(&mut self, mut at: u64) -> io::Result<bool> {
        loop {
            at = self.skip_hole(at)?;
            if at == self.length {
                return Ok(true);
            }
            let piece = self.bytes(at, 1)?;
            if !is_zero(piece) {
                return Ok(false);
            }
            at += piece.len() as u64;
        }
    }

    /// The next offset that may have data, a multiple of [`Access::UNIT`], so that reserved space that was never
    /// written is not read.
    fn skip_hole(&mut self, at: u64) -> io::Result<u64> {
        if at < self.length && self.start <= at && at < self.start + self.bytes.len() as u64 {
            return Ok(at);
        }
        if self.io.scans_are_cancelled() {
            return Err(io::ErrorKind::Interrupted.into());
        }
        let next = self.io.query(|| Ok(direct::next_data(self.file, at).unwrap_or(at)))?;
        let next = next.min(self.length);
        Ok(if next == self.length { next } else { (next / Access::UNIT * Access::UNIT).max(at) })
    }
}
