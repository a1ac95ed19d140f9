//! Whether a worker has so much to do that a request had better wait in the router: pure.
//!
//! What is on a worker's own queue can be neither overtaken nor moved; what waits in the router can. So a worker gets just
//! as much as it needs never to run dry.

use crate::load::{Amount, Standing, prefill_speed};
use std::time::Duration;
use worker::plane::Phase;

/// What there is too much of.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Full {
    /// Prompts to be computed first.
    Queue,
    /// Sequences for its batch.
    Batch,
    /// Blocks for its memory.
    Memory,
}

/// A worker's part in a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Part {
    /// All of it.
    Whole,
    /// Computing the prompt for another.
    Prefill,
    /// Decoding from blocks that another computed.
    Decode,
}

/// Seconds of prefill that a worker may have before it. A hundred times what passes between reports, so that it does not run
/// dry however wrong the estimate; and no more than an urgent request can bear to wait, which cannot overtake them.
const AHEAD: f64 = 2.0;
/// A prefill worker does nothing else, so its queue is better known, and all who need one share it.
const AHEAD_OF_PREFILL: f64 = 1.0;
/// Sequences beyond a worker's batch, as a share of it, and at least: they take the places of those that end before a report
/// of it can come.
const SPARE: (u64, u64) = (8, 4);

impl Full {
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Queue => "queue",
            Self::Batch => "batch",
            Self::Memory => "memory",
        }
    }
}

/// What a worker has too much of for a new request, if anything. `batch`: sequences that it takes at a time, 0 when unknown;
/// `held`: booked on it and not sent.
pub(crate) fn full(phase: Phase, standing: &Standing, batch: u64, held: Amount, part: Part) -> Option<Full> {
    let sequences = u64::from(standing.sequences).saturating_sub(held.sequences);
    let blocks = u64::from(standing.active_blocks).saturating_sub(held.blocks);
    let ahead = if phase == Phase::Prefill { AHEAD_OF_PREFILL } else { AHEAD };
    if part != Part::Decode && queue(standing, held).as_secs_f64() >= ahead {
        return Some(Full::Queue);
    }
    // Whoever has nothing to do takes what there is.
    if part == Part::Prefill || sequences == 0 {
        return None;
    }
    if batch > 0 && sequences >= batch + (batch / SPARE.0).max(SPARE.1) {
        return Some(Full::Batch);
    }
    (standing.total_blocks > 0 && blocks >= u64::from(standing.total_blocks)).then_some(Full::Memory)
}

/// How long the prompts take that a worker has before it.
pub(crate) fn queue(standing: &Standing, held: Amount) -> Duration {
    let tokens = u64::from(standing.waiting_tokens).saturating_sub(held.prefill_tokens);
    Duration::from_secs_f64((tokens as f64 / prefill_speed(&standing.speeds)).clamp(0.0, 1e6))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load::{Figure, Speeds};

    fn standing(waiting_tokens: u32, sequences: u32, active_blocks: u32) -> Standing {
        let speeds = Speeds { prefill: Figure::of(1000.0), ..Speeds::default() };
        Standing { waiting_tokens, sequences, active_blocks, total_blocks: 100, speeds, ..Standing::default() }
    }

    #[test]
    fn a_worker_is_full_by_its_queue_its_batch_or_its_memory() {
        let is = |standing: Standing, part| full(Phase::Both, &standing, 16, Amount::default(), part);
        assert_eq!(is(standing(1999, 1, 0), Part::Whole), None);
        assert_eq!(is(standing(2000, 1, 0), Part::Whole), Some(Full::Queue));
        assert_eq!(is(standing(2000, 1, 0), Part::Decode), None, "its prompt is computed elsewhere");
        assert_eq!(is(standing(0, 19, 0), Part::Whole), None, "some in spare");
        assert_eq!(is(standing(0, 20, 0), Part::Decode), Some(Full::Batch));
        assert_eq!(is(standing(0, 1, 100), Part::Whole), Some(Full::Memory));
        assert_eq!(is(standing(0, 0, 100), Part::Whole), None, "nobody is there who could make room");
        let unknown = full(Phase::Both, &standing(0, 999, 0), 0, Amount::default(), Part::Whole);
        assert_eq!(unknown, None);
        let prefill = |tokens| full(Phase::Prefill, &standing(tokens, 0, 0), 0, Amount::default(), Part::Prefill);
        assert_eq!((prefill(999), prefill(1000)), (None, Some(Full::Queue)));
    }

    #[test]
    fn what_waits_in_the_router_does_not_keep_itself_waiting() {
        let held = Amount { prefill_tokens: 5000, sequences: 30, blocks: 90, prompts: 1 };
        assert_eq!(full(Phase::Both, &standing(5500, 31, 100), 16, held, Part::Whole), None);
        assert_eq!(full(Phase::Both, &standing(7000, 31, 100), 16, held, Part::Whole), Some(Full::Queue));
    }
}
