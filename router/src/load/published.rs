//! What decisions read of a worker's books: written whenever the books change, read without a lock.
//!
//! **Ordering.** Every figure is an atomic of its own, written and read relaxed; then the version is raised, which releases
//! them to whoever finds it raised. A reader keeps what it read together with the version that it found before, and reads
//! again once that has moved on: so it never keeps old figures for good. What changes while it reads it may see in part,
//! the new queue next to the old batch; both were true within a microsecond of each other, the figures are estimates, and
//! the next look mends it. So no reader waits for a writer. Decisions and bookings take turns on the router's lock, which
//! orders them: a decision sees every booking before it.

use super::stats::{Figure, Known, ONBOARDED, Onboard, Speeds, Standing};
use super::sync::{AtomicU32, AtomicU64, Ordering};
use super::timestamp::Moment;

/// The published figures: three cache lines, and nothing else on them. Two short figures share a word.
#[derive(Default)]
#[repr(align(64))]
pub(super) struct Face {
    /// When the latest report came, as a [`Moment`]; 0 is never.
    reported: AtomicU64,
    /// Until when the worker is to be left alone, as a [`Moment`]; 0 is not at all.
    rests: AtomicU64,
    /// When it was last chosen, in choices; 0 is never.
    chosen: AtomicU64,
    /// Which of the speeds were measured.
    known: AtomicU32,
    /// Raised by whatever changes here.
    version: AtomicU32,
    /// Queue and prompts, sequences and blocks: while the latest report is news, and once it is not.
    fresh: [AtomicU64; 2],
    stale: [AtomicU64; 2],
    /// What is the same in both cases.
    rest: [AtomicU64; 3],
    /// Latency and bandwidth of the levels that blocks come up from.
    onboard: [AtomicU64; ONBOARDED],
    /// Blocks that others wait for from them.
    queued: [AtomicU64; ONBOARDED.div_ceil(2)],
}

impl Face {
    /// Publishes what the books say. `fresh` and `stale` differ in their four counts only.
    pub(super) fn publish(&self, reported: Option<Moment>, fresh: &Standing, stale: &Standing) {
        self.reported.store(reported.map_or(0, Moment::bits), Ordering::Relaxed);
        self.known.store(fresh.speeds.known().bits(), Ordering::Relaxed);
        for (to, from) in [(&self.fresh, fresh), (&self.stale, stale)] {
            let Standing { waiting_tokens, prompts, sequences, active_blocks, .. } = *from;
            store(to, [(waiting_tokens, prompts), (sequences, active_blocks)]);
        }
        let Speeds { prefill, step, block_bytes, resume, residence, onboard } = fresh.speeds;
        let pair = |a: Figure, b: Figure| (a.bits(), b.bits());
        store(&self.rest, [(fresh.total_blocks, prefill.bits()), pair(step, block_bytes), pair(resume, residence)]);
        store(&self.onboard, onboard.map(|Onboard { latency, bandwidth }| pair(latency, bandwidth)));
        let queued = |at: usize| fresh.queued.get(at).copied().unwrap_or_default();
        store(&self.queued, std::array::from_fn(|at| (queued(2 * at), queued(2 * at + 1))));
        self.raise();
    }

    /// Publishes until when the worker is to be left alone.
    pub(super) fn rest_until(&self, until: Option<Moment>) {
        self.rests.store(until.map_or(0, Moment::bits), Ordering::Relaxed);
        self.raise();
    }

    /// Publishes when the worker was last chosen, in choices.
    pub(super) fn choose(&self, nth: u64) {
        self.chosen.store(nth, Ordering::Relaxed);
        self.raise();
    }

    fn raise(&self) {
        self.version.fetch_add(1, Ordering::Release);
    }

    /// Is another once anything here is.
    #[inline]
    pub(super) fn version(&self) -> u32 {
        self.version.load(Ordering::Acquire)
    }

    /// Until when the worker is to be left alone; 0 is not at all.
    pub(super) fn rests(&self) -> u64 {
        self.rests.load(Ordering::Relaxed)
    }

    /// When the worker was last chosen, in choices; 0 is never.
    pub(super) fn chosen(&self) -> u64 {
        self.chosen.load(Ordering::Relaxed)
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
        let counts = load(if news { &self.fresh } else { &self.stale });
        let [(waiting_tokens, prompts), (sequences, active_blocks)] = counts;
        let [(total_blocks, prefill), (step, block_bytes), (resume, residence)] = load(&self.rest);
        let [prefill, step, block_bytes] = [prefill, step, block_bytes].map(Figure::from_bits);
        let [resume, residence] = [resume, residence].map(Figure::from_bits);
        let onboard = load(&self.onboard).map(|(latency, bandwidth)| {
            let [latency, bandwidth] = [latency, bandwidth].map(Figure::from_bits);
            Onboard { latency, bandwidth }
        });
        let speeds = Speeds { prefill, step, block_bytes, resume, residence, onboard };
        let pairs: [_; ONBOARDED.div_ceil(2)] = load(&self.queued);
        let queued = std::array::from_fn(|at| if at % 2 == 0 { pairs[at / 2].0 } else { pairs[at / 2].1 });
        Standing { waiting_tokens, prompts, sequences, active_blocks, total_blocks, queued, speeds }
    }

    /// Which speeds were measured.
    #[inline]
    pub(super) fn known(&self) -> Known {
        Known::from_bits(self.known.load(Ordering::Relaxed))
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
