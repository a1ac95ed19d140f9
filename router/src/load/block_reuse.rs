//! After which time blocks are asked for again, and what it costs other blocks to place one on a worker whose memory
//! will be full: the miss rate of an LRU cache by Che's approximation (Che, Tung and Wang, 2002).
//!
//! A request uses each block of its prompt. `F(t)` is the probability that a block is used again within `t` seconds. A
//! worker on which `U` blocks are used per second keeps a block for `T` seconds after its use, where `T` solves
//! `U ∫₀ᵀ (1 − F) = M` for a memory of `M` blocks: that many different blocks are used in this time. Of the used blocks
//! `F(∞) − F(T)` are asked for again, and are lost by then. One more use adds that share of a block, and shortens `T`
//! for all others, which lose `F'(T) · ∫₀ᵀ (1 − F) / (1 − F(T))` blocks more. The sum is the [lost
//! share](LostShare::at). It depends on the worker by `M / U` only.
//!
//! `F` is the Kaplan-Meier estimate (1958), in which blocks that were not asked for again yet count as censored. A
//! sample of the blocks is followed, in bounded memory.
//!
//! Not here: how many blocks are used on a worker (`block_use_rate`), and what losing one costs (`policy::cost`).

use super::prefix_demand::HORIZON;
use super::timestamp::Timestamp;

/// Intervals between the uses of a block, of one model.
#[derive(Debug)]
pub(crate) struct BlockReuse {
    /// The last use of sampled blocks: a direct-mapped table. A block that takes the place of another one ends it. It
    /// is empty until the first use: most of a thousand adapters of a server get no requests.
    table: Box<[LastUse]>,
    /// A block is sampled if its hash is below this.
    threshold: u64,
    /// The second in which the threshold was last changed.
    resized: u64,
    /// Sampled blocks by the second of their last use, modulo [`MAX_SECONDS`].
    open: Box<[u32]>,
    /// The first use. Times count from a second before it, so that nothing depends on when the process was started.
    first: Option<Timestamp>,
    /// The latest use. `open` is right up to its second.
    latest: u64,
    /// Blocks that were used again, and blocks that were not followed further, by the time since the use before.
    reused: [f64; BUCKETS],
    ended: [f64; BUCKETS],
    lost_share: LostShare,
}

#[derive(Clone, Copy, Default, Debug)]
struct LastUse {
    hash: u64,
    /// In nanoseconds; 0: free.
    at: u64,
}

/// Share of a used block that is lost, by the memory of a worker divided by the blocks that are used there per second.
#[derive(Clone, Debug)]
pub(crate) struct LostShare {
    /// `∫₀ᵗ (1 − F)` in seconds at the end of each bucket, and the share for a worker that keeps blocks until then.
    memory: [f64; BUCKETS],
    share: [f64; BUCKETS],
}

/// Buckets of intervals: four for each doubling, from 0.1 s, below which an interval is as good as none.
const BUCKETS: usize = 51;
const PER_DOUBLING: f64 = 4.0;
const MIN_INTERVAL: f64 = 0.1;
/// Longest interval, which is in the last bucket. The memory of a worker is filled within minutes, or its price is low.
const MAX_SECONDS: u64 = 586;
/// Slots of the table: 256 KiB.
const SLOTS: usize = 16_384;
/// Sampled blocks above which fewer are sampled: with a quarter of the slots in use, an eighth of the blocks is ended
/// early.
const MAX_OPEN: u32 = SLOTS as u32 / 4;
/// Sampled blocks below which more are sampled again: after a burst. Twice as many are still far below the maximum.
const MIN_OPEN: u32 = MAX_OPEN / 8;
/// One in four blocks is sampled at first, and at most.
const FIRST_THRESHOLD: u64 = u64::MAX / 4;
/// Time constant in seconds of the decay of what was observed.
const MEMORY_SECONDS: f64 = 600.0;
/// Weight of what is expected before it was observed: half of an observation. Of the blocks the same share is asked for
/// again as of those observed so far, all of them before the first one, since that is what a cache is for; of these,
/// half within [`HORIZON`], and the later, the longer a block was not asked for (`1 − F(t) = h / (h + t)`, the Lomax
/// distribution with exponent 1).
const PRIOR: f64 = 0.5;
/// The uses per second of the next minute are known to about a factor of √2 either way. The lost share is the mean over
/// that range: near a limit it differs by a factor of ten, and a conversation should not move for an error of estimate.
/// Factors, and their weights.
const RATES: [(f64, f64); 5] = [(0.707, 0.125), (0.841, 0.25), (1.0, 0.25), (1.189, 0.25), (1.414, 0.125)];

/// Nanoseconds of a second.
const NANOSECONDS: u64 = 1_000_000_000;

/// End of a bucket in seconds.
fn end_of(bucket: usize) -> f64 {
    MIN_INTERVAL * ((bucket + 1) as f64 / PER_DOUBLING).exp2()
}

/// Weight of what was observed this many seconds ago, also of uses that were not followed by another one yet.
fn decay(seconds: u64) -> f64 {
    (-(seconds as f64) / MEMORY_SECONDS).exp()
}

/// The second of a time in nanoseconds.
const fn second_of(at: u64) -> u64 {
    at / NANOSECONDS
}

fn bucket_of(nanoseconds: u64) -> usize {
    let doublings = (nanoseconds as f64 / 1e9 / MIN_INTERVAL).max(1.0).log2();
    ((doublings * PER_DOUBLING) as usize).min(BUCKETS - 1)
}

impl Default for BlockReuse {
    fn default() -> Self {
        let mut reuse = Self {
            table: Box::default(),
            threshold: FIRST_THRESHOLD,
            resized: 0,
            open: vec![0; MAX_SECONDS as usize].into(),
            first: None,
            latest: 0,
            reused: [0.0; BUCKETS],
            ended: [0.0; BUCKETS],
            lost_share: LostShare { memory: [0.0; BUCKETS], share: [0.0; BUCKETS] },
        };
        reuse.lost_share = reuse.estimate(1.0);
        reuse
    }
}

impl BlockReuse {
    /// A prompt uses these blocks. `visible`: share of all prompts that this router places. The estimate follows within
    /// a second.
    pub(super) fn used(&mut self, hashes: impl Iterator<Item = u64>, visible: f64, now: Timestamp) {
        // Threads may come in another order than that in which they read the clock.
        let first = *self.first.get_or_insert(now);
        let now = (now.bits().saturating_sub(first.bits()) + NANOSECONDS).max(self.latest);
        let (before, second) = (second_of(self.latest), second_of(now));
        self.latest = now;
        if second > before {
            self.advance(before, second);
            self.lost_share = self.estimate(visible);
        }
        if self.table.is_empty() {
            self.table = vec![LastUse::default(); SLOTS].into();
        }
        let threshold = self.threshold;
        for hash in hashes.filter(|hash| *hash < threshold) {
            let slot = &mut self.table[hash as usize % SLOTS];
            let last = std::mem::replace(slot, LastUse { hash, at: now });
            // Blocks whose last use is longer ago are no longer counted as open.
            if last.at != 0 && second - second_of(last.at) < MAX_SECONDS {
                let observed = if last.hash == hash { &mut self.reused } else { &mut self.ended };
                observed[bucket_of(now - last.at)] += 1.0;
                self.open[(second_of(last.at) % MAX_SECONDS) as usize] -= 1;
            }
            self.open[(second % MAX_SECONDS) as usize] += 1;
        }
    }

    /// Share of a used block that is lost.
    pub(super) fn lost_share(&self) -> &LostShare {
        &self.lost_share
    }

    /// Time has passed: ends the blocks that were not used for the longest interval, and decays what was observed.
    fn advance(&mut self, before: u64, second: u64) {
        let passed = second - before;
        let keep = decay(passed);
        for observed in self.reused.iter_mut().chain(&mut self.ended) {
            *observed *= keep;
        }
        for at in before + 1..=before + passed.min(MAX_SECONDS) {
            let ended = std::mem::take(&mut self.open[(at % MAX_SECONDS) as usize]);
            self.ended[BUCKETS - 1] += f64::from(ended) * decay(MAX_SECONDS);
        }
        let open = self.open.iter().sum::<u32>();
        if open > MAX_OPEN {
            self.halve_sample(second);
        } else if open < MIN_OPEN && self.threshold < FIRST_THRESHOLD && second - self.resized >= MAX_SECONDS {
            self.double_sample(second);
        }
    }

    /// Samples half as many blocks from now on, and removes the others. What was observed before counts half: each
    /// observation stands for twice as many blocks from now on.
    fn halve_sample(&mut self, second: u64) {
        (self.threshold, self.resized) = (self.threshold / 2, second);
        for observed in self.reused.iter_mut().chain(&mut self.ended) {
            *observed /= 2.0;
        }
        for last in self.table.iter_mut().filter(|last| last.hash >= self.threshold) {
            let at = second_of(std::mem::take(last).at);
            if at != 0 && second - at < MAX_SECONDS {
                self.open[(at % MAX_SECONDS) as usize] -= 1;
            }
        }
    }

    /// Samples twice as many blocks from now on. What was observed before counts twice, since each observation stands
    /// for half as many blocks from now on. It is done at most once in the longest interval: until then the sampled
    /// blocks that are open are fewer than they will be.
    fn double_sample(&mut self, second: u64) {
        (self.threshold, self.resized) = (self.threshold.saturating_mul(2).min(FIRST_THRESHOLD), second);
        for observed in self.reused.iter_mut().chain(&mut self.ended) {
            *observed *= 2.0;
        }
    }

    /// The estimate from all that was observed. Where a router places a share of the prompts, it sees that share of
    /// the uses of a block, so that the rate at which blocks are used again is that much higher than observed.
    fn estimate(&self, visible: f64) -> LostShare {
        let mut ended = self.ended;
        let second = second_of(self.latest);
        for age in 0..MAX_SECONDS.min(second) {
            let open = self.open[((second - age) % MAX_SECONDS) as usize];
            ended[bucket_of(age * NANOSECONDS)] += f64::from(open) * decay(age);
        }
        let [again, not_again] = [&self.reused, &ended].map(|observed| observed.iter().sum::<f64>());
        let share = (again + PRIOR) / (again + not_again + PRIOR);
        let prior = |seconds: f64| PRIOR * (1.0 - share + share * HORIZON / (HORIZON + seconds));
        ended[BUCKETS - 1] += prior(end_of(BUCKETS - 1));
        let mut start = 0.0;
        let reused: [f64; BUCKETS] = std::array::from_fn(|bucket| {
            let begin = std::mem::replace(&mut start, end_of(bucket));
            self.reused[bucket] + prior(begin) - prior(start)
        });
        let mut at_risk: f64 = reused.iter().sum::<f64>() + ended.iter().sum::<f64>();
        let (mut survival, mut memory, mut start) = (1.0, 0.0, 0.0);
        let mut curve = [(0.0, 0.0, 0.0); BUCKETS];
        for bucket in 0..BUCKETS {
            // Blocks that ended within the bucket were observed for half of it (the actuarial estimate).
            let observed = at_risk - ended[bucket] / 2.0;
            let hazard = (reused[bucket] / observed / visible).clamp(0.0, 1.0);
            let (next, width) = (survival * (1.0 - hazard), end_of(bucket) - start);
            let mean = f64::midpoint(survival, next);
            memory += mean * width;
            curve[bucket] = (memory, next, (survival - next) / width / mean.max(f64::MIN_POSITIVE));
            (survival, start) = (next, end_of(bucket));
            at_risk -= reused[bucket] + ended[bucket];
        }
        // `survival` is now 1 − F(∞).
        let lost = |(memory, left, rate): (f64, f64, f64)| (left - survival).max(0.0) + rate * memory;
        let exact = LostShare { memory: curve.map(|(memory, ..)| memory), share: curve.map(lost) };
        let mean = |memory: f64| RATES.iter().map(|(rate, weight)| weight * exact.at(memory / rate)).sum();
        LostShare { memory: exact.memory, share: exact.memory.map(mean) }
    }
}

impl LostShare {
    /// Blocks that are lost for each block that a request uses on a worker, of which it keeps those of the last
    /// `seconds` uses: the memory in blocks, over the blocks used per second.
    pub(super) fn at(&self, seconds: f64) -> f64 {
        let above = self.memory.partition_point(|memory| *memory < seconds);
        if above == 0 {
            return self.share[0];
        }
        if above == BUCKETS {
            return 0.0;
        }
        let (low, high) = (self.memory[above - 1], self.memory[above]);
        let part = (seconds - low) / (high - low).max(f64::MIN_POSITIVE);
        self.share[above - 1] + (self.share[above] - self.share[above - 1]) * part.min(1.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hash::splitmix64;
    use std::time::Duration;
    use tokio::time::Instant;

    /// Prompts of 64 blocks: each conversation sends one every `interval` seconds for `uses` times, and a new one
    /// begins every second.
    fn observe(reuse: &mut BlockReuse, interval: u64, uses: u64, visible: impl Fn(u64) -> bool, share: f64) {
        let start = Instant::now();
        for second in 0..1_800 {
            for turn in 0..uses {
                let Some(began) = u64::checked_sub(second, turn * interval) else { continue };
                if visible(splitmix64(began * 1_000 + turn)) {
                    let hashes = (0..64).map(|block| splitmix64(began << 16 | block));
                    reuse.used(hashes, share, (start + Duration::from_secs(second)).into());
                }
            }
        }
    }

    #[test]
    fn nothing_is_lost_where_blocks_are_kept_until_they_are_used_again() {
        let mut reuse = BlockReuse::default();
        observe(&mut reuse, 20, 5, |_| true, 1.0);
        let lost = reuse.lost_share();
        // Four of five uses are followed by another one 20 s later. Blocks that are kept for 10 s are lost by then.
        assert!((0.7..1.0).contains(&lost.at(10.0)), "{}", lost.at(10.0));
        assert!(lost.at(40.0) < 0.05 && lost.at(1e9) == 0.0, "{}", lost.at(40.0));
        assert!(lost.at(20.0) > 1.5 * lost.at(10.0), "near the limit each block costs others their place");
    }

    #[test]
    fn blocks_that_are_never_used_again_cost_nothing() {
        let mut reuse = BlockReuse::default();
        assert!(reuse.lost_share().at(10.0) > 0.5, "before anything was observed");
        observe(&mut reuse, 1, 1, |_| true, 1.0);
        let lost = reuse.lost_share();
        assert!([1.0, 10.0, 100.0].iter().all(|seconds| lost.at(*seconds) < 0.02), "{lost:?}");
    }

    #[test]
    fn a_router_that_sees_a_part_of_the_prompts_estimates_the_same_curve() {
        let observed = |visible: fn(u64) -> bool, share| {
            let mut reuse = BlockReuse::default();
            observe(&mut reuse, 20, 20, visible, share);
            reuse.lost_share().at(10.0)
        };
        let (all, half) = (observed(|_| true, 1.0), observed(|draw| draw % 2 == 0, 0.5));
        assert!((half / all - 1.0).abs() < 0.15, "{half} {all}");
    }

    #[test]
    fn a_model_without_prompts_has_no_table() {
        let mut reuse = BlockReuse::default();
        assert!(reuse.table.is_empty());
        reuse.used([1].into_iter(), 1.0, Instant::now().into());
        assert_eq!(reuse.table.len(), SLOTS);
    }

    #[test]
    fn a_smaller_sample_gives_the_same_curve() {
        let (mut reuse, start) = (BlockReuse::default(), Instant::now());
        // Of the blocks of a second, a tenth is used again after ten seconds.
        for second in 0..60_u64 {
            let again = second.checked_sub(10).into_iter().flat_map(|before| (0..20).map(move |block| (before, block)));
            let hashes =
                (0..200).map(|block| (second, block)).chain(again).map(|(of, block)| splitmix64(of << 16 | block));
            reuse.used(hashes, 1.0, (start + Duration::from_secs(second)).into());
        }
        let before = reuse.estimate(1.0).at(5.0);
        reuse.halve_sample(second_of(reuse.latest));
        let after = reuse.estimate(1.0).at(5.0);
        assert!(before > 0.1 && (after / before - 1.0).abs() < 0.1, "{before} {after}");
    }

    #[test]
    fn the_sample_is_bounded() {
        let (mut reuse, start) = (BlockReuse::default(), Instant::now());
        for second in 0..1_200_u64 {
            let hashes = (0..2_000).map(|block| splitmix64(second << 16 | block));
            reuse.used(hashes, 1.0, (start + Duration::from_secs(second)).into());
        }
        let open: u32 = reuse.open.iter().sum();
        assert!((MAX_OPEN / 4..=MAX_OPEN + 500).contains(&open), "{open}");
        let live = reuse.table.iter().filter(|last| last.at != 0).count();
        assert!(live <= SLOTS && reuse.threshold < FIRST_THRESHOLD, "{live}");

        // After the burst one block is used per second.
        for second in 1_200..9_000_u64 {
            reuse.used(std::iter::once(splitmix64(second << 16)), 1.0, (start + Duration::from_secs(second)).into());
        }
        assert!(reuse.threshold > FIRST_THRESHOLD / 2, "the sample is as large as before");
    }
}
