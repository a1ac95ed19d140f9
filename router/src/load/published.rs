//! The part of a worker's load that decisions read: written whenever the load changes, read without a lock.
//!
//! A versioned record in the manner of a seqlock, in which readers never retry. **Ordering.** Every field is an atomic
//! of its own, written and read relaxed; then the version is raised with release. A reader stores what it read together
//! with the version that it loaded before with acquire, and reads again when the version has moved on, so it never
//! keeps old values. A reader may see a concurrent write in part, such as the new queue beside the old batch: both were
//! true within a microsecond of each other, the values are estimates, and the next read corrects them. Readers do not
//! wait for writers. Decisions and bookings are serialized by the router's lock: a decision sees every booking before
//! it.

use super::stats::{LOWER_TIERS, LoadStats, Measured, MeasuredMask, Onboard, Speeds};
use super::sync::{AtomicU32, AtomicU64, Ordering};
use super::timestamp::Timestamp;

/// The published values, alone on three cache lines. Two 32-bit values share a word.
#[derive(Default)]
#[repr(align(64))]
pub(super) struct PublishedLoad {
    /// Time of the latest report, as a [`Timestamp`]; 0 before the first.
    reported: AtomicU64,
    /// End of the ejection, as a [`Timestamp`]; 0 when the worker is not ejected.
    ejected_until: AtomicU64,
    /// Number of the choice for its model that last chose the worker; 0 means never.
    chosen: AtomicU64,
    /// Mask of the speeds that the worker has measured.
    measured: AtomicU32,
    /// Incremented after every change.
    version: AtomicU32,
    /// Queue and prompts, sequences and blocks, context and waiting time, with a fresh and with a stale report.
    fresh: [AtomicU64; 3],
    stale: [AtomicU64; 3],
    /// Values that do not depend on the age of the report.
    common: [AtomicU64; 5],
    /// Latency and bandwidth of onboarding, by source tier.
    onboard: [AtomicU64; LOWER_TIERS],
    /// Blocks queued for onboarding, by source tier, and in the half of the last word that is left the lost share.
    queued: [AtomicU64; LOWER_TIERS.div_ceil(2)],
}

/// The lost share takes the place of a number of blocks.
const _: () = assert!(LOWER_TIERS % 2 == 1);

impl PublishedLoad {
    /// Publishes the load. `fresh` and `stale` differ in their counts only.
    pub(super) fn publish(&self, reported: Option<Timestamp>, fresh: &LoadStats, stale: &LoadStats) {
        self.reported.store(reported.map_or(0, Timestamp::bits), Ordering::Relaxed);
        self.measured.store(fresh.speeds.measured().bits(), Ordering::Relaxed);
        for (to, from) in [(&self.fresh, fresh), (&self.stale, stale)] {
            let LoadStats { waiting_tokens, prompts, sequences, active_blocks, context_tokens, .. } = *from;
            let context = (context_tokens, from.waiting_seconds.bits());
            store(to, [(waiting_tokens, prompts), (sequences, active_blocks), context]);
        }
        let LoadStats { total_blocks, sequences_max, rest_tokens, step_pace, prefill_pace, lost_share, .. } = *fresh;
        let Speeds { prefill, block_bytes, handoff_overhead, handoff_transfer, mean_duration, onboard } = fresh.speeds;
        let pair = |a: Measured, b: Measured| (a.bits(), b.bits());
        store(
            &self.common,
            [
                (total_blocks, sequences_max),
                pair(prefill, block_bytes),
                pair(handoff_overhead, mean_duration),
                pair(step_pace, prefill_pace),
                pair(rest_tokens, handoff_transfer),
            ],
        );
        store(&self.onboard, onboard.map(|Onboard { latency, bandwidth }| pair(latency, bandwidth)));
        let queued = |at: usize| fresh.queued.get(at).copied().unwrap_or(lost_share.bits());
        store(&self.queued, std::array::from_fn(|at| (queued(2 * at), queued(2 * at + 1))));
        self.raise();
    }

    /// Publishes the end of the ejection.
    pub(super) fn set_ejected_until(&self, until: Option<Timestamp>) {
        self.ejected_until.store(until.map_or(0, Timestamp::bits), Ordering::Relaxed);
        self.raise();
    }

    /// Publishes the number of the choice that last chose the worker.
    pub(super) fn choose(&self, nth: u64) {
        self.chosen.store(nth, Ordering::Relaxed);
        self.raise();
    }

    fn raise(&self) {
        self.version.fetch_add(1, Ordering::Release);
    }

    /// Changes whenever any published value changes.
    #[inline]
    pub(super) fn version(&self) -> u32 {
        self.version.load(Ordering::Acquire)
    }

    /// End of the ejection, as a [`Timestamp`]; 0 when the worker is not ejected.
    pub(super) fn ejected_until(&self) -> u64 {
        self.ejected_until.load(Ordering::Relaxed)
    }

    /// Number of the choice for its model that last chose the worker; 0 means never.
    pub(super) fn chosen(&self) -> u64 {
        self.chosen.load(Ordering::Relaxed)
    }

    /// Age of the latest report in nanoseconds; `None` before the first.
    #[inline]
    pub(super) fn age(&self, now: Timestamp) -> Option<u64> {
        let at = self.reported.load(Ordering::Relaxed);
        (at != 0).then(|| now.bits().saturating_sub(at))
    }

    /// The load, with a `fresh` report or a stale one.
    #[inline]
    pub(super) fn stats(&self, fresh: bool) -> LoadStats {
        let counts = load(if fresh { &self.fresh } else { &self.stale });
        let [(waiting_tokens, prompts), (sequences, active_blocks), (context_tokens, waiting_seconds)] = counts;
        let [
            (total_blocks, sequences_max),
            (prefill, block_bytes),
            (handoff_overhead, mean_duration),
            (step_pace, prefill_pace),
            (rest_tokens, handoff_transfer),
        ] = load(&self.common);
        let [prefill, block_bytes, rest_tokens] = [prefill, block_bytes, rest_tokens].map(Measured::from_bits);
        let [handoff_overhead, handoff_transfer, mean_duration] =
            [handoff_overhead, handoff_transfer, mean_duration].map(Measured::from_bits);
        let onboard = load(&self.onboard).map(|(latency, bandwidth)| {
            let [latency, bandwidth] = [latency, bandwidth].map(Measured::from_bits);
            Onboard { latency, bandwidth }
        });
        let speeds = Speeds { prefill, block_bytes, handoff_overhead, handoff_transfer, mean_duration, onboard };
        let pairs: [_; LOWER_TIERS.div_ceil(2)] = load(&self.queued);
        let (_, lost_share) = pairs[LOWER_TIERS / 2];
        let queued = std::array::from_fn(|at| if at % 2 == 0 { pairs[at / 2].0 } else { pairs[at / 2].1 });
        LoadStats {
            waiting_tokens,
            prompts,
            sequences,
            context_tokens,
            active_blocks,
            total_blocks,
            sequences_max,
            rest_tokens,
            waiting_seconds: Measured::from_bits(waiting_seconds),
            step_pace: Measured::from_bits(step_pace),
            prefill_pace: Measured::from_bits(prefill_pace),
            lost_share: Measured::from_bits(lost_share),
            // They do not change, so they are not published here.
            block_tokens: 0,
            has_store: false,
            queued,
            speeds,
        }
    }

    /// Mask of the speeds that the worker has measured.
    #[inline]
    pub(super) fn measured(&self) -> MeasuredMask {
        MeasuredMask::from_bits(self.measured.load(Ordering::Relaxed))
    }
}

fn store<const N: usize>(to: &[AtomicU64; N], from: [(u32, u32); N]) {
    let word = |(a, b)| u64::from(a) | u64::from(b) << 32;
    to.iter().zip(from).for_each(|(to, from)| to.store(word(from), Ordering::Relaxed));
}

#[inline]
fn load<const N: usize>(from: &[AtomicU64; N]) -> [(u32, u32); N] {
    std::array::from_fn(|at| {
        let word = from[at].load(Ordering::Relaxed);
        (word as u32, (word >> 32) as u32)
    })
}
