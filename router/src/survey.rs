//! One look at everybody who serves a model, taken for each decision: what each worker holds of the prompt, and how busy it
//! is. The figures are copied onto desks that all decisions use in turn, so none allocates for each worker; whatever follows
//! the look is pure.

use crate::fleet::{Seat, Serving};
use crate::index::{Held, Index, Overlap};
use crate::load::{Glance, Moment, Spread, Standing};
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

/// The desks of all seats, in their order.
#[derive(Default)]
pub(crate) struct Survey {
    desks: Vec<Desk>,
    prompts: u64,
}

impl Survey {
    /// Looks at everybody. `tokens`: of the prompt; `tried`: who had it already.
    pub(crate) fn take(
        &mut self,
        serving: &Serving,
        overlaps: &Overlaps,
        tokens: usize,
        tried: &[WorkerId],
        now: Instant,
    ) {
        self.desks.clear();
        let (mut prompts, mut spread, now) = (0, Spread::default(), Moment::from(now));
        let look = |seat: &Seat| {
            let Glance { standing, known, avoided, chosen } = seat.books.glance(now);
            prompts += u64::from(standing.prompts);
            spread.add(known);
            let fit = if tokens >= seat.context || tried.contains(&seat.id) {
                Fit::Out
            } else if avoided {
                Fit::Avoided
            } else {
                Fit::Well
            };
            Desk { held: overlaps.held(seat.way, seat.slot), standing, chosen, fit }
        };
        self.desks.extend(serving.seats().iter().map(look));
        self.prompts = prompts;
        spread.level(&mut self.desks, |desk| &mut desk.standing.speeds);
    }

    pub(crate) fn desks(&self) -> &[Desk] {
        &self.desks
    }

    /// Prompts that wait at a worker, on average.
    pub(crate) fn prompts_typical(&self) -> f64 {
        self.prompts as f64 / self.desks.len().max(1) as f64
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
