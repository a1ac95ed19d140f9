//! Admission: a request whose worker has too much to do waits here, where it can still be overtaken, moved and refused.
//!
//! ```text
//!   place ─▶ does its worker take it? ── yes, and nobody waits ──▶ go
//!              │ no                                               ▲
//!              ▼            a report, a first token, an end       │ its turn
//!           the room ─────────────────────────────────────────────┘
//!              ├─ a worker idles, or the one it waits for has left ─▶ placed again, same turn
//!              └─ displaced, too late, waited too long ─▶ refused
//! ```
//! Who waits is booked on the worker that it was placed on, so those who are placed after it see it, as they would see it in
//! the worker's own queue. Whose turn it is is the [`Room`]'s decision; here it is done, for the door (`door.rs`). On an idle
//! fleet all of this is one look at the books.

mod rate;
mod room;
mod saturation;
pub(crate) mod settings;

pub(crate) use room::{Asked, Entry, Held, Lane, Room};

use crate::fleet::{Fleet, Member, Roster};
use crate::metrics::Metrics;
use room::Refusal;
use saturation::{Full, Part, full, queue};
use settings::Settings;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::{Notify, oneshot};
use tokio::time::Instant;
use worker::engine::{Error, Priority};

/// The door and the room behind it.
pub(crate) struct Admission {
    desk: Mutex<Desk>,
    /// Something changed that somebody may wait for.
    poke: Notify,
    /// Whether somebody waits.
    awaited: AtomicBool,
    metrics: Metrics,
}

#[derive(Default)]
struct Desk {
    room: Room,
    calls: HashMap<u64, oneshot::Sender<Call>>,
    /// When it was last looked at who could go elsewhere.
    looked: Option<Instant>,
}

/// What a request that waits is told.
pub(crate) enum Call {
    Go,
    /// Be placed anew.
    Again,
    /// Somebody else gets the place.
    Displaced(Duration),
}

/// A request's place in the router, from the door until its last byte. Dropping it gives the place up.
#[must_use = "dropping a permit gives the place up"]
pub(crate) struct Permit {
    admission: Arc<Admission>,
    number: u64,
}

/// Time opens doors, too: a worker falls silent, a breaker closes. Nobody is told of that, and it is not urgent.
pub(crate) const LOOK_EVERY: Duration = Duration::from_millis(250);

impl Admission {
    pub(crate) fn new(metrics: &Metrics) -> Arc<Self> {
        Arc::new(Self {
            desk: Mutex::default(),
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

    /// A request at the door: it goes, or waits for a call, or is refused. And what it waits for.
    #[expect(clippy::type_complexity, reason = "used once, at the door")]
    pub(crate) fn enter(
        self: &Arc<Self>,
        fleet: &Fleet,
        limits: &Settings,
        asked: &Asked,
    ) -> Result<(Permit, Option<(oneshot::Receiver<Call>, &'static str)>), Error> {
        let (now, class) = (Instant::now(), asked.priority);
        let mut desk = self.desk();
        let state = look(&fleet.roster(), &desk.room, asked.lane, Some(asked.held), now);
        let why = match state {
            Err(full) => full.name(),
            Ok(_) if desk.room.is_empty() => "tenant",
            Ok(_) => "turn",
        };
        let permit = |number| Permit { admission: self.clone(), number };
        let refusal = match desk.room.enter(limits, asked.clone(), state.ok(), now) {
            Entry::Straight(number) => {
                drop(desk);
                self.count(class, "straight");
                return Ok((permit(number), None));
            }
            Entry::Waits { number, displaced } => {
                for number in displaced {
                    let after = desk.room.come_back(limits, asked);
                    desk.call(number, Call::Displaced(after));
                }
                let (sender, call) = oneshot::channel();
                desk.calls.insert(number, sender);
                self.awaited.store(true, Ordering::SeqCst);
                drop(desk);
                let permit = permit(number);
                self.round(fleet, limits);
                return Ok((permit, Some((call, why))));
            }
            Entry::Refused(refusal) => refusal,
        };
        drop(desk);
        let (outcome, error) = match refusal {
            Refusal::Full(retry_after) => ("full", Error::Overloaded { retry_after }),
            Refusal::TenantFull(retry_after) => ("tenant_full", Error::Overloaded { retry_after }),
            Refusal::Late => ("late", Error::Late),
        };
        self.count(class, outcome);
        Err(error)
    }

    /// A request that was called to be placed anew waits for where it was placed now.
    pub(crate) fn again(
        &self,
        fleet: &Fleet,
        limits: &Settings,
        permit: &Permit,
        asked: Asked,
    ) -> oneshot::Receiver<Call> {
        let (sender, call) = oneshot::channel();
        let mut desk = self.desk();
        desk.room.again(permit.number, asked, Instant::now());
        desk.calls.insert(permit.number, sender);
        self.awaited.store(true, Ordering::SeqCst);
        drop(desk);
        self.round(fleet, limits);
        call
    }

    /// Calls everybody whose turn it is.
    pub(crate) fn round(&self, fleet: &Fleet, limits: &Settings) {
        let mut desk = self.desk();
        if !desk.room.is_empty() {
            let (now, roster) = (Instant::now(), fleet.roster());
            desk.move_on(&roster, now);
            let mut known = HashMap::new();
            while let Some(number) = desk.room.turn(limits, now, |room, lane| {
                *known.entry(lane).or_insert_with(|| look(&roster, room, lane, None, now).ok())
            }) {
                known.clear();
                desk.call(number, Call::Go);
            }
            desk.stir(&roster, now);
        }
        self.awaited.store(!desk.room.is_empty(), Ordering::SeqCst);
        for (class, tokens) in [Priority::Low, Priority::Normal, Priority::High].into_iter().zip(desk.room.by_class()) {
            self.metrics.waiting_tokens.with_label_values(&[name(class)]).set(tokens as i64);
        }
    }

    /// Waits until somebody may go who waits, or might.
    pub(crate) async fn poked(&self) {
        if self.awaited.load(Ordering::SeqCst) {
            // A poke that came too early is made up for here.
            let _ = tokio::time::timeout(LOOK_EVERY, self.poke.notified()).await;
        } else {
            self.poke.notified().await;
        }
    }

    /// A request waits no longer: it has not gone by itself. When it had better come again.
    pub(crate) fn give_up(&self, limits: &Settings, permit: &Permit, asked: &Asked, late: bool) -> Duration {
        self.count(asked.priority, if late { "late" } else { "in_vain" });
        let mut desk = self.desk();
        desk.calls.remove(&permit.number);
        desk.room.come_back(limits, asked)
    }

    /// A request goes that has waited.
    pub(crate) fn waited(&self, class: Priority, waited: Duration) {
        self.count(class, "waited");
        self.metrics.wait_seconds.with_label_values(&[name(class)]).observe(waited.as_secs_f64());
    }

    pub(crate) fn count(&self, class: Priority, outcome: &str) {
        self.metrics.admissions.with_label_values(&[name(class), outcome]).inc();
    }

    fn desk(&self) -> MutexGuard<'_, Desk> {
        // Nothing that runs under this lock panics half-way.
        self.desk.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Desk {
    fn call(&mut self, number: u64, call: Call) {
        if let Some(waits) = self.calls.remove(&number) {
            // Who went away meanwhile gives its place up by its permit.
            let _ = waits.send(call);
        }
    }

    fn recall(&mut self, number: u64) {
        if self.room.recall(number) {
            self.call(number, Call::Again);
        }
    }

    /// Those who wait for a worker that has left, or is better left alone, are placed anew; in the second case not at once
    /// again: it may be the only one.
    fn move_on(&mut self, roster: &Roster, now: Instant) {
        let gone = |id| roster.get(id).is_none();
        let avoided = |id| roster.get(id).is_some_and(|member| member.avoided(now));
        if !self.room.awaited().any(|id| gone(id) || avoided(id)) {
            return;
        }
        let misplaced = |asked: &Asked| {
            let at = |of: &dyn Fn(_) -> bool| of(asked.lane.decode) || asked.lane.prefill.is_some_and(of);
            at(&gone) || (asked.placed + LOOK_EVERY <= now && at(&avoided))
        };
        for number in self.room.some(usize::MAX, misplaced) {
            self.recall(number);
        }
    }

    /// While a worker has nothing to do, as many as it could soon take are placed anew: perhaps with it.
    fn stir(&mut self, roster: &Roster, now: Instant) {
        if self.looked.is_some_and(|at| now < at + LOOK_EVERY) {
            return;
        }
        self.looked = Some(now);
        for model in self.room.models() {
            let stale = |asked: &Asked| asked.model == model && asked.placed + LOOK_EVERY <= now;
            for number in self.room.some(idle(roster, &model, now), stale) {
                self.recall(number);
            }
        }
    }
}

/// How many workers of a model have nothing to do.
pub(crate) fn idle(roster: &Roster, model: &str, now: Instant) -> usize {
    let idle = |member: &&Arc<Member>| {
        let standing = member.books.standing(now);
        standing.waiting_tokens == 0 && standing.sequences == 0 && !member.avoided(now)
    };
    roster.members().filter(|member| *member.instance.model.id == *model).filter(idle).count()
}

/// What keeps a lane closed; or how long the queue of an open one takes. `own`: what a request that does not wait yet has booked there itself.
pub(crate) fn look(
    roster: &Roster,
    room: &Room,
    lane: Lane,
    own: Option<[Held; 2]>,
    now: Instant,
) -> Result<Duration, Full> {
    let own = own.unwrap_or_default();
    let at = |id, own: Held, part| {
        // Of whom nothing is heard there is no reason to wait for.
        let Some(member) = roster.get(id).filter(|member| !member.books.silent(now)) else { return Ok(Duration::ZERO) };
        let (standing, held) = (member.books.standing(now), room.held(id).plus(own));
        // What nobody has measured is no reason to refuse anybody.
        let queue = if member.measured() { queue(&standing, held) } else { Duration::ZERO };
        full(member.instance.phase, &standing, member.batch(), held, part).map_or(Ok(queue), Err)
    };
    match lane.prefill {
        None => at(lane.decode, own[0], Part::Whole),
        Some(prefill) => {
            at(lane.decode, own[0], Part::Decode)?;
            at(prefill, own[1], Part::Prefill)
        }
    }
}

/// A class's label.
const fn name(class: Priority) -> &'static str {
    match class {
        Priority::Low => "low",
        Priority::Normal => "normal",
        Priority::High => "high",
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let mut desk = self.admission.desk();
        let waited = desk.room.leave(self.number);
        let called = desk.calls.remove(&self.number).is_some();
        drop(desk);
        if let Some(asked) = waited.filter(|_| called) {
            self.admission.count(asked.priority, "gone");
        }
        self.admission.poke();
    }
}

#[cfg(test)]
mod tests;
