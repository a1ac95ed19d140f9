//! The network between the processes of a simulation: cuts, frozen processes, delay, loss, repetition and reordering.
//!
//! A cut between two processes and a frozen process look the same to the other side: nothing arrives. What was sent
//! before a cut is lost with it; what was sent to a frozen process is there when it goes on.

use super::world::Rng;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::time::Duration;
use tokio::sync::Notify;
use tokio::time::timeout;

/// A process.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum Node {
    /// The server of the planes.
    Broker,
    /// The shared store of blocks.
    Store,
    Router(u64),
    Worker(u64),
}

impl fmt::Display for Node {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Broker => f.write_str("broker"),
            Self::Store => f.write_str("store"),
            Self::Router(id) => write!(f, "r{id}"),
            Self::Worker(id) => write!(f, "w{id}"),
        }
    }
}

/// How well messages are carried.
#[derive(Clone, Debug)]
pub(super) struct Quality {
    pub(super) delay: Range<Duration>,
    /// Fractions of the events that are lost, delivered twice, and overtaken by later ones.
    pub(super) loss: f64,
    pub(super) duplication: f64,
    pub(super) reordering: f64,
    /// Whether removals of blocks arrive without the blocks: a fault of the product, to see that the checks find it.
    pub(super) skips_removals: bool,
}

impl Default for Quality {
    /// One data centre.
    fn default() -> Self {
        let delay = Duration::from_micros(100)..Duration::from_millis(2);
        Self { delay, loss: 0.0, duplication: 0.0, reordering: 0.0, skips_removals: false }
    }
}

#[derive(Default)]
struct State {
    /// Number of faults that cut a pair.
    cuts: BTreeMap<(Node, Node), u32>,
    frozen: BTreeMap<Node, u32>,
    quality: Quality,
}

pub(super) struct Network {
    state: Mutex<State>,
    /// Not a `watch`, which wakes its receivers in random order.
    changed: Notify,
}

impl Network {
    pub(super) fn new() -> Self {
        Self { state: Mutex::default(), changed: Notify::new() }
    }

    /// Whether messages from one process reach the other now.
    pub(super) fn reaches(&self, a: Node, b: Node) -> bool {
        let state = self.state.lock();
        !state.cuts.contains_key(&pair(a, b)) && ![a, b].iter().any(|node| state.frozen.contains_key(node))
    }

    /// Whether a pair is cut, frozen or not.
    pub(super) fn is_cut(&self, a: Node, b: Node) -> bool {
        self.state.lock().cuts.contains_key(&pair(a, b))
    }

    pub(super) fn is_frozen(&self, node: Node) -> bool {
        self.state.lock().frozen.contains_key(&node)
    }

    /// Waits until messages from one process reach the other.
    pub(super) async fn reached(&self, a: Node, b: Node) {
        self.until(|| self.reaches(a, b)).await;
    }

    /// Waits until a process is not frozen.
    pub(super) async fn thawed(&self, node: Node) {
        self.until(|| !self.is_frozen(node)).await;
    }

    /// Waits until messages have not reached the other for this long.
    pub(super) async fn lost(&self, a: Node, b: Node, time: Duration) {
        loop {
            self.until(|| !self.reaches(a, b)).await;
            if timeout(time, self.reached(a, b)).await.is_err() {
                return;
            }
        }
    }

    async fn until(&self, holds: impl Fn() -> bool) {
        loop {
            let changed = self.changed.notified();
            if holds() {
                return;
            }
            changed.await;
        }
    }

    pub(super) fn quality(&self) -> Quality {
        self.state.lock().quality.clone()
    }

    /// A delay of one message.
    pub(super) fn delay(&self, rng: &mut Rng) -> Duration {
        rng.duration(&self.state.lock().quality.delay)
    }

    pub(super) fn set_quality(&self, quality: Quality) {
        self.state.lock().quality = quality;
    }

    pub(super) fn cut(&self, a: Node, b: Node) {
        *self.state.lock().cuts.entry(pair(a, b)).or_default() += 1;
        self.changed.notify_waiters();
    }

    pub(super) fn mend(&self, a: Node, b: Node) {
        release(&mut self.state.lock().cuts, &pair(a, b));
        self.changed.notify_waiters();
    }

    pub(super) fn freeze(&self, node: Node) {
        *self.state.lock().frozen.entry(node).or_default() += 1;
        self.changed.notify_waiters();
    }

    pub(super) fn thaw(&self, node: Node) {
        release(&mut self.state.lock().frozen, &node);
        self.changed.notify_waiters();
    }
}

fn pair(a: Node, b: Node) -> (Node, Node) {
    (a.min(b), a.max(b))
}

/// Removes one of the faults of a key.
fn release<K: Ord>(faults: &mut BTreeMap<K, u32>, key: &K) {
    if let Some(count) = faults.get_mut(key) {
        *count -= 1;
        if *count == 0 {
            faults.remove(key);
        }
    }
}
