//! A worker as a decision sees it: plain figures, small enough that thousands are copied for each request.

use kvbm::Level;
use std::fmt;

/// A figure that may not have been measured yet.
///
/// A float whose `NaN` says so: half of what an `Option` takes, where a thousand workers have five of them each.
#[derive(Clone, Copy)]
pub(crate) struct Figure(f64);

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
pub(super) const ONBOARDED: usize = Level::ALL.len() - 1;

/// A worker as a decision sees it.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub(crate) struct Standing {
    /// Prompt tokens to be computed before a new request's.
    pub(crate) waiting_tokens: u64,
    /// Requests that wait there for their first token.
    pub(crate) prompts: u64,
    /// Sequences that decode, or will.
    pub(crate) sequences: u64,
    /// G1 blocks in use by requests, or promised to them.
    pub(crate) active_blocks: u64,
    /// G1 blocks in all; 0 when unknown.
    pub(crate) total_blocks: u64,
    /// Measurements.
    pub(crate) speeds: Speeds,
}

/// Means over a fleet, which stand in for what a worker has not measured.
#[derive(Default)]
pub(crate) struct Typical {
    sums: [(f64, u32); 5],
    onboard: [Onboard; ONBOARDED],
    members: u32,
    /// By level, members that know how blocks come up.
    onboarding: [u32; ONBOARDED],
}

impl Figure {
    /// Not measured.
    pub(crate) const NONE: Self = Self(f64::NAN);

    pub(crate) const fn of(value: f64) -> Self {
        Self(value)
    }

    #[inline]
    pub(crate) fn get(self) -> Option<f64> {
        (!self.0.is_nan()).then_some(self.0)
    }

    #[inline]
    pub(crate) fn or(self, stand_in: f64) -> f64 {
        if self.0.is_nan() { stand_in } else { self.0 }
    }

    #[inline]
    fn or_else(&mut self, other: Self) {
        if self.0.is_nan() {
            *self = other;
        }
    }

    pub(super) const fn bits(self) -> u64 {
        self.0.to_bits()
    }

    pub(super) const fn from_bits(bits: u64) -> Self {
        Self(f64::from_bits(bits))
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
        value.map_or(Self::NONE, Self)
    }
}

impl Speeds {
    /// How blocks come up from a level, if it was measured. From G1 nothing needs to.
    #[inline]
    pub(crate) fn from(&self, level: Level) -> Option<(f64, f64)> {
        let onboard = self.onboard.get((level as usize).checked_sub(1)?)?;
        Some((onboard.latency.get()?, onboard.bandwidth.get()?))
    }

    /// Notes how blocks come up from a level.
    pub(crate) fn onboards(&mut self, level: Level, latency: f64, bandwidth: f64) {
        if let Some(onboard) = (level as usize).checked_sub(1).and_then(|at| self.onboard.get_mut(at)) {
            *onboard = Onboard { latency: Figure::of(latency), bandwidth: Figure::of(bandwidth) };
        }
    }

    fn means(&mut self) -> [&mut Figure; 5] {
        [&mut self.prefill, &mut self.step, &mut self.block_bytes, &mut self.resume, &mut self.residence]
    }
}

impl Typical {
    /// Takes a worker's measurements in. Of a tier, the first that was measured stands for all.
    #[inline]
    pub(crate) fn add(&mut self, speeds: &Speeds) {
        self.members += 1;
        let Speeds { prefill, step, block_bytes, resume, residence, onboard } = speeds;
        for ((sum, count), figure) in self.sums.iter_mut().zip([prefill, step, block_bytes, resume, residence]) {
            if let Some(value) = figure.get() {
                *sum += value;
                *count += 1;
            }
        }
        for ((own, count), other) in self.onboard.iter_mut().zip(&mut self.onboarding).zip(onboard) {
            own.latency.or_else(other.latency);
            own.bandwidth.or_else(other.bandwidth);
            *count += u32::from(other.bandwidth.get().is_some());
        }
    }

    /// Whether there is anything that some have measured and others have not.
    pub(crate) fn fills(&self) -> bool {
        let mut known = self.sums.iter().map(|(_, count)| count).chain(&self.onboarding);
        known.any(|count| (1..self.members).contains(count))
    }

    /// Puts the means where nothing is measured.
    pub(crate) fn fill(&self, speeds: &mut Speeds) {
        for (figure, (sum, count)) in speeds.means().into_iter().zip(self.sums) {
            // Of nothing, 0 / 0: not measured.
            figure.or_else(Figure(sum / f64::from(count)));
        }
        for (own, typical) in speeds.onboard.iter_mut().zip(self.onboard) {
            own.latency.or_else(typical.latency);
            own.bandwidth.or_else(typical.bandwidth);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_nobody_measured_stays_open_and_what_some_measured_is_their_mean() {
        let measured = |prefill| Speeds { prefill: Figure::of(prefill), ..Speeds::default() };
        let mut with_disk = measured(300.0);
        with_disk.onboards(Level::G3, 0.5, 1e9);
        let mut typical = Typical::default();
        for speeds in [measured(100.0), with_disk, Speeds::default()] {
            typical.add(&speeds);
        }
        let mut newcomer = Speeds::default();
        assert!(typical.fills());
        typical.fill(&mut newcomer);
        assert_eq!((newcomer.prefill.get(), newcomer.step.get()), (Some(200.0), None));
        assert_eq!((newcomer.from(Level::G3), newcomer.from(Level::G2)), (Some((0.5, 1e9)), None));
        assert_eq!(newcomer.from(Level::G1), None, "what is there does not come up");
        let mut own = measured(7.0);
        typical.fill(&mut own);
        assert_eq!(own.prefill.get(), Some(7.0), "what is measured stands");
        let mut alike = Typical::default();
        for speeds in [measured(1.0), measured(2.0)] {
            alike.add(&speeds);
        }
        assert!(!alike.fills(), "all know the same");
        let mut disk = measured(3.0);
        disk.onboards(Level::G3, 0.5, 1e9);
        alike.add(&disk);
        assert!(alike.fills(), "one knows more");
    }
}
