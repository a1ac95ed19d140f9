//! Publishes the events of a log.

use crate::plane::{Event, EventBody, Events, Lease, Source};
use kvbm::EventLog;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::{CancellationToken, DropGuard};

/// Publishes the events of a shared store for as long as it is kept.
#[must_use = "dropping the publisher ends the events of the store"]
pub struct EventPublisher {
    _stop: DropGuard,
}

/// The digest of a log is sent this often. It bounds how long a follower keeps a wrong view, for example after the last
/// event of a store was lost.
const DIGEST_INTERVAL: Duration = Duration::from_secs(10);

/// Events read from a log at a time; bounds how long its lock is held.
const BATCH: usize = 256;

impl EventPublisher {
    /// Publishes the events of `log` as `source`, and offers the log.
    pub fn start(events: Arc<dyn Events>, source: Source, log: Arc<EventLog>) -> Self {
        let stop = CancellationToken::new();
        let mut publisher = LogPublisher::new(events, source, log);
        tokio::spawn(stop.clone().run_until_cancelled_owned(async move {
            loop {
                publisher.changed().await;
            }
        }));
        Self { _stop: stop.drop_guard() }
    }
}

/// Publishes one log's events to the plane, in order, starting with the first.
pub(super) struct LogPublisher {
    events: Arc<dyn Events>,
    pub(super) source: Source,
    log: Arc<EventLog>,
    latest: watch::Receiver<u64>,
    /// Number of the last published event.
    pub(super) published: u64,
    /// When the next digest is due.
    digest_due: Instant,
    _offer: Lease,
}

impl LogPublisher {
    pub(super) fn new(events: Arc<dyn Events>, source: Source, log: Arc<EventLog>) -> Self {
        let offer = events.offer(source, Arc::clone(&log));
        // Subscribers also get what was stored before; marking the value as changed makes the first `changed` return at
        // once.
        let mut latest = log.latest();
        latest.mark_changed();
        let digest_due = Instant::now() + DIGEST_INTERVAL;
        Self { events, source, latest, log, published: 0, digest_due, _offer: offer }
    }

    /// Waits for events and publishes all of them. Cancel safe: after the wait there is no await point.
    pub(super) async fn changed(&mut self) {
        tokio::select! {
            biased;
            // The log is kept here, so the sender exists.
            _ = self.latest.changed() => self.publish_new(),
            () = tokio::time::sleep_until(self.digest_due) => {}
        }
        if Instant::now() >= self.digest_due {
            let (number, digest) = self.log.digest();
            // A digest of events that are not published yet could not be compared with any view.
            if number == self.published {
                self.digest_due = Instant::now() + DIGEST_INTERVAL;
                self.publish(EventBody::Digest { number, digest });
            }
        }
    }

    fn publish_new(&mut self) {
        loop {
            match self.log.after(self.published, BATCH) {
                Ok(news) if news.is_empty() => return,
                Ok(news) => {
                    for numbered in news {
                        self.published = numbered.number;
                        self.publish(EventBody::Block { number: numbered.number, event: numbered.event });
                    }
                }
                // Subscribers see the gap in the numbers and ask for the range.
                Err(gap) => self.published = gap.oldest_lost,
            }
        }
    }

    pub(super) fn publish(&self, body: EventBody) {
        self.events.publish(Event { source: self.source, epoch: self.log.epoch(), body });
    }
}
