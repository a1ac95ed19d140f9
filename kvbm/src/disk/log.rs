//! The log: segments in order, a head that is written, an index of what rests where.
//!
//! Everything here blocks and is called off the async threads. Writers take what waits in one step with a place at the
//! head, so the order of offsets is the order of the queue; then they fill and write side by side. Blocks are listed and
//! indexed, and so announced, when their bytes are written.

use super::direct::{Access, Pool};
use super::listing::Listing;
use super::load::again;
use super::owner::Owner;
use super::queue::{Batch, Queue, Writer};
use super::record::{self, Record};
use super::room::REST;
use super::segment::{self, Head, Segment};
use super::{OpenError, Settings};
use crate::index::{Index, Resting};
use crate::shares::Division;
use crate::{Block, Fingerprint, Header, SequenceHash, StoreError};
use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock};
use tokio::sync::mpsc;
use tokio::time::Instant;

/// One write: large enough to be as fast as the device.
pub(super) const WRITE: u64 = 4 << 20;
/// Blocks that may wait for a writer, in bytes: about 50 ms of a fast device.
const QUEUE: u64 = 64 << 20;
/// So many reads that fail in a row are no bad sector.
const STRIKES: u32 = 3;

/// Where a block rests.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Place {
    pub(super) segment: u32,
    /// In units of [`Access::UNIT`].
    pub(super) offset: u32,
    /// Payload bytes.
    pub(super) length: u32,
    /// Whose block it is, as far as domains are told apart.
    pub(super) group: u16,
    /// Which path.
    pub(super) volume: u8,
    /// Read, or built upon by a later segment, since it was written here.
    pub(super) hot: bool,
}

/// What the logs of a tier have in common.
#[derive(Clone)]
pub(super) struct Shared {
    pub(super) index: Arc<Index<Place>>,
    /// The next segment's number. One sequence for all paths, so that a higher number is a later segment.
    pub(super) next: Arc<AtomicU32>,
    pub(super) pool: Pool,
    pub(super) paths: u32,
    /// What domains are promised of all paths together, and how many bytes those are.
    pub(super) division: Division,
    pub(super) capacity: u64,
    pub(super) damaged: Arc<Damage>,
    /// Who takes what is in use and has no room here any more.
    pub(super) spill: Arc<OnceLock<Spill>>,
    #[cfg(test)]
    pub(super) rig: super::tests::Rig,
}

/// Where blocks go that are in use, and for which there is no room in the log any more.
pub(super) struct Spill {
    pub(super) wants: Box<dyn Fn(Fingerprint, SequenceHash) -> bool + Send + Sync>,
    pub(super) to: mpsc::Sender<Block>,
}

/// What was found to be damaged while logs were recovered.
#[derive(Default)]
pub(super) struct Damage {
    /// Stretches of segments that held no sound record.
    pub(super) stretches: AtomicU64,
    /// Footers that are not what they were.
    pub(super) footers: AtomicU64,
}

pub(super) struct Log {
    pub(super) volume: u8,
    pub(super) folder: PathBuf,
    pub(super) access: Access,
    pub(super) shared: Shared,
    pub(super) queue: Queue,
    pub(super) settings: Settings,
    /// What domains are promised of this path.
    pub(super) division: Division,
    pub(super) taken: Arc<AtomicU64>,
    // Dropped before the owner: the head is sealed while nobody else can open the log.
    pub(super) state: Mutex<State>,
    /// What rests in the folder is known.
    recovered: Condvar,
    resting_until: Mutex<Option<Instant>>,
    /// Reads that failed, none having succeeded in between.
    strikes: AtomicU32,
    /// The folder cannot be used.
    lost: AtomicBool,
    /// Nothing of this log is to be in the index any more.
    withdrawn: AtomicBool,
    owner: Owner,
}

pub(super) struct State {
    pub(super) recovered: bool,
    /// What is written, one of each group that has written.
    pub(super) heads: BTreeMap<u16, Open>,
    pub(super) segments: BTreeMap<u32, Arc<Segment>>,
}

/// A segment that is written.
pub(super) struct Open {
    pub(super) head: Arc<Head>,
    /// Where the next record goes, and how many there are.
    pub(super) end: u64,
    pub(super) records: usize,
}

/// What a writer has to do next.
enum Step {
    Write { head: Arc<Head>, at: u64 },
    Refuse(StoreError),
}

impl Log {
    /// Takes possession of a folder. Nothing is written before [`Log::recover`] has looked at what rests there.
    pub(super) fn open(volume: u8, folder: &Path, settings: Settings, shared: Shared) -> Result<Self, OpenError> {
        let failed = |source| OpenError::Io { path: folder.to_owned(), source };
        let owner = Owner::claim(folder)?;
        let access = Access::probe(folder).map_err(failed)?;
        #[cfg(test)]
        let access = shared.rig.access().unwrap_or(access);
        let last = segment::numbers(folder).map_err(failed)?.last().copied();
        shared.next.fetch_max(last.map_or(0, |last| last + 1), Ordering::Relaxed);
        let state = State { recovered: false, heads: BTreeMap::new(), segments: BTreeMap::new() };
        let division = shared.division.part(settings.capacity_bytes, shared.capacity);
        Ok(Self {
            volume,
            folder: folder.to_owned(),
            access,
            shared,
            queue: Queue::new(QUEUE, division.clone()),
            settings: settings.in_blocks(division.bounds.len())?,
            division,
            taken: Arc::default(),
            state: Mutex::new(state),
            recovered: Condvar::new(),
            resting_until: Mutex::default(),
            strikes: AtomicU32::new(0),
            lost: AtomicBool::new(false),
            withdrawn: AtomicBool::new(false),
            owner,
        })
    }

    /// The folder cannot be used any more; said once.
    pub(super) fn lose(&self, error: &io::Error) {
        if !self.lost.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                folder = %self.folder.display(), %error,
                "a path of the disk tier is down: its blocks are misses until it can be used again"
            );
        }
    }

    pub(super) fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Relaxed)
    }

    /// What a failed read or write says about the folder.
    pub(super) fn suspect(&self, error: &io::Error) {
        if !self.owner.holds(&self.folder) {
            self.lose(error);
        }
    }

    pub(super) fn read_failed(&self, error: &io::Error) {
        if self.strikes.fetch_add(1, Ordering::Relaxed) + 1 >= STRIKES {
            self.lose(error);
        }
        self.suspect(error);
    }

    pub(super) fn read_succeeded(&self) {
        self.strikes.store(0, Ordering::Relaxed);
    }

    /// Takes everything out of the index, and refuses what still waits.
    pub(super) fn withdraw(&self) {
        self.withdrawn.store(true, Ordering::SeqCst);
        let segments: Vec<Arc<Segment>> = {
            let mut state = self.state.lock().expect("no writer died half-way");
            self.finish_recovery(&mut state);
            state.segments.values().cloned().collect()
        };
        for segment in segments {
            let blocks: Vec<_> = segment.listing().iter().map(|(space, entry)| (space, entry.name)).collect();
            self.shared.index.remove(blocks, |place| self.is_in(place, segment.number()));
        }
    }

    /// Whether a place is in a segment of this log.
    pub(super) fn is_in(&self, place: &Place, segment: u32) -> bool {
        place.volume == self.volume && place.segment == segment
    }

    /// Lets the writers write.
    pub(super) fn finish_recovery(&self, state: &mut State) {
        state.recovered = true;
        self.recovered.notify_all();
    }

    /// Whether the device is left alone after a failed write.
    pub(super) fn rests(&self) -> bool {
        let until = self.resting_until.lock().expect("only assigned to");
        until.is_some_and(|until| Instant::now() < until)
    }

    pub(super) fn rest(&self) {
        *self.resting_until.lock().expect("only assigned to") = Some(Instant::now() + REST);
    }

    /// Bytes of all segments.
    pub(super) fn taken(&self) -> u64 {
        self.taken.load(Ordering::Relaxed)
    }

    pub(super) fn capacity(&self) -> u64 {
        self.settings.capacity_bytes
    }

    /// Whether a block of so many payload bytes fits into a segment.
    pub(super) fn fits(&self, payload: u64) -> bool {
        u32::try_from(payload).is_ok()
            && record::span(payload, self.access.grain()).next_multiple_of(Access::BLOCK) + self.footer(1)
                <= self.settings.segment_bytes
    }

    /// Writes what waits, until nothing does.
    pub(super) fn drain(&self) {
        let Some(mut writer) = self.queue.writer() else { return };
        while let Some((batch, step)) = self.next(&mut writer) {
            let written = match step {
                Step::Write { head, at } => {
                    let written = self.write(&head, at, &batch);
                    written.map_err(|error| self.give_up_head(&head, error))
                }
                Step::Refuse(error) => Err(error),
            };
            for job in batch.jobs {
                let answer = match &written {
                    Ok(()) => Ok(()),
                    Err(StoreError::Busy) => Err(StoreError::Busy),
                    Err(StoreError::Full) => Err(StoreError::Full),
                    Err(StoreError::Io(error)) => Err(StoreError::Io(again(error))),
                };
                // First, so that whoever is told that it failed may try elsewhere.
                drop(job.claim);
                // Whoever asked may have gone; the block rests all the same.
                let _ = job.answer.send(answer);
            }
        }
    }

    fn next(&self, writer: &mut Writer<'_>) -> Option<(Batch, Step)> {
        let state = self.state.lock().expect("no writer died half-way");
        let waiting = self.recovered.wait_while(state, |state| !state.recovered);
        let mut state = waiting.expect("no writer died half-way");
        if self.withdrawn.load(Ordering::SeqCst) {
            return Some((self.take(&state, writer, u64::MAX)?, Step::Refuse(StoreError::Busy)));
        }
        let mut batch = self.take(&state, writer, self.settings.segment_bytes)?;
        while batch.is_empty() {
            if let Err(error) = self.roll(&mut state, batch.group) {
                let refused = self.take(&state, writer, u64::MAX)?;
                return Some((refused, Step::Refuse(error)));
            }
            batch = self.take(&state, writer, self.settings.segment_bytes)?;
        }
        let open = state.heads.get_mut(&batch.group).expect("only an open segment has room");
        let (head, at) = (open.head.clone(), open.end);
        let spans = batch.records().map(|record| record.span(self.access.grain()));
        open.end += spans.sum::<u64>().next_multiple_of(Access::BLOCK);
        open.records += batch.records().count();
        Some((batch, Step::Write { head, at }))
    }

    /// As much of the queue as one write takes and a head of `limit` bytes has room for.
    fn take(&self, state: &State, writer: &mut Writer<'_>, limit: u64) -> Option<Batch> {
        let (mut taken, mut more) = (0, 0);
        writer.take(|group, block| {
            let open = state.heads.get(&group).map(|open| (open.end, open.records));
            let closed = open.is_none() && limit != u64::MAX;
            let (end, records) = open.unwrap_or_default();
            let span = block.map_or(self.access.grain(), |block| Record::Block(block).span(self.access.grain()));
            let fits = !closed
                && (taken == 0 || taken + span <= WRITE)
                && (end + (taken + span).next_multiple_of(Access::BLOCK))
                    .saturating_add(self.footer(records + more + 1))
                    <= limit;
            if fits {
                (taken, more) = (taken + span, more + 1);
            }
            fits
        })
    }

    fn write(&self, head: &Head, at: u64, batch: &Batch) -> io::Result<()> {
        #[cfg(test)]
        self.shared.rig.write(self.volume)?;
        let records: Vec<Record<'_>> = batch.records().collect();
        let offsets = head.write(at, records.iter().copied(), &self.shared.pool)?;
        let blocks = records.iter().zip(offsets).filter_map(|(record, offset)| match record {
            Record::Block(block) => Some(self.resting(block, head.segment().number(), offset)),
            Record::Gone(..) => None,
        });
        self.index_blocks(blocks);
        if self.withdrawn.load(Ordering::SeqCst) {
            // Between the check above and now; whoever withdrew may have been here before us.
            let blocks: Vec<_> = batch.jobs.iter().map(|job| &job.block.header).collect();
            let blocks = blocks.into_iter().map(|header| (header.fingerprint, header.name));
            self.shared.index.remove(blocks, |place| self.is_in(place, head.segment().number()));
            return Err(io::ErrorKind::NotConnected.into());
        }
        Ok(())
    }

    /// After a failed write: what the head has is kept, and the device left alone for a while.
    fn give_up_head(&self, head: &Arc<Head>, error: io::Error) -> StoreError {
        tracing::warn!(folder = %self.folder.display(), %error, "write failed, disk tier takes no blocks for a while");
        let mut state = self.state.lock().expect("no writer died half-way");
        state.heads.retain(|_, open| !Arc::ptr_eq(&open.head, head));
        self.rest();
        self.suspect(&error);
        StoreError::Io(error)
    }

    fn footer(&self, records: usize) -> u64 {
        // Each may be another owner's.
        Listing::footer_span(records, records)
    }

    /// Says that blocks rest. One that a later segment builds upon must not go before its children; segments that are
    /// written side by side are of one age.
    pub(super) fn index_blocks(&self, blocks: impl IntoIterator<Item = Resting<Place>>) {
        let aside = self.shared.paths * self.division.bounds.len() as u32 - 1;
        self.shared
            .index
            .insert(blocks, |parent, child| parent.hot |= parent.segment.saturating_add(aside) < child.segment);
    }

    pub(super) fn resting(&self, block: &Block, segment: u32, offset: u64) -> Resting<Place> {
        let (offset, length) = ((offset / Access::UNIT) as u32, block.header.length as u32);
        let Header { fingerprint, name, parent, keep, domain, .. } = block.header;
        let group = self.division.group(domain);
        let place = Place { segment, offset, length, group, volume: self.volume, hot: false };
        Resting { fingerprint, name, parent, keep, place }
    }
}
