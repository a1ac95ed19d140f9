//! What waits to be written, and how many are writing.

use super::record::Record;
use crate::block::{Block, Fingerprint, Header, SequenceHash};
use crate::tier::{Claim, Division, Fair, StoreError};
use std::io;
use std::sync::{Mutex, MutexGuard, PoisonError};
use tokio::sync::oneshot;

/// Writers at once: two have a write on its way to the device while the third fills its buffer, or makes room.
const WRITERS: usize = 3;
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
    /// Whose turn it was.
    pub(super) group: u16,
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

/// Bounded by bytes, of which each group of domains has its part. Groups take turns.
pub(super) struct Queue {
    division: Division,
    /// Bytes that may wait of each group.
    limit: u64,
    state: Mutex<State>,
}

struct State {
    /// Each with the group in whose segments the block is.
    gone: Vec<(u16, Fingerprint, SequenceHash)>,
    jobs: Fair<Job>,
    bytes: Vec<u64>,
    writers: usize,
}

impl Queue {
    pub(super) fn new(limit: u64, division: Division) -> Self {
        let groups = division.bounds.len();
        let (jobs, bytes) = (Fair::new(&division.weights), vec![0; groups]);
        let state = Mutex::new(State { gone: Vec::new(), jobs, bytes, writers: 0 });
        Self { division, limit: limit / groups as u64, state }
    }

    /// Takes a block if there is room; a block larger than the whole queue is taken when nothing else waits.
    pub(super) fn offer(
        &self,
        block: Block,
        claim: Option<Claim>,
    ) -> Result<oneshot::Receiver<Result<(), StoreError>>, StoreError> {
        let (mut state, group) = (self.lock(), self.division.group(block.header.domain));
        if !state.has_room(group, &block, self.limit) {
            return Err(StoreError::Busy);
        }
        let (answer, waiting) = oneshot::channel();
        let bytes = weight(&block);
        state.bytes[usize::from(group)] += bytes;
        state.jobs.push(group, bytes, Job { block, answer, claim });
        Ok(waiting)
    }

    /// Whether a block would be taken now.
    pub(super) fn has_room(&self, block: &Block) -> bool {
        self.lock().has_room(self.division.group(block.header.domain), block, self.limit)
    }

    /// Notes a discard, if there is room: among the segments of the group that has the block, so that it is not given up
    /// before the block is.
    pub(super) fn discard(&self, group: u16, fingerprint: Fingerprint, name: SequenceHash) {
        let mut state = self.lock();
        if state.gone.len() < DISCARDS {
            state.gone.push((group, fingerprint, name));
        }
    }

    /// Refuses everything that waits.
    pub(super) fn clear(&self) {
        self.lock().clear();
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
    fn clear(&mut self) {
        self.jobs.clear();
        self.bytes.fill(0);
    }

    fn has_room(&self, group: u16, block: &Block, limit: u64) -> bool {
        let bytes = self.bytes[usize::from(group)];
        bytes == 0 || bytes + weight(block) <= limit
    }
}

/// The right to take from the queue, until nothing is left.
pub(super) struct Writer<'a> {
    queue: &'a Queue,
    done: bool,
}

impl Writer<'_> {
    /// The next records, of the group whose turn it is, as long as `fits` says so; discards come first. `None` says that there
    /// are none and ends the right, in one step, so that no offer falls between.
    pub(super) fn take(&mut self, mut fits: impl FnMut(u16, Option<&Block>) -> bool) -> Option<Batch> {
        let mut state = self.queue.lock();
        let state = &mut *state;
        if state.jobs.is_empty() && state.gone.is_empty() {
            state.writers -= 1;
            self.done = true;
            return None;
        }
        let gone = state.gone.first().map(|(group, ..)| *group);
        let group = gone.or_else(|| state.jobs.first().map(|(group, _)| group)).unwrap_or(0);
        let mut batch = Batch { group, ..Batch::default() };
        while state.gone.first().is_some_and(|(of, ..)| *of == group) && fits(group, None) {
            let (_, fingerprint, name) = state.gone.remove(0);
            batch.gone.push((fingerprint, name));
        }
        while let Some((turn, job)) = state.jobs.first() {
            if turn != group || !state.gone.is_empty() || !fits(group, Some(&job.block)) {
                break;
            }
            state.bytes[usize::from(group)] -= weight(&job.block);
            batch.jobs.extend(state.jobs.pop());
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
            state.clear();
        }
    }
}

/// The same error for one more who waits.
pub(super) fn again(error: &io::Error) -> io::Error {
    match error.raw_os_error() {
        Some(code) => io::Error::from_raw_os_error(code),
        None => io::Error::new(error.kind(), error.to_string()),
    }
}

fn weight(block: &Block) -> u64 {
    block.header.length + Header::LEN as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tier::conformance::chain;

    #[test]
    fn a_full_queue_is_busy_and_an_empty_one_takes_any_block() {
        let queue = Queue::new(7_000, Division::default());
        let blocks = chain(1, 4);
        let kept: Vec<_> = blocks.iter().map(|block| queue.offer(block.clone(), None)).collect();
        assert!(kept[0].is_ok() && kept[1].is_ok());
        assert!(matches!(kept[2], Err(StoreError::Busy)));
        let mut writer = queue.writer().unwrap();
        assert_eq!(writer.take(|_, _| true).unwrap().jobs.len(), 2);
        assert!(writer.take(|_, _| true).is_none());
        let narrow = Queue::new(10, Division::default());
        assert!(narrow.offer(blocks[0].clone(), None).is_ok());
    }

    #[test]
    fn a_batch_is_of_one_domain_and_a_flood_leaves_room_and_turns_to_others() {
        let domain = |n: u8| crate::block::DomainId::from_bytes([n; 16]);
        let shares = crate::tier::Shares::default().weigh(domain(1), 2.0).weigh(domain(2), 2.0);
        let queue = Queue::new(3 * 12_000, shares.at(crate::block::Level::G3, 1));
        let offer = |n: u8, count: usize| {
            let blocks = chain(u64::from(n), count).into_iter().map(|block| block.in_domain(domain(n)));
            blocks.filter_map(|block| queue.offer(block, None).ok()).count()
        };
        assert_eq!((offer(1, 100), offer(2, 2), offer(3, 1)), (3, 2, 1), "a third of the room each");
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
    fn writers_are_few_and_the_right_ends_with_the_work() {
        let queue = Queue::new(u64::MAX, Division::default());
        assert!(queue.writer().is_none(), "nothing to write");
        let _waiting: Vec<_> = chain(1, 3).into_iter().map(|block| queue.offer(block, None).unwrap()).collect();
        let (mut first, _others) = (queue.writer().unwrap(), [queue.writer().unwrap(), queue.writer().unwrap()]);
        assert!(queue.writer().is_none());
        assert_eq!(first.take(|_, _| true).unwrap().jobs.len(), 3);
        assert!(first.take(|_, _| true).is_none());
        drop(first);
        queue.discard(0, crate::tier::conformance::fingerprint(), SequenceHash::from_bytes([0; 16]));
        assert!(queue.writer().is_some());
    }

    #[test]
    fn a_writer_that_dies_answers_for_what_waits() {
        let queue = Queue::new(u64::MAX, Division::default());
        let mut waiting = queue.offer(chain(1, 1).remove(0), None).unwrap();
        drop(queue.writer());
        assert!(waiting.try_recv().is_err_and(|error| error == oneshot::error::TryRecvError::Closed));
        assert!(queue.offer(chain(1, 1).remove(0), None).is_ok() && queue.writer().is_some());
    }
}
