//! How fast a device is, relative to the average one of the model.
//!
//! Workers on one device share its pace. Their steps delay each other, so what one of them measures depends on the
//! others at that time, and says nothing of the worker.

/// Durations relative to those on an average worker; `None` before anything was measured.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub(super) struct Pace {
    /// Of decode steps with the same batch.
    pub(super) step: Option<f64>,
    /// Of prompts of the same length.
    pub(super) prefill: Option<f64>,
}

/// Weight of a new measurement in the exponentially weighted moving averages: about the last hundred count, because one
/// step or prompt says more of itself than of the device.
const WEIGHT: f64 = 0.01;
/// Range of a measurement: beyond it, it is wrong.
const RANGE: (f64, f64) = (0.05, 20.0);

impl Pace {
    /// A decode step took this time, relative to the expected one.
    pub(super) fn step_measured(&mut self, ratio: f64) {
        average(&mut self.step, ratio);
    }

    /// A prompt took this time, relative to the expected one.
    pub(super) fn prefill_measured(&mut self, ratio: f64) {
        average(&mut self.prefill, ratio);
    }
}

fn average(value: &mut Option<f64>, measured: f64) {
    let (measured, before) = (measured.clamp(RANGE.0, RANGE.1), value.unwrap_or(1.0));
    *value = Some(before + (measured - before) * WEIGHT);
}
