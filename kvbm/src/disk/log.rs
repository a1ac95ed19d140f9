//! The log: segments in order, a head that is written, an index of what rests where.
//!
//! Everything here blocks and is called off the async threads. Writers take what waits in one step with a place at the
//! head, so the order of offsets is the order of the queue; then they fill and write side by side. Blocks are listed and
//! indexed, and so announced, when their bytes are written.

use super::direct::{Access, Buffer};
use super::listing::Listing;
use super::load::again;
use super::owner::Owner;
use super::queue::{Batch, Queue, Writer};
use super::record::{self, Record};
use super::room::REST;
use super::segment::{Head, Segment};
use super::{OpenError, Settings};
use crate::index::{Index, Resting};
use crate::{Block, EventLog, Fingerprint, Level, SequenceHash, StoreError};
use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use tokio::time::Instant;

/// One write: large enough to be as fast as the device.
pub(super) const WRITE: u64 = 4 << 20;
/// Blocks that may wait for a writer, in bytes: about 50 ms of a fast device.
const QUEUE: u64 = 64 << 20;
/// Footers have room for so many fingerprints; a process has one per model that it serves.
const FINGERPRINTS: usize = 64;

/// Where a block rests.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Place {
    pub(super) segment: u32,
    /// In units of [`Access::UNIT`].
    pub(super) offset: u32,
    /// Payload bytes.
    pub(super) length: u32,
    /// Read, or built upon by a later segment, since it was written here.
    pub(super) hot: bool,
}

pub(super) struct Log {
    pub(super) folder: PathBuf,
    pub(super) access: Access,
    pub(super) index: Index<Place>,
    pub(super) queue: Queue,
    pub(super) settings: Settings,
    pub(super) taken: Arc<AtomicU64>,
    // Dropped before the owner: the head is sealed while nobody else can open the log.
    pub(super) state: Mutex<State>,
    #[cfg(test)]
    pub(super) failing: std::sync::atomic::AtomicI32,
    _owner: Owner,
}

pub(super) struct State {
    pub(super) head: Option<Arc<Head>>,
    /// Where the next record goes, and how many there are.
    pub(super) end: u64,
    pub(super) records: usize,
    pub(super) next: u32,
    pub(super) segments: BTreeMap<u32, Arc<Segment>>,
    pub(super) resting_until: Option<Instant>,
}

/// What a writer has to do next.
enum Step {
    Write { head: Arc<Head>, at: u64 },
    Refuse(StoreError),
}

impl Log {
    pub(super) fn open(folder: &Path, settings: Settings, events: Arc<EventLog>) -> Result<Self, OpenError> {
        let failed = |source| OpenError::Io { path: folder.to_owned(), source };
        fs::create_dir_all(folder).map_err(failed)?;
        let owner = Owner::claim(folder)?;
        let access = Access::probe(folder).map_err(failed)?;
        let started = std::time::Instant::now();
        let mut log = Self {
            folder: folder.to_owned(),
            access,
            index: Index::new(Level::G3, events),
            queue: Queue::new(QUEUE),
            settings: settings.in_grains(access.grain())?,
            taken: Arc::default(),
            state: Mutex::new(State {
                head: None,
                end: 0,
                records: 0,
                next: 0,
                segments: BTreeMap::new(),
                resting_until: None,
            }),
            #[cfg(test)]
            failing: std::sync::atomic::AtomicI32::new(0),
            _owner: owner,
        };
        log.recover().map_err(failed)?;
        tracing::info!(
            folder = %folder.display(), ?access, blocks = log.index.len(), bytes = log.taken(), took = ?started.elapsed(),
            "disk tier open"
        );
        Ok(log)
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
            && record::span(payload, self.access.grain()) + self.footer(1) <= self.settings.segment_bytes
    }

    /// Denies a block from now on, also after a restart, if it rests where the caller thinks.
    pub(super) fn discard(&self, fingerprint: Fingerprint, name: SequenceHash, still: impl Fn(&Place) -> bool) {
        if self.index.remove([(fingerprint, name)], still) > 0 {
            self.queue.discard(fingerprint, name);
        }
    }

    /// Writes what waits, until nothing does.
    pub(super) fn drain(&self) {
        let Some(mut writer) = self.queue.writer() else { return };
        let mut buffer = Buffer::zeroed(0);
        while let Some((batch, step)) = self.next(&mut writer) {
            let written = match step {
                Step::Write { head, at } => {
                    let written = self.write(&head, at, &batch, &mut buffer);
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
                // Whoever asked may have gone; the block rests all the same.
                let _ = job.answer.send(answer);
            }
        }
    }

    fn next(&self, writer: &mut Writer<'_>) -> Option<(Batch, Step)> {
        let mut state = self.state.lock().expect("no writer died half-way");
        let mut batch = self.take(&mut state, writer, self.settings.segment_bytes)?;
        if batch.is_empty() {
            if let Err(error) = self.roll(&mut state) {
                let refused = self.take(&mut state, writer, u64::MAX)?;
                return Some((refused, Step::Refuse(error)));
            }
            batch = self.take(&mut state, writer, self.settings.segment_bytes)?;
        }
        let head = state.head.clone().expect("only an open segment has room");
        let at = state.end;
        let spans = batch.records().map(|record| record.span(self.access.grain()));
        state.end += spans.sum::<u64>();
        state.records += batch.records().count();
        Some((batch, Step::Write { head, at }))
    }

    /// As much of the queue as one write takes and a head of `limit` bytes has room for.
    fn take(&self, state: &mut State, writer: &mut Writer<'_>, limit: u64) -> Option<Batch> {
        let closed = state.head.is_none() && limit != u64::MAX;
        let (mut end, mut records, mut taken) = (state.end, state.records, 0);
        writer.take(|block| {
            let span = block.map_or(self.access.grain(), |block| Record::Block(block).span(self.access.grain()));
            let fits = !closed
                && (taken == 0 || taken + span <= WRITE)
                && (end + span).saturating_add(self.footer(records + 1)) <= limit;
            if fits {
                (end, records, taken) = (end + span, records + 1, taken + span);
            }
            fits
        })
    }

    fn write(&self, head: &Head, at: u64, batch: &Batch, buffer: &mut Buffer) -> io::Result<()> {
        #[cfg(test)]
        self.fault()?;
        let records: Vec<Record<'_>> = batch.records().collect();
        let offsets = head.write(at, records.iter().copied(), buffer)?;
        let blocks = records.iter().zip(offsets).filter_map(|(record, offset)| match record {
            Record::Block(block) => Some(resting(block, head.segment().number(), offset)),
            Record::Gone(..) => None,
        });
        self.index.insert(blocks, built_upon);
        Ok(())
    }

    /// After a failed write: what the head has is kept, and the device left alone for a while.
    fn give_up_head(&self, head: &Arc<Head>, error: io::Error) -> StoreError {
        tracing::warn!(folder = %self.folder.display(), %error, "write failed, disk tier takes no blocks for a while");
        let mut state = self.state.lock().expect("no writer died half-way");
        if state.head.as_ref().is_some_and(|current| Arc::ptr_eq(current, head)) {
            state.head = None;
        }
        state.resting_until = Some(Instant::now() + REST);
        StoreError::Io(error)
    }

    /// Where tests let the device fail.
    #[cfg(test)]
    pub(super) fn fault(&self) -> io::Result<()> {
        match self.failing.load(Ordering::Relaxed) {
            0 => Ok(()),
            code => Err(io::Error::from_raw_os_error(code)),
        }
    }

    fn footer(&self, records: usize) -> u64 {
        Listing::footer_span(records, FINGERPRINTS, self.access.grain())
    }
}

pub(super) fn resting(block: &Block, segment: u32, offset: u64) -> Resting<Place> {
    let place =
        Place { segment, offset: (offset / Access::UNIT) as u32, length: block.header.length as u32, hot: false };
    let header = &block.header;
    Resting { fingerprint: header.fingerprint, name: header.name, parent: header.parent, place }
}

/// A block that a later segment builds upon must not go before its children.
pub(super) fn built_upon(parent: &mut Place, child: Place) {
    parent.hot |= parent.segment < child.segment;
}
