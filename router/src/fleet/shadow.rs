//! What is known of a worker beside its events, which has it known by what was sent to it when its events say too little.
//!
//! What a worker announces stays in the index under its name, believed or not. What was sent to one that is not believed is
//! indexed beside it under another name, its *shadow*, whose place in the index decisions then look at.

use super::event_accuracy::{Mode, Reason, Trust};
use super::sent_blocks::{BLOCKS, Sent};
use crate::index::Index;
use kvbm::{BlockEvent, Level, Run, SequenceHash};
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

/// Under which name the index keeps what was sent to a worker. Nobody else has it: workers' ids are small, or drawn at random.
pub(crate) fn shadow(worker: WorkerId) -> WorkerId {
    WorkerId(!worker.0)
}

impl Ledger {
    /// Whether the worker has said nothing of its blocks yet.
    pub(crate) fn never_announced(&self) -> bool {
        self.lock().trust.never_announced()
    }

    /// A prompt that was placed at `placed` has been computed, with blocks among it that the worker had not announced.
    pub(crate) fn computed(&self, placed: Instant) {
        self.lock().trust.computed(placed, Instant::now());
    }

    /// These blocks were sent to the worker, which has room for so many; 0 when unknown.
    pub(crate) fn sent(&self, index: &Index, worker: WorkerId, names: &[SequenceHash], room: usize) {
        // Held to the end, so that the index hears of blocks in the order in which they were noted.
        let mut state = self.lock();
        let gone = state.sent.note(names, if room == 0 { BLOCKS } else { room }, Instant::now());
        // Nothing comes of it before the shadow is there.
        let source = Source::Worker(shadow(worker));
        index.apply(source, &BlockEvent::Stored { level: Level::G1, parent: None, blocks: names.to_vec() });
        forget(index, source, gone);
    }

    /// The worker had announced so many tokens of a prompt, and found so many.
    pub(crate) fn answered(&self, announced: u64, found: u64, block_size: u64) {
        self.lock().trust.answered(announced, found, block_size);
    }

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
        let run = |name| Run { level: Level::G1, parent: None, blocks: vec![name] };
        let runs: Vec<Run> = self.lock().sent.blocks().map(run).collect();
        index.replace(Source::Worker(shadow(worker)), &runs);
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
