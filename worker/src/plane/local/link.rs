//! How well a plane in memory carries: late, not at all, out of order, or twice. Seeded, so that it does the same again.

use super::Event;
use std::collections::BTreeMap;
use std::time::Duration;
use tokio::sync::broadcast::{
    self,
    error::{RecvError, TryRecvError},
};
use tokio::time::Instant;

/// How well a plane carries what it is given.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Link {
    /// Events kept for a subscriber that lags; older ones it loses.
    pub backlog: usize,
    /// Everything arrives this much later.
    pub lag: Duration,
    /// The fraction of events that never arrive.
    pub loss: f64,
    /// The fraction of events that some of those behind them overtake.
    pub reorder: f64,
    /// The fraction of events that arrive again, among those behind them.
    pub repeat: f64,
    /// Fixes which ones.
    pub seed: u64,
}

impl Default for Link {
    /// A perfect link. The backlog equals what an event log keeps: behind that a snapshot is cheaper anyway.
    fn default() -> Self {
        Self { backlog: 4096, lag: Duration::ZERO, loss: 0.0, reorder: 0.0, repeat: 0.0, seed: 0 }
    }
}

/// An event, and when it was sent.
pub(super) type Sent = (Instant, Event);

/// What one subscriber gets over a link.
pub(super) struct Line {
    receiver: broadcast::Receiver<Sent>,
    link: Link,
    dice: Dice,
    /// How many have come out of the channel.
    taken: u64,
    /// Events that others overtake, by how many must have come before each; empty on a link that keeps order.
    late: BTreeMap<(u64, u64), Sent>,
    delays: u64,
}

/// An event is overtaken by at most so many.
const OVERTAKEN_MAX: f64 = 8.0;

impl Line {
    pub(super) fn new(receiver: broadcast::Receiver<Sent>, link: Link, nth: u64) -> Self {
        Self { receiver, link, dice: Dice(link.seed ^ nth), taken: 0, late: BTreeMap::new(), delays: 0 }
    }

    /// The next event to arrive; `None` when there will be none.
    pub(super) async fn next(&mut self) -> Option<Sent> {
        loop {
            if self.late.first_key_value().is_some_and(|((due, _), _)| *due <= self.taken) {
                return self.pop();
            }
            let sent = if self.late.is_empty() {
                match self.receiver.recv().await {
                    Ok(sent) => sent,
                    Err(RecvError::Lagged(_)) => continue,
                    Err(RecvError::Closed) => return None,
                }
            } else {
                match self.receiver.try_recv() {
                    Ok(sent) => sent,
                    Err(TryRecvError::Lagged(_)) => continue,
                    // Nobody is there to overtake it.
                    Err(TryRecvError::Empty | TryRecvError::Closed) => return self.pop(),
                }
            };
            self.taken += 1;
            if self.falls(self.link.loss) {
                continue;
            }
            if self.falls(self.link.repeat) {
                self.delay(sent.clone());
            }
            if self.falls(self.link.reorder) {
                self.delay(sent);
                continue;
            }
            return Some(sent);
        }
    }

    /// Whether it happens, this time; on a perfect link nothing is drawn.
    fn falls(&mut self, probability: f64) -> bool {
        probability > 0.0 && self.dice.roll() < probability
    }

    fn delay(&mut self, sent: Sent) {
        let by = 1 + (self.dice.roll() * OVERTAKEN_MAX) as u64;
        self.delays += 1;
        self.late.insert((self.taken + by, self.delays), sent);
    }

    fn pop(&mut self) -> Option<Sent> {
        self.late.pop_first().map(|(_, sent)| sent)
    }
}

/// `SplitMix64` (Steele, Lea and Flood, 2014): ample for deciding what becomes of test events.
struct Dice(u64);

impl Dice {
    /// Uniform in [0, 1).
    fn roll(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64
    }
}
