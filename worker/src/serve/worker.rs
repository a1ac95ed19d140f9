//! A worker: an engine that is registered, whose load is reported, whose role can change, and which can be cordoned.

use super::cordon::{Cordon, RegistrationControl, RegistrationState};
use super::publisher::LogPublisher;
use crate::engine::Engine;
use crate::plane::{Discovery, Event, EventBody, Events, Instance, Lease, Load, PlaneError, Role, Source, Topic};
use futures::StreamExt;
use futures::stream::BoxStream;
use kvbm::EventLog;
use spans::LogLimit;
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
    cordon: Cordon,
    task: JoinHandle<()>,
    stop: DropGuard,
}

/// Load is sent at least this often, so that the loss of a report or of the last event is noticed within a second.
pub(super) const MAX_REPORT_INTERVAL: Duration = Duration::from_secs(1);

/// Interval of attempts to register a worker again that is no longer cordoned, or that another process has registered.
/// NATS may be away for a moment.
const REGISTER_INTERVAL: Duration = Duration::from_secs(1);

/// Load is sent at most this often: every engine step changes it, and a fast engine makes hundreds of steps a second.
const MIN_REPORT_INTERVAL: Duration = Duration::from_millis(20);

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
        let stop = CancellationToken::new();
        let (cordon, control) = Cordon::new(instance.role, load.clone());
        let registration = Registration {
            discovery: Arc::clone(&planes.discovery),
            instance,
            engine: Arc::clone(&engine),
            lease: Some(lease),
            failures: LogLimit::default(),
        };
        let reporter = Reporter { publisher, registration, role_requests, load: load.clone(), control, retry_at: None };
        let task = tokio::spawn(reporter.run(stop.clone()));
        Ok(Self { engine, load, cordon, task, stop: stop.drop_guard() })
    }

    /// Takes the worker out of service and back.
    pub fn cordon(&self) -> &Cordon {
        &self.cordon
    }

    /// Deregisters the worker, waits until its requests have finished, and reports until then. Drop the future to stop
    /// at once.
    pub async fn drain(mut self) {
        self.cordon.close();
        // An error means that the engine has stopped, so it is idle.
        let _ = self.load.wait_for(Load::is_idle).await;
        drop(self.stop);
        // A reporter that panicked has logged it, and its lease is dropped.
        let _ = self.task.await;
        drop(self.engine);
    }
}

/// The registration of a worker.
struct Registration {
    discovery: Arc<dyn Discovery>,
    instance: Instance,
    engine: Arc<dyn Engine>,
    /// `None` while the worker is deregistered. A lost lease is kept until the worker is registered again: the other
    /// process may advertise the URL of this one by mistake, and requests that arrive here are served.
    lease: Option<Lease>,
    /// Limits the lines about failed attempts to register again.
    failures: LogLimit,
}

impl Registration {
    /// Whether the worker is registered, as far as this process knows.
    fn is_held(&self) -> bool {
        self.lease.as_ref().is_some_and(|lease| !lease.lost().is_cancelled())
    }

    /// Resolves when the lease is lost. It borrows nothing: a reference to a lease cannot be sent between threads.
    fn lost(&self) -> impl Future<Output = ()> + use<> {
        let lost = self.lease.as_ref().map(Lease::lost);
        async move {
            match lost {
                Some(lost) => lost.cancelled().await,
                None => std::future::pending().await,
            }
        }
    }

    /// Registers again after a cordon or the loss of the lease: same epoch, because the blocks are still there.
    async fn register_again(&mut self) -> Result<(), PlaneError> {
        let worker = self.instance.id;
        match self.discovery.register(self.instance.clone(), Arc::clone(&self.engine)).await {
            Ok(lease) => {
                tracing::info!(%worker, "worker is registered again");
                self.lease = Some(lease);
                Ok(())
            }
            Err(error) => {
                if let Some(suppressed) = self.failures.admit() {
                    tracing::warn!(%worker, %error, suppressed, "worker cannot be registered; retried every second");
                }
                Err(error)
            }
        }
    }

    /// Registers again with another role: same epoch, so running requests go on.
    async fn change_role(&mut self, to: Role) {
        let instance = Instance { role: to, ..self.instance.clone() };
        match self.discovery.register(instance.clone(), Arc::clone(&self.engine)).await {
            Ok(lease) => {
                tracing::info!(worker = %instance.id, from = %self.instance.role, %to, "worker changes its role");
                self.lease = Some(lease);
                self.instance = instance;
            }
            // The router repeats the request while it holds.
            Err(error) => tracing::warn!(worker = %instance.id, %to, %error, "worker cannot change its role"),
        }
    }
}

struct Reporter {
    publisher: LogPublisher,
    registration: Registration,
    role_requests: BoxStream<'static, Event>,
    load: watch::Receiver<Load>,
    control: RegistrationControl,
    /// When the worker, which is not cordoned any more or whose lease is lost, is registered again.
    retry_at: Option<Instant>,
}

impl Reporter {
    async fn run(mut self, stop: CancellationToken) {
        let mut sent = Instant::now();
        let mut due = sent;
        loop {
            tokio::select! {
                biased;
                () = stop.cancelled() => return,
                is_wanted = self.control.changed() => if is_wanted {
                    self.retry_at = (!self.registration.is_held()).then(Instant::now);
                } else {
                    self.retry_at = None;
                    let lease = self.registration.lease.take();
                    if lease.is_some() && self.control.is_cordoned() {
                        let worker = self.registration.instance.id;
                        tracing::info!(%worker, "worker cordoned: it is being deregistered; running requests finish");
                    }
                    drop(lease);
                    self.control.set(RegistrationState::Deregistered);
                },
                () = self.registration.lost(), if self.retry_at.is_none() => {
                    self.retry_at = Some(Instant::now() + REGISTER_INTERVAL);
                    self.control.set(RegistrationState::Superseded);
                }
                () = tokio::time::sleep_until(self.retry_at.unwrap_or(sent)), if self.retry_at.is_some() => {
                    let registered = self.registration.register_again().await;
                    self.retry_at = registered.is_err().then(|| Instant::now() + REGISTER_INTERVAL);
                    match registered {
                        Ok(()) => self.control.set(RegistrationState::Registered),
                        Err(PlaneError::Refused(_)) => self.control.set(RegistrationState::Superseded),
                        Err(_) => {}
                    }
                }
                Some(request) = self.role_requests.next() => {
                    let registration = &mut self.registration;
                    if let EventBody::RoleRequest { worker, role } = request.body
                        && registration.is_held()
                        && worker == registration.instance.id
                        && role != registration.instance.role
                    {
                        registration.change_role(role).await;
                        self.control.set_role(registration.instance.role);
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
                // Until the next report is due, changes need not wake this task: every request makes several.
                changed = self.load.changed(), if due > sent + MIN_REPORT_INTERVAL => {
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
