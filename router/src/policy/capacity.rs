//! Waits for blocks and for a place in the batch, before and after a worker is full. Pure.
//!
//! The number of sequences on a worker varies as they come and go: when `n` are expected, the standard deviation is
//! `√n` (Poisson). So a worker whose expected occupancy is a little below its capacity is full for a part of the time.
//! The expected shortage is that of a normal distribution; it is freed at the rate of the occupancy over the mean
//! duration of a request.

use super::prompt::Prompt;
use crate::index::WorkerOverlap;
use crate::load::ServiceEstimate;

/// Waits in seconds.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub(super) struct CapacityWait {
    /// Until enough blocks are free.
    pub(super) memory: f64,
    /// Until the batch has a place.
    pub(super) batch: f64,
    /// Probability that the worker is full, so that a request waits for whatever a sequence holds.
    pub(super) full_probability: f64,
}

/// Upper bound in seconds of a wait: by then the engine has preempted or rejected a request.
const WAIT_MAX: f64 = 60.0;
/// Standard deviations from which a shortage counts as impossible: its expected size is below 1e-15 of one. The
/// exponential of larger ones is slow, and a limit that is unknown is billions away.
const MAX_DEVIATIONS: f64 = 8.0;

/// The waits of a prompt of which a worker holds a part.
#[expect(clippy::inline_always, reason = "a thousand times per decision, and nearly always neither limit is near")]
#[inline(always)]
pub(super) fn wait(prompt: &Prompt, held: WorkerOverlap, estimate: &ServiceEstimate) -> CapacityWait {
    if u64::from(estimate.spare_blocks) > prompt.blocks {
        return CapacityWait::default();
    }
    wait_near_capacity(prompt, held, estimate)
}

#[cold]
fn wait_near_capacity(prompt: &Prompt, held: WorkerOverlap, estimate: &ServiceEstimate) -> CapacityWait {
    let places = f64::from(estimate.sequences_max) - f64::from(estimate.sequences) - 1.0;
    let (active, count) = (f64::from(estimate.active_blocks), f64::from(estimate.sequences.max(1)));
    let count_deviation = estimate.deviation;
    let needed = prompt.blocks.saturating_sub(u64::from(held.in_g1())) as f64;
    let wait = |left_in_deviations: f64, deviation: f64, occupied: f64| {
        if left_in_deviations > MAX_DEVIATIONS {
            return 0.0;
        }
        (estimate.mean_duration * deviation * normal_loss(left_in_deviations) / occupied).min(WAIT_MAX)
    };
    let (mut memory, mut left_in_deviations) = (0.0, f64::INFINITY);
    if estimate.total_blocks > 0 && estimate.active_blocks > 0 {
        let deviation = active / count_deviation;
        left_in_deviations = (f64::from(estimate.total_blocks) - active - needed) / deviation;
        memory = wait(left_in_deviations, deviation, active);
    }
    let places_in_deviations = places / count_deviation;
    let full_probability = exceeds(places_in_deviations.min(left_in_deviations));
    CapacityWait { memory, batch: wait(places_in_deviations, count_deviation, count), full_probability }
}

/// Probability that a standard normal variable exceeds `z`: the logistic approximation, with an error below 0.01.
fn exceeds(z: f64) -> f64 {
    if z > MAX_DEVIATIONS { 0.0 } else { (1.0 + (1.702 * z).exp()).recip() }
}

/// Expected excess of a standard normal variable over `z`. The exponent is a quadratic fit whose error is below 3 % of
/// the value for `z` from 0 to 4.
fn normal_loss(z: f64) -> f64 {
    let loss = |z: f64| (-0.9189 - z * (1.1813 + 0.379 * z)).exp();
    if z >= 0.0 { loss(z) } else { loss(-z) - z }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load::{LoadStats, defaults};

    const PROMPT: Prompt = Prompt { tokens: 1000, block_size: 10, blocks: 110, output_tokens: 100.0 };

    fn waits(cached: u32, stats: LoadStats) -> CapacityWait {
        wait(&PROMPT, WorkerOverlap::of([cached, 0, 0, 0, 0]), &ServiceEstimate::of(&stats))
    }

    #[test]
    fn the_expected_shortage_is_that_of_a_normal_distribution() {
        // Table values of the unit normal loss.
        for (z, loss) in [(0.0, 0.3989), (1.0, 0.0833), (2.0, 0.00849), (3.0, 0.000_382), (-1.0, 1.0833)] {
            assert!((normal_loss(z) - loss).abs() < 0.03 * loss, "{z}: {}", normal_loss(z));
        }
    }

    #[test]
    fn a_full_worker_costs_the_wait_for_blocks() {
        let full = LoadStats { active_blocks: 1000, total_blocks: 1050, sequences: 100, ..LoadStats::default() };
        // Sixty blocks are missing: more than half of a deviation of 100 blocks.
        let expected = defaults::MEAN_DURATION * 100.0 * normal_loss(-0.6) / 1000.0;
        assert!((waits(0, full).memory - expected).abs() < 1e-9, "{:?}", waits(0, full));
        assert!(waits(100, full).memory < waits(0, full).memory / 2.0, "cached blocks need no free blocks");
        assert_eq!(waits(0, LoadStats { total_blocks: 5000, ..full }), CapacityWait::default());
    }

    #[test]
    fn memory_and_places_have_a_price_before_they_are_gone() {
        let near = LoadStats { active_blocks: 800, total_blocks: 1050, sequences: 100, ..LoadStats::default() };
        assert!(waits(0, near).memory > 0.0);
        let sequences = |sequences| waits(0, LoadStats { sequences, sequences_max: 64, ..LoadStats::default() }).batch;
        assert!(sequences(10) == 0.0 && sequences(50) > 0.0);
        assert!(sequences(63) < sequences(80) && sequences(80) < sequences(160));
        assert_eq!(waits(0, LoadStats { sequences: 500, ..LoadStats::default() }), CapacityWait::default(), "unknown");
    }
}
