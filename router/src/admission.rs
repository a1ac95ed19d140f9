//! Admission: a request whose worker has too much to do waits here, where it can still be overtaken, moved and refused.
//!
//! ```text
//!   place ─▶ does its worker take it? ── yes, and nobody waits ──▶ go
//!              │ no                                               ▲
//!              ▼            a report, a first token, an end       │ its turn
//!           the room ─────────────────────────────────────────────┘
//!              ├─ a worker idles, or the one it waits for has left ─▶ placed again, same turn
//!              └─ displaced, too late, waits or would wait for too long ─▶ refused
//! ```
//! Who waits is booked on the worker that it was placed on, so those who are placed after it see it, as they would see it in
//! the worker's own queue. Whose turn it is is the [`Room`](queue)'s decision, and who is told what is the [`Desk`]'s; here they
//! are told, at the door (`dispatch/admit.rs`). On an idle fleet all of this is one look at the books.

mod backlog;
mod controller;
mod drain_rate;
mod queue;
mod saturation;
mod settings;
mod ticket;

pub(crate) use controller::{Desk, Entrance, Sight, Told};
pub(crate) use saturation::Part;
pub use settings::{Settings, Tenant};
pub(crate) use ticket::{Asked, Bid, Lane};

use crate::fleet::Fleet;
use crate::metrics::Metrics;
use controller::LOOK_EVERY;
use queue::Refusal;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;
use tokio::sync::{Notify, oneshot};
use tokio::time::{Instant, timeout_at};
use worker::engine::{Error, GroupId, Priority};

/// The door and the room behind it.
pub(crate) struct Admission {
    inside: Mutex<Inside>,
    /// Something changed that somebody may wait for.
    poke: Notify,
    /// Whether somebody waits.
    awaited: AtomicBool,
    metrics: Metrics,
}

#[derive(Default)]
struct Inside {
    desk: Desk,
    /// By number, those who wait to be told something.
    calls: HashMap<u64, oneshot::Sender<Told>>,
    /// Permits of groups, for the choices that come after the first. The permit removes its entry when it is dropped.
    groups: HashMap<GroupId, Weak<Permit>>,
    /// Nobody is told anything any more.
    closed: bool,
}

/// A request's place in the router, from the door until its last byte. Dropping it gives the place up.
#[must_use = "dropping a permit gives the place up"]
pub(crate) struct Permit {
    admission: Arc<Admission>,
    number: u64,
    class: Priority,
    group: Option<GroupId>,
}

/// What classes are called, from the least.
const CLASSES: [&str; 3] = ["low", "normal", "high"];

impl Admission {
    pub(crate) fn new(metrics: &Metrics) -> Arc<Self> {
        Arc::new(Self {
            inside: Mutex::default(),
            poke: Notify::new(),
            awaited: AtomicBool::new(false),
            metrics: metrics.clone(),
        })
    }

    /// Something changed: a worker may take more than before.
    pub(crate) fn poke(&self) {
        if self.awaited.load(Ordering::SeqCst) {
            self.poke.notify_one();
        }
    }

    /// A request at the door: it goes, or waits to be told something, or is refused. And what it waits for.
    #[expect(clippy::type_complexity, reason = "used once, at the door")]
    pub(crate) fn enter(
        self: &Arc<Self>,
        fleet: &Fleet,
        limits: &Settings,
        asked: &Asked,
    ) -> Result<(Permit, Option<(oneshot::Receiver<Told>, &'static str)>), Error> {
        let (roster, class) = (fleet.roster(), asked.priority);
        let mut inside = self.inside();
        let entrance = inside.desk.enter(Sight { limits, roster: &roster, now: Instant::now() }, asked);
        let Entrance { number, waits, displaced } = entrance.map_err(|refusal| self.refused(class, refusal))?;
        inside.tell(displaced);
        let permit = Permit { admission: self.clone(), number, class, group: None };
        match waits {
            None => self.count(class, "immediate"),
            Some(_) => self.await_call(),
        }
        let waits = waits.map(|why| (inside.call(number), why));
        Ok((permit, waits))
    }

    /// Keeps the permit of a group's first choice where [`Self::join`] finds it, for as long as it is held.
    pub(crate) fn share(&self, group: GroupId, mut permit: Permit) -> Arc<Permit> {
        permit.group = Some(group);
        let permit = Arc::new(permit);
        self.inside().groups.insert(group, Arc::downgrade(&permit));
        permit
    }

    /// Admits a later choice of a group at once: with the permit of the first choice, or with one of its own when the
    /// first choice has ended.
    pub(crate) fn join(self: &Arc<Self>, group: GroupId, asked: &Asked) -> Arc<Permit> {
        let mut inside = self.inside();
        if let Some(permit) = inside.groups.get(&group).and_then(Weak::upgrade) {
            return permit;
        }
        let number = inside.desk.admit_now(asked);
        drop(inside);
        self.share(group, Permit { admission: self.clone(), number, class: asked.priority, group: None })
    }

    /// A request that was told to be placed anew waits for where it was placed now.
    pub(crate) fn again(&self, limits: &Settings, permit: &Permit, asked: Asked) -> oneshot::Receiver<Told> {
        let mut inside = self.inside();
        inside.desk.again(limits, permit.number, asked);
        self.await_call();
        inside.call(permit.number)
    }

    /// Tells everybody what there is to tell.
    pub(crate) fn round(&self, fleet: &Fleet, limits: &Settings) {
        let (roster, now) = (fleet.roster(), Instant::now());
        let mut inside = self.inside();
        let told = inside.desk.round(Sight { limits, roster: &roster, now });
        inside.tell(told);
        self.awaited.store(!inside.desk.room.is_empty(), Ordering::SeqCst);
        for (class, tokens) in CLASSES.iter().zip(inside.desk.room.by_class()) {
            self.metrics.waiting_tokens.with_label_values(&[class]).set(tokens as i64);
        }
        for (model, rate) in inside.desk.room.rates(now) {
            self.metrics.drain_rate.with_label_values(&[model]).set(rate);
        }
    }

    /// Waits until there may be something to tell.
    pub(crate) async fn poked(&self) {
        if self.awaited.load(Ordering::SeqCst) {
            // A poke that came too early is made up for here.
            let (look, due) = (Instant::now() + LOOK_EVERY, self.inside().desk.room.due());
            let _ = timeout_at(due.map_or(look, |due| due.min(look)), self.poke.notified()).await;
        } else {
            self.poke.notified().await;
        }
    }

    /// Nobody will be told anything any more: who waits is not left waiting for it.
    pub(crate) fn close(&self) {
        let mut inside = self.inside();
        inside.closed = true;
        inside.calls.clear();
    }

    /// A request goes that has waited.
    pub(crate) fn waited(&self, class: Priority, waited: Duration) {
        self.count(class, "queued");
        self.metrics.wait_seconds.with_label_values(&[CLASSES[class as usize]]).observe(waited.as_secs_f64());
    }

    /// A request is refused: what its client is told.
    pub(crate) fn refused(&self, class: Priority, refusal: Refusal) -> Error {
        let (outcome, error) = match refusal {
            Refusal::Full(retry_after) => ("queue_full", Error::Overloaded { retry_after }),
            Refusal::TenantFull(retry_after) => ("tenant_limit", Error::Overloaded { retry_after }),
            Refusal::PredictedTimeout(retry_after) => ("predicted_timeout", Error::Overloaded { retry_after }),
            Refusal::PredictedTimeoutQueued(retry_after) => {
                ("predicted_timeout_queued", Error::Overloaded { retry_after })
            }
            Refusal::Displaced(retry_after) => ("shed", Error::Overloaded { retry_after }),
            Refusal::InVain(retry_after) => ("queue_timeout", Error::Overloaded { retry_after }),
            Refusal::Late => ("deadline_exceeded", Error::Late),
        };
        self.count(class, outcome);
        error
    }

    fn count(&self, class: Priority, outcome: &str) {
        self.metrics.admissions.with_label_values(&[CLASSES[class as usize], outcome]).inc();
    }

    /// Somebody waits from now on, and may be the first to go, or to be late.
    fn await_call(&self) {
        self.awaited.store(true, Ordering::SeqCst);
        self.poke.notify_one();
    }

    fn inside(&self) -> MutexGuard<'_, Inside> {
        // Nothing that runs under this lock panics half-way.
        self.inside.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inside {
    fn call(&mut self, number: u64) -> oneshot::Receiver<Told> {
        let (sender, call) = oneshot::channel();
        if !self.closed {
            self.calls.insert(number, sender);
        }
        call
    }

    fn tell(&mut self, told: Vec<(u64, Told)>) {
        for (number, told) in told {
            if let Some(waits) = self.calls.remove(&number) {
                // Who went away meanwhile gives its place up by its permit.
                let _ = waits.send(told);
            }
        }
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let mut inside = self.admission.inside();
        let waited = inside.desk.leave(self.number);
        let called = inside.calls.remove(&self.number).is_some();
        if let Some(group) = self.group
            && inside.groups.get(&group).is_some_and(|permit| std::ptr::eq(permit.as_ptr(), self))
        {
            inside.groups.remove(&group);
        }
        drop(inside);
        if waited && called {
            self.admission.count(self.class, "cancelled");
        }
        self.admission.poke();
    }
}

#[cfg(test)]
mod tests;
