//! The state machine of a subscription: it puts the batches of a publisher in order, closes gaps by replay, and detects
//! restarts. It does no I/O: each input returns the [`Action`]s to carry out in order.
//!
//! ```text
//!            gap, connected                       end, failed
//! Following ────────────────▶ Replaying (held) ────────────────▶ Following
//!     ▲  number went back         │  number went back, or another process answers
//!     └── NewEpoch ◀──────────────┴── NewEpoch, replay from 0
//! ```
//!
//! | input | `Following` | `Replaying` |
//! | --- | --- | --- |
//! | live, expected number | `Apply` | held |
//! | live, later number | hold it, `Replay` from the missing number; without replay: `Stale`, `Apply` | held |
//! | live, number not above the last live one | `NewEpoch`, then as above with 0 expected | the same |
//! | live, already replayed | dropped | dropped at the end |
//! | replayed, expected number | dropped | `Apply` |
//! | replayed, later number | dropped | the buffer was too short: `Stale`, `Apply` |
//! | replayed, last applied number | dropped | dropped; after a new connection it must be the same batch |
//! | end of the replay | nothing | `Apply` held batches; a hole in them: `Replay` again, then `Stale` |
//! | replay failed | nothing | not confirmed: `NewEpoch`; then `Apply` held batches; a hole: `Stale` |
//! | nothing listens at its address | once: `NewEpoch` | the same, without what was held |
//! | connected | `Replay` from the last applied number; without replay: `NewEpoch` | the same, without what was held |
//!
//! **A new connection may lead to a new process.** Its numbers do not tell: it may have published more than the old
//! one. So the replay begins with the last applied batch. If the publisher has another batch with this number, or none,
//! it is a new process. If the replay socket does not answer, the publisher counts as a new process: a block that is
//! missing from the view costs a cache hit, but for a block that the engine no longer has, requests are sent to the
//! wrong engine.
//!
//! **Where nothing listens, the process has ended**, and its blocks with it. They are forgotten then, and not when the
//! next connection is made: the next process may answer requests before its publisher is reached.
//!
//! **Stale** means that batches were lost for good: the view may contain blocks that the engine has removed, and lack
//! others, until the engine clears its cache or restarts. Later batches are still applied.

use super::wire::{Message, Replayed};
use bytes::Bytes;
use std::collections::VecDeque;
use std::hash::{DefaultHasher, Hash, Hasher};

/// What to do, in order.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Action {
    /// Apply the batch to the view.
    Apply(Message),
    /// Request the batches from this number on. A request that is under way is abandoned.
    Replay {
        /// Number of the first batch.
        from: u64,
    },
    /// The publisher has ended or is a new process: its engine has no blocks of before.
    NewEpoch,
    /// Batches are lost, so the view is unreliable until a batch clears it, or a new epoch.
    Stale,
}

/// Follows one publisher.
#[derive(Debug)]
pub struct Follower {
    /// Whether the publisher has a replay socket.
    replay: bool,
    /// Number of the next batch to apply.
    next: u64,
    /// Digest of the last applied batch.
    last: Option<u64>,
    /// Number of the last live batch of this process.
    last_live: Option<u64>,
    replaying: Option<Replaying>,
    actions: Vec<Action>,
}

#[derive(Debug)]
struct Replaying {
    /// Number of the last live batch at the time of the request: the publisher has looked for all batches up to it.
    published: Option<u64>,
    /// Whether the publisher must still prove that it is the same process.
    unconfirmed: bool,
    /// Live batches that arrived during the replay, in order.
    held: VecDeque<Message>,
    held_bytes: usize,
}

/// Maximum number of held batches. An engine publishes up to a few hundred per second, and a replay takes less than a
/// second. A batch beyond it is dropped; the gap that this leaves begins another replay.
const MAX_HELD: usize = 4096;
/// Maximum size of held batches in bytes. A batch takes a few KiB.
const MAX_HELD_BYTES: usize = 64 << 20;

/// Bytes of a batch that its digest covers: the time at which it was made, and the hashes of its first blocks.
const DIGESTED: usize = 512;

impl Follower {
    /// Follows a publisher from its first batch. `replay` says whether it has a replay socket.
    pub fn new(replay: bool) -> Self {
        let (last, last_live, replaying) = (None, None, None);
        Self { replay, next: 0, last, last_live, replaying, actions: Vec::new() }
    }

    /// A connection to the publisher was made.
    pub fn connected(&mut self) -> Vec<Action> {
        // Held batches may be those of an old process. If not, the replay has them.
        (self.replaying, self.last_live) = (None, None);
        if self.replay {
            self.request(self.last.is_some(), VecDeque::new());
        } else if self.last.is_some() {
            self.restart();
        }
        self.take()
    }

    /// Nothing listens at the publisher's address.
    pub fn refused(&mut self) -> Vec<Action> {
        if self.last.is_some() {
            self.restart();
        }
        self.take()
    }

    /// A live batch arrived.
    pub fn live(&mut self, message: Message) -> Vec<Action> {
        if self.last_live.is_some_and(|last| message.number <= last) {
            self.restart();
        }
        self.last_live = Some(message.number);
        match &mut self.replaying {
            Some(replaying) => replaying.hold(&message),
            None if message.number < self.next => {}
            None if message.number == self.next => self.apply(message),
            None if self.replay => {
                self.request(false, VecDeque::new());
                if let Some(replaying) = &mut self.replaying {
                    replaying.hold(&message);
                }
            }
            None => {
                self.lost();
                self.apply(message);
            }
        }
        self.take()
    }

    /// An answer to the latest request for a replay arrived.
    pub fn replayed(&mut self, answer: Replayed) -> Vec<Action> {
        if let Some(replaying) = &mut self.replaying {
            let unconfirmed = replaying.unconfirmed;
            match answer {
                Replayed::Batch(message) if unconfirmed => self.confirm(message),
                Replayed::Batch(message) if message.number >= self.next => {
                    if message.number > self.next {
                        self.lost();
                    }
                    self.apply(message);
                }
                // A replay may begin earlier than requested.
                Replayed::Batch(_) => {}
                // The publisher does not have the batch that was applied last.
                Replayed::End if unconfirmed => self.restart_and_request(),
                Replayed::End => self.finish(true),
            }
        }
        self.take()
    }

    /// The replay failed: no connection, no answer in time, or an answer that is no batch.
    pub fn replay_failed(&mut self) -> Vec<Action> {
        if let Some(replaying) = &self.replaying {
            if replaying.unconfirmed {
                self.forget();
            }
            self.finish(false);
        }
        self.take()
    }

    /// The first answer after a new connection should be the batch that was applied last.
    fn confirm(&mut self, message: Message) {
        let expected = self.next - 1;
        if message.number < expected {
            return;
        }
        if message.number == expected && Some(digest(&message.payload)) != self.last {
            self.restart_and_request();
            return;
        }
        if let Some(replaying) = &mut self.replaying {
            replaying.unconfirmed = false;
        }
        if message.number > expected {
            // Either process may have sent this.
            self.forget();
            self.lost();
            self.apply(message);
        }
    }

    /// Applies held batches after a replay.
    fn finish(&mut self, complete: bool) {
        let Some(Replaying { published, mut held, .. }) = self.replaying.take() else { return };
        while let Some(message) = held.pop_front() {
            if message.number > self.next {
                // A batch from before the request is not in the buffer, so another replay would not have it either.
                if complete && Some(message.number) > published {
                    held.push_front(message);
                    self.request(false, held);
                    return;
                }
                self.lost();
            }
            if message.number >= self.next {
                self.apply(message);
            }
        }
    }

    fn apply(&mut self, message: Message) {
        self.next = message.number.saturating_add(1);
        self.last = Some(digest(&message.payload));
        self.actions.push(Action::Apply(message));
    }

    /// Reported each time: a batch before it may have cleared the cache.
    fn lost(&mut self) {
        self.actions.push(Action::Stale);
    }

    /// Begins again with what is held.
    fn forget(&mut self) {
        (self.next, self.last) = (0, None);
        self.actions.push(Action::NewEpoch);
    }

    /// Begins again with nothing.
    fn restart(&mut self) {
        (self.replaying, self.last_live) = (None, None);
        self.forget();
    }

    fn restart_and_request(&mut self) {
        self.restart();
        self.request(false, VecDeque::new());
    }

    /// Requests what is missing, and with `confirm` the last applied batch as well.
    fn request(&mut self, confirm: bool, held: VecDeque<Message>) {
        let from = if confirm { self.next - 1 } else { self.next };
        let held_bytes = held.iter().map(|message| message.payload.len()).sum();
        let published = self.last_live;
        self.replaying = Some(Replaying { published, unconfirmed: confirm, held, held_bytes });
        self.actions.push(Action::Replay { from });
    }

    fn take(&mut self) -> Vec<Action> {
        std::mem::take(&mut self.actions)
    }
}

impl Replaying {
    fn hold(&mut self, message: &Message) {
        let bytes = self.held_bytes + message.payload.len();
        if self.held.len() < MAX_HELD && bytes <= MAX_HELD_BYTES {
            self.held_bytes = bytes;
            // A copy, because the payload is a part of a larger receive buffer.
            let payload = Bytes::copy_from_slice(&message.payload);
            self.held.push_back(Message { number: message.number, payload });
        }
    }
}

/// Differs between batches of two processes: a batch begins with the time at which it was made.
fn digest(payload: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    payload.len().hash(&mut hasher);
    payload[..payload.len().min(DIGESTED)].hash(&mut hasher);
    hasher.finish()
}

#[cfg(test)]
mod tests;
