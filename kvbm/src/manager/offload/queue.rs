//! What waits for one tier, between those who offer and the lane that takes.

use super::batching::Linger;
use super::fair_queue::{Offer, Turns};
use crate::tier::Shares;
use std::convert::Infallible;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::{Notify, mpsc};
use tokio::time::{Instant, timeout_at};

/// Names that wait, and who waits for them.
pub(super) struct Queue {
    state: Mutex<State>,
    /// Told when there is more to take. The lane alone waits for it.
    news: Notify,
}

struct State {
    turns: Turns,
    /// Those who wait until all names below a number are done, in order.
    marks: Vec<(u64, Mark)>,
    /// Nobody takes anything any more.
    closed: bool,
}

/// Dropped when what it marks is done.
type Mark = mpsc::Sender<Infallible>;

/// What a lane takes at once.
pub(super) struct Batch {
    pub(super) offers: Vec<Offer>,
    _marks: Vec<Mark>,
}

/// Closes a queue when it is dropped.
pub(super) struct Closes(Arc<Queue>);

impl Queue {
    /// Room for so many names.
    pub(super) fn new(room: usize) -> Self {
        let state = State { turns: Turns::new(room), marks: Vec::new(), closed: false };
        Self { state: Mutex::new(state), news: Notify::new() }
    }

    /// Lets names wait, and says how many were forgotten for it.
    pub(super) fn push(&self, offers: &[Offer]) -> usize {
        let mut state = self.lock();
        if state.closed {
            return offers.len();
        }
        let forgotten = state.turns.push(offers);
        drop(state);
        self.news.notify_one();
        forgotten
    }

    pub(super) fn weigh(&self, shares: &Shares) {
        self.lock().turns.weigh(shares);
    }

    /// Resolves when everything that waits now is done or forgotten, or the queue is closed.
    pub(super) async fn flush(&self) {
        let (mark, mut done) = mpsc::channel(1);
        {
            let mut state = self.lock();
            if state.closed {
                return;
            }
            let number = state.turns.number();
            state.marks.push((number, mark));
        }
        self.news.notify_one();
        done.recv().await;
    }

    /// Waits for names, then for more of them.
    pub(super) async fn next(&self, size: usize, linger: &mut Linger) -> Batch {
        while self.lock().is_idle() {
            self.news.notified().await;
        }
        let first = Instant::now();
        linger.begin(first);
        loop {
            let (waiting, marked) = self.lock().stand();
            let until = linger.until(first, waiting);
            // Somebody who waits for a mark does not want to linger.
            if waiting >= size || marked || until == first {
                break;
            }
            if timeout_at(until, self.news.notified()).await.is_err() {
                break;
            }
        }
        let batch = self.lock().take(size);
        linger.end(Instant::now(), batch.offers.len());
        batch
    }

    /// What a lane holds for as long as it takes.
    pub(super) fn closed_on_drop(self: &Arc<Self>) -> Closes {
        Closes(self.clone())
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn is_idle(&self) -> bool {
        self.stand() == (0, false)
    }

    /// How many names wait, and whether anybody waits for them.
    fn stand(&self) -> (usize, bool) {
        (self.turns.len(), !self.marks.is_empty())
    }

    fn take(&mut self, size: usize) -> Batch {
        let offers = self.turns.take(size);
        let mut marks = Vec::new();
        if !self.marks.is_empty() {
            let oldest = self.turns.oldest().unwrap_or(u64::MAX);
            let done = self.marks.partition_point(|(number, _)| *number <= oldest);
            marks.extend(self.marks.drain(..done).map(|(_, mark)| mark));
        }
        Batch { offers, _marks: marks }
    }
}

impl Drop for Closes {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        state.closed = true;
        state.marks.clear();
    }
}
