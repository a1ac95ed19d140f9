//! A worker as a decision sees it: plain figures, small enough that thousands are copied for each request.

use super::timestamp::Moment;
use kvbm::Level;
use std::fmt;
use std::time::Duration;

/// A figure that may not have been measured yet.
///
/// A short float whose `NaN` says so: a quarter of what an `Option<f64>` takes, where a decision reads a dozen of each of a
/// thousand workers. No measurement is good to seven digits.
#[derive(Clone, Copy)]
pub(crate) struct Figure(f32);

/// How fast blocks come up from a tier.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub(crate) struct Onboard {
    /// Seconds until the first block.
    pub(crate) latency: Figure,
    /// Bytes per second after that.
    pub(crate) bandwidth: Figure,
}

/// What a worker's own measurements say.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub(crate) struct Speeds {
    /// Prompt tokens per second.
    pub(crate) prefill: Figure,
    /// Seconds that one more sequence adds to a decode step.
    pub(crate) step: Figure,
    /// Bytes of one block.
    pub(crate) block_bytes: Figure,
    /// Seconds from a hand-over's readiness to the first token, the transfer apart.
    pub(crate) resume: Figure,
    /// Seconds that a request stays, from its placement to its end.
    pub(crate) residence: Figure,
    /// From G2 on: nothing comes up from G1.
    pub(crate) onboard: [Onboard; ONBOARDED],
}

/// Levels that blocks come up from.
pub(crate) const ONBOARDED: usize = Level::ALL.len() - 1;

/// The place of a level among them. From G1 nothing needs to come.
#[inline]
pub(crate) fn below(level: Level) -> Option<usize> {
    (level as usize).checked_sub(1)
}

/// Figures of [`Speeds`]: some single ones, and two of each level that blocks come up from.
const FIGURES: usize = SINGLE + 2 * ONBOARDED;
const SINGLE: usize = 5;

/// A worker as a decision sees it.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub(crate) struct Standing {
    /// Prompt tokens to be computed before a new request's.
    pub(crate) waiting_tokens: u32,
    /// Requests that wait there for their first token.
    pub(crate) prompts: u32,
    /// Sequences that decode, or will.
    pub(crate) sequences: u32,
    /// G1 blocks in use by requests, or promised to them.
    pub(crate) active_blocks: u32,
    /// G1 blocks in all; 0 when unknown.
    pub(crate) total_blocks: u32,
    /// Blocks that others wait for there, by the level that they come up from.
    pub(crate) queued: [u32; ONBOARDED],
    /// Measurements.
    pub(crate) speeds: Speeds,
}

/// Which of the figures of [`Speeds`] were measured, a bit each.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Known(u32);

/// What all of a fleet have measured, and what any.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Spread {
    all: Known,
    any: Known,
}

/// Means over a fleet of what only some of it have measured: they stand in for the others.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Typical {
    spread: Spread,
    means: Speeds,
    worked_out: Option<Moment>,
}

/// Measurements are averages themselves, and move slowly.
pub(crate) const MEANS_STAND: Duration = Duration::from_millis(100);

impl Figure {
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
    pub(crate) fn or(self, stand_in: f64) -> f64 {
        if self.0.is_nan() { stand_in } else { f64::from(self.0) }
    }

    pub(super) const fn bits(self) -> u32 {
        self.0.to_bits()
    }

    pub(super) const fn from_bits(bits: u32) -> Self {
        Self(f32::from_bits(bits))
    }
}

impl Default for Figure {
    fn default() -> Self {
        Self::NONE
    }
}

impl PartialEq for Figure {
    /// Two figures that nobody measured are alike.
    fn eq(&self, other: &Self) -> bool {
        self.get() == other.get()
    }
}

impl fmt::Debug for Figure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.get().fmt(f)
    }
}

impl From<Option<f64>> for Figure {
    fn from(value: Option<f64>) -> Self {
        value.map_or(Self::NONE, Self::of)
    }
}

impl Speeds {
    /// How blocks come up from a level, if it was measured.
    #[inline]
    pub(crate) fn from(&self, level: Level) -> Option<(f64, f64)> {
        let onboard = self.onboard.get(below(level)?)?;
        Some((onboard.latency.get()?, onboard.bandwidth.get()?))
    }

    /// Notes how blocks come up from a level.
    pub(crate) fn onboards(&mut self, level: Level, latency: f64, bandwidth: f64) {
        if let Some(onboard) = below(level).and_then(|at| self.onboard.get_mut(at)) {
            *onboard = Onboard { latency: Figure::of(latency), bandwidth: Figure::of(bandwidth) };
        }
    }

    /// Which of them were measured.
    pub(super) fn known(&self) -> Known {
        let mut speeds = *self;
        Known((0..FIGURES).fold(0, |bits, nth| bits | u32::from(speeds.figure(nth).get().is_some()) << nth))
    }

    /// Each figure by its number.
    #[inline]
    fn figure(&mut self, nth: usize) -> &mut Figure {
        match nth {
            0 => &mut self.prefill,
            1 => &mut self.step,
            2 => &mut self.block_bytes,
            3 => &mut self.resume,
            4 => &mut self.residence,
            _ => {
                let Onboard { latency, bandwidth } = &mut self.onboard[(nth - SINGLE) / 2];
                if (nth - SINGLE).is_multiple_of(2) { latency } else { bandwidth }
            }
        }
    }
}

impl Known {
    pub(super) const fn bits(self) -> u32 {
        self.0
    }

    pub(super) const fn from_bits(bits: u32) -> Self {
        Self(bits)
    }
}

impl Default for Spread {
    fn default() -> Self {
        Self { all: Known(u32::MAX), any: Known(0) }
    }
}

impl Spread {
    #[inline]
    pub(crate) fn add(&mut self, known: Known) {
        self.all.0 &= known.0;
        self.any.0 |= known.0;
    }

    /// Figures that some have measured and others have not. Nearly always there are few, or none.
    fn uneven(self) -> impl Iterator<Item = usize> {
        let uneven = self.any.0 & !self.all.0;
        (0..FIGURES).filter(move |nth| uneven >> nth & 1 == 1)
    }
}

impl Typical {
    /// Who has measured what, as it was last told.
    pub(crate) fn spread(&self) -> Spread {
        self.spread
    }

    /// Works the means out anew when others have measured other things than before, or some time has passed. Whether
    /// something may stand in otherwise now.
    pub(crate) fn keep_up<I: Iterator<Item = Speeds>>(
        &mut self,
        spread: Spread,
        now: Moment,
        fleet: impl Fn() -> I,
    ) -> bool {
        let stands = |at: &Moment| now.bits().saturating_sub(at.bits()) < MEANS_STAND.as_nanos() as u64;
        if self.spread == spread && self.worked_out.as_ref().is_some_and(stands) {
            return false;
        }
        let otherwise = self.spread != spread || spread.any != spread.all;
        (self.spread, self.worked_out) = (spread, Some(now));
        for nth in spread.uneven() {
            let (mut sum, mut measured) = (0.0, 0_u32);
            for value in fleet().filter_map(|mut speeds| speeds.figure(nth).get()) {
                sum += value;
                measured += 1;
            }
            *self.means.figure(nth) = Figure::of(sum / f64::from(measured));
        }
        otherwise
    }

    /// Puts the means where a worker has measured nothing and others have.
    #[inline]
    pub(crate) fn fill(&self, known: Known, speeds: &mut Speeds) {
        if self.spread.any.0 & !known.0 != 0 {
            let mut means = self.means;
            let lacking = self.spread.uneven().filter(|nth| known.0 >> nth & 1 == 0);
            lacking.for_each(|nth| *speeds.figure(nth) = *means.figure(nth));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::time::Instant;

    /// A fleet whose gaps are filled.
    fn level<const N: usize>(mut fleet: [Speeds; N]) -> [Speeds; N] {
        let (mut typical, spread) = (Typical::default(), spread(&fleet));
        typical.keep_up(spread, Moment::from(Instant::now()), || fleet.into_iter());
        for speeds in &mut fleet {
            typical.fill(speeds.known(), speeds);
        }
        fleet
    }

    fn spread(fleet: &[Speeds]) -> Spread {
        let mut spread = Spread::default();
        for speeds in fleet {
            spread.add(speeds.known());
        }
        spread
    }

    #[test]
    fn means_stand_for_a_while_unless_something_else_is_measured() {
        let prefill = |speed| Speeds { prefill: Figure::of(speed), ..Speeds::default() };
        let (mut typical, start) = (Typical::default(), Instant::now());
        let mut mean = |fleet: [Speeds; 2], after: Duration| {
            typical.keep_up(spread(&fleet), Moment::from(start + after), || fleet.into_iter());
            let mut newcomer = Speeds::default();
            typical.fill(newcomer.known(), &mut newcomer);
            newcomer.prefill.get()
        };
        assert_eq!(mean([prefill(1.0), Speeds::default()], Duration::ZERO), Some(1.0));
        assert_eq!(mean([prefill(2.0), Speeds::default()], MEANS_STAND / 2), Some(1.0));
        assert_eq!(mean([prefill(2.0), Speeds::default()], MEANS_STAND * 2), Some(2.0));
        let with_step = Speeds { step: Figure::of(1.0), ..prefill(3.0) };
        assert_eq!(mean([with_step, Speeds::default()], MEANS_STAND * 2), Some(3.0));
    }

    #[test]
    fn what_nobody_measured_stays_open_and_what_some_measured_is_their_mean() {
        let measured = |prefill| Speeds { prefill: Figure::of(prefill), ..Speeds::default() };
        let mut with_disk = measured(300.0);
        with_disk.onboards(Level::G3, 0.5, 1e9);
        let [own, _, newcomer] = level([measured(100.0), with_disk, Speeds::default()]);
        assert_eq!((newcomer.prefill.get(), newcomer.step.get()), (Some(200.0), None));
        assert_eq!((newcomer.from(Level::G3), newcomer.from(Level::G2)), (Some((0.5, 1e9)), None));
        assert_eq!(newcomer.from(Level::G1), None, "what is there does not come up");
        assert_eq!(own.prefill.get(), Some(100.0), "what is measured stands");
        assert_eq!(own.from(Level::G3), Some((0.5, 1e9)), "and what is not is as elsewhere");
    }

    #[test]
    fn every_figure_has_a_number_of_its_own() {
        for nth in 0..FIGURES {
            let mut speeds = Speeds::default();
            *speeds.figure(nth) = Figure::of(1.0);
            assert_eq!(speeds.known(), Known(1 << nth));
            assert_eq!(level([speeds, Speeds::default()]), [speeds; 2]);
        }
    }
}
