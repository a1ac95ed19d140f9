//! Holds what was promised of a worker's cache against what the worker found, and has the worker known by what was sent to it
//! when its events say too little.
//!
//! What a worker announces stays in the index under its name, believed or not. What was sent to one that is not believed is
//! indexed beside it under another name, its *shadow*, whose place in the index decisions then look at.

use crate::decide::{Decision, Row};
use crate::disaggregate::Split;
use crate::fleet::Member;
use crate::index::Index;
use crate::metrics::Metrics;
use crate::policy::Policy;
use crate::router::Core;
use crate::sent::{BLOCKS, Sent};
use crate::survey::Overlaps;
use crate::trust::{Mode, Reason, Trust};
use kvbm::{BlockEvent, Level, SequenceHash};
use std::sync::{Mutex, MutexGuard, PoisonError};
use tokio::time::Instant;
use worker::plane::{Source, WorkerId};

/// What is known of one life of a worker beside its events.
#[derive(Default)]
pub(crate) struct Ledger(Mutex<State>);

#[derive(Default)]
struct State {
    trust: Trust,
    sent: Sent,
}

/// What was expected of a worker when a prompt was placed there.
pub(crate) struct Forecast {
    placed: Instant,
    /// Prompt tokens that should be cached.
    cached: u64,
    /// The same by its own events; `None` when they could not tell: others were about to compute some of it there, or it was to
    /// come from elsewhere.
    announced: Option<u64>,
    /// Prompt tokens in full blocks, and of them those that it had not announced.
    full: u64,
    fresh: u64,
    /// The prompt's blocks, when they are to be noted as sent.
    names: Vec<SequenceHash>,
    /// Seconds that a prompt token takes there.
    token: f64,
    /// Seconds that the next best choice would have cost more, where choices are weighed in seconds.
    spare: f64,
}

/// Under which name the index keeps what was sent to a worker. Nobody else has it: workers' ids are small, or drawn at random.
pub(crate) fn shadow(worker: WorkerId) -> WorkerId {
    WorkerId(!worker.0)
}

impl Forecast {
    /// What a decision expects of a worker in it. To be asked before the request itself is promised.
    pub(crate) fn of(
        core: &Core,
        policy: &Policy,
        decision: &Decision<'_>,
        row: &Row<'_>,
        overlaps: &Overlaps,
    ) -> Self {
        let (member, way, block_size) = (row.member(), row.seat.way, row.prompt.block_size);
        let names = overlaps.names(way);
        let announced = u64::from(overlaps.held(way, member.announced).run()) * block_size;
        let full = names.len() as u64 * block_size;
        let promised = core.promises.made(member.announced, names, block_size as usize);
        let noted = member.mode != Mode::Exact || member.ledger.lock().trust.never_announced();
        let spare = match policy {
            Policy::Composed(_) => f64::INFINITY,
            _ => decision.runner_up - row.cost().total(),
        };
        Self {
            placed: Instant::now(),
            cached: row.cached(),
            announced: (!promised && decision.chosen.split == Split::Together).then_some(announced),
            full,
            fresh: full.saturating_sub(announced),
            names: if noted { names.to_vec() } else { Vec::new() },
            token: row.desk.pace.token,
            spare: spare.max(0.0),
        }
    }

    /// The prompt has been computed there. `found`: tokens that were cached, when the worker says.
    pub(crate) fn computed(&self, core: &Core, member: &Member, found: Option<u64>) {
        let now = Instant::now();
        let mut state = member.ledger.lock();
        // Who found all of it has computed no block.
        if self.fresh > 0 && found.is_none_or(|found| found < self.full) {
            state.trust.computed(self.placed, now);
        }
        if self.names.is_empty() {
            return;
        }
        let room = member.books.standing(now).total_blocks as usize;
        let gone = state.sent.note(&self.names, if room == 0 { BLOCKS } else { room }, now);
        // Nothing comes of it before the shadow is there.
        let source = Source::Worker(shadow(member.id()));
        let blocks = self.names.clone();
        core.index.apply(source, &BlockEvent::Stored { level: Level::G1, parent: None, blocks });
        forget(&core.index, source, gone);
    }

    /// The first of an answer says how many tokens were cached.
    pub(crate) fn compare(&self, metrics: &Metrics, member: &Member, found: u64) {
        let missing = self.cached.saturating_sub(found);
        metrics.predicted_tokens.inc_by(self.cached);
        metrics.actual_tokens.inc_by(found);
        metrics.false_tokens.inc_by(missing);
        metrics.missed_tokens.inc_by(found.saturating_sub(self.cached));
        // Of the time that the missing tokens took, what the next best choice would have saved.
        metrics.regret_seconds.inc_by((missing as f64 * self.token - self.spare).max(0.0));
        if let Some(announced) = self.announced {
            let block_size = member.instance.model.block_size as u64;
            member.ledger.lock().trust.answered(announced, found, block_size);
        }
    }
}

impl Ledger {
    /// An event of the worker came, or a snapshot that tells of some.
    pub(crate) fn announced(&self) {
        self.lock().trust.announced(Instant::now());
    }

    /// How the worker is to be known from now on, when that changes; and what was sent to it too long ago is forgotten.
    pub(crate) fn judge(&self, index: &Index, worker: WorkerId) -> Option<Mode> {
        let (mut state, now) = (self.lock(), Instant::now());
        let gone = state.sent.expire(now);
        forget(index, Source::Worker(shadow(worker)), gone);
        let mode = state.trust.judge(now);
        if mode == Some(Mode::Exact) {
            state.sent = Sent::default();
        }
        mode
    }

    /// Has the index know what was sent to the worker, as its shadow's.
    pub(crate) fn cast(&self, index: &Index, worker: WorkerId) {
        let blocks: Vec<_> = self.lock().sent.blocks().map(|name| (Level::G1, name)).collect();
        index.replace(Source::Worker(shadow(worker)), &blocks);
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing that runs under this lock panics half-way.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The stores that a worker's shadow reaches: where its own events cannot be believed, those of its stores may be why.
pub(crate) fn reach<T>(mode: Mode, stores: &[T]) -> &[T] {
    if mode == Mode::Approximate(Reason::Silent) { stores } else { &[] }
}

fn forget(index: &Index, source: Source, blocks: Vec<SequenceHash>) {
    if !blocks.is_empty() {
        index.apply(source, &BlockEvent::Removed { level: Level::G1, blocks });
    }
}
