//! The desk before the waiting room: what each request is told, and when. Pure: who is there and the time are passed in, and
//! nothing is sent. The live door and a replay keep the same one.
//!
//! Those who wait for a worker that has left are placed anew, and so are some for whom that may pay: while another worker
//! idles, or takes requests soon enough for a deadline that cannot be met where they wait. Requests that will not be served
//! within the wait limit, by the drain rate as it is measured by then, are refused at the same moments.

use super::queue::{Entry, Refusal, Room};
use super::saturation::{Full, Part, full, queue};
use super::settings::Settings;
use super::ticket::{Asked, Lane};
use crate::fleet::{Member, Roster};
use crate::load::Amount;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;

/// Who waits, and when it was last looked at who could go elsewhere, and who waits for nothing.
#[derive(Default)]
pub(crate) struct Desk {
    pub(super) room: Room,
    looked: Option<Instant>,
}

/// What is to be seen from the desk.
#[derive(Clone, Copy)]
pub(crate) struct Sight<'a> {
    pub(crate) limits: &'a Settings,
    pub(crate) roster: &'a Roster,
    pub(crate) now: Instant,
}

/// A request was let in.
pub(crate) struct Entrance {
    /// What it is called from now on.
    pub(crate) number: u64,
    /// What it waits for; it goes at once without.
    pub(crate) waits: Option<&'static str>,
    /// Those who had to go for it.
    pub(crate) displaced: Vec<(u64, Told)>,
}

/// What a request that waits is told.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Told {
    Go,
    /// Be placed anew.
    Again,
    No(Refusal),
}

/// Time opens doors, too: a worker falls silent, a breaker closes. Nobody is told of that, and it is not urgent.
pub(crate) const LOOK_EVERY: Duration = Duration::from_millis(250);

impl Desk {
    /// A request comes.
    pub(crate) fn enter(&mut self, sight: Sight<'_>, asked: &Asked) -> Result<Entrance, Refusal> {
        let Sight { limits, roster, now } = sight;
        let state = look(roster, &self.room, asked.lane, Some(asked.held), now);
        let waits = match state {
            Err(full) => full.name(),
            Ok(_) if self.room.is_empty() => "tenant",
            Ok(_) => "behind_others",
        };
        match self.room.enter(limits, asked.clone(), state.ok(), now) {
            Entry::Straight(number) => Ok(Entrance { number, waits: None, displaced: Vec::new() }),
            Entry::Waits { number, displaced } => {
                let told = |(number, asked): (_, Asked)| {
                    (number, Told::No(Refusal::Displaced(self.room.retry_after(limits, &asked, now))))
                };
                let displaced = displaced.into_iter().map(told).collect();
                Ok(Entrance { number, waits: Some(waits), displaced })
            }
            Entry::Refused(refusal) => Err(refusal),
        }
    }

    /// Admits a request without queueing it: another choice of a prompt that was admitted before.
    pub(super) fn admit_now(&mut self, asked: &Asked) -> u64 {
        self.room.admit_now(asked)
    }

    /// One that was told to be placed anew is back.
    pub(crate) fn again(&mut self, limits: &Settings, number: u64, asked: Asked) {
        self.room.put(limits, number, asked);
    }

    /// Something changed, or time has passed: what those who wait are told, in this order.
    pub(crate) fn round(&mut self, sight: Sight<'_>) -> Vec<(u64, Told)> {
        let Sight { limits, roster, now } = sight;
        let mut told: Vec<(u64, Told)> = Vec::new();
        if self.room.is_empty() {
            return told;
        }
        while let Some((number, asked)) = self.room.overdue(now) {
            let late = asked.latest.is_some_and(|latest| latest < asked.tired);
            let why = if late { Refusal::Late } else { Refusal::InVain(self.room.retry_after(limits, &asked, now)) };
            told.push((number, Told::No(why)));
        }
        let is_due = self.looked.is_none_or(|at| at + LOOK_EVERY <= now);
        if is_due {
            self.looked = Some(now);
            for model in self.room.models() {
                let sequences = |member: &Arc<Member>| {
                    u64::from(member.books.standing(now).sequences).saturating_sub(held(&self.room, member).sequences)
                };
                let running = of(roster, &model).map(sequences).sum();
                self.room.running(&model, running);
            }
            for (number, asked) in self.room.hopeless(now).into_iter().rev() {
                let after = self.room.retry_after(limits, &asked, now);
                told.push((number, Told::No(Refusal::PredictedTimeoutQueued(after))));
            }
        }
        self.move_on(roster, now, &mut told);
        let mut known = HashMap::new();
        while let Some(number) = self.room.turn(limits, now, |room, lane| {
            *known.entry(lane).or_insert_with(|| look(roster, room, lane, None, now).ok())
        }) {
            known.clear();
            told.push((number, Told::Go));
        }
        if is_due {
            self.stir(roster, now, &mut told);
        }
        told
    }

    /// A request goes, wherever it is. Whether it waited.
    pub(crate) fn leave(&mut self, number: u64) -> bool {
        self.room.leave(number).is_some()
    }

    /// Has some of those who wait placed anew.
    fn recall(&mut self, these: Vec<u64>, told: &mut Vec<(u64, Told)>) {
        for number in these {
            self.room.recall(number);
            told.push((number, Told::Again));
        }
    }

    /// Those who wait for a worker that has left, is cordoned, or is better left alone, are placed anew; in the second case not at once
    /// again: it may be the only one.
    fn move_on(&mut self, roster: &Roster, now: Instant, told: &mut Vec<(u64, Told)>) {
        let gone = |id| roster.get(id).is_none() || roster.is_cordoned(id);
        let avoided = |id| roster.get(id).is_some_and(|member| member.avoided(now));
        if self.room.awaited().any(|id| gone(id) || avoided(id)) {
            let at = |lane: &Lane, of: &dyn Fn(_) -> bool| of(lane.decode) || lane.prefill.is_some_and(of);
            let misplaced = |asked: &Asked| {
                at(&asked.lane, &gone) || (asked.placed + LOOK_EVERY <= now && at(&asked.lane, &avoided))
            };
            self.recall(self.room.some(usize::MAX, misplaced), told);
        }
    }

    /// While a worker has nothing to do, as many as it could soon take are placed anew: perhaps with it. And while workers take
    /// requests, as many of those who would be in time with one of them, and are too late where they wait.
    fn stir(&mut self, roster: &Roster, now: Instant, told: &mut Vec<(u64, Told)>) {
        for model in self.room.models() {
            let stale = |asked: &Asked| asked.model == model && asked.placed + LOOK_EVERY <= now;
            self.recall(self.room.some(idle(roster, &model, now), stale), told);
            let room = &self.room;
            let queue = |member: &Arc<Member>| {
                let lane = Lane { decode: member.id(), prefill: None };
                look(roster, room, lane, None, now).ok().filter(|_| member.decodes() && !member.avoided(now))
            };
            let open: Vec<Duration> = of(roster, &model).filter_map(queue).collect();
            let Some(quickest) = open.iter().min() else { continue };
            let late = |asked: &Asked| {
                let by = |latest| now + *quickest <= latest && latest < now + wait(roster, room, asked.lane, now);
                stale(asked) && asked.latest.is_some_and(by)
            };
            self.recall(room.some(open.len(), late), told);
        }
    }
}

/// Workers of a model that take new requests.
fn of<'a>(roster: &'a Roster, model: &'a str) -> impl Iterator<Item = &'a Arc<Member>> {
    roster.members().filter(move |member| *member.instance.model.id == *model && !roster.is_cordoned(member.id()))
}

/// How many workers of a model have nothing to do.
fn idle(roster: &Roster, model: &str, now: Instant) -> usize {
    let idle = |member: &&Arc<Member>| {
        let standing = member.books.standing(now);
        standing.waiting_tokens == 0 && standing.sequences == 0 && !member.avoided(now)
    };
    of(roster, model).filter(idle).count()
}

/// What keeps a lane closed; or how long the queue of an open one takes. `own`: what a request that does not wait yet has booked there itself.
fn look(roster: &Roster, room: &Room, lane: Lane, own: Option<[Amount; 2]>, now: Instant) -> Result<Duration, Full> {
    let own = own.unwrap_or_default();
    let at = |id, own: Amount, part| {
        // Of whom nothing is heard there is no reason to wait for.
        let Some(member) = roster.get(id).filter(|member| !member.books.silent(now)) else { return Ok(Duration::ZERO) };
        let held = held(room, member).plus(own);
        let standing = member.books.standing(now);
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

/// How long the prompts take that are before those who wait for a lane.
fn wait(roster: &Roster, room: &Room, lane: Lane, now: Instant) -> Duration {
    let member = roster.get(lane.prefill.unwrap_or(lane.decode));
    member.map_or(Duration::ZERO, |member| queue(&member.books.standing(now), held(room, member)))
}

/// What waits, here or in another router, is not there yet: two rooms must not keep each other waiting.
fn held(room: &Room, member: &Member) -> Amount {
    room.held(member.id()).plus(member.books.elsewhere())
}
