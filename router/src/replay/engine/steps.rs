//! The time that steps of the batch take.

/// The current step, or several steps that differ only in the length of the context.
#[derive(Clone, Copy, Default)]
pub(super) struct Steps {
    pub(super) began_ns: u64,
    pub(super) count: u64,
    /// Prompt tokens that the step computes, without the last tokens of transferred prompts, which say nothing about
    /// the speed of prefill.
    pub(super) prompt_tokens: u64,
    /// Seconds of the first step, and by how much each following step is longer.
    pub(super) first_s: f64,
    pub(super) growth_s: f64,
}

impl Steps {
    pub(super) fn seconds(&self, nth: u64) -> f64 {
        self.first_s + nth as f64 * self.growth_s
    }

    /// End of each step, in order.
    pub(super) fn ends(&self) -> impl Iterator<Item = u64> {
        let ends = |at: &mut u64, nth| {
            *at += nanoseconds(self.seconds(nth));
            Some(*at)
        };
        (0..self.count).scan(self.began_ns, ends)
    }

    /// End of the last step.
    pub(super) fn end(&self) -> u64 {
        self.ends().last().unwrap_or(self.began_ns)
    }
}

/// Converts seconds, rounded up to at least one nanosecond so that virtual time advances.
pub(super) fn nanoseconds(seconds: f64) -> u64 {
    (seconds * 1e9).max(1.0) as u64
}
