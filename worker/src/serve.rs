//! Serving: one engine beside its cache, as the planes see it.
//!
//! ```text
//!   start ──▶ visible ──drain──▶ withdrawn, still reporting ──idle──▶ gone
//!                │ engine or reporter dies                             ▲
//!                └─────────────────────────────────────────────────────┘
//! ```
//! A [`Worker`] keeps the lease in the very task that reports: when reporting dies, the worker is seen to leave. When a
//! router wishes it another phase, it registers anew in the same life, and what runs on it goes on. An [`Announcer`] does the same for a shared store, whose blocks outlive the workers that wrote them.
//!
//! Look here in vain for how load is measured: the engine measures, this module only passes it on.

use crate::engine::Engine;
use crate::plane::{Discovery, Event, EventBody, Events, Instance, Lease, Load, Phase, PlaneError, Source, Topic};
use futures::StreamExt;
use futures::stream::BoxStream;
use kvbm::EventLog;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tokio_util::sync::{CancellationToken, DropGuard};

/// Both planes, as every role needs them.
#[derive(Clone)]
pub struct Planes {
    /// Who is there.
    pub discovery: Arc<dyn Discovery>,
    /// What changed.
    pub events: Arc<dyn Events>,
}

/// An engine that others can see: registered, its blocks and its load announced. Dropping it withdraws it at once.
#[must_use = "dropping a worker withdraws it"]
pub struct Worker {
    /// Kept while it drains: once withdrawn, nobody else may hold it.
    engine: Arc<dyn Engine>,
    load: watch::Receiver<Load>,
    withdraw: CancellationToken,
    task: JoinHandle<()>,
    stop: DropGuard,
}

/// Announces the blocks of a shared store for as long as it is kept.
#[must_use = "dropping an announcer silences the store"]
pub struct Announcer {
    _stop: DropGuard,
}

/// Load is sent at least this often, so that a lost report, or a lost last event, is noticed within a second.
const REPORT_EVERY: Duration = Duration::from_secs(1);

/// Load is sent at most this often: an engine step changes it, and a fast engine makes hundreds of steps a second.
const REPORT_GAP: Duration = Duration::from_millis(20);

/// What rests is sent as one number this often, so that whoever believes something else, or lost the last event of a store,
/// does so for not much longer.
const DIGEST_EVERY: Duration = Duration::from_secs(10);

/// Events read from a log at a time; bounds how long its lock is held.
const BATCH: usize = 256;

impl Worker {
    /// Makes `engine` visible as `instance` and reports on it: blocks from `log`, load from `load`.
    ///
    /// When the sender of `load` is dropped, the engine counts as dead and the worker leaves.
    pub async fn start(
        planes: &Planes,
        instance: Instance,
        engine: Arc<dyn Engine>,
        log: Arc<EventLog>,
        load: watch::Receiver<Load>,
    ) -> Result<Self, PlaneError> {
        // The log is offered first: whoever learns of the worker may ask for it at once.
        let feed = Feed::new(Arc::clone(&planes.events), Source::Worker(instance.id), log);
        let wishes = planes.events.subscribe(Topic::Phases);
        let lease = planes.discovery.register(instance.clone(), Arc::clone(&engine)).await?;
        let (stop, withdraw) = (CancellationToken::new(), CancellationToken::new());
        let presence =
            Presence { discovery: Arc::clone(&planes.discovery), instance, engine: Arc::clone(&engine), lease };
        let reporter =
            Reporter { feed, presence: Some(presence), wishes, load: load.clone(), withdraw: withdraw.clone() };
        let task = tokio::spawn(reporter.run(stop.clone()));
        Ok(Self { engine, load, withdraw, task, stop: stop.drop_guard() })
    }

    /// Withdraws the worker, lets it finish what it has, and reports until it is idle. Drop the future to cut it short.
    pub async fn drain(mut self) {
        self.withdraw.cancel();
        // An error means that the engine is gone, which is as idle as it gets.
        let _ = self.load.wait_for(|load| load.running == 0 && load.waiting == 0).await;
        drop(self.stop);
        // A reporter that panicked has said so, and its lease is gone.
        let _ = self.task.await;
        drop(self.engine);
    }
}

impl Announcer {
    /// Announces what is in `log` as `source`, and offers the log.
    pub fn start(events: Arc<dyn Events>, source: Source, log: Arc<EventLog>) -> Self {
        let stop = CancellationToken::new();
        let mut feed = Feed::new(events, source, log);
        tokio::spawn(stop.clone().run_until_cancelled_owned(async move {
            loop {
                feed.changed().await;
            }
        }));
        Self { _stop: stop.drop_guard() }
    }
}

/// Carries one log's events to the plane, in order, from the first one on.
struct Feed {
    events: Arc<dyn Events>,
    source: Source,
    log: Arc<EventLog>,
    latest: watch::Receiver<u64>,
    published: u64,
    /// When its digest is due.
    due: Instant,
    _offer: Lease,
}

impl Feed {
    fn new(events: Arc<dyn Events>, source: Source, log: Arc<EventLog>) -> Self {
        let offer = events.offer(source, Arc::clone(&log));
        // Whoever is there already gets what rests already; the mark makes the first `changed` look at once.
        let mut latest = log.latest();
        latest.mark_changed();
        let due = Instant::now() + DIGEST_EVERY;
        Self { events, source, latest, log, published: 0, due, _offer: offer }
    }

    /// Waits for news and publishes all of it. May be cancelled: once news was seen, nothing here waits any more.
    async fn changed(&mut self) {
        tokio::select! {
            biased;
            // The log is kept here, so the sender lives.
            _ = self.latest.changed() => self.carry(),
            () = tokio::time::sleep_until(self.due) => {}
        }
        if Instant::now() >= self.due {
            let (number, digest) = self.log.digest();
            // Of what is not published yet it would say nothing to anybody.
            if number == self.published {
                self.due = Instant::now() + DIGEST_EVERY;
                self.publish(EventBody::Digest { number, digest });
            }
        }
    }

    fn carry(&mut self) {
        loop {
            match self.log.after(self.published, BATCH) {
                Ok(news) if news.is_empty() => return,
                Ok(news) => {
                    for numbered in news {
                        self.published = numbered.number;
                        self.publish(EventBody::Block { number: numbered.number, event: numbered.event });
                    }
                }
                // Those who listen see the gap in the numbers, and ask.
                Err(gap) => self.published = gap.oldest_lost,
            }
        }
    }

    fn publish(&self, body: EventBody) {
        self.events.publish(Event { source: self.source, epoch: self.log.epoch(), body });
    }
}

/// How a worker is seen, for as long as it is kept.
struct Presence {
    discovery: Arc<dyn Discovery>,
    instance: Instance,
    engine: Arc<dyn Engine>,
    lease: Lease,
}

impl Presence {
    /// Registers anew with another phase: others see the same life of it, and let what they sent go on.
    async fn turn(&mut self, to: Phase) {
        let instance = Instance { phase: to, ..self.instance.clone() };
        match self.discovery.register(instance.clone(), Arc::clone(&self.engine)).await {
            Ok(lease) => {
                tracing::info!(worker = %instance.id, from = %self.instance.phase, %to, "worker changes its role");
                self.lease = lease;
                self.instance = instance;
            }
            // It is wished again while it holds.
            Err(error) => tracing::warn!(worker = %instance.id, %to, %error, "worker cannot change its role"),
        }
    }
}

struct Reporter {
    feed: Feed,
    /// `None` once withdrawn.
    presence: Option<Presence>,
    wishes: BoxStream<'static, Event>,
    load: watch::Receiver<Load>,
    withdraw: CancellationToken,
}

impl Reporter {
    async fn run(mut self, stop: CancellationToken) {
        let mut sent = Instant::now();
        let mut due = sent;
        loop {
            tokio::select! {
                biased;
                () = stop.cancelled() => return,
                () = self.withdraw.cancelled(), if self.presence.is_some() => self.presence = None,
                Some(wish) = self.wishes.next() => {
                    if let (Some(presence), EventBody::Phase { worker, phase }) = (&mut self.presence, wish.body)
                        && worker == presence.instance.id
                        && phase != presence.instance.phase
                    {
                        presence.turn(phase).await;
                    }
                }
                () = self.feed.changed() => {}
                () = tokio::time::sleep_until(due) => {
                    sent = Instant::now();
                    due = sent + REPORT_EVERY;
                    // What was published, not what was announced: a number ahead of its event would look like a loss.
                    let load = Load { number: self.feed.published, ..self.load.borrow_and_update().clone() };
                    self.feed.publish(EventBody::Load(load));
                }
                changed = self.load.changed() => {
                    if changed.is_err() {
                        tracing::error!(source = %self.feed.source, "the engine stopped; the worker deregisters");
                        return;
                    }
                    due = due.min(sent + REPORT_GAP);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
