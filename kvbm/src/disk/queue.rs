//! The write queue: jobs and tombstones that are to be written, and permits for the writers.

use super::record::Record;
use crate::block::{Block, Fingerprint, Header, SequenceHash};
use crate::tier::{DrrQueue, StoreError, TierQuotas, WriteClaim};
use parking_lot::{Mutex, MutexGuard};
use std::io;
use tokio::sync::oneshot;

/// Maximum number of writers. Two have a write at the device while the third fills its buffer or frees space.
const MAX_WRITERS: usize = 3;
/// Maximum number of queued tombstones. They are rare; a missing one costs a load that is verified and discarded
/// again.
const MAX_TOMBSTONES: usize = 1024;

/// A block to be written, and the channel for the result.
pub(super) struct Job {
    pub(super) block: Block,
    pub(super) answer: oneshot::Sender<Result<(), StoreError>>,
    /// Released when the block is stored or the write failed.
    pub(super) claim: Option<WriteClaim>,
}

/// Records that are written together. Tombstones come first, because they were pushed before the blocks that follow.
#[derive(Default)]
pub(super) struct Batch {
    /// Quota group of the records.
    pub(super) group: u16,
    pub(super) tombstones: Vec<(Fingerprint, SequenceHash)>,
    pub(super) jobs: Vec<Job>,
}

impl Batch {
    pub(super) fn is_empty(&self) -> bool {
        self.tombstones.is_empty() && self.jobs.is_empty()
    }

    /// The records to write, in order.
    pub(super) fn records(&self) -> impl Iterator<Item = Record<'_>> {
        let tombstones = self.tombstones.iter().map(|(fingerprint, hash)| Record::Tombstone(*fingerprint, *hash));
        tombstones.chain(self.jobs.iter().map(|job| Record::Block(&job.block)))
    }
}

/// A queue bounded by bytes per quota group. Groups are served by deficit round robin.
pub(super) struct Queue {
    quotas: TierQuotas,
    /// Maximum number of queued bytes per group.
    limit: u64,
    state: Mutex<State>,
}

struct State {
    /// Tombstones, each with the group of the segment that has the block.
    tombstones: Vec<(u16, Fingerprint, SequenceHash)>,
    jobs: DrrQueue<Job>,
    bytes: Vec<u64>,
    writers: usize,
}

impl Queue {
    pub(super) fn new(limit: u64, quotas: TierQuotas) -> Self {
        let groups = quotas.bounds.len();
        let (jobs, bytes) = (DrrQueue::new(&quotas.weights), vec![0; groups]);
        let state = Mutex::new(State { tombstones: Vec::new(), jobs, bytes, writers: 0 });
        Self { quotas, limit: limit / groups as u64, state }
    }

    /// Queues a block if there is room. A block larger than the limit is accepted when its group has none queued.
    pub(super) fn push(
        &self,
        block: Block,
        claim: Option<WriteClaim>,
    ) -> Result<oneshot::Receiver<Result<(), StoreError>>, StoreError> {
        let (mut state, group) = (self.lock(), self.quotas.group(block.header.domain));
        if !state.has_room(group, &block, self.limit) {
            return Err(StoreError::Busy);
        }
        let (answer, waiting) = oneshot::channel();
        let bytes = queued_bytes(&block);
        state.bytes[usize::from(group)] += bytes;
        state.jobs.push(group, bytes, Job { block, answer, claim });
        Ok(waiting)
    }

    /// Whether [`Queue::push`] would accept a block now.
    pub(super) fn has_room(&self, block: &Block) -> bool {
        self.lock().has_room(self.quotas.group(block.header.domain), block, self.limit)
    }

    /// Queues a tombstone, if there is room, for the group whose segments have the block. So the tombstone is not
    /// reclaimed before the block.
    pub(super) fn push_tombstone(&self, group: u16, fingerprint: Fingerprint, hash: SequenceHash) {
        let mut state = self.lock();
        if state.tombstones.len() < MAX_TOMBSTONES {
            state.tombstones.push((group, fingerprint, hash));
        }
    }

    /// Rejects all queued blocks.
    pub(super) fn clear(&self) {
        self.lock().clear();
    }

    #[cfg(test)]
    pub(super) fn is_idle(&self) -> bool {
        let state = self.lock();
        state.jobs.is_empty() && state.tombstones.is_empty() && state.writers == 0
    }

    /// Whether there is work for one more writer.
    pub(super) fn needs_writer(&self) -> bool {
        let state = self.lock();
        !(state.jobs.is_empty() && state.tombstones.is_empty()) && state.writers < MAX_WRITERS
    }

    /// A permit to write, if there is work and fewer than [`MAX_WRITERS`] write.
    pub(super) fn writer(&self) -> Option<WriterPermit<'_>> {
        let mut state = self.lock();
        let idle = state.jobs.is_empty() && state.tombstones.is_empty();
        (!idle && state.writers < MAX_WRITERS).then(|| {
            state.writers += 1;
            WriterPermit { queue: self, done: false }
        })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Each critical section is a push or a pop with its counter.
        self.state.lock()
    }
}

impl State {
    fn clear(&mut self) {
        self.jobs.clear();
        self.bytes.fill(0);
    }

    fn has_room(&self, group: u16, block: &Block, limit: u64) -> bool {
        let bytes = self.bytes[usize::from(group)];
        bytes == 0 || bytes + queued_bytes(block) <= limit
    }
}

/// Permission to take records from the queue, until the queue is empty.
pub(super) struct WriterPermit<'a> {
    queue: &'a Queue,
    done: bool,
}

impl WriterPermit<'_> {
    /// The next records of one group, as long as `fits` accepts them; tombstones come first. `None` means that the
    /// queue is empty and ends the permit in the same critical section, so that no push is missed.
    pub(super) fn take(&mut self, mut fits: impl FnMut(u16, Option<&Block>) -> bool) -> Option<Batch> {
        let mut state = self.queue.lock();
        let state = &mut *state;
        if state.jobs.is_empty() && state.tombstones.is_empty() {
            state.writers -= 1;
            self.done = true;
            return None;
        }
        let tombstones = state.tombstones.first().map(|(group, ..)| *group);
        let group = tombstones.or_else(|| state.jobs.first().map(|(group, _)| group)).unwrap_or(0);
        let mut batch = Batch { group, ..Batch::default() };
        while state.tombstones.first().is_some_and(|(of, ..)| *of == group) && fits(group, None) {
            let (_, fingerprint, hash) = state.tombstones.remove(0);
            batch.tombstones.push((fingerprint, hash));
        }
        while let Some((turn, job)) = state.jobs.first() {
            if turn != group || !state.tombstones.is_empty() || !fits(group, Some(&job.block)) {
                break;
            }
            state.bytes[usize::from(group)] -= queued_bytes(&job.block);
            batch.jobs.extend(state.jobs.pop());
        }
        Some(batch)
    }
}

impl Drop for WriterPermit<'_> {
    fn drop(&mut self) {
        if !self.done {
            // After a panic of a writer the queued jobs are dropped, which answers their callers.
            let mut state = self.queue.lock();
            state.writers -= 1;
            state.clear();
        }
    }
}

/// The same error for another caller.
pub(super) fn same_error(error: &StoreError) -> StoreError {
    match error {
        StoreError::Busy => StoreError::Busy,
        StoreError::Unavailable(why) => StoreError::Unavailable(why.clone()),
        StoreError::Full => StoreError::Full,
        StoreError::TooLarge(bytes) => StoreError::TooLarge(*bytes),
        StoreError::Io(error) => StoreError::Io(clone_error(error)),
    }
}

/// A copy of an error of the device.
pub(super) fn clone_error(error: &io::Error) -> io::Error {
    match error.raw_os_error() {
        Some(code) => io::Error::from_raw_os_error(code),
        None => io::Error::new(error.kind(), error.to_string()),
    }
}

fn queued_bytes(block: &Block) -> u64 {
    block.header.length + Header::LEN as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tier::conformance::chain;

    #[test]
    fn a_full_queue_is_busy_and_an_empty_one_accepts_any_block() {
        let queue = Queue::new(7_000, TierQuotas::default());
        let blocks = chain(1, 4);
        let kept: Vec<_> = blocks.iter().map(|block| queue.push(block.clone(), None)).collect();
        assert!(kept[0].is_ok() && kept[1].is_ok());
        assert!(matches!(kept[2], Err(StoreError::Busy)));
        let mut writer = queue.writer().unwrap();
        assert_eq!(writer.take(|_, _| true).unwrap().jobs.len(), 2);
        assert!(writer.take(|_, _| true).is_none());
        let narrow = Queue::new(10, TierQuotas::default());
        assert!(narrow.push(blocks[0].clone(), None).is_ok());
    }

    #[test]
    fn batches_have_one_domain_and_floods_leave_room_to_others() {
        let domain = |n: u8| crate::block::DomainId::from_bytes([n; 16]);
        let quotas = crate::tier::Quotas::default().with_weight(domain(1), 2.0).with_weight(domain(2), 2.0);
        let queue = Queue::new(3 * 12_000, quotas.for_tier(crate::block::Level::G3, 1));
        let push = |n: u8, count: usize| {
            let blocks = chain(u64::from(n), count).into_iter().map(|block| block.in_domain(domain(n)));
            blocks.filter_map(|block| queue.push(block, None).ok()).count()
        };
        assert_eq!((push(1, 100), push(2, 2), push(3, 1)), (3, 2, 1), "a third of the room each");
        let mut writer = queue.writer().unwrap();
        let batches = std::iter::from_fn(|| writer.take(|_, _| true)).map(|batch| {
            let domains: Vec<_> = batch.jobs.iter().map(|job| job.block.header.domain).collect();
            assert!(domains.windows(2).all(|pair| pair[0] == pair[1]));
            (batch.group, domains.len())
        });
        let mut batches: Vec<_> = batches.collect();
        batches.sort_unstable();
        assert_eq!(batches, [(0, 1), (1, 3), (2, 2)]);
    }

    #[test]
    fn a_permit_ends_when_the_queue_is_empty() {
        let queue = Queue::new(u64::MAX, TierQuotas::default());
        assert!(queue.writer().is_none(), "nothing to write");
        let _waiting: Vec<_> = chain(1, 3).into_iter().map(|block| queue.push(block, None).unwrap()).collect();
        let mut first = queue.writer().unwrap();
        let _others = [queue.writer().unwrap(), queue.writer().unwrap()];
        assert!(queue.writer().is_none());
        assert_eq!(first.take(|_, _| true).unwrap().jobs.len(), 3);
        assert!(first.take(|_, _| true).is_none());
        drop(first);
        queue.push_tombstone(0, crate::tier::conformance::fingerprint(), SequenceHash::from_bytes([0; 16]));
        assert!(queue.writer().is_some());
    }

    #[test]
    fn a_writer_that_panics_answers_queued_jobs() {
        let queue = Queue::new(u64::MAX, TierQuotas::default());
        let mut waiting = queue.push(chain(1, 1).remove(0), None).unwrap();
        drop(queue.writer());
        assert!(waiting.try_recv().is_err_and(|error| error == oneshot::error::TryRecvError::Closed));
        assert!(queue.push(chain(1, 1).remove(0), None).is_ok() && queue.writer().is_some());
    }
}
