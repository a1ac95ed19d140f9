//! Lower bounds of the service times of a worker, in 24 bytes: enough to see of most workers that they cost more than
//! others, without reading their service times.

use super::estimate::ServiceEstimate;

/// Lower bounds, rounded down. If a time of the worker is not a number of at least 0, `queue` is -∞, below any cost.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) struct LeastTimes {
    /// Seconds until the queued prompts are computed.
    queue: f32,
    /// Seconds of prefill per prompt token, as the worker reports it.
    seconds_per_token: f32,
    /// Duration of prompts, relative to that on an average worker.
    prefill_pace: f32,
    /// Part by which a decode step is shorter than that of an average worker with the same batch; rounded up.
    step_gain: f32,
    /// Sequences that decode or wait to decode.
    sequences: f32,
    /// Requests that wait for their first token.
    prompts: f32,
}

/// More than the rounding of an `f32` and of the few operations of a bound.
const MARGIN: f64 = 1e-6;

impl LeastTimes {
    pub(super) fn of(estimate: &ServiceEstimate) -> Self {
        let down = |value: f64| (value * (1.0 - MARGIN)).min(f32::MAX.into()) as f32;
        let gain = (1.0 - estimate.step_pace()).max(0.0) * (1.0 + MARGIN);
        Self {
            queue: if estimate.is_regular() { down(estimate.queue) } else { f32::NEG_INFINITY },
            seconds_per_token: down(estimate.seconds_per_token),
            prefill_pace: down(estimate.compute(Some(1.0), 0.0)),
            step_gain: gain as f32,
            sequences: down(estimate.sequences.into()),
            prompts: down(estimate.prompts.into()),
        }
    }

    /// Seconds until the queued prompts are computed.
    #[inline]
    pub(crate) fn queue(&self) -> f64 {
        self.queue.into()
    }

    /// Seconds that a prompt computes: `average` seconds on an average worker, or, before prompts were measured, this
    /// many tokens.
    #[inline]
    pub(crate) fn compute(&self, average: f64, is_measured: bool) -> f64 {
        average * f64::from(if is_measured { self.prefill_pace } else { self.seconds_per_token })
    }

    /// Part by which a decode step is shorter than that of an average worker with the same batch.
    #[inline]
    pub(crate) fn step_gain(&self) -> f64 {
        self.step_gain.into()
    }

    /// Sequences that decode or wait to decode.
    #[inline]
    pub(crate) fn sequences(&self) -> f64 {
        self.sequences.into()
    }

    /// Requests that wait for their first token.
    #[inline]
    pub(crate) fn prompts(&self) -> f64 {
        self.prompts.into()
    }
}
