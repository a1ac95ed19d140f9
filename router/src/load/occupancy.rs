//! Waits for blocks and for a place in the batch, before and after a worker is full. Pure.
//!
//! The number of sequences on a worker varies as they come and go: when `n` are expected, the standard deviation is
//! `√n` (Poisson). So a worker whose expected occupancy is a little below its capacity is full for a part of the time.
//! The expected shortage is that of a normal distribution; it is freed at the rate of the occupancy over the mean
//! duration of a request.
//!
//! Sequences grow until they end, so the occupancy that counts is the highest one that is expected ([`peak_blocks`]),
//! not the present one: with prompts that are shorter than the outputs, a worker with many new sequences runs out of
//! blocks long after they came.
//!
//! What does not depend on the prompt is computed when the load of the worker changes, and the normal distribution is
//! read from a table: a decision needs the waits of every worker.

/// Waits in seconds.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub(crate) struct CapacityWait {
    /// Until enough blocks are free.
    pub(crate) memory: f64,
    /// Until the batch has a place.
    pub(crate) batch: f64,
    /// Probability that the worker is full, so that a request waits for whatever a sequence holds.
    pub(crate) full_probability: f64,
}

/// What is left of the blocks and of the batch of one worker, in standard deviations of what is in use.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) struct Occupancy {
    /// Free blocks; infinite when their number is unknown.
    blocks: f64,
    /// Standard deviations per block.
    per_block: f64,
    /// Seconds until a shortage of one standard deviation, of blocks or of places, is freed.
    seconds: f64,
    /// Free places in the batch, without the one that the request takes.
    places: f64,
    /// Seconds until the batch has a place.
    batch_wait: f64,
}

/// Upper bound in seconds of a wait: by then the engine has preempted or rejected a request.
const WAIT_MAX: f64 = 60.0;
/// Standard deviations by which the occupancy of a worker may exceed what is expected. More are negligible: a normal
/// variable exceeds them by less than 1e-5 of a deviation on average.
const MARGIN_DEVIATIONS: f64 = 4.0;

/// Blocks that `sequences` will have in use at their peak if no other one comes, when they have `active` now and each
/// takes `growth` more on average before it ends. When a share `x` of the mean rest of an output was generated,
/// `exp(-x)` of the sequences are left (exponentially distributed rests), each with `x · growth` more blocks:
/// `exp(-x) (active + x · sequences · growth)`. This is highest at `x = 1 - active / (sequences · growth)`.
pub(super) fn peak_blocks(active: f64, sequences: f64, growth: f64) -> f64 {
    let all = sequences * growth;
    if active < all { all * (active / all - 1.0).exp() } else { active }
}

impl Occupancy {
    /// `active_blocks` of `total_blocks` are in use at the peak of `sequences` (0 when unknown), of which the batch
    /// takes `sequences_max` (0 when unknown); a request takes `mean_duration` seconds. Also returns the number of
    /// blocks of a request up to which the waits are negligible.
    pub(super) fn of(
        (active_blocks, total_blocks): (u32, u32),
        (sequences, sequences_max): (u32, u32),
        mean_duration: f64,
    ) -> (Self, u32) {
        let (active, sequences) = (f64::from(active_blocks), f64::from(sequences));
        let sequences_max = if sequences_max == 0 { u32::MAX } else { sequences_max };
        // The number of sequences varies by its square root (Poisson), and that of blocks in proportion.
        let deviation = sequences.max(1.0).sqrt();
        let per_block = deviation / active;
        let places_left = f64::from(sequences_max) - sequences - 1.0;
        let is_batch_far = places_left > MARGIN_DEVIATIONS * deviation;
        let margin = if is_batch_far { (MARGIN_DEVIATIONS / per_block) as u32 } else { u32::MAX };
        let free = if total_blocks == 0 { u32::MAX } else { total_blocks.saturating_sub(active_blocks) };
        let are_blocks_known = total_blocks > 0 && active_blocks > 0;
        let (seconds, places) = (mean_duration / deviation, places_left / deviation);
        let occupancy = Self {
            blocks: if are_blocks_known { (f64::from(total_blocks) - active) * per_block } else { f64::INFINITY },
            per_block: if are_blocks_known { per_block } else { 0.0 },
            seconds,
            places,
            batch_wait: (seconds * expected_excess(places)).min(WAIT_MAX),
        };
        (occupancy, free.saturating_sub(margin))
    }

    /// The waits of a request that takes a number of free blocks.
    #[inline]
    pub(super) fn wait(&self, blocks: u64) -> CapacityWait {
        let left = self.blocks - blocks as f64 * self.per_block;
        let memory = (self.seconds * expected_excess(left)).min(WAIT_MAX);
        CapacityWait { memory, batch: self.batch_wait, full_probability: exceeds(self.places.min(left)) }
    }
}

/// The standard normal distribution at `z` from 0 to [`Z_MAX`], in steps of 1 / [`STEPS`]: the probability that a
/// variable exceeds `z`, and the expected excess over it (unit normal loss). Above that, both count as 0.
static NORMAL: [[f64; 2]; POINTS] = normal();
const Z_MAX: usize = 8;
const STEPS: usize = 32;
const POINTS: usize = Z_MAX * STEPS + 1;

/// Integrates the density twice by the trapezoidal rule, from the right.
const fn normal() -> [[f64; 2]; POINTS] {
    const WIDTH: f64 = 1.0 / STEPS as f64;
    let mut density = [0.0; POINTS];
    // The density at 0, and from each point to the next: exp(-h²/2 - hz), of which exp(-h²) is the next one's part.
    let (mut value, half) = (0.398_942_280_401_432_7, 1.0 - WIDTH * WIDTH / 2.0 + WIDTH * WIDTH * WIDTH * WIDTH / 8.0);
    let mut ratio = half;
    let mut at = 0;
    while at < POINTS {
        density[at] = value;
        value *= ratio;
        ratio *= half * half;
        at += 1;
    }
    let mut table = [[0.0; 2]; POINTS];
    let mut at = POINTS - 1;
    while at > 0 {
        at -= 1;
        let probability = table[at + 1][0] + (density[at] + density[at + 1]) * WIDTH / 2.0;
        table[at] = [probability, table[at + 1][1] + (probability + table[at + 1][0]) * WIDTH / 2.0];
    }
    table
}

/// One of the two columns at `z` ≥ 0, interpolated linearly.
#[inline]
fn interpolated(z: f64, column: usize) -> f64 {
    let scaled = (z * STEPS as f64).min((POINTS - 1) as f64);
    let at = (scaled as u32 as usize).min(POINTS - 2);
    let (low, high) = (NORMAL[at][column], NORMAL[at + 1][column]);
    low + (high - low) * (scaled - at as f64)
}

/// Probability that a standard normal variable exceeds `z`.
#[inline]
fn exceeds(z: f64) -> f64 {
    let probability = interpolated(z.abs(), 0);
    if z < 0.0 { 1.0 - probability } else { probability }
}

/// Expected excess of a standard normal variable over `z`.
#[inline]
fn expected_excess(z: f64) -> f64 {
    interpolated(z.abs(), 1) + (-z).max(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The waits of a request of 110 blocks on a worker, after a mean duration of ten seconds.
    fn waits(cached: u64, blocks: (u32, u32), sequences: (u32, u32)) -> CapacityWait {
        let (occupancy, spare) = Occupancy::of(blocks, sequences, 10.0);
        if spare > 110 { CapacityWait::default() } else { occupancy.wait(110 - cached) }
    }

    #[test]
    fn the_table_is_the_normal_distribution() {
        for (z, probability, excess) in [
            (0.0, 0.5, 0.398_942),
            (0.51, 0.305_026, 0.194_776),
            (1.0, 0.158_655, 0.083_315),
            (2.0, 0.022_750, 0.008_491),
            (3.0, 0.001_349_9, 0.000_382_2),
            (5.0, 2.866_5e-7, 5.346_2e-8),
        ] {
            let is = |value: f64, expected: f64| assert!((value / expected - 1.0).abs() < 0.005, "{z}: {value}");
            is(exceeds(z), probability);
            is(expected_excess(z), excess);
            is(exceeds(-z), 1.0 - probability);
            is(expected_excess(-z), excess + z);
        }
        for far in [8.0, 9.0, 1e12, f64::INFINITY] {
            assert!(exceeds(far) < 1e-14 && expected_excess(far) < 1e-14 && exceeds(-far) > 0.999, "{far}");
        }
    }

    #[test]
    fn sequences_that_grow_count_with_their_peak() {
        // Sequences that have more than they will still take: most end before they have grown.
        for (active, sequences, growth) in
            [(1000.0, 10.0, 100.0), (1000.0, 10.0, 10.0), (0.0, 0.0, 9.0), (5.0, 0.0, 9.0)]
        {
            assert!((peak_blocks(active, sequences, growth) - active).abs() < 1e-9, "{active} {sequences} {growth}");
        }
        // A hundred new ones of 5 blocks that take 50 more each. The highest of a fine grid:
        let at = |x: f64| (-x).exp() * (500.0 + x * 5000.0);
        let highest = (0..1000).map(|x| at(f64::from(x) / 100.0)).fold(0.0, f64::max);
        let peak = peak_blocks(500.0, 100.0, 50.0);
        assert!((peak / highest - 1.0).abs() < 1e-4 && peak > 4.0 * 500.0, "{peak} {highest}");
    }

    #[test]
    fn a_full_worker_costs_the_wait_for_blocks() {
        let full = |cached| waits(cached, (1000, 1050), (100, 0));
        // Sixty blocks are missing, 0.6 of a deviation of 100 blocks: the expected shortage is 0.7687 deviations.
        let expected = 10.0 * 100.0 * 0.7687 / 1000.0;
        assert!((full(0).memory - expected).abs() < 0.002 * expected, "{:?}", full(0));
        assert!(full(100).memory < full(0).memory / 2.0, "cached blocks need no free blocks");
        assert_eq!(waits(0, (1000, 5000), (100, 0)), CapacityWait::default());
    }

    #[test]
    fn memory_and_places_have_a_price_before_they_are_gone() {
        assert!(waits(0, (800, 1050), (100, 0)).memory > 0.0);
        let sequences = |sequences| waits(0, (0, 0), (sequences, 64)).batch;
        assert!(sequences(10) == 0.0 && sequences(50) > 0.0);
        assert!(sequences(63) < sequences(80) && sequences(80) < sequences(160));
        assert_eq!(waits(0, (0, 0), (500, 0)), CapacityWait::default(), "unknown");
    }
}
