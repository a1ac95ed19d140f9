//! Writing: queued records are written to the head segment of their group, in large concurrent writes.
//!
//! A writer takes records from the queue and reserves space in the head under one lock, so the order of offsets is
//! the order of the queue; then it encodes and writes concurrently with the other writers. Blocks are indexed, and
//! events published, after their write. A writer that finds no space rotates the head (`space`); the others wait only
//! until the next head exists.

use super::direct::Access;
use super::log::{Log, State};
use super::queue::{Batch, WriterPermit, same_error};
use super::record::Record;
use super::segment::Head;
use crate::tier::StoreError;
use std::io;
use std::sync::Arc;

/// Maximum length of one write in bytes: enough to be as fast as the device.
const MAX_WRITE_BYTES: u64 = 4 << 20;

/// Which records are taken from the queue.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Take {
    /// Those for which the head of their group has room.
    Writable,
    /// Any, because they are rejected.
    Rejected,
}

/// Next step of a writer.
pub(super) enum Step {
    Write { head: Arc<Head>, at: u64 },
    Reject(StoreError),
}

impl Log {
    /// Writes queued records until the queue is empty.
    pub(super) fn drain(&self) {
        let Some(mut writer) = self.queue.writer() else { return };
        while let Some((batch, step)) = self.next(&mut writer) {
            let written = match step {
                Step::Write { head, at } => {
                    let written = self.write(&head, at, &batch);
                    written.map_err(|error| self.abandon_head(&head, error))
                }
                Step::Reject(error) => Err(error),
            };
            for job in batch.jobs {
                let answer = match &written {
                    Ok(()) => Ok(()),
                    Err(error) => Err(same_error(error)),
                };
                // Released before the answer, so that a caller that gets an error can try another path.
                drop(job.claim);
                // The caller may have been cancelled; the block is stored nevertheless.
                let _ = job.answer.send(answer);
            }
        }
    }

    pub(super) fn next(&self, writer: &mut WriterPermit<'_>) -> Option<(Batch, Step)> {
        let mut state = self.lock();
        self.wait(&mut state, |state| !state.recovered);
        let (segment, mut rotations) = (self.settings.segment_bytes, 0);
        loop {
            if self.is_withdrawn() {
                let down = StoreError::Unavailable(self.failure().unwrap_or("the path went down").to_owned());
                return Some((self.take(&state, writer, Take::Rejected)?.0, Step::Reject(down)));
            }
            let (batch, waits) = self.take(&state, writer, Take::Writable)?;
            if !batch.is_empty() {
                let open = state.heads.get_mut(&batch.group).expect("only an open segment has room");
                let spans = batch.records().map(|record| record.span(self.access.alignment()));
                let at = open.take(spans.sum(), batch.records().count());
                let head = open.head.clone();
                // Before the write, so that a concurrent choice of victims sees it.
                self.mark_parents(batch.jobs.iter().map(|job| &job.block.header), head.segment().number());
                return Some((batch, Step::Write { head, at }));
            }
            if state.rotating {
                // Until the group has a new head, or the rotation failed.
                let group = batch.group;
                let head = |state: &State| state.heads.get(&group).map(|open| open.head.segment().number());
                let full = head(&state);
                self.wait(&mut state, |state| state.rotating && head(state) == full);
                continue;
            }
            let rotating = self.begin_rotation(&mut state);
            drop(state);
            // Carried over blocks may leave too little space for the queued ones, so that the new head is sealed
            // early; this must not happen twice in a row. A footer of many small records may take an eighth.
            let least = waits.next_multiple_of(Access::BLOCK) + Self::footer_bytes(1);
            let room = segment.saturating_sub(least);
            let carry = if rotations == 0 { segment / 2 } else { room.min(segment / 2) / 8 * 7 };
            rotations += 1;
            if let Err(error) = self.rotate(batch.group, carry, least) {
                // Taken before the rotation ends: another writer would find the writes suspended and answer these
                // records with `Busy`, without the reason.
                let batch = self.take(&self.lock(), writer, Take::Rejected)?.0;
                return Some((batch, Step::Reject(error)));
            }
            drop(rotating);
            state = self.lock();
        }
    }

    /// Takes as many records as one write takes. The second value is the length of the first record that is left.
    fn take(&self, state: &State, writer: &mut WriterPermit<'_>, which: Take) -> Option<(Batch, u64)> {
        let (mut taken, mut more, mut waits) = (0, 0, 0);
        let batch = writer.take(|group, block| {
            let open = state.heads.get(&group).map(|open| (open.end, open.records, open.head.segment().bytes()));
            let (end, records, limit) = match which {
                Take::Writable => open.unwrap_or_default(),
                Take::Rejected => (0, 0, u64::MAX),
            };
            let span =
                block.map_or(self.access.alignment(), |block| Record::Block(block).span(self.access.alignment()));
            let whole = end + (taken + span).next_multiple_of(Access::BLOCK);
            let fits = (taken == 0 || taken + span <= MAX_WRITE_BYTES)
                && whole.saturating_add(Self::footer_bytes(records + more + 1)) <= limit;
            if fits {
                (taken, more) = (taken + span, more + 1);
            } else {
                waits = span;
            }
            fits
        })?;
        Some((batch, waits))
    }

    pub(super) fn write(&self, head: &Head, at: u64, batch: &Batch) -> io::Result<()> {
        #[cfg(test)]
        self.shared.hooks.write_data(self.path)?;
        let records: Vec<Record<'_>> = batch.records().collect();
        let offsets = head.write(at, &records, &self.shared.pool)?;
        self.write_succeeded();
        let blocks = records.iter().zip(offsets).filter_map(|(record, offset)| match record {
            Record::Block(block) => Some(self.index_entry(block, head.segment(), offset)),
            Record::Tombstone(..) => None,
        });
        self.index_blocks(blocks);
        if self.is_withdrawn() {
            // `withdraw` may have run after the check above.
            let blocks = batch.jobs.iter().map(|job| (job.block.header.fingerprint, job.block.header.hash));
            self.shared.index.remove(blocks, |location| self.is_in_segment(location, head.segment().number()));
            return Err(io::ErrorKind::NotConnected.into());
        }
        Ok(())
    }

    /// Handles a failed write: seals the head and suspends writes for a while.
    fn abandon_head(&self, head: &Arc<Head>, error: io::Error) -> StoreError {
        let given_up = {
            let mut state = self.lock();
            let group = head.segment().group();
            let current = state.heads.get(&group).is_some_and(|open| Arc::ptr_eq(&open.head, head));
            current.then(|| state.heads.remove(&group))
        };
        // This seals the segment, unless another thread still writes to it.
        drop(given_up);
        self.start_cooldown(&error);
        self.check_folder_after(&error);
        StoreError::Io(error)
    }
}
