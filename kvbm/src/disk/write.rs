//! Writing: what waits goes to a place at the head of its group, in large writes, several at once.
//!
//! A writer takes from the queue and takes a place at the head in one step, so the order of offsets is the order of the
//! queue; then it fills and writes beside the others. Blocks are listed and indexed, and so announced, when their bytes
//! are written. Whoever finds no room rolls (`space`); meanwhile the others wait only until there is a head again.

use super::direct::Access;
use super::log::{Log, State};
use super::queue::{Batch, Writer, again};
use super::record::Record;
use super::segment::Head;
use crate::tier::StoreError;
use std::io;
use std::sync::Arc;

/// One write: large enough to be as fast as the device.
const WRITE: u64 = 4 << 20;

/// What a writer has to do next.
pub(super) enum Step {
    Write { head: Arc<Head>, at: u64 },
    Refuse(StoreError),
}

impl Log {
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

    pub(super) fn next(&self, writer: &mut Writer<'_>) -> Option<(Batch, Step)> {
        let mut state = self.wait(self.lock(), |state| !state.recovered);
        let (segment, mut rolls) = (self.settings.segment_bytes, 0);
        loop {
            if self.is_withdrawn() {
                return Some((self.take(&state, writer, u64::MAX)?.0, Step::Refuse(StoreError::Busy)));
            }
            let (batch, waits) = self.take(&state, writer, segment)?;
            if !batch.is_empty() {
                let open = state.heads.get_mut(&batch.group).expect("only an open segment has room");
                let spans = batch.records().map(|record| record.span(self.access.grain()));
                let at = open.take(spans.sum(), batch.records().count());
                let head = open.head.clone();
                // Before they are written: whoever chooses what goes meanwhile is to know.
                self.build_upon(batch.jobs.iter().map(|job| &job.block.header), head.segment().number());
                return Some((batch, Step::Write { head, at }));
            }
            if state.rolling {
                // Until the group has a head again, which is before the roll is over, or the roll failed.
                let group = batch.group;
                let head = |state: &State| {
                    let open = state.heads.get(&group).filter(|open| !open.reserved);
                    open.map(|open| open.head.segment().number())
                };
                let full = head(&state);
                state = self.wait(state, |state| state.rolling && head(state) == full);
                continue;
            }
            let rolling = self.begin_rolling(&mut state);
            drop(state);
            // What is carried over may leave too little for what waits, and is then sealed with little beside it; not twice
            // in a row. A footer of many small records may take an eighth.
            let room = segment.saturating_sub(waits.next_multiple_of(Access::BLOCK) + Self::footer(1));
            let carry = if rolls == 0 { segment / 2 } else { room.min(segment / 2) / 8 * 7 };
            rolls += 1;
            let rolled = self.roll(batch.group, carry);
            drop(rolling);
            state = self.lock();
            if let Err(error) = rolled {
                return Some((self.take(&state, writer, u64::MAX)?.0, Step::Refuse(error)));
            }
        }
    }

    /// As much of the queue as one write takes and a head of `limit` bytes has room for; and what the next one takes that
    /// has none.
    fn take(&self, state: &State, writer: &mut Writer<'_>, limit: u64) -> Option<(Batch, u64)> {
        let (mut taken, mut more, mut waits) = (0, 0, 0);
        let batch = writer.take(|group, block| {
            let open = state.heads.get(&group).filter(|open| !open.reserved);
            let open = open.map(|open| (open.end, open.records));
            let closed = open.is_none() && limit != u64::MAX;
            let (end, records) = open.unwrap_or_default();
            let span = block.map_or(self.access.grain(), |block| Record::Block(block).span(self.access.grain()));
            let whole = end + (taken + span).next_multiple_of(Access::BLOCK);
            let fits = !closed
                && (taken == 0 || taken + span <= WRITE)
                && whole.saturating_add(Self::footer(records + more + 1)) <= limit;
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
        self.shared.rig.write_data(self.volume)?;
        let records: Vec<Record<'_>> = batch.records().collect();
        let offsets = head.write(at, &records, &self.shared.pool)?;
        self.write_succeeded();
        let blocks = records.iter().zip(offsets).filter_map(|(record, offset)| match record {
            Record::Block(block) => Some(self.resting(block, head.segment(), offset)),
            Record::Gone(..) => None,
        });
        self.index_blocks(blocks);
        if self.is_withdrawn() {
            // Between the check above and now; whoever withdrew may have been here before us.
            let blocks = batch.jobs.iter().map(|job| (job.block.header.fingerprint, job.block.header.name));
            self.shared.index.remove(blocks, |place| self.is_in(place, head.segment().number()));
            return Err(io::ErrorKind::NotConnected.into());
        }
        Ok(())
    }

    /// After a failed write: what the head has is kept, and the device left alone for a while.
    fn give_up_head(&self, head: &Arc<Head>, error: io::Error) -> StoreError {
        let given_up = {
            let mut state = self.lock();
            let group = head.segment().group();
            let current = state.heads.get(&group).is_some_and(|open| Arc::ptr_eq(&open.head, head));
            current.then(|| state.heads.remove(&group))
        };
        // Sealed here, unless somebody still writes to it.
        drop(given_up);
        self.rest(&error);
        self.suspect(&error);
        StoreError::Io(error)
    }
}
