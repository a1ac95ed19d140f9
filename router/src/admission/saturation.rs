//! Whether a worker has so much work that a new request had better wait in the router. Pure.
//!
//! A request in a worker's own queue can be neither overtaken nor rerouted, a request in the router can. So a worker
//! gets just enough work never to run out of it.

use crate::load::{Demand, ItlTarget, LoadStats, prefill_speed};
use std::time::Duration;
use worker::plane::Role;

/// What a worker has too much of.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Saturation {
    /// Prompt tokens to compute.
    Queue,
    /// Sequences, compared with its batch.
    Batch,
    /// Blocks, compared with its memory.
    Memory,
    /// Sequences, compared with those that it decodes within the target of the time between tokens.
    Itl,
}

/// What a worker does for a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Stage {
    /// Prefill and decode.
    Whole,
    /// Prefill for another worker.
    Prefill,
    /// Decode from blocks that a prefill worker computed.
    Decode,
}

/// A route with capacity.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Opening {
    /// Time that the worker needs for the prompts in its queue.
    pub(crate) queue_time: Duration,
    /// Whether it also takes requests that can no longer meet their target ([`takes_late`]).
    pub(crate) takes_late: bool,
}

/// Seconds of prefill in a worker's queue beyond which it gets no more. A hundred times the interval of load reports,
/// so that it does not run out of work however wrong the estimate; and no more than an urgent request can bear,
/// because it cannot overtake them.
const MAX_QUEUED_PREFILL_SECONDS: f64 = 2.0;
/// The same for a prefill worker. Its queue is estimated better because it does nothing else, and all requests that
/// need one share it.
const MAX_QUEUED_SECONDS_PREFILL_WORKER: f64 = 1.0;
/// Queue of a worker below which it gets a late request. Five times the shortest interval of load reports, so that the
/// worker does not run out of work before the router learns of it.
const LATE_QUEUE_TIME: Duration = Duration::from_millis(100);
/// Late requests are sent to workers with less than half of their memory in use. Most are late because they are long,
/// and each keeps its blocks until its last token, while requests in time wait for free blocks. With half, those that
/// arrive during its stay have as much as it and all before it.
const LATE_MEMORY_SHARE: f64 = 0.5;
/// Sequences beyond a worker's batch: an eighth of the batch and at least four. They replace sequences that end before
/// a load report can say so.
const SPARE_SEQUENCES_DIVISOR: u64 = 8;
const SPARE_SEQUENCES_MIN: u64 = 4;

impl Saturation {
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Queue => "queue",
            Self::Batch => "batch",
            Self::Memory => "memory",
            Self::Itl => "itl",
        }
    }
}

/// What a worker has too much of for another request, if anything. `batch`: maximum number of sequences in its batch,
/// 0 when unknown; `not_sent`: reservations on it of requests that were not sent; `itl`: target of the time between
/// tokens, if there is one.
pub(crate) fn saturation(
    role: Role,
    stats: &LoadStats,
    batch: u64,
    not_sent: Demand,
    stage: Stage,
    itl: Option<ItlTarget>,
) -> Option<Saturation> {
    let sequences = u64::from(stats.sequences).saturating_sub(not_sent.sequences);
    let blocks = u64::from(stats.peak_blocks()).saturating_sub(not_sent.blocks);
    let max_seconds =
        if role == Role::Prefill { MAX_QUEUED_SECONDS_PREFILL_WORKER } else { MAX_QUEUED_PREFILL_SECONDS };
    if stage != Stage::Decode && queue_time(stats, not_sent).as_secs_f64() >= max_seconds {
        return Some(Saturation::Queue);
    }
    // An idle worker takes any request.
    if stage == Stage::Prefill || sequences == 0 {
        return None;
    }
    if batch > 0 && sequences >= batch + (batch / SPARE_SEQUENCES_DIVISOR).max(SPARE_SEQUENCES_MIN) {
        return Some(Saturation::Batch);
    }
    if stats.total_blocks > 0 && blocks >= u64::from(stats.total_blocks) {
        return Some(Saturation::Memory);
    }
    let itl = if stage == Stage::Decode { itl.map(ItlTarget::without_prompts) } else { itl };
    itl.is_some_and(|itl| itl.is_missed(stats, batch, not_sent, None)).then_some(Saturation::Itl)
}

/// Whether a worker gets a request that can no longer meet its target: only if it has capacity to spare, because
/// requests in time that come later have to wait for its prefill and its blocks.
pub(crate) fn takes_late(stats: &LoadStats, not_sent: Demand, queue_time: Duration) -> bool {
    let blocks = u64::from(stats.active_blocks).saturating_sub(not_sent.blocks) as f64;
    let is_roomy = stats.total_blocks == 0 || blocks <= f64::from(stats.total_blocks) * LATE_MEMORY_SHARE;
    let is_idle = u64::from(stats.sequences) <= not_sent.sequences;
    queue_time <= LATE_QUEUE_TIME && (is_roomy || is_idle)
}

/// Time that a worker needs for the prompts in its queue.
pub(crate) fn queue_time(stats: &LoadStats, not_sent: Demand) -> Duration {
    let tokens = u64::from(stats.waiting_tokens).saturating_sub(not_sent.prefill_tokens);
    Duration::from_secs_f64((tokens as f64 / prefill_speed(&stats.speeds)).clamp(0.0, 1e6))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load::{Measured, Speeds, StepTime};

    fn stats(waiting_tokens: u32, sequences: u32, active_blocks: u32) -> LoadStats {
        let speeds = Speeds { prefill: Measured::of(1000.0), ..Speeds::default() };
        LoadStats { waiting_tokens, sequences, active_blocks, total_blocks: 100, speeds, ..LoadStats::default() }
    }

    #[test]
    fn worker_is_saturated_by_queue_batch_or_memory() {
        let is = |stats: LoadStats, stage| saturation(Role::Both, &stats, 16, Demand::default(), stage, None);
        assert_eq!(is(stats(1999, 1, 0), Stage::Whole), None);
        assert_eq!(is(stats(2000, 1, 0), Stage::Whole), Some(Saturation::Queue));
        assert_eq!(is(stats(2000, 1, 0), Stage::Decode), None, "its prompt is computed on another worker");
        assert_eq!(is(stats(0, 19, 0), Stage::Whole), None, "a few beyond the batch");
        assert_eq!(is(stats(0, 20, 0), Stage::Decode), Some(Saturation::Batch));
        assert_eq!(is(stats(0, 1, 100), Stage::Whole), Some(Saturation::Memory));
        assert_eq!(is(stats(0, 0, 100), Stage::Whole), None, "an idle worker takes any request");
        let unknown = saturation(Role::Both, &stats(0, 999, 0), 0, Demand::default(), Stage::Whole, None);
        assert_eq!(unknown, None);
        let prefill =
            |tokens| saturation(Role::Prefill, &stats(tokens, 0, 0), 0, Demand::default(), Stage::Prefill, None);
        assert_eq!((prefill(999), prefill(1000)), (None, Some(Saturation::Queue)));
    }

    #[test]
    fn worker_is_saturated_by_the_target_between_tokens() {
        // Of 18 ms, 8 are left for sequences; each takes one, and one more where its prompt is computed there, too.
        let step = StepTime { base: 0.01, per_sequence: 0.001, per_context_token: 0.0 };
        let itl = Some(ItlTarget::new(0.020_001, step, 0.1, 100.0));
        let is = |sequences, stage| saturation(Role::Both, &stats(0, sequences, 0), 16, Demand::default(), stage, itl);
        assert_eq!((is(3, Stage::Whole), is(4, Stage::Whole)), (None, Some(Saturation::Itl)));
        assert_eq!((is(7, Stage::Decode), is(8, Stage::Decode)), (None, Some(Saturation::Itl)));
        assert_eq!(is(8, Stage::Prefill), None, "it decodes elsewhere");
    }

    #[test]
    fn late_requests_go_to_workers_with_capacity_to_spare() {
        let is = |tokens, sequences, blocks| {
            let stats = stats(tokens, sequences, blocks);
            takes_late(&stats, Demand::default(), queue_time(&stats, Demand::default()))
        };
        assert!(is(100, 5, 50) && !is(101, 5, 50), "a short queue");
        assert!(!is(0, 5, 51), "half of the memory");
        assert!(is(0, 0, 51), "an idle worker");
    }

    #[test]
    fn queued_requests_do_not_saturate_their_worker() {
        let not_sent = Demand { prefill_tokens: 5000, sequences: 30, blocks: 90, prompts: 1, ..Demand::default() };
        let is = |tokens| saturation(Role::Both, &stats(tokens, 31, 100), 16, not_sent, Stage::Whole, None);
        assert_eq!((is(5500), is(7000)), (None, Some(Saturation::Queue)));
    }
}
