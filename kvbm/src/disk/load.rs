//! Reading: where the wanted blocks lie, and the bytes of neighbours in one call.

use super::direct::{self, Access};
use super::log::{Log, Place, Shared};
use super::queue::again;
use super::{record, segment};
use crate::block::{Block, Corrupt, Fingerprint, SequenceHash};
use crate::tier::coalesce::{self, Run, Wanted};
use crate::tier::{LoadError, Loaded};
use bytes::Bytes;
use std::collections::BTreeMap;
use std::fs::OpenOptions;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// One read: enough to be as fast as the device, small enough that the first blocks arrive early. A buffer of it is a large
/// page; where this was measured a megabyte took nearly as long.
pub(super) const READ: u64 = 2 << 20;
/// Reading over so much that nobody asked for takes less time than asking again.
const GAP: u64 = 64 << 10;

/// Blocks that are read from one segment in one call.
pub(super) struct Part {
    pub(super) segment: u32,
    /// Whose they are.
    pub(super) group: u16,
    pub(super) run: Run,
}

/// Which of `names` are not here, and the reads that bring the others, for each of `logs`.
pub(super) fn plan(
    shared: &Shared,
    logs: &[Option<Arc<Log>>],
    fingerprint: Fingerprint,
    names: &[SequenceHash],
) -> (Vec<usize>, Vec<Vec<Part>>) {
    let (index, most) = (&shared.index, shared.max_block.load(Ordering::Relaxed));
    let mut missing = Vec::new();
    let mut segments: Vec<BTreeMap<(u32, u16), Vec<Wanted>>> = vec![BTreeMap::new(); logs.len()];
    for (nth, place) in index.find(fingerprint, names, |place| place.hot = true).into_iter().enumerate() {
        let log = place.and_then(|place| Some((place, logs[usize::from(place.volume)].as_ref()?)));
        let Some((place, log)) = log else {
            missing.push(nth);
            continue;
        };
        if u64::from(place.length) > most {
            // No block of the engine that asks.
            shared.index.remove([(fingerprint, names[nth])], |at| *at == place);
            missing.push(nth);
            continue;
        }
        let length = record::span(u64::from(place.length), log.access.grain());
        let offset = u64::from(place.offset) * Access::UNIT;
        let segments = &mut segments[usize::from(place.volume)];
        segments.entry((place.segment, place.group)).or_default().push(Wanted { index: nth, offset, length });
    }
    let parts = |segments: BTreeMap<(u32, u16), Vec<Wanted>>| {
        let parts = segments.into_iter().flat_map(|((segment, group), wanted)| {
            coalesce::runs(wanted, GAP, READ - Access::BLOCK).into_iter().map(move |run| Part { segment, group, run })
        });
        // Blocks of a request are wanted in its order; those of the segment with the first one come first.
        let mut parts: Vec<Part> = parts.collect();
        parts.sort_by_key(|part| part.run.wanted.iter().map(|wanted| wanted.index).min());
        parts
    };
    (missing, segments.into_iter().map(parts).collect())
}

impl Log {
    /// Reads a part, blocking. What turns out not to be a block is forgotten; a segment that was reclaimed is a miss.
    pub(super) fn load(&self, fingerprint: Fingerprint, names: &[SequenceHash], part: &Part) -> Vec<Loaded> {
        let indices = part.run.wanted.iter().map(|wanted| wanted.index);
        let still = |place: &Place| self.is_in(place, part.segment);
        let answer = |index: usize, record: Option<Bytes>| {
            // Given up meanwhile, its space may have been written anew.
            if !self.shared.index.get(fingerprint, names[index]).as_ref().is_some_and(still) {
                return (index, Ok(self.moved(fingerprint, names[index])));
            }
            let block = record.ok_or(Corrupt::Length).and_then(|record| record::block(&record));
            if block.is_err() && self.shared.index.remove([(fingerprint, names[index])], still) > 0 {
                self.queue.discard(part.group, fingerprint, names[index]);
            }
            (index, block.map(Some).map_err(LoadError::Corrupt))
        };
        match self.read(part.segment, &part.run) {
            Ok(records) => {
                self.read_succeeded();
                indices.zip(records).map(|(index, record)| answer(index, record)).collect()
            }
            Err(error) => {
                // Not to be tried again, and not to be discarded: the device may be itself again after a restart.
                let lost = indices.clone().map(|index| (fingerprint, names[index]));
                self.shared.index.remove(lost, still);
                if error.kind() == io::ErrorKind::NotFound {
                    self.suspect(&error);
                    return indices.map(|index| (index, Ok(self.moved(fingerprint, names[index])))).collect();
                }
                self.read_failed(&error);
                indices.map(|index| (index, Err(LoadError::Io(again(&error))))).collect()
            }
        }
    }

    /// A block that was carried over while it was to be read.
    fn moved(&self, fingerprint: Fingerprint, name: SequenceHash) -> Option<Block> {
        let find = || self.shared.index.get(fingerprint, name).filter(|place| place.volume == self.volume);
        let place = find()?;
        if u64::from(place.length) > self.shared.max_block.load(Ordering::Relaxed) {
            return None;
        }
        let length = record::span(u64::from(place.length), self.access.grain());
        let wanted = vec![Wanted { index: 0, offset: u64::from(place.offset) * Access::UNIT, length }];
        let record = self.read(place.segment, &Run { wanted }).ok()?.pop()??;
        // What went after all is a miss.
        find().is_some_and(|now| self.is_in(&now, place.segment)).then(|| record::block(&record).ok())?
    }

    /// The records of a run; `None` for one that the file is too short for.
    pub(super) fn read(&self, number: u32, run: &Run) -> io::Result<Vec<Option<Bytes>>> {
        #[cfg(test)]
        self.shared.rig.read(self.volume)?;
        let path = segment::path(&self.folder, number);
        let read = |access: Access| -> io::Result<Vec<Option<Bytes>>> {
            let file = self.io.look(|| access.open(&path, OpenOptions::new().read(true)))?;
            // One buffer for all: the blocks of a run are wanted, used and let go together.
            // Whole blocks of the device, which reads no others.
            let start = run.start() / Access::BLOCK * Access::BLOCK;
            let bytes = (run.end().next_multiple_of(Access::BLOCK) - start) as usize;
            let mut buffer = self.shared.pool.take(bytes);
            let read = self.io.look(|| direct::read(&file, start, &mut buffer[..bytes]))?;
            let buffer = Bytes::from_owner(buffer).slice(..read);
            let records = run.wanted.iter().map(|wanted| {
                let start = (wanted.offset - start) as usize;
                let end = start + wanted.length as usize;
                (end <= read).then(|| buffer.slice(start..end))
            });
            Ok(records.collect())
        };
        match read(self.access) {
            // Written with a finer grain than this device takes.
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => read(Access::Buffered),
            answer => answer,
        }
    }
}
