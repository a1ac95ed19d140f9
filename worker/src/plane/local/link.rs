//! Faults of an in-memory plane: delay, loss, reordering, duplication. Seeded, so that a run is reproducible.

use crate::plane::Event;
use kvbm::splitmix::SplitMix64;
use std::collections::BTreeMap;
use std::time::Duration;
use tokio::sync::broadcast::{
    self,
    error::{RecvError, TryRecvError},
};
use tokio::time::Instant;

/// The faults of a plane.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Link {
    /// Events kept for a slow subscriber; older ones are lost to it.
    pub backlog: usize,
    /// Delay of every delivery.
    pub lag: Duration,
    /// Fraction of events that are lost.
    pub loss: f64,
    /// Fraction of events that are overtaken by later ones.
    pub reorder: f64,
    /// Fraction of events that are delivered twice.
    pub repeat: f64,
    /// Decides which events are affected.
    pub seed: u64,
}

impl Default for Link {
    /// A link without faults. The backlog equals the capacity of an event log: beyond it a snapshot is cheaper.
    fn default() -> Self {
        Self { backlog: 4096, lag: Duration::ZERO, loss: 0.0, reorder: 0.0, repeat: 0.0, seed: 0 }
    }
}

/// An event and the time when it was published.
pub(super) type SentEvent = (Instant, Event);

/// What one subscriber receives over a link.
pub(super) struct Subscription {
    receiver: broadcast::Receiver<SentEvent>,
    link: Link,
    rng: SplitMix64,
    /// Number of events received from the channel.
    received: u64,
    /// Delayed events, keyed by the number of received events after which they are due; empty on a link without
    /// reordering and duplication.
    delayed: BTreeMap<(u64, u64), SentEvent>,
    delay_count: u64,
}

/// An event is overtaken by at most this many others.
const MAX_OVERTAKEN: f64 = 8.0;

impl Subscription {
    pub(super) fn new(receiver: broadcast::Receiver<SentEvent>, link: Link, nth: u64) -> Self {
        Self {
            receiver,
            link,
            rng: SplitMix64::new(link.seed ^ nth),
            received: 0,
            delayed: BTreeMap::new(),
            delay_count: 0,
        }
    }

    /// The next event to deliver; `None` when the plane is dropped.
    pub(super) async fn next(&mut self) -> Option<SentEvent> {
        loop {
            if self.delayed.first_key_value().is_some_and(|((due, _), _)| *due <= self.received) {
                return self.pop();
            }
            let sent = if self.delayed.is_empty() {
                match self.receiver.recv().await {
                    Ok(sent) => sent,
                    Err(RecvError::Lagged(_)) => continue,
                    Err(RecvError::Closed) => return None,
                }
            } else {
                match self.receiver.try_recv() {
                    Ok(sent) => sent,
                    Err(TryRecvError::Lagged(_)) => continue,
                    // There is no later event that could overtake it.
                    Err(TryRecvError::Empty | TryRecvError::Closed) => return self.pop(),
                }
            };
            self.received += 1;
            if self.happens(self.link.loss) {
                continue;
            }
            if self.happens(self.link.repeat) {
                self.delay(sent.clone());
            }
            if self.happens(self.link.reorder) {
                self.delay(sent);
                continue;
            }
            return Some(sent);
        }
    }

    /// Whether a fault of this probability happens. Without faults no random number is drawn.
    fn happens(&mut self, probability: f64) -> bool {
        probability > 0.0 && self.rng.uniform() < probability
    }

    fn delay(&mut self, sent: SentEvent) {
        let by = 1 + (self.rng.uniform() * MAX_OVERTAKEN) as u64;
        self.delay_count += 1;
        self.delayed.insert((self.received + by, self.delay_count), sent);
    }

    fn pop(&mut self) -> Option<SentEvent> {
        self.delayed.pop_first().map(|(_, sent)| sent)
    }
}

/// Returns at once without a lag: even a sleep of zero would yield to the timer.
pub(super) async fn wait(since: Instant, lag: Duration) {
    if !lag.is_zero() {
        tokio::time::sleep_until(since + lag).await;
    }
}
