//! What changed: numbered block events, one log per owner of memory.
//!
//! A worker's G1 and G2 share one log; a shared store (G3 of a process, G4 of a fleet) has its own, so that its blocks
//! are indexed under the store. Numbers are gapless from 1 within an [`Epoch`]; whoever sees a gap asks for the events since,
//! as long as the log keeps them, and then for a snapshot. The log keeps the set of announced blocks beside the numbers, so a
//! snapshot is always consistent with its number.

mod batch;
mod snapshot;
mod summary;

pub(crate) use batch::Stored;
pub use snapshot::{Run, Snapshot};
pub use summary::Census;

use crate::block::{Level, SequenceHash};
use crate::table::BlockMap;
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::watch;

/// One life of an owner of blocks; a restart begins a new one.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Serialize, Deserialize)]
pub struct Epoch(pub u64);

/// What happened to blocks of one level.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BlockEvent {
    /// The blocks, each the child of the one before and the first a child of `parent`, now rest at `level`.
    Stored {
        /// Where.
        level: Level,
        /// What precedes the first block; `None` at the root.
        parent: Option<SequenceHash>,
        /// A run of one chain, at least one.
        blocks: Vec<SequenceHash>,
    },
    /// The blocks no longer rest at `level`.
    Removed {
        /// Where.
        level: Level,
        /// In any order, at least one.
        blocks: Vec<SequenceHash>,
    },
    /// Nothing rests at `level` any more.
    Cleared {
        /// Where.
        level: Level,
    },
}

impl BlockEvent {
    /// Keeps its first blocks, so many. The event of the others, if there are more.
    fn split_off(&mut self, at: usize) -> Option<Self> {
        match self {
            Self::Stored { level, blocks, .. } if blocks.len() > at => {
                let rest = blocks.split_off(at);
                Some(Self::Stored { level: *level, parent: blocks.last().copied(), blocks: rest })
            }
            Self::Removed { level, blocks } if blocks.len() > at => {
                Some(Self::Removed { level: *level, blocks: blocks.split_off(at) })
            }
            _ => None,
        }
    }
}

/// An event with its number.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Numbered {
    /// Gapless from 1 within an epoch.
    pub number: u64,
    /// What happened.
    pub event: BlockEvent,
}

/// Which blocks rest where, as one number, in whatever order they came: what an owner and those who follow it compare. The
/// sum, modulo 2⁶⁴, of each block's part, weighed by its level.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Digest(u64);

impl Digest {
    /// A block's part, unweighed: the first eight bytes of its name through the finaliser of `SplitMix64`, so that names which
    /// differ in a bit do not cancel out.
    pub fn part(short: u64) -> u64 {
        let mut z = short.wrapping_add(0x9e37_79b9_7f4a_7c15);
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// The same with blocks at a level, whose parts add up to `sum`.
    #[must_use]
    pub fn with(self, level: Level, sum: u64) -> Self {
        Self(self.0.wrapping_add(Self::weight(level).wrapping_mul(sum)))
    }

    /// The same without them.
    #[must_use]
    pub fn without(self, level: Level, sum: u64) -> Self {
        self.with(level, sum.wrapping_neg())
    }

    /// Odd, so that no bit of a sum is lost, and another for each level. What is in a peer's memory is that peer's own.
    fn weight(level: Level) -> u64 {
        match level {
            Level::G1 => 1,
            Level::G2 => 3,
            Level::G3 => 5,
            Level::G4 => 7,
            Level::G3_5 => 9,
            Level::Peer => 0,
        }
    }
}

/// The events asked for are no longer kept: take a [`Snapshot`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("events up to {oldest_lost} were truncated from the log")]
pub struct Gap {
    /// The newest event that was dropped from the log.
    pub oldest_lost: u64,
}

/// The numbered log of one owner.
///
/// Announcing never blocks and never fails: the log is a ring, and a reader that falls behind gets a [`Gap`].
pub struct EventLog {
    epoch: Epoch,
    /// In their order, before [`State`] takes them in.
    queue: Mutex<Vec<BlockEvent>>,
    state: Mutex<State>,
    latest: watch::Sender<u64>,
}

struct State {
    last: u64,
    ring: VecDeque<Numbered>,
    announced: BlockMap<Announced>,
    /// Of `announced`.
    digest: Digest,
}

/// A block that rests somewhere: 34 bytes with its name.
#[derive(Clone, Copy)]
struct Announced {
    parent: Option<SequenceHash>,
    /// Where, a bit for each level.
    levels: u8,
}

impl Announced {
    fn rests_at(self, level: Level) -> bool {
        self.levels & bit(level) != 0
    }
}

fn bit(level: Level) -> u8 {
    1 << level as u8
}

impl State {
    /// An event gets its number.
    fn enter(&mut self, event: BlockEvent) {
        self.note(&event);
        self.last += 1;
        self.ring.push_back(Numbered { number: self.last, event });
        if self.ring.len() > EventLog::KEPT {
            self.ring.pop_front();
        }
    }

    fn note(&mut self, event: &BlockEvent) {
        let Self { announced, digest, .. } = self;
        let part = |block: &SequenceHash| Digest::part(block.short());
        match event {
            BlockEvent::Stored { level, parent, blocks } => {
                let mut before = *parent;
                for block in blocks {
                    let known = announced.entry(*block).or_insert(Announced { parent: before, levels: 0 });
                    if !known.rests_at(*level) {
                        known.levels |= bit(*level);
                        *digest = digest.with(*level, part(block));
                    }
                    before = Some(*block);
                }
            }
            BlockEvent::Removed { level, blocks } => {
                for block in blocks {
                    let Some(known) = announced.get_mut(block).filter(|known| known.rests_at(*level)) else { continue };
                    known.levels &= !bit(*level);
                    *digest = digest.without(*level, part(block));
                    if known.levels == 0 {
                        announced.remove(block);
                    }
                }
            }
            BlockEvent::Cleared { level } => announced.retain(|block, known| {
                if known.rests_at(*level) {
                    known.levels &= !bit(*level);
                    *digest = digest.without(*level, part(block));
                }
                known.levels != 0
            }),
        }
    }
}

impl EventLog {
    /// Events kept for readers that lag. At 1,000 events a second this is four seconds; behind that a snapshot is cheaper.
    const KEPT: usize = 4096;

    /// Blocks that are laid in runs where others wait for it: about a millisecond.
    const AT_ONCE: usize = 4096;

    /// An empty log for one life of its owner.
    pub fn new(epoch: Epoch) -> Self {
        let state = State { last: 0, ring: VecDeque::new(), announced: BlockMap::default(), digest: Digest::default() };
        Self { epoch, queue: Mutex::default(), state: Mutex::new(state), latest: watch::Sender::new(0) }
    }

    /// The life that the numbers belong to.
    pub fn epoch(&self) -> Epoch {
        self.epoch
    }

    /// Blocks that one event names, so that it fits into any plane's message: 16 KiB, and the blocks of 16,384 tokens.
    pub const BLOCKS_MAX: usize = 1024;

    /// Gives the event the next number, or the next ones when it names [more blocks](Self::BLOCKS_MAX) than one may. Events that say
    /// nothing (no blocks) get none.
    pub fn announce(&self, event: BlockEvent) {
        self.queue(event);
        self.settle();
    }

    /// The same for who has no time now, being under a lock that gives events their order, and [settles](Self::settle) it
    /// soon: whoever reads the log first finds it there as well.
    pub(crate) fn queue(&self, event: BlockEvent) {
        if let BlockEvent::Stored { blocks, .. } | BlockEvent::Removed { blocks, .. } = &event
            && blocks.is_empty()
        {
            return;
        }
        let mut queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        let mut rest = Some(event);
        while let Some(mut event) = rest {
            rest = event.split_off(Self::BLOCKS_MAX);
            queue.push(event);
        }
    }

    /// Takes in what was queued, and says so to those who wait.
    pub(crate) fn settle(&self) {
        let last = self.lock().last;
        // Two announcers may arrive here out of order; readers only use the value as "look again".
        self.latest.send_if_modified(|latest| last > std::mem::replace(latest, last.max(*latest)));
    }

    /// Events after `number`, at most `limit`, or a gap when some of them are gone.
    pub fn after(&self, number: u64, limit: usize) -> Result<Vec<Numbered>, Gap> {
        let state = self.lock();
        let oldest_lost = state.last - state.ring.len() as u64;
        if number < oldest_lost {
            return Err(Gap { oldest_lost });
        }
        let skip = (number - oldest_lost) as usize;
        Ok(state.ring.iter().skip(skip).take(limit).cloned().collect())
    }

    /// Everything announced so far. That of millions of blocks takes seconds: see [`told`](Self::told).
    pub fn snapshot(&self) -> Snapshot {
        // Copied, so that nobody waits for the lock while it is laid in runs.
        let (number, announced) = {
            let state = self.lock();
            (state.last, state.announced.iter().map(|(name, known)| (*name, *known)).collect())
        };
        Snapshot { epoch: self.epoch, number, runs: snapshot::runs(announced) }
    }

    /// The same on a runtime, whose other tasks do not wait for it.
    pub async fn told(self: Arc<Self>) -> Snapshot {
        if self.lock().announced.len() <= Self::AT_ONCE {
            return self.snapshot();
        }
        let laid = tokio::task::spawn_blocking(move || self.snapshot());
        laid.await.expect("grouping blocks into runs does not panic")
    }

    /// What a snapshot would hold, as one number, and the number of the last event in it.
    pub fn digest(&self) -> (u64, Digest) {
        let state = self.lock();
        (state.last, state.digest)
    }

    /// The number of the latest event, and a way to wait for the next.
    pub fn latest(&self) -> watch::Receiver<u64> {
        self.latest.subscribe()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // No code that runs under these locks can panic half-way through a change of meaning.
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let queued = std::mem::take(&mut *self.queue.lock().unwrap_or_else(PoisonError::into_inner));
        for event in queued {
            state.enter(event);
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
