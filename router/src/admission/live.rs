//! Admission on the router's clock: the lock around the [`AdmissionController`], wake-ups, and metrics.

use super::controller::{Accepted, AdmissionController, Context, POLL_INTERVAL, Resolution};
use super::queue::Rejection;
use super::settings::Settings;
use super::ticket::QueuedRequest;
use crate::fleet::Fleet;
use crate::hash::NumberMap;
use crate::telemetry::Metrics;
use parking_lot::{Mutex, MutexGuard};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;
use tokio::sync::{Notify, oneshot};
use tokio::time::{Instant, timeout_at};
use worker::engine::{Error, GroupId, Priority};

/// Admission of requests for all models of this router.
pub(crate) struct Admission {
    inner: Mutex<Inner>,
    /// Wakes the task that calls [`Self::dispatch_ready`].
    changed: Notify,
    /// Whether requests are queued.
    has_queued: AtomicBool,
    metrics: Metrics,
}

#[derive(Default)]
pub(super) struct Inner {
    pub(super) controller: AdmissionController,
    /// Senders of the resolutions of queued requests, by their number.
    waiters: NumberMap<u64, oneshot::Sender<Resolution>>,
    /// Permits of groups, for the choices that come after the first. The permit removes its entry when it is dropped.
    pub(super) groups: NumberMap<GroupId, Weak<Permit>>,
    /// The router has stopped: no further resolutions are sent.
    closed: bool,
}

/// The right of a request to run, or its position in the queue, until its last byte. Dropping it releases either.
#[must_use = "dropping a permit gives the place up"]
pub(crate) struct Permit {
    admission: Arc<Admission>,
    number: u64,
    class: Priority,
    group: Option<GroupId>,
}

/// Values of the metric label `priority`, the lowest first.
const PRIORITY_LABELS: [&str; 3] = ["low", "normal", "high"];

impl Admission {
    pub(crate) fn new(metrics: &Metrics) -> Arc<Self> {
        Arc::new(Self {
            inner: Mutex::default(),
            changed: Notify::new(),
            has_queued: AtomicBool::new(false),
            metrics: metrics.clone(),
        })
    }

    /// Reports a change after which a worker may have more capacity than before.
    pub(crate) fn notify(&self) {
        if self.has_queued.load(Ordering::SeqCst) {
            self.changed.notify_one();
        }
    }

    /// Admits a request, queues it, or rejects it. A queued request also gets the receiver of its resolution and the
    /// reason why it waits. `itl`: target of the time between tokens.
    #[expect(clippy::type_complexity, reason = "used once, by dispatch")]
    pub(crate) fn admit_or_queue(
        self: &Arc<Self>,
        fleet: &Fleet,
        limits: &Settings,
        itl: Option<Duration>,
        request: &QueuedRequest,
    ) -> Result<(Permit, Option<(oneshot::Receiver<Resolution>, &'static str)>), Error> {
        let (snapshot, class) = (fleet.snapshot(), request.priority);
        let mut inner = self.inner();
        let context = Context { limits, itl, fleet: &snapshot, now: request.placed };
        let accepted = inner.controller.admit_or_queue(context, request);
        let Accepted { number, queue_reason, shed } = accepted.map_err(|rejection| self.rejected(class, rejection))?;
        inner.resolve(shed);
        let permit = Permit { admission: self.clone(), number, class, group: None };
        match queue_reason {
            None => self.count(class, "immediate"),
            Some(_) => self.wake_dispatcher(),
        }
        let queued = queue_reason.map(|reason| (inner.add_waiter(number), reason));
        Ok((permit, queued))
    }

    /// Keeps the permit of a group's first choice where [`Self::join`] finds it, for as long as it is held.
    pub(crate) fn share(&self, group: GroupId, mut permit: Permit) -> Arc<Permit> {
        permit.group = Some(group);
        let permit = Arc::new(permit);
        self.inner().groups.insert(group, Arc::downgrade(&permit));
        permit
    }

    /// Admits a later choice of a group at once: with the permit of the first choice, or with one of its own when the
    /// first choice has ended.
    pub(crate) fn join(self: &Arc<Self>, group: GroupId, request: &QueuedRequest) -> Arc<Permit> {
        let mut inner = self.inner();
        if let Some(permit) = inner.groups.get(&group).and_then(Weak::upgrade) {
            return permit;
        }
        let number = inner.controller.admit_now(request);
        drop(inner);
        self.share(group, Permit { admission: self.clone(), number, class: request.priority, group: None })
    }

    /// Queues a request again that got [`Resolution::Reroute`], with its new placement.
    pub(crate) fn requeue(
        &self,
        limits: &Settings,
        permit: &Permit,
        request: QueuedRequest,
    ) -> oneshot::Receiver<Resolution> {
        let mut inner = self.inner();
        inner.controller.requeue(limits, permit.number, request);
        self.wake_dispatcher();
        inner.add_waiter(permit.number)
    }

    /// Sends the resolutions that are due, and updates the metrics of the queue.
    pub(crate) fn dispatch_ready(&self, fleet: &Fleet, limits: &Settings, itl: Option<Duration>) {
        let (snapshot, now) = (fleet.snapshot(), Instant::now());
        let mut inner = self.inner();
        let resolutions = inner.controller.dispatch_ready(Context { limits, itl, fleet: &snapshot, now });
        inner.resolve(resolutions);
        self.has_queued.store(!inner.controller.queue.is_empty(), Ordering::SeqCst);
        for (class, tokens) in PRIORITY_LABELS.iter().zip(inner.controller.queue.queued_tokens()) {
            self.metrics.admission_queue_tokens.with_label_values(&[class]).set(tokens as i64);
        }
        for (model, rate) in inner.controller.queue.rates(now) {
            self.metrics.drain_rate.with_label_values(&[model]).set(rate);
        }
    }

    /// Waits until there may be resolutions to send.
    pub(crate) async fn notified(&self) {
        if self.has_queued.load(Ordering::SeqCst) {
            // A notification before this call is lost when no request was queued; the poll makes up for it.
            let (poll, due) = (Instant::now() + POLL_INTERVAL, self.inner().controller.queue.next_expiry());
            let _ = timeout_at(due.map_or(poll, |due| due.min(poll)), self.changed.notified()).await;
        } else {
            self.changed.notified().await;
        }
    }

    /// Number of queued requests, and of those that hold a permit.
    pub(crate) fn outstanding(&self) -> (usize, usize) {
        self.inner().controller.queue.outstanding()
    }

    /// Closes the queue: all waiters end with an error, and so do later requests that would wait.
    pub(crate) fn close(&self) {
        let mut inner = self.inner();
        inner.closed = true;
        inner.waiters.clear();
    }

    /// Counts a queued request that was admitted, and the time that it waited.
    pub(crate) fn waited(&self, class: Priority, waited: Duration) {
        self.count(class, "queued");
        self.metrics
            .admission_wait_seconds
            .with_label_values(&[PRIORITY_LABELS[class as usize]])
            .observe(waited.as_secs_f64());
    }

    /// Counts a request that is sent too late for its target.
    pub(crate) fn sent_late(&self, class: Priority) {
        self.metrics.late_requests.with_label_values(&[PRIORITY_LABELS[class as usize]]).inc();
    }

    /// Counts a rejection. Returns the error for the client.
    pub(crate) fn rejected(&self, class: Priority, rejection: Rejection) -> Error {
        let (outcome, error) = match rejection {
            Rejection::QueueFull(retry_after) => ("queue_full", Error::Overloaded { retry_after }),
            Rejection::TenantLimit(retry_after) => ("tenant_limit", Error::Overloaded { retry_after }),
            Rejection::PredictedTimeout(retry_after) => ("predicted_timeout", Error::Overloaded { retry_after }),
            Rejection::PredictedTimeoutQueued(retry_after) => {
                ("predicted_timeout_queued", Error::Overloaded { retry_after })
            }
            Rejection::Shed(retry_after) => ("shed", Error::Overloaded { retry_after }),
            Rejection::QueueTimeout(retry_after) => ("queue_timeout", Error::Overloaded { retry_after }),
            Rejection::Late(retry_after) => ("late", Error::Overloaded { retry_after }),
            Rejection::DeadlineExceeded => ("deadline_exceeded", Error::DeadlineExceeded),
        };
        self.count(class, outcome);
        error
    }

    fn count(&self, class: Priority, outcome: &str) {
        self.metrics.admission_requests.with_label_values(&[PRIORITY_LABELS[class as usize], outcome]).inc();
    }

    /// Wakes the dispatcher now: the new request may be the first to be admitted, or the first to expire.
    fn wake_dispatcher(&self) {
        self.has_queued.store(true, Ordering::SeqCst);
        self.changed.notify_one();
    }

    pub(super) fn inner(&self) -> MutexGuard<'_, Inner> {
        // No code under this lock panics.
        self.inner.lock()
    }
}

impl Inner {
    fn add_waiter(&mut self, number: u64) -> oneshot::Receiver<Resolution> {
        let (sender, receiver) = oneshot::channel();
        if !self.closed {
            self.waiters.insert(number, sender);
        }
        receiver
    }

    fn resolve(&mut self, resolutions: Vec<(u64, Resolution)>) {
        for (number, resolution) in resolutions {
            if let Some(sender) = self.waiters.remove(&number) {
                // A request whose client has left is removed by its permit.
                let _ = sender.send(resolution);
            }
        }
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let mut inner = self.admission.inner();
        let was_queued = inner.controller.leave(self.number);
        let was_unresolved = inner.waiters.remove(&self.number).is_some();
        if let Some(group) = self.group
            && inner.groups.get(&group).is_some_and(|permit| std::ptr::eq(permit.as_ptr(), self))
        {
            inner.groups.remove(&group);
        }
        drop(inner);
        if was_queued && was_unresolved {
            self.admission.count(self.class, "cancelled");
        }
        self.admission.notify();
    }
}
