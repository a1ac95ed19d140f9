//! What this router tells the others of its bookings, until it is said.

use super::inflight::Promise;
use crate::load::Amount;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::Notify;
use worker::plane::{Booked, WorkerId};

/// What is to be said to the other routers.
pub(crate) struct Herald {
    outbox: Mutex<Outbox>,
    news: Notify,
}

#[derive(Default)]
struct Outbox {
    last: u64,
    changes: Vec<Booked>,
    listened_to: bool,
}

/// One booking, as the others are to see it; dropping it tells them that it has ended.
pub(crate) struct Notice {
    herald: Arc<Herald>,
    number: u64,
}

/// Changes kept for the next message. When so many have gathered, the plane is behind, and the workers' reports must do.
const CHANGES_MAX: usize = 4096;

impl Herald {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self { outbox: Mutex::default(), news: Notify::new() })
    }

    /// Tells of a booking.
    pub(crate) fn placed(self: &Arc<Self>, worker: WorkerId, amount: Amount, promise: &Promise) -> Notice {
        let mut outbox = self.lock();
        outbox.last += 1;
        let number = outbox.last;
        let Amount { prefill_tokens, blocks, sequences, .. } = amount;
        // The anchors are copied only when somebody listens.
        if outbox.listened_to {
            let (decodes, anchors) = (sequences > 0, promise.anchors().to_vec());
            outbox.say(Booked::Placed { number, worker, prefill_tokens, blocks, decodes, anchors });
            self.news.notify_one();
        }
        Notice { herald: self.clone(), number }
    }

    /// Waits for something to say.
    pub(crate) async fn news(&self) {
        self.news.notified().await;
    }

    /// All that there is to say.
    pub(crate) fn take(&self) -> Vec<Booked> {
        std::mem::take(&mut self.lock().changes)
    }

    /// Whether anybody is there to hear it.
    pub(crate) fn listened_to(&self, yes: bool) {
        self.lock().listened_to = yes;
    }

    fn say(&self, change: Booked) {
        let mut outbox = self.lock();
        if outbox.listened_to {
            outbox.say(change);
            self.news.notify_one();
        }
    }

    fn lock(&self) -> MutexGuard<'_, Outbox> {
        // Nothing that runs under this lock panics half-way.
        self.outbox.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Outbox {
    fn say(&mut self, change: Booked) {
        if self.changes.len() < CHANGES_MAX {
            self.changes.push(change);
        }
    }
}

impl Notice {
    pub(crate) fn going(&self) {
        self.herald.say(Booked::Going(self.number));
    }

    pub(crate) fn sent(&self) {
        self.herald.say(Booked::Sent(self.number));
    }

    pub(crate) fn amended(&self, prefill_tokens: u64) {
        self.herald.say(Booked::Amended { number: self.number, prefill_tokens });
    }

    pub(crate) fn started(&self) {
        self.herald.say(Booked::Started(self.number));
    }
}

impl Drop for Notice {
    fn drop(&mut self) {
        self.herald.say(Booked::Released(self.number));
    }
}
