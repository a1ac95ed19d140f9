//! Loads: locates the requested blocks, and reads adjacent records in one call.

use super::direct::{self, Access};
use super::log::{Location, Log, Shared};
use super::path::LogPath;
use super::queue::clone_error;
use super::{record, segment};
use crate::block::{Block, Corrupt, Fingerprint, SequenceHash};
use crate::tier::coalesce::{self, BlockRange, ReadRun};
use crate::tier::{LoadError, Loaded};
use bytes::Bytes;
use futures::stream::{self, Stream};
use std::collections::BTreeMap;
use std::fs::OpenOptions;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use tokio_util::task::AbortOnDropHandle;

/// Maximum length of one read in bytes: enough to be as fast as the device, small enough that the first blocks arrive
/// early. Such a buffer is one huge page; one megabyte took nearly as long in measurements.
pub(super) const MAX_READ_BYTES: u64 = 2 << 20;
/// Maximum number of unwanted bytes between two records of one read. Reading them takes less time than a second call.
const MAX_GAP_BYTES: u64 = 64 << 10;

/// Blocks that are read from one segment in one call.
pub(super) struct SegmentRead {
    pub(super) segment: u32,
    /// Quota group of the segment.
    pub(super) group: u16,
    pub(super) run: ReadRun,
}

/// Plans a load: the indices of `hashes` that are missing, and the reads on each of `logs`.
pub(super) fn plan(
    shared: &Shared,
    logs: &[Option<Arc<Log>>],
    fingerprint: Fingerprint,
    hashes: &[SequenceHash],
) -> (Vec<usize>, Vec<Vec<SegmentRead>>) {
    let (index, max_length) = (&shared.index, shared.max_block.load(Ordering::Relaxed));
    let mut missing = Vec::new();
    let mut segments: Vec<BTreeMap<(u32, u16), Vec<BlockRange>>> = vec![BTreeMap::new(); logs.len()];
    for (index_in_request, location) in
        index.find(fingerprint, hashes, |location| location.hot = true).into_iter().enumerate()
    {
        let log = location.and_then(|location| Some((location, logs[usize::from(location.path)].as_ref()?)));
        let Some((location, log)) = log else {
            missing.push(index_in_request);
            continue;
        };
        if u64::from(location.length) > max_length {
            // The engine has no blocks of this length.
            shared.index.remove([(fingerprint, hashes[index_in_request])], |at| *at == location);
            missing.push(index_in_request);
            continue;
        }
        let length = record::span(u64::from(location.length), log.access.alignment());
        let offset = u64::from(location.offset) * Access::UNIT;
        let segments = &mut segments[usize::from(location.path)];
        segments.entry((location.segment, location.group)).or_default().push(BlockRange {
            index: index_in_request,
            offset,
            length,
        });
    }
    let parts = |segments: BTreeMap<(u32, u16), Vec<BlockRange>>| {
        let parts = segments.into_iter().flat_map(|((segment, group), wanted)| {
            coalesce::coalesce(wanted, MAX_GAP_BYTES, MAX_READ_BYTES - Access::BLOCK)
                .into_iter()
                .map(move |run| SegmentRead { segment, group, run })
        });
        // Requests consume blocks in order, so reads with earlier blocks come first.
        let mut parts: Vec<SegmentRead> = parts.collect();
        parts.sort_by_key(|part| part.run.blocks.iter().map(|wanted| wanted.index).min());
        parts
    };
    (missing, segments.into_iter().map(parts).collect())
}

impl Log {
    /// Executes a read, blocking. A corrupt record is removed from the index; the blocks of a segment that was
    /// reclaimed, or whose file is missing, are misses.
    pub(super) fn load(&self, fingerprint: Fingerprint, hashes: &[SequenceHash], part: &SegmentRead) -> Vec<Loaded> {
        let indices = part.run.blocks.iter().map(|wanted| wanted.index);
        let is_current = |location: &Location| self.is_in_segment(location, part.segment);
        let answer = |index: usize, record: Option<Bytes>| {
            // The segment was reclaimed meanwhile, and its space may have been reused.
            if !self.shared.index.get(fingerprint, hashes[index]).as_ref().is_some_and(is_current) {
                return (index, Ok(self.load_moved(fingerprint, hashes[index])));
            }
            let block = record.ok_or(Corrupt::Length).and_then(|record| record::block(&record));
            if block.is_err() && self.shared.index.remove([(fingerprint, hashes[index])], is_current) > 0 {
                self.queue.push_tombstone(part.group, fingerprint, hashes[index]);
            }
            (index, block.map(Some).map_err(LoadError::Corrupt))
        };
        match self.read(part.segment, &part.run) {
            Ok(records) => {
                self.read_succeeded();
                indices.zip(records).map(|(index, record)| answer(index, record)).collect()
            }
            Err(error) => {
                // The blocks leave the index but get no tombstone: the device may work again after a restart.
                let lost = indices.clone().map(|index| (fingerprint, hashes[index]));
                self.shared.index.remove(lost, is_current);
                if error.kind() == io::ErrorKind::NotFound {
                    if self.check_folder_after(&error) {
                        self.remove_missing(part.segment);
                    }
                    return indices.map(|index| (index, Ok(self.load_moved(fingerprint, hashes[index])))).collect();
                }
                self.read_failed(&error);
                indices.map(|index| (index, Err(LoadError::Io(clone_error(&error))))).collect()
            }
        }
    }

    /// Loads a block that was carried over while it was to be read.
    fn load_moved(&self, fingerprint: Fingerprint, hash: SequenceHash) -> Option<Block> {
        let find = || self.shared.index.get(fingerprint, hash).filter(|location| location.path == self.path);
        let location = find()?;
        if u64::from(location.length) > self.shared.max_block.load(Ordering::Relaxed) {
            return None;
        }
        let length = record::span(u64::from(location.length), self.access.alignment());
        let wanted = vec![BlockRange { index: 0, offset: u64::from(location.offset) * Access::UNIT, length }];
        let record = self.read(location.segment, &ReadRun { blocks: wanted }).ok()?.pop()??;
        // A block that was reclaimed meanwhile is a miss.
        find().is_some_and(|now| self.is_in_segment(&now, location.segment)).then(|| record::block(&record).ok())?
    }

    /// Reads the records of a run; `None` for a record behind the end of the file.
    pub(super) fn read(&self, number: u32, run: &ReadRun) -> io::Result<Vec<Option<Bytes>>> {
        #[cfg(test)]
        self.shared.hooks.read(self.path)?;
        let path = segment::path(&self.folder, number);
        let read = |access: Access| -> io::Result<Vec<Option<Bytes>>> {
            let file = self.io.query(|| access.open(&path, OpenOptions::new().read(true)))?;
            // All records share one buffer, because the blocks of a run are used together. The read covers whole
            // device blocks.
            let start = run.start() / Access::BLOCK * Access::BLOCK;
            let bytes = (run.end().next_multiple_of(Access::BLOCK) - start) as usize;
            let mut buffer = self.shared.pool.take(bytes);
            let read = self.io.query(|| direct::read(&file, start, &mut buffer[..bytes]))?;
            let buffer = Bytes::from_owner(buffer).slice(..read);
            let records = run.blocks.iter().map(|wanted| {
                let start = (wanted.offset - start) as usize;
                let end = start + wanted.length as usize;
                (end <= read).then(|| buffer.slice(start..end))
            });
            Ok(records.collect())
        };
        match read(self.access) {
            // The log was written with a finer alignment than this device accepts.
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => read(Access::Buffered),
            answer => answer,
        }
    }
}

/// Reads a part of one path on a blocking thread.
pub(super) async fn read_part(
    log_path: Arc<LogPath>,
    log: Arc<Log>,
    fingerprint: Fingerprint,
    hashes: Arc<[SequenceHash]>,
    part: SegmentRead,
) -> impl Stream<Item = Loaded> {
    let indices: Vec<usize> = part.run.blocks.iter().map(|wanted| wanted.index).collect();
    let failed = log.failed.clone();
    let reading = async {
        let permit = log_path.readers.acquire(part.group, part.run.end() - part.run.start()).await;
        let reading = log_path.clone().spawn_blocking(move || {
            let loaded = log_path.work(&log, |log| log.load(fingerprint, &hashes, &part));
            drop(permit);
            loaded
        });
        // Dropping the stream cancels reads that have not started.
        AbortOnDropHandle::new(reading).await.ok().flatten()
    };
    let loaded = tokio::select! {
        biased;
        loaded = reading => loaded,
        () = failed.cancelled() => None,
    };
    let loaded = loaded.unwrap_or_else(|| {
        let error = io::Error::other("the G3 path has failed");
        indices.into_iter().map(|index| (index, Err(LoadError::Io(clone_error(&error))))).collect()
    });
    stream::iter(loaded)
}
