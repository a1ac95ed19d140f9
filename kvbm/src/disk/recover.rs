//! Opening a log that another process left, orderly or not: footers where they are sound, a scan where they are not.

use super::direct::{self, Access};
use super::file_io::FileIo;
use super::footer::{Entry, Listing};
use super::log::{Log, Place};
use super::record::{self, Found};
use super::segment::{self, Segment, open_regular, path, seal};
use crate::block::{Fingerprint, SequenceHash};
use crate::table::NameHasher;
use crate::tier::Resting;
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

/// Bytes that are looked at together while a segment without a footer is scanned.
const WINDOW: usize = 4 << 20;

/// Bytes of records that turn out not to be sound, as a multiple of the file, before no more of them are looked at.
const EFFORT: u64 = 2;

/// Footers read at once: the device answers several quickly, and checking them takes a core each.
const READERS: usize = 8;

/// What a recovery has found so far.
#[derive(Default)]
struct Recovery {
    segments: Vec<Arc<Segment>>,
    /// Where each block was discarded last. These are few, so that they are looked up for nearly nothing.
    discarded: HashMap<(Fingerprint, SequenceHash), Position, BuildHasherDefault<NameHasher>>,
    /// Blocks that a later discard is about, with the segment of the discard and the group of the block.
    about: Vec<(u32, u16, Fingerprint, SequenceHash)>,
}

/// Where a record is in the log: its segment, and its offset there.
type Position = (u32, u32);

impl Log {
    /// Finds what the last process left, newest record of each block wins, and announces it: what segments with a footer
    /// have first, what has to be scanned as it is found. Blocks meanwhile find what was announced so far; writers wait.
    pub(super) fn recover(&self) -> io::Result<()> {
        let started = Instant::now();
        let found = self.find();
        self.finish_recovery();
        let blocks: usize = found?;
        tracing::info!(
            folder = %self.folder.display(), access = ?self.access, blocks, bytes = self.taken(),
            duration_s = started.elapsed().as_secs_f64(), "G3 path opened"
        );
        Ok(())
    }

    /// How many records were found.
    fn find(&self) -> io::Result<usize> {
        #[cfg(test)]
        self.shared.rig.read(self.volume)?;
        let numbers = self.io.look(|| segment::numbers(&self.folder))?;
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
        let found = recovery.segments.iter().map(|segment| segment.listing().len()).sum();
        self.settle_discards(&mut recovery);
        let segments = recovery.segments.into_iter().map(|segment| (segment.number(), segment));
        self.lock().segments.extend(segments);
        Ok(found)
    }

    /// Reads segments on several threads, and takes what was read on this one. A segment that cannot be read is left out.
    fn read_all<T: Send>(
        &self,
        numbers: &[u32],
        read: impl Fn(u32) -> io::Result<T> + Sync,
        mut take: impl FnMut(u32, T),
    ) {
        let next = AtomicUsize::new(0);
        let read_some = |found: &mpsc::Sender<(u32, T)>| {
            while let Some(&number) = numbers.get(next.fetch_add(1, Ordering::Relaxed)) {
                // One segment that nobody foresaw costs no other.
                let panicked = |_| Err(io::Error::other("reading the segment panicked"));
                match catch_unwind(AssertUnwindSafe(|| read(number))).unwrap_or_else(panicked) {
                    Ok(read) => drop(found.send((number, read))),
                    Err(_) if self.io.is_called_off() => return,
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

    /// Announces what rests in segments, which come in order but for those that had to be scanned.
    fn announce(&self, recovery: &mut Recovery, segments: Vec<Arc<Segment>>) {
        let late = !recovery.segments.is_empty();
        for segment in &segments {
            let listing = segment.listing();
            for (space, entry) in listing.iter().filter(|(_, entry)| entry.gone) {
                let at = (segment.number(), entry.offset);
                let last = recovery.discarded.entry((space, entry.name)).or_insert(at);
                *last = at.max(*last);
                let earlier = |place: &Place| place.volume == self.volume && (place.segment, place.offset) < at;
                let known = if late { self.shared.index.get(space, entry.name).filter(earlier) } else { None };
                if let Some(place) = known {
                    self.shared.index.remove([(space, entry.name)], earlier);
                    recovery.about.push((segment.number(), place.group, space, entry.name));
                }
            }
        }
        for segment in &segments {
            let (number, listing) = (segment.number(), segment.listing());
            let rests = |(space, entry): &(Fingerprint, &Entry)| {
                let at = (number, entry.offset);
                let later = recovery.discarded.get(&(*space, entry.name)).filter(|discard| **discard > at);
                recovery.about.extend(later.map(|(discards, _)| (*discards, segment.group(), *space, entry.name)));
                let newer = |place: &Place| place.volume == self.volume && (place.segment, place.offset) > at;
                later.is_none() && !(late && self.shared.index.get(*space, entry.name).as_ref().is_some_and(newer))
            };
            let blocks = listing.iter().filter(|(_, entry)| !entry.gone).filter(rests);
            let blocks = blocks.map(|(fingerprint, entry)| Resting {
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
            });
            // Chosen before: the index cannot be asked while it takes them.
            let blocks: Vec<Resting<Place>> = blocks.collect();
            self.index_blocks(blocks);
        }
        recovery.segments.extend(segments);
        if self.is_withdrawn() {
            // Between the first announcement and now.
            self.shared.index.remove_all(|place| place.volume == self.volume);
        }
    }

    /// A segment of discards alone belongs to whose blocks those are about: it must not go before they do. Where a discard's
    /// segment is another group's, it is noted again among its block's.
    fn settle_discards(&self, recovery: &mut Recovery) {
        let Recovery { segments, about, .. } = recovery;
        for segment in segments.iter_mut().filter(|segment| segment.listing().iter().all(|(_, entry)| entry.gone)) {
            let first = about.iter().find(|(discards, ..)| *discards == segment.number());
            segment.give(first.map_or(0, |(_, group, ..)| *group));
        }
        let groups: BTreeMap<u32, u16> = segments.iter().map(|segment| (segment.number(), segment.group())).collect();
        for (discards, group, space, name) in about.drain(..) {
            // One that rests again is newer than its discard.
            if groups.get(&discards) != Some(&group) && self.shared.index.get(space, name).is_none() {
                self.queue.discard(group, space, name);
            }
        }
    }

    /// A segment with a sound footer; `None` when it has to be scanned.
    fn sealed(&self, number: u32) -> io::Result<Option<Arc<Segment>>> {
        let path = path(&self.folder, number);
        let file = self.io.look(|| open_regular(&path, OpenOptions::new().read(true)))?;
        let length = self.io.look(|| file.metadata())?.len();
        let listing = match footer(&self.io, &file, length, number, self.shared.keys.as_deref())? {
            Footer::Sound(listing) => listing,
            Footer::Missing | Footer::Damaged => return Ok(None),
        };
        Ok(Some(self.known(number, listing, length)))
    }

    /// What a scan finds in a segment, which has a footer from then on; `None` when nothing sound was in it, and it is removed.
    fn scanned(&self, number: u32) -> io::Result<Option<Arc<Segment>>> {
        let path = path(&self.folder, number);
        let file = self.io.look(|| open_regular(&path, OpenOptions::new().read(true).write(true)))?;
        let length = self.io.look(|| file.metadata())?.len();
        let keys = self.shared.keys.as_deref();
        let footer = footer(&self.io, &file, length, number, keys)?;
        let Scanned { mut listing, stretches, footer: remains } = scan(&self.io, &file, length, number, keys)?;
        if remains || matches!(footer, Footer::Damaged) {
            self.shared.damaged.footers.fetch_add(1, Ordering::Relaxed);
            tracing::warn!(segment = %path.display(), "segment footer is corrupt; the segment was scanned");
        }
        if stretches > 0 {
            self.shared.damaged.stretches.fetch_add(stretches, Ordering::Relaxed);
            tracing::warn!(
                segment = %path.display(), corrupt_ranges = stretches,
                "segment is corrupt; its corrupt ranges are skipped"
            );
        }
        tracing::info!(segment = %path.display(), records = listing.len(), "scanned a segment without a footer");
        if listing.len() == 0 {
            tracing::info!(segment = %path.display(), bytes = length, "removes a segment without a sound record");
            self.io.remove(&path)?;
            return Ok(None);
        }
        let length = seal(&self.io, &file, &mut listing, number, keys).unwrap_or(length);
        Ok(Some(self.known(number, listing, length)))
    }

    /// A segment that is not empty.
    fn known(&self, number: u32, listing: Listing, length: u64) -> Arc<Segment> {
        // One that was written when domains were told apart otherwise counts as its first block's.
        let group = listing.records().find(|(.., entry)| !entry.gone);
        let group = group.map_or(0, |(domain, ..)| self.division.group(domain));
        Segment::new((number, group), listing, length, true, &self.taken)
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
    let Some(trailer) = Listing::locate(&tail, length) else { return Ok(Footer::Missing) };
    // Before memory is taken for it.
    let Some(at) = trailer.start() else { return Ok(Footer::Damaged) };
    let mut footer = vec![0; (length - at) as usize];
    io.read_exact(file, &mut footer, at)?;
    Ok(Listing::decode(&footer, number, keys).map_or(Footer::Damaged, Footer::Sound))
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
pub(super) fn scan(
    io: &FileIo,
    file: &File,
    length: u64,
    number: u32,
    keys: Option<&MetadataKeys>,
) -> io::Result<Scanned> {
    let mut listing = Listing::default();
    let (mut stretches, mut unsound, mut footer) = (0, false, None);
    // Records that are not sound lie apart from each other, unless somebody forged them to be looked at for ever.
    let mut effort = EFFORT * length;
    let mut window = Window { io, file, length, start: 0, bytes: Vec::new() };
    let mut at = 0;
    while at < length {
        at = window.skip_hole(at)?;
        if at == length {
            break;
        }
        let mut verdict = record::judge(window.bytes(at, 1)?, effort);
        if let Err(needed) = verdict {
            verdict = match length - at {
                left if left >= needed as u64 => record::judge(window.bytes(at, needed)?, effort),
                _ => Ok(None),
            };
        }
        if let Ok(None) = verdict {
            effort -= record::claimed(window.bytes(at, 1)?).filter(|claimed| *claimed <= effort).unwrap_or(0);
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
            unsound |= !is_zero(bytes);
            if footer.is_none() && at.is_multiple_of(Access::BLOCK) && listing.begins(bytes) {
                footer = Some(at);
            }
            Access::UNIT
        };
    }
    let footer = match footer {
        Some(at) => !is_interrupted(&mut window, at, &listing.encode(at, number, keys))?,
        None => false,
    };
    Ok(Scanned { listing, stretches, footer })
}

/// Whether what lies at byte `at` is a footer as far as it goes, with zeros after it: the process died before all of it was
/// written, or before the file was cut behind it.
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

/// A part of the file in memory. It moves to whatever is asked for, forwards and backwards.
struct Window<'a> {
    io: &'a FileIo,
    file: &'a File,
    length: u64,
    start: u64,
    bytes: Vec<u8>,
}

impl Window<'_> {
    /// What is in memory from byte `at` on: at least `needed` bytes, which the file must have.
    fn bytes(&mut self, at: u64, needed: usize) -> io::Result<&[u8]> {
        if at < self.start || at + needed as u64 > self.start + self.bytes.len() as u64 {
            self.start = at;
            self.bytes.resize((self.length - at).min(needed.max(WINDOW) as u64) as usize, 0);
            if let Err(error) = self.io.read_exact(self.file, &mut self.bytes, at) {
                // What was read is not what the window claims to have.
                self.bytes.clear();
                return Err(error);
            }
        }
        Ok(&self.bytes[(at - self.start) as usize..])
    }

    /// Whether the file has only zeros from byte `at` on; looked at piece by piece, whatever the length of the file.
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

    /// Where the next byte that may not be zero is, at or before a multiple of [`Access::UNIT`]: what a segment reserved and
    /// never wrote is not read.
    fn skip_hole(&mut self, at: u64) -> io::Result<u64> {
        if at < self.length && self.start <= at && at < self.start + self.bytes.len() as u64 {
            return Ok(at);
        }
        if self.io.is_called_off() {
            return Err(io::ErrorKind::Interrupted.into());
        }
        let next = self.io.look(|| Ok(direct::next_data(self.file, at).unwrap_or(at)))?;
        let next = next.min(self.length);
        Ok(if next == self.length { next } else { (next / Access::UNIT * Access::UNIT).max(at) })
    }
}
