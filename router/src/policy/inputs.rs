//! What a decision sees of everybody who serves a model: what each worker holds of the prompt, and how busy it is.
//!
//! One look, before anybody is weighed: what changes in the books after it is for the next decision.

use crate::booking::InflightPrefixes;
use crate::fleet::{Seat, Serving};
use crate::index::{Index, Overlap, WorkerOverlap};
use crate::load::{Desk, Desks};
use kvbm::{ChainKey, Domain, SequenceHash};
use std::cell::RefCell;
use std::sync::MutexGuard;
use tokio::time::Instant;
use worker::engine::ModelCard;
use worker::plane::WorkerId;

/// Whether a worker is to be considered.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Fit {
    /// As any other.
    Well,
    /// When nobody else is there.
    Avoided,
    /// Not at all: the prompt is too long for it, or was there already.
    Out,
}

/// Everybody, as one prompt sees them.
pub(crate) struct Survey<'a> {
    serving: &'a Serving,
    overlaps: &'a Overlaps,
    tokens: usize,
    tried: &'a [WorkerId],
    desks: MutexGuard<'a, Desks>,
}

impl<'a> Survey<'a> {
    /// Looks at everybody. `tokens`: of the prompt; `tried`: who had it already.
    pub(crate) fn new(
        serving: &'a Serving,
        overlaps: &'a Overlaps,
        tokens: usize,
        tried: &'a [WorkerId],
        now: Instant,
    ) -> Self {
        Self { serving, overlaps, tokens, tried, desks: serving.desks(now.into()) }
    }

    pub(crate) fn serving(&self) -> &'a Serving {
        self.serving
    }

    /// What is known of each, by seat.
    #[inline]
    pub(crate) fn desks(&self) -> &[Desk] {
        self.desks.all()
    }

    /// What anybody holds of the prompt, named in one way: each thing once.
    pub(crate) fn kinds(&self, way: usize) -> &[WorkerOverlap] {
        self.overlaps.kinds(way)
    }

    /// Which of it the worker in a seat holds, by its place among them.
    #[inline]
    pub(crate) fn kind(&self, seat: &Seat) -> usize {
        self.overlaps.kind(seat.way, seat.slot)
    }

    /// Whether it is to be considered.
    #[inline]
    pub(crate) fn fit(&self, seat: &Seat, desk: &Desk) -> Fit {
        if self.tokens >= seat.context || self.tried.contains(&seat.id) {
            Fit::Out
        } else if desk.avoided {
            Fit::Avoided
        } else {
            Fit::Well
        }
    }

    /// Prompts that wait at a worker, on average.
    pub(crate) fn prompts_typical(&self) -> f64 {
        self.desks.prompts_typical()
    }
}

/// One prompt's names and overlap, for each way in which the workers of a model name blocks.
pub(crate) struct Overlaps(Vec<Way>);

/// One way to name blocks.
struct Way {
    block_size: usize,
    names: Vec<SequenceHash>,
    overlap: Overlap,
}

thread_local! {
    /// Answers of the index that were read, and have room for the next.
    static SPARE: RefCell<Vec<Overlap>> = const { RefCell::new(Vec::new()) };
}

/// Decisions of one thread that look at several ways, or at each other.
const SPARES: usize = 4;

impl Way {
    fn new(block_size: usize, names: Vec<SequenceHash>, index: &Index) -> Self {
        let mut overlap = SPARE.with_borrow_mut(Vec::pop).unwrap_or_default();
        index.overlap_into(&names, &mut overlap);
        Self { block_size, names, overlap }
    }
}

impl Drop for Way {
    fn drop(&mut self) {
        let overlap = std::mem::take(&mut self.overlap);
        SPARE.with_borrow_mut(|spare| {
            if spare.len() < SPARES {
                spare.push(overlap);
            }
        });
    }
}

impl Overlaps {
    /// Names a prompt's blocks, and asks the index for them.
    pub(crate) fn of(tokens: &[u32], domain: &Domain, serving: &Serving, index: &Index) -> Self {
        let way = |card: &std::sync::Arc<ModelCard>| {
            let full = cacheable(tokens.len() as u64, card.block_size as u64) as usize;
            let cached = &tokens[..full * card.block_size];
            let names = ChainKey::root(domain, &card.identity, None).hashes(cached, card.block_size);
            Way::new(card.block_size, names, index)
        };
        Self(serving.ways().iter().map(way).collect())
    }

    /// The only way in which blocks are named.
    pub(crate) fn only(block_size: usize, names: Vec<SequenceHash>, index: &Index) -> Self {
        Self(vec![Way::new(block_size, names, index)])
    }

    /// Adds what requests under way have promised.
    pub(crate) fn extend(&mut self, promises: &InflightPrefixes) {
        self.0.iter_mut().for_each(|way| promises.extend(&mut way.overlap, &way.names, way.block_size));
    }

    /// The prompt's blocks, named in a way.
    pub(crate) fn names(&self, way: u32) -> &[SequenceHash] {
        self.0.get(way as usize).map_or(&[], |way| &way.names)
    }

    /// What anybody holds of the prompt, named in one way: each thing once.
    pub(crate) fn kinds(&self, way: usize) -> &[WorkerOverlap] {
        self.0.get(way).map_or(&[], |way| way.overlap.distinct())
    }

    /// Which of it the worker at a slot holds.
    #[inline]
    pub(crate) fn kind(&self, way: u32, slot: crate::index::SourceId) -> usize {
        self.0.get(way as usize).map_or(0, |way| way.overlap.distinct_index(slot))
    }

    /// What stands at a slot of a prompt.
    #[inline]
    pub(crate) fn held(&self, way: u32, slot: crate::index::SourceId) -> WorkerOverlap {
        self.0.get(way as usize).map_or_else(WorkerOverlap::default, |way| way.overlap.at(slot))
    }
}

/// Full blocks of a prompt that a cache can spare: the last token is always computed, for its logits.
pub(crate) fn cacheable(tokens: u64, block_size: u64) -> u64 {
    tokens.saturating_sub(1) / block_size
}
