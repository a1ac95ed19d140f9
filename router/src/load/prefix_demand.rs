//! How often prefixes are asked for: a count-min sketch (Cormode and Muthukrishnan, 2005) with exponentially decaying
//! counters, in bounded memory.
//!
//! A prefix is identified by the hash of its last block, which commits to everything before it. Of each prompt some
//! depths are counted, at equal distances.
//!
//! Of the prompts of other routers only the number is known, so the demand for a prefix among a router's own prompts is
//! taken for that among all. What other routers publish of a prompt does not contain the blocks that its worker holds,
//! which are those of a hot prefix.

use super::timestamp::Timestamp;
use crate::hash::splitmix64;

/// The sketch: rows of counters, each row with a hash function of its own.
#[derive(Default, Debug)]
pub(crate) struct PrefixDemand {
    /// Empty until the first prompt.
    counters: Box<[Counter]>,
    /// Prompts of this router, and of all routers, with the decay of the counters.
    own_prompts: f64,
    all_prompts: f64,
    /// Length of the time since the first prompt, in seconds, with the same decay.
    seconds: f64,
    /// When these were decayed last.
    prompts_at: Option<Timestamp>,
}

#[derive(Clone, Copy, Default, Debug)]
struct Counter {
    requests: f32,
    /// Length of the time since the first request, in seconds, with the same decay as `requests`. `requests / seconds`
    /// is the rate.
    seconds: f32,
    /// When both were decayed last, as [`Timestamp::bits`].
    at: u64,
}

/// A prefix that many requests share.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) struct SharedPrefix {
    /// Length in blocks.
    pub(crate) blocks: u32,
    /// Requests that are expected to ask for it within the next [`HORIZON`], at all routers: as many as in the last.
    pub(crate) requests: f64,
    /// Share of all prompts that ask for it.
    pub(crate) share: f64,
}

impl SharedPrefix {
    /// Requests per second.
    pub(crate) fn per_second(&self) -> f64 {
        self.requests / HORIZON
    }
}

const ROWS: usize = 4;
/// Counters per row. With a hundred new prompts per second a third of the counters are in use, and all four of a new
/// prompt with a probability of 1 %. The sketch has 1 MiB.
const WIDTH: usize = 16_384;
/// Time constant of the decay in seconds, and the time for which a demand is assumed to last: long enough to repay a
/// copy that takes seconds, and short enough that a prefix which is no longer requested is forgotten within minutes.
pub(crate) const HORIZON: f64 = 60.0;
/// Seconds that are added to the time since the first request. Requests that come within a few steps of an engine, of 7
/// to 80 ms each, join the same batches: they are a burst, not a rate. So the value is above a step. That it is not
/// larger has no derivation: of 0.1 and 1 s it was chosen on the generated classes, where a large fleet made too few
/// copies in the first seconds of a new prefix with 1 s. The conversation trace, which is none of them, is replayed
/// with it (docs/benchmarks.md).
const MIN_SECONDS: f64 = 0.1;
/// Tokens between counted depths: computing fewer takes less than a step of a large model.
const DEPTH_TOKENS: usize = 1024;
/// Maximum number of counted depths; of a longer prompt they are further apart.
const DEPTHS_MAX: usize = 32;
/// Requests per [`HORIZON`] below which a prefix is not shared.
const MIN_REQUESTS: f64 = 2.0;
/// Prompts that are added to those of this router and to those of all: a router that begins does not take the prompts
/// of the others for many times its own.
const PRIOR_PROMPTS: f64 = 4.0;

impl PrefixDemand {
    /// The prefix of a prompt that saves most work when another worker has it: the one with the largest product of
    /// length and requests. The prompt has this many blocks; `hash` returns the hash of each. A prompt that is placed
    /// again is not new, and is not counted again.
    pub(crate) fn shared(
        &mut self,
        blocks: usize,
        block_size: usize,
        hash: impl Fn(usize) -> u64,
        is_new: bool,
        now: Timestamp,
    ) -> Option<SharedPrefix> {
        if is_new {
            self.count_prompt(1.0, now);
        }
        let stride = (DEPTH_TOKENS / block_size.max(1)).max(blocks.div_ceil(DEPTHS_MAX)).max(1);
        let mut best: Option<SharedPrefix> = None;
        let work = |prefix: &SharedPrefix| f64::from(prefix.blocks) * prefix.requests;
        for depth in (stride..=blocks).step_by(stride) {
            let requests = self.requests(hash(depth - 1), is_new, now);
            if requests < MIN_REQUESTS {
                // No longer prefix has more requests. It is not counted, either: the next request that gets here will
                // find this depth counted.
                break;
            }
            let prefix = SharedPrefix { blocks: depth as u32, requests, share: 0.0 };
            if best.as_ref().is_none_or(|best| work(best) < work(&prefix)) {
                best = Some(prefix);
            }
        }
        best.map(|best| {
            let share = (best.requests / expected(self.own_prompts, self.seconds)).min(1.0);
            SharedPrefix { requests: best.requests / self.own_share(), share, ..best }
        })
    }

    /// Share of this router's prompts in those of all routers.
    pub(super) fn own_share(&self) -> f64 {
        (self.own_prompts + PRIOR_PROMPTS) / (self.all_prompts + PRIOR_PROMPTS)
    }

    /// Counts a prompt that another router has placed.
    pub(super) fn prompt_placed_elsewhere(&mut self, now: Timestamp) {
        self.count_prompt(0.0, now);
    }

    fn count_prompt(&mut self, own: f64, now: Timestamp) {
        let elapsed = self.prompts_at.map_or(0, |at| now.bits().saturating_sub(at.bits())) as f64 / 1e9;
        let keep = (-elapsed / HORIZON).exp();
        self.seconds = HORIZON + (self.seconds - HORIZON) * keep;
        self.own_prompts = self.own_prompts * keep + own;
        self.all_prompts = self.all_prompts * keep + 1.0;
        self.prompts_at = Some(now);
    }

    /// How often a hash will be counted within [`HORIZON`] at its present rate. Counts it if it `is_new`.
    fn requests(&mut self, hash: u64, is_new: bool, now: Timestamp) -> f64 {
        if self.counters.is_empty() {
            if !is_new {
                return 0.0;
            }
            self.counters = vec![Counter::default(); ROWS * WIDTH].into();
        }
        let mut positions = [0; ROWS];
        let mut random = hash;
        for (row, position) in positions.iter_mut().enumerate() {
            random = splitmix64(random);
            *position = row * WIDTH + (random as usize) % WIDTH;
        }
        let decayed = |counter: &Counter| {
            if counter.at == 0 {
                return (0.0, 0.0);
            }
            let elapsed = now.bits().saturating_sub(counter.at) as f64 / 1e9;
            let keep = (-elapsed / HORIZON).exp();
            let seconds = HORIZON + (f64::from(counter.seconds) - HORIZON) * keep;
            (f64::from(counter.requests) * keep, seconds)
        };
        let counts = positions.map(|at| decayed(&self.counters[at]));
        let least = counts.iter().map(|(requests, _)| *requests).fold(f64::INFINITY, f64::min);
        // The counter that was begun last is the least polluted by other prefixes.
        let seconds = counts.iter().map(|(_, seconds)| *seconds).fold(f64::INFINITY, f64::min);
        let counted = if is_new { least + 1.0 } else { least };
        if is_new {
            // Conservative update: no counter is raised beyond what the least one shows.
            for (at, (requests, seconds)) in positions.into_iter().zip(counts) {
                let requests = requests.max(counted) as f32;
                self.counters[at] = Counter { requests, seconds: seconds as f32, at: now.bits() };
            }
        }
        if counted < MIN_REQUESTS { counted } else { expected(counted, seconds) }
    }
}

/// Requests that are expected within the next [`HORIZON`], after this many in this many seconds.
fn expected(counted: f64, seconds: f64) -> f64 {
    counted * HORIZON / (seconds + MIN_SECONDS)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;
    use tokio::time::Instant;

    const BLOCK: usize = 512;

    /// A name for each block of a prompt that shares its first `shared` blocks with all others.
    fn names(shared: usize, own: u64) -> impl Fn(usize) -> u64 {
        move |at| splitmix64(if at < shared { at as u64 } else { own << 32 | at as u64 })
    }

    #[test]
    fn the_shared_part_is_found_and_its_rate_is_known_early() {
        let (mut demand, start) = (PrefixDemand::default(), Instant::now());
        let mut found = None;
        for nth in 0..200_u64 {
            let now = start + Duration::from_millis(100 * nth);
            found = demand.shared(64, BLOCK, names(32, nth + 1), true, now.into());
        }
        let found = found.unwrap();
        assert_eq!(found.blocks, 32);
        // Ten a second for twenty seconds: 600 in the next minute.
        assert!((found.requests / 600.0 - 1.0).abs() < 0.1, "{found:?}");
    }

    #[test]
    fn the_share_of_the_prompts_is_known_early_and_among_several_routers() {
        // Three of four prompts ask for the prefix.
        let share = |prompts: u64, elsewhere: u64| {
            let (mut demand, start, mut found) = (PrefixDemand::default(), Instant::now(), None);
            for nth in 0..prompts {
                let now = (start + Duration::from_millis(100 * nth)).into();
                (0..elsewhere).for_each(|_| demand.prompt_placed_elsewhere(now));
                let prefix = demand.shared(8, BLOCK, names(if nth % 4 == 3 { 0 } else { 8 }, nth + 1), true, now);
                found = prefix.or(found);
            }
            found.unwrap().share
        };
        let (early, late, routers) = (share(40, 0), share(4000, 0), share(4000, 3));
        assert!((early - 0.75).abs() < 0.1 && (late - 0.75).abs() < 0.02, "{early} {late}");
        assert!((routers - late).abs() < 1e-9, "prompts that others placed say nothing: {routers} {late}");
    }

    #[test]
    fn prompts_without_a_common_beginning_share_nothing() {
        let (mut demand, now) = (PrefixDemand::default(), Instant::now());
        for nth in 0..500 {
            assert_eq!(demand.shared(64, BLOCK, names(0, nth + 1), true, now.into()), None, "prompt {nth}");
        }
    }

    #[test]
    fn a_prefix_that_is_no_longer_asked_for_is_forgotten() {
        let (mut demand, start) = (PrefixDemand::default(), Instant::now());
        for _ in 0..100 {
            demand.shared(8, BLOCK, names(8, 1), true, start.into());
        }
        let later = start + Duration::from_mins(10);
        assert_eq!(demand.shared(8, BLOCK, names(8, 1), true, later.into()), None);
    }

    #[test]
    fn a_prompt_that_is_placed_again_is_not_counted_again() {
        let (mut demand, now) = (PrefixDemand::default(), Instant::now());
        let mut requests = |is_new| demand.shared(8, BLOCK, names(8, 1), is_new, now.into()).map(|it| it.requests);
        let last = (0..10).filter_map(|_| requests(true)).last();
        assert!(last.is_some());
        assert_eq!((requests(false), requests(false)), (last, last));
    }

    #[test]
    fn the_prompts_of_other_routers_count_as_much_as_own_ones() {
        let demand = |others: u64| {
            let (mut demand, start, mut found) = (PrefixDemand::default(), Instant::now(), None);
            for nth in 0..200 {
                let now = (start + Duration::from_millis(100 * nth)).into();
                (0..others).for_each(|_| demand.prompt_placed_elsewhere(now));
                found = demand.shared(8, BLOCK, names(8, 1), true, now);
            }
            found.unwrap().requests
        };
        let (alone, four) = (demand(0), demand(3));
        assert!((alone / 600.0 - 1.0).abs() < 0.1, "{alone}");
        assert!((four / alone - 4.0).abs() < 0.2, "one of four routers sees a quarter of the requests: {four} {alone}");
    }

    #[test]
    fn a_model_without_prompts_has_no_counters() {
        let (mut demand, now) = (PrefixDemand::default(), Instant::now());
        assert_eq!(demand.shared(8, BLOCK, names(8, 1), false, now.into()), None);
        assert!(demand.counters.is_empty());
        demand.shared(8, BLOCK, names(8, 1), true, now.into());
        assert_eq!(demand.counters.len(), ROWS * WIDTH);
    }

    #[test]
    fn a_burst_is_not_a_rate() {
        let (mut demand, now) = (PrefixDemand::default(), Instant::now());
        let last = (0..20).filter_map(|_| demand.shared(2, BLOCK, names(2, 1), true, now.into())).last().unwrap();
        assert!(last.requests <= 20.0 * HORIZON / MIN_SECONDS, "{last:?}");
    }
}
