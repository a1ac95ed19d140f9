//! What waits to be written, and how many are writing.

use super::record::Record;
use crate::claim::Claim;
use crate::{Block, Fingerprint, Header, SequenceHash, StoreError};
use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};
use tokio::sync::oneshot;

/// Writers at once: one fills its buffer while the other's is on its way to the device. More would only seek.
const WRITERS: usize = 2;
/// Discards that wait to be noted. They are rare; one that is not noted costs a load that is verified and discarded again.
const DISCARDS: usize = 1024;

/// A block that waits, and who waits for it.
pub(super) struct Job {
    pub(super) block: Block,
    pub(super) answer: oneshot::Sender<Result<(), StoreError>>,
    /// Let go when the block rests or does not.
    pub(super) claim: Option<Claim>,
}

/// Discards come first: they were decided before the blocks that follow them were offered.
#[derive(Default)]
pub(super) struct Batch {
    pub(super) gone: Vec<(Fingerprint, SequenceHash)>,
    pub(super) jobs: Vec<Job>,
}

impl Batch {
    pub(super) fn is_empty(&self) -> bool {
        self.gone.is_empty() && self.jobs.is_empty()
    }

    /// What is to be written, in order.
    pub(super) fn records(&self) -> impl Iterator<Item = Record<'_>> {
        let gone = self.gone.iter().map(|(fingerprint, name)| Record::Gone(*fingerprint, *name));
        gone.chain(self.jobs.iter().map(|job| Record::Block(&job.block)))
    }
}

/// Bounded by bytes.
pub(super) struct Queue {
    limit: u64,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    gone: Vec<(Fingerprint, SequenceHash)>,
    jobs: VecDeque<Job>,
    bytes: u64,
    writers: usize,
}

impl Queue {
    pub(super) fn new(limit: u64) -> Self {
        Self { limit, state: Mutex::default() }
    }

    /// Takes a block if there is room; a block larger than the whole queue is taken when nothing else waits.
    pub(super) fn offer(
        &self,
        block: Block,
        claim: Option<Claim>,
    ) -> Result<oneshot::Receiver<Result<(), StoreError>>, StoreError> {
        let mut state = self.lock();
        if !state.has_room(&block, self.limit) {
            return Err(StoreError::Busy);
        }
        let (answer, waiting) = oneshot::channel();
        state.bytes += weight(&block);
        state.jobs.push_back(Job { block, answer, claim });
        Ok(waiting)
    }

    /// Whether a block would be taken now.
    pub(super) fn has_room(&self, block: &Block) -> bool {
        self.lock().has_room(block, self.limit)
    }

    /// Notes a discard, if there is room.
    pub(super) fn discard(&self, fingerprint: Fingerprint, name: SequenceHash) {
        let mut state = self.lock();
        if state.gone.len() < DISCARDS {
            state.gone.push((fingerprint, name));
        }
    }

    #[cfg(test)]
    pub(super) fn is_idle(&self) -> bool {
        let state = self.lock();
        state.jobs.is_empty() && state.gone.is_empty() && state.writers == 0
    }

    /// Whether one more writer would find something to do.
    pub(super) fn wants_writer(&self) -> bool {
        let state = self.lock();
        !(state.jobs.is_empty() && state.gone.is_empty()) && state.writers < WRITERS
    }

    /// The right to write, if there is something to write and not everybody is writing already.
    pub(super) fn writer(&self) -> Option<Writer<'_>> {
        let mut state = self.lock();
        let idle = state.jobs.is_empty() && state.gone.is_empty();
        (!idle && state.writers < WRITERS).then(|| {
            state.writers += 1;
            Writer { queue: self, done: false }
        })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Each change under this lock is a push or a pop with its count.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn has_room(&self, block: &Block, limit: u64) -> bool {
        self.bytes == 0 || self.bytes + weight(block) <= limit
    }
}

/// The right to take from the queue, until nothing is left.
pub(super) struct Writer<'a> {
    queue: &'a Queue,
    done: bool,
}

impl Writer<'_> {
    /// The next records, as long as `fits` says so. `None` says that there are none and ends the right, in one step, so
    /// that no offer falls between.
    pub(super) fn take(&mut self, mut fits: impl FnMut(Option<&Block>) -> bool) -> Option<Batch> {
        let mut state = self.queue.lock();
        if state.jobs.is_empty() && state.gone.is_empty() {
            state.writers -= 1;
            self.done = true;
            return None;
        }
        let mut batch = Batch::default();
        while !state.gone.is_empty() && fits(None) {
            batch.gone.push(state.gone.remove(0));
        }
        while let Some(job) = state.jobs.front() {
            if !state.gone.is_empty() || !fits(Some(&job.block)) {
                break;
            }
            state.bytes -= weight(&job.block);
            batch.jobs.extend(state.jobs.pop_front());
        }
        Some(batch)
    }
}

impl Drop for Writer<'_> {
    fn drop(&mut self) {
        if !self.done {
            // A writer that panics takes what waits with it: everybody is answered, nobody waits for ever.
            let mut state = self.queue.lock();
            state.writers -= 1;
            state.jobs.clear();
            state.bytes = 0;
        }
    }
}

fn weight(block: &Block) -> u64 {
    block.header.length + Header::LEN as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::contract::chain;

    #[test]
    fn a_full_queue_is_busy_and_an_empty_one_takes_any_block() {
        let queue = Queue::new(7_000);
        let blocks = chain(1, 4);
        let kept: Vec<_> = blocks.iter().map(|block| queue.offer(block.clone(), None)).collect();
        assert!(kept[0].is_ok() && kept[1].is_ok());
        assert!(matches!(kept[2], Err(StoreError::Busy)));
        let mut writer = queue.writer().unwrap();
        assert_eq!(writer.take(|_| true).unwrap().jobs.len(), 2);
        assert!(writer.take(|_| true).is_none());
        let narrow = Queue::new(10);
        assert!(narrow.offer(blocks[0].clone(), None).is_ok());
    }

    #[test]
    fn writers_are_few_and_the_right_ends_with_the_work() {
        let queue = Queue::new(u64::MAX);
        assert!(queue.writer().is_none(), "nothing to write");
        let _waiting: Vec<_> = chain(1, 3).into_iter().map(|block| queue.offer(block, None).unwrap()).collect();
        let (mut first, _second) = (queue.writer().unwrap(), queue.writer().unwrap());
        assert!(queue.writer().is_none());
        assert_eq!(first.take(|_| true).unwrap().jobs.len(), 3);
        assert!(first.take(|_| true).is_none());
        drop(first);
        queue.discard(crate::contract::fingerprint(), SequenceHash::from_bytes([0; 16]));
        assert!(queue.writer().is_some());
    }

    #[test]
    fn a_writer_that_dies_answers_for_what_waits() {
        let queue = Queue::new(u64::MAX);
        let mut waiting = queue.offer(chain(1, 1).remove(0), None).unwrap();
        drop(queue.writer());
        assert!(waiting.try_recv().is_err_and(|error| error == oneshot::error::TryRecvError::Closed));
        assert!(queue.offer(chain(1, 1).remove(0), None).is_ok() && queue.writer().is_some());
    }
}
