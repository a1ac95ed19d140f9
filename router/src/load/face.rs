//! What decisions read of a worker's books: written whenever the books change, read without a lock.
//!
//! **Ordering.** Every figure is an atomic of its own, written and read relaxed. Decisions and bookings take turns on the
//! router's lock, which orders them: a decision sees every booking before it. A report or an end that comes in beside a
//! decision may be seen in part, the new queue next to the old batch; both were true within a microsecond of each other,
//! and the figures are estimates. So nothing here needs an order, and no reader waits for a writer.

use super::moment::Moment;
use super::standing::{Figure, ONBOARDED, Onboard, Speeds, Standing};
use std::sync::atomic::{AtomicU64, Ordering};

/// The published figures.
#[derive(Default)]
pub(super) struct Face {
    /// When the latest report came, as a [`Moment`]; 0 is never.
    reported: AtomicU64,
    /// Queue, prompts, sequences and blocks while the latest report is news, and once it is not.
    fresh: [AtomicU64; 4],
    stale: [AtomicU64; 4],
    total_blocks: AtomicU64,
    /// The five figures of [`Speeds`], then two per level that blocks come up from.
    speeds: [AtomicU64; 5],
    onboard: [[AtomicU64; 2]; ONBOARDED],
}

impl Face {
    /// Publishes what the books say. `fresh` and `stale` differ in their four counts only.
    pub(super) fn publish(&self, reported: Option<Moment>, fresh: &Standing, stale: &Standing) {
        self.reported.store(reported.map_or(0, Moment::bits), Ordering::Relaxed);
        for (to, from) in [(&self.fresh, fresh), (&self.stale, stale)] {
            let Standing { waiting_tokens, prompts, sequences, active_blocks, .. } = *from;
            store(to, [waiting_tokens, prompts, sequences, active_blocks]);
        }
        self.total_blocks.store(fresh.total_blocks, Ordering::Relaxed);
        let Speeds { prefill, step, block_bytes, resume, residence, onboard } = fresh.speeds;
        store(&self.speeds, [prefill, step, block_bytes, resume, residence].map(Figure::bits));
        for (to, Onboard { latency, bandwidth }) in self.onboard.iter().zip(onboard) {
            store(to, [latency.bits(), bandwidth.bits()]);
        }
    }

    /// How old the latest report is, in nanoseconds; `None` before the first.
    #[inline]
    pub(super) fn age(&self, now: Moment) -> Option<u64> {
        let at = self.reported.load(Ordering::Relaxed);
        (at != 0).then(|| now.bits().saturating_sub(at))
    }

    /// The figures, as they stand while the latest report is `news` or not.
    #[inline]
    pub(super) fn standing(&self, news: bool) -> Standing {
        let [waiting_tokens, prompts, sequences, active_blocks] = load(if news { &self.fresh } else { &self.stale });
        let [prefill, step, block_bytes, resume, residence] = load(&self.speeds).map(Figure::from_bits);
        let onboard = std::array::from_fn(|level| {
            let [latency, bandwidth] = load(&self.onboard[level]).map(Figure::from_bits);
            Onboard { latency, bandwidth }
        });
        Standing {
            waiting_tokens,
            prompts,
            sequences,
            active_blocks,
            total_blocks: self.total_blocks.load(Ordering::Relaxed),
            speeds: Speeds { prefill, step, block_bytes, resume, residence, onboard },
        }
    }
}

fn store<const N: usize>(to: &[AtomicU64; N], from: [u64; N]) {
    to.iter().zip(from).for_each(|(to, from)| to.store(from, Ordering::Relaxed));
}

#[inline]
fn load<const N: usize>(from: &[AtomicU64; N]) -> [u64; N] {
    std::array::from_fn(|at| from[at].load(Ordering::Relaxed))
}
