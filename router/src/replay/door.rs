//! The router's waiting room in a replay: the live one's own rules ([`crate::admission`]), on virtual time.

use crate::admission::settings::Settings;
use crate::admission::{Asked, Entry, Held, LOOK_EVERY, Lane, Room, idle, look};
use crate::door::OUTPUT_TOKENS;
use crate::fleet::Roster;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;
use worker::engine::Priority;
use worker::plane::WorkerId;

/// The door, and who waits behind it.
pub(super) struct Door {
    limits: Settings,
    room: Room,
    /// By number: the requests that wait.
    waiting: HashMap<u64, u32>,
    /// When the first token is too late, from the arrival on.
    deadline: Option<Duration>,
    looked: Option<Instant>,
    model: Arc<str>,
}

/// What a request brings to the door.
pub(super) struct Bid {
    pub(super) request: u32,
    pub(super) arrived: Instant,
    pub(super) tokens: u64,
    /// Where it was placed, and what was booked there.
    pub(super) worker: WorkerId,
    pub(super) held: Held,
    /// What its prompt takes there.
    pub(super) takes: Duration,
}

/// What a request is told.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Told {
    /// It goes to its worker, and runs under this number until it leaves.
    Go(u32, u64),
    /// It is to be placed anew, and keeps its number.
    Again(u32, u64),
    /// It is refused.
    No(u32),
}

impl Door {
    pub(super) fn new(deadline: Option<Duration>, model: &str) -> Self {
        let limits = Settings::default();
        Self { limits, room: Room::default(), waiting: HashMap::new(), deadline, looked: None, model: model.into() }
    }

    /// A request comes. Nothing is told to one that waits.
    pub(super) fn enter(&mut self, bid: &Bid, roster: &Roster, now: Instant) -> Vec<Told> {
        let asked = self.asked(bid, now);
        let open = look(roster, &self.room, asked.lane, Some(asked.held), now).ok();
        match self.room.enter(&self.limits, asked, open, now) {
            Entry::Straight(number) => vec![Told::Go(bid.request, number)],
            Entry::Refused(_) => vec![Told::No(bid.request)],
            Entry::Waits { number, displaced } => {
                self.waiting.insert(number, bid.request);
                displaced.into_iter().filter_map(|number| Some(Told::No(self.waiting.remove(&number)?))).collect()
            }
        }
    }

    /// One that was to be placed anew is back.
    pub(super) fn again(&mut self, number: u64, bid: &Bid, now: Instant) {
        let asked = self.asked(bid, now);
        self.room.again(number, asked, now);
        self.waiting.insert(number, bid.request);
    }

    /// Something changed: whose turn is it, who has waited too long, and who could go elsewhere.
    pub(super) fn round(&mut self, roster: &Roster, now: Instant) -> Vec<Told> {
        if self.room.is_empty() {
            return Vec::new();
        }
        let tired = Duration::from_secs_f64(self.limits.wait_seconds_max);
        let late = self
            .room
            .some(usize::MAX, |asked| asked.latest.is_some_and(|latest| latest <= now) || asked.placed + tired <= now);
        let mut told: Vec<Told> = late.into_iter().filter_map(|number| self.leave(number).map(Told::No)).collect();
        let mut known = HashMap::new();
        while let Some(number) = self.room.turn(&self.limits, now, |room, lane| {
            *known.entry(lane).or_insert_with(|| look(roster, room, lane, None, now).ok())
        }) {
            known.clear();
            told.extend(self.waiting.remove(&number).map(|request| Told::Go(request, number)));
        }
        if self.looked.is_none_or(|at| now >= at + LOOK_EVERY) {
            self.looked = Some(now);
            for number in self.room.some(idle(roster, &self.model, now), |asked| asked.placed + LOOK_EVERY <= now) {
                self.room.recall(number);
                told.extend(self.waiting.remove(&number).map(|request| Told::Again(request, number)));
            }
        }
        told
    }

    /// A request has ended, or waits no longer. Which it was, if it waited.
    pub(super) fn leave(&mut self, number: u64) -> Option<u32> {
        self.room.leave(number);
        self.waiting.remove(&number)
    }

    fn asked(&self, bid: &Bid, now: Instant) -> Asked {
        let deadline = self.deadline.map(|deadline| bid.arrived + deadline);
        Asked {
            model: self.model.clone(),
            tenant: "".into(),
            priority: Priority::Normal,
            latest: deadline.map(|deadline| deadline.checked_sub(bid.takes).unwrap_or(deadline)),
            tokens: bid.tokens,
            charge: bid.held.tokens + OUTPUT_TOKENS,
            lane: Lane { decode: bid.worker, prefill: None },
            held: [bid.held, Held::default()],
            placed: now,
        }
    }
}
