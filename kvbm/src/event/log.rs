//! The log of numbered events of one worker or store, with the set of blocks that the events add up to.

use super::{BlockEvent, CacheDigest, Epoch, Numbered, SetDigest, Snapshot, snapshot};
use crate::block::{Level, SequenceHash};
use crate::blocking;
use crate::table::BlockMap;
use parking_lot::{Mutex, MutexGuard};
use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use tokio::sync::watch;

impl BlockEvent {
    /// Appends the event to `events`, as several if it has more than `max` blocks. Each of these has memory for its own
    /// blocks only, because the log keeps it.
    fn split_into(self, max: usize, events: &mut Vec<Self>) {
        match self {
            Self::Stored { level, mut parent, blocks } if blocks.len() > max => {
                events.extend(blocks.chunks(max).map(|blocks| {
                    let parent = std::mem::replace(&mut parent, blocks.last().copied());
                    Self::Stored { level, parent, blocks: blocks.to_vec() }
                }));
            }
            Self::Removed { level, blocks } if blocks.len() > max => {
                events.extend(blocks.chunks(max).map(|blocks| Self::Removed { level, blocks: blocks.to_vec() }));
            }
            event => events.push(event),
        }
    }
}

/// The requested events were truncated from the log: a [`Snapshot`] is needed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("events up to {oldest_lost} were truncated from the log")]
pub struct Gap {
    /// Number of the newest event that was dropped from the log.
    pub oldest_lost: u64,
}

/// The numbered events of one worker or store, in a ring buffer.
///
/// Announcing never waits for readers and never fails: a reader that falls behind gets a [`Gap`].
pub struct EventLog {
    epoch: Epoch,
    /// Events in their order that [`State`] does not include yet.
    queue: Mutex<Vec<BlockEvent>>,
    state: Mutex<State>,
    /// Number of the latest event.
    latest: watch::Sender<u64>,
}

struct State {
    /// Number of the last event; 0 before the first.
    last: u64,
    ring: VecDeque<Numbered>,
    announced: BlockMap<Announced>,
    /// Digest of `announced`.
    digest: CacheDigest,
}

/// A block that at least one level has: 34 bytes with its hash.
#[derive(Clone, Copy)]
pub(super) struct Announced {
    pub(super) parent: Option<SequenceHash>,
    /// Levels that have the block, one bit for each.
    pub(super) levels: u8,
}

impl Announced {
    pub(super) fn is_at(self, level: Level) -> bool {
        self.levels & bit(level) != 0
    }
}

pub(super) fn bit(level: Level) -> u8 {
    1 << level as u8
}

impl State {
    /// Numbers an event and applies it.
    fn append(&mut self, event: BlockEvent) {
        self.apply(&event);
        self.last += 1;
        self.ring.push_back(Numbered { number: self.last, event });
        if self.ring.len() > EventLog::CAPACITY {
            self.ring.pop_front();
        }
    }

    fn apply(&mut self, event: &BlockEvent) {
        let Self { announced, digest, .. } = self;
        let part = |block: &SequenceHash| SetDigest::term(block.short());
        match event {
            BlockEvent::Stored { level, parent, blocks } => {
                // These lookups do not wait for each other's cache misses, as those of the loop do.
                let new = blocks.iter().filter(|block| !announced.contains_key(block)).count();
                announced.reserve(new);
                let mut before = *parent;
                for block in blocks {
                    let known = announced.entry(*block).or_insert(Announced { parent: before, levels: 0 });
                    if !known.is_at(*level) {
                        known.levels |= bit(*level);
                        *digest = digest.with(*level, part(block));
                    }
                    before = Some(*block);
                }
            }
            BlockEvent::Removed { level, blocks } => {
                for block in blocks {
                    let Some(known) = announced.get_mut(block).filter(|known| known.is_at(*level)) else { continue };
                    known.levels &= !bit(*level);
                    *digest = digest.without(*level, part(block));
                    if known.levels == 0 {
                        announced.remove(block);
                    }
                }
            }
            BlockEvent::Cleared { level } => announced.retain(|block, known| {
                if known.is_at(*level) {
                    known.levels &= !bit(*level);
                    *digest = digest.without(*level, part(block));
                }
                known.levels != 0
            }),
        }
    }
}

impl EventLog {
    /// Events retained for readers that lag. At 1,000 events per second these are four seconds; a snapshot is cheaper
    /// for a longer lag.
    const CAPACITY: usize = 4096;

    /// Maximum number of blocks that are grouped into runs on an async thread: about a millisecond.
    const MAX_INLINE_BLOCKS: usize = 4096;

    /// An empty log.
    pub fn new(epoch: Epoch) -> Self {
        let state =
            State { last: 0, ring: VecDeque::new(), announced: BlockMap::default(), digest: CacheDigest::default() };
        Self { epoch, queue: Mutex::default(), state: Mutex::new(state), latest: watch::Sender::new(0) }
    }

    /// The epoch that the numbers belong to.
    pub fn epoch(&self) -> Epoch {
        self.epoch
    }

    /// Maximum number of blocks of one event, so that it fits into a message of any plane: 16 KiB, the blocks of 16,384
    /// tokens.
    pub const MAX_EVENT_BLOCKS: usize = 1024;

    /// Appends the event with the next number. An event with more than [`MAX_EVENT_BLOCKS`](Self::MAX_EVENT_BLOCKS) is
    /// split into several; one without blocks is ignored.
    pub fn announce(&self, event: BlockEvent) {
        self.queue(event);
        self.flush();
    }

    /// Queues the event, which is quick, so that a caller can hold the lock that orders its events. The caller calls
    /// [`flush`](Self::flush) soon; readers see queued events in any case.
    pub(crate) fn queue(&self, event: BlockEvent) {
        if let BlockEvent::Stored { blocks, .. } | BlockEvent::Removed { blocks, .. } = &event
            && blocks.is_empty()
        {
            return;
        }
        event.split_into(Self::MAX_EVENT_BLOCKS, &mut self.queue.lock());
    }

    /// Applies queued events, and notifies readers.
    pub(crate) fn flush(&self) {
        let last = self.lock().last;
        // Two callers may arrive here out of order, so the value must not decrease.
        self.latest.send_if_modified(|latest| last > std::mem::replace(latest, last.max(*latest)));
    }

    /// Events after `number`, at most `limit`, or a gap if some of them were dropped.
    pub fn after(&self, number: u64, limit: usize) -> Result<Vec<Numbered>, Gap> {
        let state = self.lock();
        let oldest_lost = state.last - state.ring.len() as u64;
        if number < oldest_lost {
            return Err(Gap { oldest_lost });
        }
        let skip = (number - oldest_lost) as usize;
        Ok(state.ring.iter().skip(skip).take(limit).cloned().collect())
    }

    /// A snapshot of all announced blocks. With millions of blocks it takes seconds: see
    /// [`snapshot_in_background`](Self::snapshot_in_background).
    pub fn snapshot(&self) -> Snapshot {
        // Copies the set, so that the lock is not held while runs are made.
        let (number, announced) = {
            let state = self.lock();
            (state.last, state.announced.iter().map(|(hash, known)| (*hash, *known)).collect())
        };
        Snapshot { epoch: self.epoch, number, runs: snapshot::runs(announced) }
    }

    /// Makes a snapshot without blocking the async runtime.
    pub async fn snapshot_in_background(self: Arc<Self>) -> Snapshot {
        if self.lock().announced.len() <= Self::MAX_INLINE_BLOCKS {
            return self.snapshot();
        }
        let snapshot = blocking::spawn(move || self.snapshot());
        snapshot.await.expect("grouping blocks into runs does not panic")
    }

    /// Number of the last event, and the digest of the blocks that a snapshot would contain.
    pub fn digest(&self) -> (u64, CacheDigest) {
        let state = self.lock();
        (state.last, state.digest)
    }

    /// Watches the number of the latest event.
    pub fn latest(&self) -> watch::Receiver<u64> {
        self.latest.subscribe()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // No code that could panic between related changes runs under these locks.
        let mut state = self.state.lock();
        let queued = std::mem::take(&mut *self.queue.lock());
        for event in queued {
            state.append(event);
        }
        state
    }
}

impl fmt::Debug for EventLog {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EventLog")
            .field("epoch", &self.epoch)
            .field("latest", &*self.latest.borrow())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
