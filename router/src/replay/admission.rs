//! The router's waiting room in a replay: the live one's own [`Desk`], on virtual time, and who is behind its numbers.

use crate::admission::{Asked, Desk, Settings, Sight, Told};
use crate::fleet::Roster;
use std::collections::HashMap;
use std::time::Duration;
use tokio::time::Instant;

/// The door, and who waits behind it.
pub(super) struct Door {
    limits: Settings,
    desk: Desk,
    /// By number: the requests that wait.
    waiting: HashMap<u64, u32>,
}

/// What a request is told.
#[derive(Clone, Copy)]
pub(super) struct Word {
    pub(super) request: u32,
    /// Its number at the door, if it was let in.
    pub(super) permit: u64,
    pub(super) told: Told,
}

impl Door {
    pub(super) fn new(limits: Settings) -> Self {
        Self { limits, desk: Desk::default(), waiting: HashMap::new() }
    }

    /// For how long a request may wait.
    pub(super) fn patience(&self) -> Duration {
        self.limits.max_queue_time.0
    }

    /// A request comes. One that waits is told nothing.
    pub(super) fn enter(&mut self, request: u32, asked: &Asked, roster: &Roster, now: Instant) -> Vec<Word> {
        let entrance = match self.desk.enter(Sight { limits: &self.limits, roster, now }, asked) {
            Ok(entrance) => entrance,
            Err(refusal) => return vec![Word { request, permit: 0, told: Told::No(refusal) }],
        };
        self.waiting.insert(entrance.number, request);
        let goes = entrance.waits.is_none().then_some((entrance.number, Told::Go));
        self.words(goes.into_iter().chain(entrance.displaced).collect())
    }

    /// One that was to be placed anew is back.
    pub(super) fn again(&mut self, request: u32, permit: u64, asked: Asked) {
        self.desk.again(&self.limits, permit, asked);
        self.waiting.insert(permit, request);
    }

    /// Something changed: what those who wait are told.
    pub(super) fn round(&mut self, roster: &Roster, now: Instant) -> Vec<Word> {
        let told = self.desk.round(Sight { limits: &self.limits, roster, now });
        self.words(told)
    }

    /// A request has ended, or waits no longer.
    pub(super) fn leave(&mut self, permit: u64) {
        self.desk.leave(permit);
    }

    fn words(&mut self, told: Vec<(u64, Told)>) -> Vec<Word> {
        let word = |(permit, told)| Some(Word { request: self.waiting.remove(&permit)?, permit, told });
        told.into_iter().filter_map(word).collect()
    }
}
