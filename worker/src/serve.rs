//! Serving: registers an engine on the planes and reports on it.
//!
//! ```text
//!   start ──▶ registered ──drain──▶ deregistered, still reporting ──idle──▶ stopped
//!                   │ engine or reporter stops                              ▲
//!                   └───────────────────────────────────────────────────────┘
//! ```
//!
//! A [`Worker`] keeps the lease in the task that reports, so a worker that stops reporting is deregistered. When a
//! router asks for another role, the worker registers again in the same epoch, and its requests go on. An
//! [`EventPublisher`] publishes the log of a shared store, whose blocks outlive the workers that wrote them.
//!
//! Not here: measuring load. The engine measures it.

use crate::engine::Engine;
use crate::plane::{Discovery, Event, EventBody, Events, Instance, Lease, Load, PlaneError, Role, Source, Topic};
use futures::StreamExt;
use futures::stream::BoxStream;
use kvbm::EventLog;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tokio_util::sync::{CancellationToken, DropGuard};

/// Both planes.
#[derive(Clone)]
pub struct Planes {
    /// Which workers exist.
    pub discovery: Arc<dyn Discovery>,
    /// Events of workers, stores and routers.
    pub events: Arc<dyn Events>,
}

/// A registered engine whose blocks and load are published. Dropping it deregisters it at once.
#[must_use = "dropping a worker deregisters it"]
pub struct Worker {
    /// Kept while the worker drains: after deregistration it may be the only reference to the engine.
    engine: Arc<dyn Engine>,
    load: watch::Receiver<Load>,
    deregister: CancellationToken,
    task: JoinHandle<()>,
    stop: DropGuard,
}

/// Publishes the events of a shared store for as long as it is kept.
#[must_use = "dropping the publisher ends the events of the store"]
pub struct EventPublisher {
    _stop: DropGuard,
}

/// Load is sent at least this often, so that the loss of a report or of the last event is noticed within a second.
const MAX_REPORT_INTERVAL: Duration = Duration::from_secs(1);

/// Load is sent at most this often: every engine step changes it, and a fast engine makes hundreds of steps a second.
const MIN_REPORT_INTERVAL: Duration = Duration::from_millis(20);

/// The digest of a log is sent this often. It bounds how long a follower keeps a wrong view, for example after the last
/// event of a store was lost.
const DIGEST_INTERVAL: Duration = Duration::from_secs(10);

/// Events read from a log at a time; bounds how long its lock is held.
const BATCH: usize = 256;

impl Worker {
    /// Registers `engine` as `instance` and reports on it: block events from `log`, load from `load`.
    ///
    /// When the sender of `load` is dropped, the engine counts as stopped and the worker deregisters.
    pub async fn start(
        planes: &Planes,
        instance: Instance,
        engine: Arc<dyn Engine>,
        log: Arc<EventLog>,
        load: watch::Receiver<Load>,
    ) -> Result<Self, PlaneError> {
        // The log is offered first: a watcher may ask for it as soon as it sees the worker.
        let publisher = LogPublisher::new(Arc::clone(&planes.events), Source::Worker(instance.id), log);
        let role_requests = planes.events.subscribe(Topic::RoleRequests);
        let lease = planes.discovery.register(instance.clone(), Arc::clone(&engine)).await?;
        let (stop, deregister) = (CancellationToken::new(), CancellationToken::new());
        let registration =
            Registration { discovery: Arc::clone(&planes.discovery), instance, engine: Arc::clone(&engine), lease };
        let reporter = Reporter {
            publisher,
            registration: Some(registration),
            role_requests,
            load: load.clone(),
            deregister: deregister.clone(),
        };
        let task = tokio::spawn(reporter.run(stop.clone()));
        Ok(Self { engine, load, deregister, task, stop: stop.drop_guard() })
    }

    /// Deregisters the worker, waits until its requests have finished, and reports until then. Drop the future to stop
    /// at once.
    pub async fn drain(mut self) {
        self.deregister.cancel();
        // An error means that the engine has stopped, so it is idle.
        let _ = self.load.wait_for(|load| load.running == 0 && load.waiting == 0).await;
        drop(self.stop);
        // A reporter that panicked has logged it, and its lease is dropped.
        let _ = self.task.await;
        drop(self.engine);
    }
}

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
struct LogPublisher {
    events: Arc<dyn Events>,
    source: Source,
    log: Arc<EventLog>,
    latest: watch::Receiver<u64>,
    published: u64,
    /// When the next digest is due.
    digest_due: Instant,
    _offer: Lease,
}

impl LogPublisher {
    fn new(events: Arc<dyn Events>, source: Source, log: Arc<EventLog>) -> Self {
        let offer = events.offer(source, Arc::clone(&log));
        // Subscribers also get what was stored before; marking the value as changed makes the first `changed` return at
        // once.
        let mut latest = log.latest();
        latest.mark_changed();
        let digest_due = Instant::now() + DIGEST_INTERVAL;
        Self { events, source, latest, log, published: 0, digest_due, _offer: offer }
    }

    /// Waits for events and publishes all of them. Cancel safe: after the wait there is no await point.
    async fn changed(&mut self) {
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

    fn publish(&self, body: EventBody) {
        self.events.publish(Event { source: self.source, epoch: self.log.epoch(), body });
    }
}

/// The registration of a worker, for as long as it is kept.
struct Registration {
    discovery: Arc<dyn Discovery>,
    instance: Instance,
    engine: Arc<dyn Engine>,
    lease: Lease,
}

impl Registration {
    /// Registers again with another role: same epoch, so running requests go on.
    async fn change_role(&mut self, to: Role) {
        let instance = Instance { role: to, ..self.instance.clone() };
        match self.discovery.register(instance.clone(), Arc::clone(&self.engine)).await {
            Ok(lease) => {
                tracing::info!(worker = %instance.id, from = %self.instance.role, %to, "worker changes its role");
                self.lease = lease;
                self.instance = instance;
            }
            // The router repeats the request while it holds.
            Err(error) => tracing::warn!(worker = %instance.id, %to, %error, "worker cannot change its role"),
        }
    }
}

struct Reporter {
    publisher: LogPublisher,
    /// `None` once deregistered.
    registration: Option<Registration>,
    role_requests: BoxStream<'static, Event>,
    load: watch::Receiver<Load>,
    deregister: CancellationToken,
}

impl Reporter {
    async fn run(mut self, stop: CancellationToken) {
        let mut sent = Instant::now();
        let mut due = sent;
        loop {
            tokio::select! {
                biased;
                () = stop.cancelled() => return,
                () = self.deregister.cancelled(), if self.registration.is_some() => self.registration = None,
                Some(request) = self.role_requests.next() => {
                    if let EventBody::RoleRequest { worker, role } = request.body
                        && let Some(registration) = &mut self.registration
                        && worker == registration.instance.id
                        && role != registration.instance.role
                    {
                        registration.change_role(role).await;
                    }
                }
                () = self.publisher.changed() => {}
                () = tokio::time::sleep_until(due) => {
                    sent = Instant::now();
                    due = sent + MAX_REPORT_INTERVAL;
                    // The number of the last published event, not of the last announced one: a number ahead of its
                    // event would look like a loss.
                    let load = Load { number: self.publisher.published, ..self.load.borrow_and_update().clone() };
                    self.publisher.publish(EventBody::Load(load));
                }
                changed = self.load.changed() => {
                    if changed.is_err() {
                        tracing::error!(source = %self.publisher.source, "the engine stopped; the worker deregisters");
                        return;
                    }
                    due = due.min(sent + MIN_REPORT_INTERVAL);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
