//! What a decision sees of everybody who serves a model: what each worker holds of the prompt, and how busy it is.
//!
//! A glance over all of them tells what is usual; then each is looked at when it is weighed, and nothing is copied but that. Books
//! that change meanwhile are seen as they are then: both was true within microseconds of each other, and it is estimates.

use crate::fleet::{Seat, Serving};
use crate::index::{Held, Index, Overlap};
use crate::load::{Glance, Moment, Spread, Standing, Typical};
use crate::promise::Promises;
use kvbm::{ChainKey, Domain, SequenceHash};
use tokio::time::Instant;
use worker::engine::ModelCard;
use worker::plane::WorkerId;

/// What is known of the worker in a seat.
pub(crate) struct Desk {
    /// What it holds of the prompt.
    pub(crate) held: Held,
    /// How busy it is, with means of the others where it has measured nothing.
    pub(crate) standing: Standing,
    /// When it was last chosen, in choices; 0 is never.
    pub(crate) chosen: u64,
    pub(crate) fit: Fit,
}

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
    now: Moment,
    /// Of all of them.
    prompts: u64,
    typical: Typical,
}

impl<'a> Survey<'a> {
    /// Glances over everybody. `tokens`: of the prompt; `tried`: who had it already.
    pub(crate) fn new(
        serving: &'a Serving,
        overlaps: &'a Overlaps,
        tokens: usize,
        tried: &'a [WorkerId],
        now: Instant,
    ) -> Self {
        let (mut prompts, mut spread, now) = (0, Spread::default(), Moment::from(now));
        for seat in serving.seats() {
            let (waiting, known) = seat.books.hint(now);
            prompts += u64::from(waiting);
            spread.add(known);
        }
        let measured = || serving.seats().iter().map(|seat| seat.books.standing(now).speeds);
        let typical = serving.typical(|typical| typical.keep_up(spread, now, measured));
        Self { serving, overlaps, tokens, tried, now, prompts, typical }
    }

    pub(crate) fn serving(&self) -> &'a Serving {
        self.serving
    }

    /// Looks at one.
    #[expect(clippy::inline_always, reason = "a thousand times per decision, and every figure stays in a register")]
    #[inline(always)]
    pub(crate) fn desk(&self, seat: &Seat) -> Desk {
        let Glance { mut standing, known, avoided, chosen } = seat.books.glance(self.now);
        self.typical.fill(known, &mut standing.speeds);
        let fit = if self.tokens >= seat.context || self.tried.contains(&seat.id) {
            Fit::Out
        } else if avoided {
            Fit::Avoided
        } else {
            Fit::Well
        };
        Desk { held: self.overlaps.held(seat.way, seat.slot), standing, chosen, fit }
    }

    /// Prompts that wait at a worker, on average.
    pub(crate) fn prompts_typical(&self) -> f64 {
        self.prompts as f64 / self.serving.seats().len().max(1) as f64
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

impl Overlaps {
    /// Names a prompt's blocks, and asks the index for them.
    pub(crate) fn of(tokens: &[u32], domain: &Domain, serving: &Serving, index: &Index) -> Self {
        let way = |card: &std::sync::Arc<ModelCard>| {
            let full = cacheable(tokens.len() as u64, card.block_size as u64) as usize;
            let cached = &tokens[..full * card.block_size];
            let names = ChainKey::root(domain, &card.identity, None).names(cached, card.block_size);
            Way { block_size: card.block_size, overlap: index.overlap(&names), names }
        };
        Self(serving.ways().iter().map(way).collect())
    }

    /// The only way in which blocks are named.
    pub(crate) fn only(block_size: usize, names: Vec<SequenceHash>, index: &Index) -> Self {
        Self(vec![Way { block_size, overlap: index.overlap(&names), names }])
    }

    /// Adds what requests under way have promised.
    pub(crate) fn extend(&mut self, promises: &Promises) {
        self.0.iter_mut().for_each(|way| promises.extend(&mut way.overlap, &way.names, way.block_size));
    }

    /// The prompt's blocks, named in a way.
    pub(crate) fn names(&self, way: u32) -> &[SequenceHash] {
        self.0.get(way as usize).map_or(&[], |way| &way.names)
    }

    /// What stands at a slot of a prompt.
    #[inline]
    pub(crate) fn held(&self, way: u32, slot: crate::index::Slot) -> Held {
        self.0.get(way as usize).map_or_else(Held::default, |way| way.overlap.at(slot))
    }
}

/// Full blocks of a prompt that a cache can spare: the last token is always computed, for its logits.
pub(crate) fn cacheable(tokens: u64, block_size: u64) -> u64 {
    tokens.saturating_sub(1) / block_size
}
