//! The load of a worker as plain values, small enough that thousands are copied for each request.

use super::occupancy::peak_blocks;
use super::timestamp::Timestamp;
use kvbm::Level;
use std::fmt;
use std::time::Duration;

/// A measurement that may be missing, encoded as `NaN`.
///
/// An `f32` takes a quarter of an `Option<f64>`; a decision reads a dozen of each of a thousand workers, and no
/// measurement has seven significant digits.
#[derive(Clone, Copy)]
pub(crate) struct Measured(f32);

/// Speed of onboarding from a tier.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub(crate) struct Onboard {
    /// Seconds until the first block.
    pub(crate) latency: Measured,
    /// Bytes per second after the first block.
    pub(crate) bandwidth: Measured,
}

/// Speeds that a worker has measured itself.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub(crate) struct Speeds {
    /// Prompt tokens per second.
    pub(crate) prefill: Measured,
    /// Bytes of one block.
    pub(crate) block_bytes: Measured,
    /// Seconds from the end of a remote prefill to the first token that do not depend on the transfer.
    pub(crate) handoff_overhead: Measured,
    /// Seconds of the transfer that come after the end of the prefill, per estimated second of all of it.
    pub(crate) handoff_transfer: Measured,
    /// Mean seconds from placement to end of a request.
    pub(crate) mean_duration: Measured,
    /// Onboarding by source tier, from G2 on.
    pub(crate) onboard: [Onboard; LOWER_TIERS],
}

/// Number of tiers below G1, from which blocks are onboarded.
pub(crate) const LOWER_TIERS: usize = Level::ALL.len() - 1;

/// Index of a tier among those below G1; `None` for G1.
#[inline]
pub(crate) fn lower_tier(level: Level) -> Option<usize> {
    (level as usize).checked_sub(1)
}

/// Number of fields of [`Speeds`]: scalars, and two for each tier below G1.
const FIELDS: usize = SCALARS + 2 * LOWER_TIERS;
const SCALARS: usize = 5;
/// Tokens of a block when the model card does not say.
pub(super) const DEFAULT_BLOCK_TOKENS: u32 = 16;

/// Load of a worker.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub(crate) struct LoadStats {
    /// Prompt tokens queued before a new request.
    pub(crate) waiting_tokens: u32,
    /// Requests that wait for their first token.
    pub(crate) prompts: u32,
    /// Sequences that decode or wait to decode.
    pub(crate) sequences: u32,
    /// Tokens of context that these sequences read in a step: prompts and half of the expected outputs.
    pub(crate) context_tokens: u32,
    /// G1 blocks in use or booked by requests.
    pub(crate) active_blocks: u32,
    /// G1 blocks in all; 0 when unknown.
    pub(crate) total_blocks: u32,
    /// Maximum number of sequences in a batch; 0 when unknown.
    pub(crate) sequences_max: u32,
    /// Tokens of a block, as the model card of the worker says; 0 when unknown.
    pub(crate) block_tokens: u32,
    /// Blocks that are lost for each block that a request uses, because the memory will be full.
    pub(crate) lost_share: Measured,
    /// Whether lost blocks can be loaded from a store.
    pub(crate) has_store: bool,
    /// Seconds in which the queued prompts are computed; unknown when the router has placed none of them.
    pub(crate) waiting_seconds: Measured,
    /// Duration of decode steps and of prompts, relative to those on an average worker.
    pub(crate) step_pace: Measured,
    pub(crate) prefill_pace: Measured,
    /// Output tokens that a sequence has still to generate, on average.
    pub(crate) rest_tokens: Measured,
    /// Blocks queued for onboarding, by source tier.
    pub(crate) queued: [u32; LOWER_TIERS],
    /// Measured speeds.
    pub(crate) speeds: Speeds,
}

/// Which fields of [`Speeds`] were measured, one bit each.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct MeasuredMask(u32);

/// Which fields all workers of a fleet have measured, and which at least one has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Coverage {
    all: MeasuredMask,
    any: MeasuredMask,
}

/// Means of the fields that only some workers have measured; they replace the missing values of the others.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct FleetMeans {
    coverage: Coverage,
    means: Speeds,
    computed_at: Option<Timestamp>,
}

/// Age at which the means are computed again: measurements are averages and change slowly.
pub(crate) const MEANS_MAX_AGE: Duration = Duration::from_millis(100);

impl LoadStats {
    /// G1 blocks that are in use or booked now, or those that the sequences will have in use at their peak, if that is
    /// more.
    pub(crate) fn peak_blocks(&self) -> u32 {
        let growth = self.rest_tokens.or(0.0) / f64::from(self.tokens_per_block());
        peak_blocks(self.active_blocks.into(), self.sequences.into(), growth) as u32
    }

    /// Tokens of a block, or what most engines have.
    pub(super) fn tokens_per_block(&self) -> u32 {
        if self.block_tokens == 0 { DEFAULT_BLOCK_TOKENS } else { self.block_tokens }
    }
}

impl Measured {
    /// Not measured.
    pub(crate) const NONE: Self = Self(f32::NAN);

    pub(crate) const fn of(value: f64) -> Self {
        Self(value as f32)
    }

    #[inline]
    pub(crate) fn get(self) -> Option<f64> {
        (!self.0.is_nan()).then_some(f64::from(self.0))
    }

    #[inline]
    pub(crate) fn or(self, default: f64) -> f64 {
        if self.0.is_nan() { default } else { f64::from(self.0) }
    }

    pub(super) const fn bits(self) -> u32 {
        self.0.to_bits()
    }

    pub(super) const fn from_bits(bits: u32) -> Self {
        Self(f32::from_bits(bits))
    }
}

impl Default for Measured {
    fn default() -> Self {
        Self::NONE
    }
}

impl PartialEq for Measured {
    /// Two missing measurements are equal.
    fn eq(&self, other: &Self) -> bool {
        self.get() == other.get()
    }
}

impl fmt::Debug for Measured {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.get().fmt(f)
    }
}

impl From<Option<f64>> for Measured {
    fn from(value: Option<f64>) -> Self {
        value.map_or(Self::NONE, Self::of)
    }
}

impl Speeds {
    /// Latency and bandwidth of onboarding from a tier, if measured.
    #[inline]
    pub(crate) fn from(&self, level: Level) -> Option<(f64, f64)> {
        let onboard = self.onboard.get(lower_tier(level)?)?;
        Some((onboard.latency.get()?, onboard.bandwidth.get()?))
    }

    /// Sets latency and bandwidth of onboarding from a tier.
    pub(crate) fn set_onboard(&mut self, level: Level, latency: f64, bandwidth: f64) {
        if let Some(onboard) = lower_tier(level).and_then(|at| self.onboard.get_mut(at)) {
            *onboard = Onboard { latency: Measured::of(latency), bandwidth: Measured::of(bandwidth) };
        }
    }

    /// Mask of the measured fields.
    pub(super) fn measured(&self) -> MeasuredMask {
        let mut speeds = *self;
        MeasuredMask((0..FIELDS).fold(0, |bits, nth| bits | u32::from(speeds.field(nth).get().is_some()) << nth))
    }

    /// A field by its number.
    #[inline]
    fn field(&mut self, nth: usize) -> &mut Measured {
        match nth {
            0 => &mut self.prefill,
            1 => &mut self.block_bytes,
            2 => &mut self.handoff_overhead,
            3 => &mut self.mean_duration,
            4 => &mut self.handoff_transfer,
            _ => {
                let Onboard { latency, bandwidth } = &mut self.onboard[(nth - SCALARS) / 2];
                if (nth - SCALARS).is_multiple_of(2) { latency } else { bandwidth }
            }
        }
    }
}

impl MeasuredMask {
    pub(super) const fn bits(self) -> u32 {
        self.0
    }

    pub(super) const fn from_bits(bits: u32) -> Self {
        Self(bits)
    }
}

impl Default for Coverage {
    fn default() -> Self {
        Self { all: MeasuredMask(u32::MAX), any: MeasuredMask(0) }
    }
}

impl Coverage {
    #[inline]
    pub(crate) fn add(&mut self, measured: MeasuredMask) {
        self.all.0 &= measured.0;
        self.any.0 |= measured.0;
    }

    /// Fields that some workers have measured and others have not; nearly always few or none.
    fn uneven(self) -> impl Iterator<Item = usize> {
        let uneven = self.any.0 & !self.all.0;
        (0..FIELDS).filter(move |nth| uneven >> nth & 1 == 1)
    }
}

impl FleetMeans {
    /// Coverage at the last update.
    pub(crate) fn coverage(&self) -> Coverage {
        self.coverage
    }

    /// Whether the coverage changed or the means are too old.
    pub(crate) fn is_due(&self, coverage: Coverage, now: Timestamp) -> bool {
        let is_old = |at: Timestamp| now.bits().saturating_sub(at.bits()) >= MEANS_MAX_AGE.as_nanos() as u64;
        self.coverage != coverage || self.computed_at.is_none_or(is_old)
    }

    /// Computes the means again if that is due. Returns whether they may have changed.
    pub(crate) fn update<I: Iterator<Item = Speeds>>(
        &mut self,
        coverage: Coverage,
        now: Timestamp,
        fleet: impl Fn() -> I,
    ) -> bool {
        if !self.is_due(coverage, now) {
            return false;
        }
        let changed = self.coverage != coverage || coverage.any != coverage.all;
        (self.coverage, self.computed_at) = (coverage, Some(now));
        for nth in coverage.uneven() {
            let (mut sum, mut measured) = (0.0, 0_u32);
            for value in fleet().filter_map(|mut speeds| speeds.field(nth).get()) {
                sum += value;
                measured += 1;
            }
            *self.means.field(nth) = Measured::of(sum / f64::from(measured));
        }
        changed
    }

    /// Replaces the missing measurements of a worker by the means.
    #[inline]
    pub(crate) fn fill(&self, measured: MeasuredMask, speeds: &mut Speeds) {
        if self.coverage.any.0 & !measured.0 != 0 {
            let mut means = self.means;
            let missing = self.coverage.uneven().filter(|nth| measured.0 >> nth & 1 == 0);
            missing.for_each(|nth| *speeds.field(nth) = *means.field(nth));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::time::Instant;

    /// A fleet with missing measurements replaced.
    fn filled<const N: usize>(mut fleet: [Speeds; N]) -> [Speeds; N] {
        let (mut fleet_means, coverage) = (FleetMeans::default(), coverage(&fleet));
        fleet_means.update(coverage, Timestamp::from(Instant::now()), || fleet.into_iter());
        for speeds in &mut fleet {
            fleet_means.fill(speeds.measured(), speeds);
        }
        fleet
    }

    fn coverage(fleet: &[Speeds]) -> Coverage {
        let mut coverage = Coverage::default();
        for speeds in fleet {
            coverage.add(speeds.measured());
        }
        coverage
    }

    #[test]
    fn means_are_kept_until_too_old_or_the_coverage_changes() {
        let prefill = |speed| Speeds { prefill: Measured::of(speed), ..Speeds::default() };
        let (mut fleet_means, start) = (FleetMeans::default(), Instant::now());
        let mut mean = |fleet: [Speeds; 2], after: Duration| {
            fleet_means.update(coverage(&fleet), Timestamp::from(start + after), || fleet.into_iter());
            let mut newcomer = Speeds::default();
            fleet_means.fill(newcomer.measured(), &mut newcomer);
            newcomer.prefill.get()
        };
        assert_eq!(mean([prefill(1.0), Speeds::default()], Duration::ZERO), Some(1.0));
        assert_eq!(mean([prefill(2.0), Speeds::default()], MEANS_MAX_AGE / 2), Some(1.0));
        assert_eq!(mean([prefill(2.0), Speeds::default()], MEANS_MAX_AGE * 2), Some(2.0));
        let with_step = Speeds { mean_duration: Measured::of(1.0), ..prefill(3.0) };
        assert_eq!(mean([with_step, Speeds::default()], MEANS_MAX_AGE * 2), Some(3.0));
    }

    #[test]
    fn missing_measurements_are_filled_with_the_mean_of_others() {
        let measured = |prefill| Speeds { prefill: Measured::of(prefill), ..Speeds::default() };
        let mut with_disk = measured(300.0);
        with_disk.set_onboard(Level::G3, 0.5, 1e9);
        let [own, _, newcomer] = filled([measured(100.0), with_disk, Speeds::default()]);
        assert_eq!((newcomer.prefill.get(), newcomer.mean_duration.get()), (Some(200.0), None));
        assert_eq!((newcomer.from(Level::G3), newcomer.from(Level::G2)), (Some((0.5, 1e9)), None));
        assert_eq!(newcomer.from(Level::G1), None, "G1 is never onboarded from");
        assert_eq!(own.prefill.get(), Some(100.0), "its own measurement is kept");
        assert_eq!(own.from(Level::G3), Some((0.5, 1e9)), "its own onboarding speed");
    }

    #[test]
    fn every_field_has_a_number_of_its_own() {
        for nth in 0..FIELDS {
            let mut speeds = Speeds::default();
            *speeds.field(nth) = Measured::of(1.0);
            assert_eq!(speeds.measured(), MeasuredMask(1 << nth));
            assert_eq!(filled([speeds, Speeds::default()]), [speeds; 2]);
        }
    }
}
