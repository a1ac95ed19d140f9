//! How much to load and how long to wait for it, so that a hit is never slower than a miss. Pure: values in, values out.
//!
//! Loading the first `k` blocks pays when it takes less time than computing them. [`plan`] picks the `k` that saves most,
//! from measured speeds; a tier that was not measured is tried. [`Patience`] then guards against every estimate being
//! wrong: a request may wait for a fixed grace, and beyond it only as long as what *has arrived* saved. So whatever the
//! tiers do, it starts at most one grace later than without a cache.

use std::time::Duration;

/// The next blocks in order, all from one tier.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) struct Stretch {
    /// Which tier; stretches of one tier share its bandwidth.
    pub(crate) tier: usize,
    /// How many blocks.
    pub(crate) blocks: usize,
    /// What was measured of the tier; `None`: not yet, or too long ago.
    pub(crate) measured: Option<Measured>,
}

/// How fast a tier was seen to be.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) struct Measured {
    /// Seconds until the first block.
    pub(crate) latency: f64,
    /// Seconds for each block after it.
    pub(crate) seconds_per_block: f64,
}

/// What to do.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) struct Plan {
    /// Leading blocks to load; the others are recomputed.
    pub(crate) blocks: usize,
    /// How long to wait for them.
    pub(crate) patience: Patience,
}

/// How long to wait, given what arrived.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) struct Patience {
    /// With nothing to show for it.
    pub(crate) grace: Duration,
    /// More for each leading block that arrived: what it saved.
    pub(crate) per_block: Duration,
}

impl Patience {
    /// The longest wait with nothing to show for it: what a hit may lose against a miss when a tier hangs. An object
    /// store's first byte takes 20 to 200 ms, and a person does not notice a quarter of a second before the first token.
    pub(crate) const GRACE: Duration = Duration::from_millis(250);

    /// Long prompts may wait this share of what is at stake, if it is more than the grace.
    const SHARE: f64 = 0.05;

    /// While nobody knows what recomputing costs: bounded, and enough to read a gigabyte from one SSD.
    const UNKNOWN: Self = Self { grace: Duration::from_secs(2), per_block: Duration::ZERO };

    /// For `blocks` that cost `seconds_per_block` each to recompute.
    fn of(blocks: usize, seconds_per_block: f64) -> Self {
        let grace = Self::GRACE.max(seconds(blocks as f64 * seconds_per_block * Self::SHARE));
        Self { grace, per_block: seconds(seconds_per_block) }
    }

    /// From the start, when the first `arrived` blocks are there.
    pub(crate) fn limit(&self, arrived: usize) -> Duration {
        self.grace.saturating_add(self.per_block.saturating_mul(arrived.try_into().unwrap_or(u32::MAX)))
    }
}

/// A load that takes no longer than this counts as free: a scheduler's hiccup is no reason to leave a tier alone, and what
/// is loaded takes no computing away from other requests.
const FREE: f64 = 0.02;

/// Which of the blocks that tiers hold are worth loading. `recompute`: seconds to compute one block, when known.
pub(crate) fn plan(stretches: &[Stretch], recompute: Option<f64>) -> Plan {
    let all = stretches.iter().map(|stretch| stretch.blocks).sum();
    let Some(cost) = recompute.filter(|cost| cost.is_finite() && *cost >= 0.0) else {
        return Plan { blocks: all, patience: Patience::UNKNOWN };
    };
    let saved = |blocks: usize| blocks as f64 * cost - (load_seconds(stretches, blocks) - FREE).max(0.0);
    let mut best = 0;
    for blocks in candidates(stretches) {
        if saved(blocks) > saved(best) {
            best = blocks;
        }
    }
    Plan { blocks: best, patience: Patience::of(best, cost) }
}

/// Where the saving can be largest. It is concave within a stretch, bent only where the stretch's tier begins to take longer than
/// all others (and longer than nothing): so at that bend, or at the end.
fn candidates(stretches: &[Stretch]) -> Vec<usize> {
    let mut candidates = Vec::with_capacity(3 * stretches.len());
    let mut before = 0;
    for stretch in stretches {
        if let Some(measured) = stretch.measured.filter(|measured| measured.seconds_per_block > 0.0) {
            let hidden =
                load_seconds(stretches, before).max(FREE) - tier_seconds(stretches, stretch.tier, measured, before);
            // The tier's first block costs its latency and nothing more.
            let first = f64::from(u8::from(asked(stretches, stretch.tier, before) == 0));
            let bend = (hidden / measured.seconds_per_block).floor() + first;
            // The bend lies between two blocks.
            candidates.extend([bend, bend + 1.0].map(|at| before + at.clamp(1.0, stretch.blocks as f64) as usize));
        }
        before += stretch.blocks;
        candidates.push(before);
    }
    candidates
}

/// Seconds until the first `blocks` are there: the tiers work at the same time.
fn load_seconds(stretches: &[Stretch], blocks: usize) -> f64 {
    let times = stretches.iter().map(|stretch| match stretch.measured {
        Some(measured) if asked(stretches, stretch.tier, blocks) > 0 => {
            tier_seconds(stretches, stretch.tier, measured, blocks)
        }
        // Not measured: assumed to be at once, so that it is tried; patience bounds what that can cost.
        _ => 0.0,
    });
    times.fold(0.0, f64::max)
}

fn tier_seconds(stretches: &[Stretch], tier: usize, measured: Measured, blocks: usize) -> f64 {
    let more = asked(stretches, tier, blocks).saturating_sub(1);
    measured.latency + more as f64 * measured.seconds_per_block
}

/// How many of the first `blocks` come from `tier`.
fn asked(stretches: &[Stretch], tier: usize, blocks: usize) -> usize {
    let mut left = blocks;
    let mut asked = 0;
    for stretch in stretches {
        let here = stretch.blocks.min(left);
        left -= here;
        if stretch.tier == tier {
            asked += here;
        }
    }
    asked
}

fn seconds(seconds: f64) -> Duration {
    Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn stretch(tier: usize, blocks: usize, latency: f64, seconds_per_block: f64) -> Stretch {
        Stretch { tier, blocks, measured: Some(Measured { latency, seconds_per_block }) }
    }

    #[test]
    fn a_tier_slower_than_computing_is_left_alone() {
        assert_eq!(plan(&[stretch(0, 100, 0.05, 0.02)], Some(0.01)).blocks, 0);
        assert_eq!(plan(&[stretch(0, 100, 0.05, 0.005)], Some(0.01)).blocks, 100);
    }

    #[test]
    fn latency_must_pay_off_too() {
        assert_eq!(plan(&[stretch(0, 4, 0.1, 0.001)], Some(0.01)).blocks, 0);
        assert_eq!(plan(&[stretch(0, 40, 0.1, 0.001)], Some(0.01)).blocks, 40);
    }

    #[test]
    fn a_slow_tier_helps_for_as_long_as_a_fast_one_is_busy_anyway() {
        // The fast one takes 100 ms for its 101 blocks; in that time the slow one delivers 4 of its own.
        let stretches = [stretch(0, 101, 0.0, 0.001), stretch(1, 50, 0.01, 0.025)];
        assert_eq!(plan(&stretches, Some(0.01)).blocks, 101 + 4);
    }

    #[test]
    fn what_was_not_measured_is_tried_within_the_grace() {
        let unknown = Stretch { tier: 0, blocks: 10, measured: None };
        assert_eq!(
            plan(&[unknown], Some(0.01)),
            Plan { blocks: 10, patience: Patience { grace: Patience::GRACE, per_block: Duration::from_millis(10) } }
        );
        let long = Stretch { blocks: 2_000, ..unknown };
        assert_eq!(plan(&[long], Some(0.01)).patience.grace, Duration::from_secs(1));
    }

    #[test]
    fn nothing_is_loaded_when_computing_is_free_and_all_when_nobody_knows() {
        let stretches = [stretch(0, 10, 0.001, 0.001)];
        assert_eq!(plan(&stretches, Some(0.0)).blocks, 0);
        assert_eq!(plan(&stretches, None).blocks, 10);
        assert_eq!(plan(&[], Some(0.01)).blocks, 0);
    }

    fn any_stretch() -> impl Strategy<Value = Stretch> {
        let measured = prop::option::of((0.0..0.3f64, 0.0..0.03f64));
        (0..3usize, 1..40usize, measured).prop_map(|(tier, blocks, measured)| {
            let measured = measured.map(|(latency, seconds_per_block)| Measured { latency, seconds_per_block });
            Stretch { tier, blocks, measured }
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn no_other_number_of_blocks_saves_more(mut stretches in prop::collection::vec(any_stretch(), 0..6), cost in 0.0..0.02f64) {
            // A tier was measured or not, once.
            for i in 0..stretches.len() {
                let first = stretches.iter().find(|stretch| stretch.tier == stretches[i].tier).unwrap().measured;
                stretches[i].measured = first;
            }
            let saved = |blocks: usize| blocks as f64 * cost - (load_seconds(&stretches, blocks) - FREE).max(0.0);
            let chosen = plan(&stretches, Some(cost)).blocks;
            let all: usize = stretches.iter().map(|stretch| stretch.blocks).sum();
            for blocks in 0..=all {
                prop_assert!(saved(blocks) <= saved(chosen) + 1e-9, "{} beats {}", blocks, chosen);
            }
        }

        #[test]
        fn a_request_never_starts_later_than_a_miss_plus_the_grace(blocks in 0..5_000usize, cost in 0.0..0.1f64, arrived in 0..5_000usize) {
            let patience = Patience::of(blocks, cost);
            let total = blocks as f64 * cost;
            let arrived = arrived.min(blocks);
            let start = patience.limit(arrived).as_secs_f64() + (blocks - arrived) as f64 * cost;
            prop_assert!(start <= total * 1.05 + Patience::GRACE.as_secs_f64() + 1e-3);
        }
    }
}
