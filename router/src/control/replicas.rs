//! Several routers over the same workers: each tells the others what it books, so that they do not herd.
//!
//! ```text
//!   Booking ──▶ Herald ──▶ events ──▶ Others ──▶ books and promises, as if booked here
//! ```
//! Workers' reports soon say the same, so this only fills the time until they do: nothing is numbered, and what is lost is
//! not asked for. A router that is not heard of for some seconds has ended, and its bookings with it; a booking whose end
//! was lost is forgotten after a while. Who is alone says no more than that he is there.

use crate::booking::{InflightPrefix, InflightPrefixes};
use crate::fleet::Fleet;
use crate::load::{Amount, Books};
use crate::state::Core;
use futures::StreamExt;
use kvbm::Epoch;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio::time::{Instant, MissedTickBehavior};
use worker::plane::{Booked, Event, EventBody, Events, RouterId, Source, Topic};

/// What the other routers have booked.
#[derive(Default)]
pub(crate) struct Others(BTreeMap<RouterId, Other>);

struct Other {
    heard: Instant,
    open: BTreeMap<u64, Entry>,
}

struct Entry {
    books: Arc<Books>,
    number: u64,
    since: Instant,
    /// Until its first token: from then on an event tells.
    promise: Option<InflightPrefix>,
}

/// A router says at least this often that it is there.
pub(crate) const HEARTBEAT: Duration = Duration::from_secs(1);
/// After three missed heartbeats it is not.
pub(crate) const GONE: Duration = Duration::from_secs(3);
/// Nothing is booked for longer, as far as others go: a report has long told of it, and its end may have been lost.
const FORGOTTEN: Duration = Duration::from_mins(1);
impl Others {
    /// What another router says.
    pub(crate) fn hear(
        &mut self,
        from: RouterId,
        changes: Vec<Booked>,
        fleet: &Fleet,
        promises: &Arc<InflightPrefixes>,
        now: Instant,
    ) {
        let other = self.0.entry(from).or_insert_with(|| Other { heard: now, open: BTreeMap::new() });
        other.heard = now;
        let roster = fleet.roster();
        for change in changes {
            match change {
                Booked::Placed { number, worker, prefill_tokens, blocks, decodes, anchors } => {
                    // A worker that we have not met is nobody that we could send to.
                    let Some(member) = roster.get(worker) else { continue };
                    let prompts = u64::from(prefill_tokens > 0);
                    let amount = Amount { prefill_tokens, blocks, prompts, sequences: u64::from(decodes) };
                    let promise = Some(promises.add_anchors(member.slot, anchors.into()));
                    let books = member.books.clone();
                    let ours = books.book_elsewhere(amount, now);
                    let entry = Entry { books, number: ours, since: now, promise };
                    if let Some(before) = other.open.insert(number, entry) {
                        before.release(now);
                    }
                }
                Booked::Going(number) => other.with(number, |entry| entry.books.going(entry.number)),
                Booked::Sent(number) => other.with(number, |entry| entry.books.sent(entry.number, now)),
                Booked::Amended { number, prefill_tokens } => {
                    other.with(number, |entry| entry.books.amend(entry.number, prefill_tokens));
                }
                Booked::Started(number) => other.with(number, |entry| {
                    entry.books.started(entry.number);
                    entry.promise = None;
                }),
                Booked::Released(number) => {
                    if let Some(entry) = other.open.remove(&number) {
                        entry.release(now);
                    }
                }
            }
        }
    }

    /// Forgets who has gone, and bookings that must have ended.
    pub(crate) fn forget(&mut self, now: Instant) {
        self.0.retain(|_, other| {
            let gone = now.saturating_duration_since(other.heard) > GONE;
            let ended = |entry: &Entry| gone || now.saturating_duration_since(entry.since) > FORGOTTEN;
            other.open.extract_if(.., |_, entry| ended(entry)).for_each(|(_, entry)| entry.release(now));
            !gone
        });
    }

    /// The one that counts first.
    fn first(&self) -> Option<RouterId> {
        self.0.keys().next().copied()
    }

    /// How many other routers there are.
    pub(crate) fn count(&self) -> usize {
        self.0.len()
    }
}

impl Other {
    /// What is said of a booking that was never heard of, or is forgotten, is nothing to us.
    fn with(&mut self, number: u64, change: impl FnOnce(&mut Entry)) {
        if let Some(entry) = self.open.get_mut(&number) {
            change(entry);
        }
    }
}

impl Entry {
    fn release(self, now: Instant) {
        self.books.release(self.number, now);
    }
}

/// Tells the other routers what is booked here, and books what they tell, for as long as the plane lives.
pub(crate) async fn attend(core: Arc<Core>, events: Arc<dyn Events>, id: RouterId) {
    let mut heard = events.subscribe(Topic::Bookings);
    let mut beat = tokio::time::interval(HEARTBEAT);
    beat.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut others = Others::default();
    let say = |changes| {
        events.publish(Event { source: Source::Router(id), epoch: Epoch(0), body: EventBody::Bookings(changes) });
    };
    loop {
        tokio::select! {
            biased;
            event = heard.next() => {
                let Some(Event { source, body, .. }) = event else { return };
                let (Source::Router(from), EventBody::Bookings(changes)) = (source, body) else { continue };
                if from != id {
                    others.hear(from, changes, &core.fleet, &core.inflight, Instant::now());
                    core.outbox.set_has_peers(true);
                }
            }
            () = core.outbox.changed() => say(core.outbox.take()),
            _ = beat.tick() => {
                others.forget(Instant::now());
                core.outbox.set_has_peers(others.count() > 0);
                core.metrics.replicas.set(others.count() as i64 + 1);
                core.is_leader.store(others.first().is_none_or(|first| id < first), Ordering::Relaxed);
                say(core.outbox.take());
            }
        }
    }
}
