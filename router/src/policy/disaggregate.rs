//! Whether a prompt is prefilled where it decodes, or on a prefill worker whose blocks are then handed over: pure.
//!
//! Alone on an idle worker a prompt is never quicker for a detour; what it buys is that the worker's decodes are not held up.
//! So prefill on a worker that decodes is charged once for the request itself and once for those whom it stalls, and the
//! detour once plus its hand-over. The length from which the detour pays follows from measured speeds.

use super::cost::Cost;
use super::tuning::Disaggregation;
use worker::plane::Phase;

/// How a request is to be served.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Split {
    /// Prefill and decode on one worker.
    Together,
    /// Prefill on a prefill worker, decode elsewhere.
    Apart,
}

/// What others lose while a prompt takes `prefill` seconds on a worker where `sequences` decode.
pub(crate) fn stall(prefill: f64, phase: Phase, sequences: u32, weight: f64) -> f64 {
    let share = match phase {
        Phase::Prefill => 0.0,
        // It was set apart to decode: whoever is not there yet comes while the prompt is computed.
        Phase::Decode => 1.0,
        // The busier, the likelier that somebody waits.
        Phase::Both => f64::from(sequences) / (f64::from(sequences) + 1.0),
    };
    weight * share * prefill
}

/// Decides for one decode worker. `missing`: full blocks of the prompt that it does not hold, without which there is
/// nothing to hand over.
pub(crate) fn decide(mode: Disaggregation, missing: u64, together: &Cost, apart: &Cost) -> Split {
    let pays = match mode {
        Disaggregation::Auto => apart.total() < together.total(),
        Disaggregation::Always => true,
        Disaggregation::Never => false,
    };
    if pays && missing > 0 { Split::Apart } else { Split::Together }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::Preset;

    fn costs(tokens: f64, phase: Phase, sequences: u32, prefill_queue: f64) -> (Cost, Cost) {
        let prefill = tokens / 1000.0;
        let together = Cost { prefill, stall: stall(prefill, phase, sequences, 1.0), ..Cost::default() };
        let apart = Cost { prefill, queue: prefill_queue, handover: 0.05, ..Cost::default() };
        (together, apart)
    }

    fn auto(tokens: f64, phase: Phase, sequences: u32, queue: f64) -> Split {
        let (together, apart) = costs(tokens, phase, sequences, queue);
        decide(Disaggregation::Auto, 1, &together, &apart)
    }

    #[test]
    fn long_prompts_part_and_short_ones_stay() {
        assert_eq!(auto(40.0, Phase::Decode, 0, 0.0), Split::Together);
        assert_eq!(auto(60.0, Phase::Decode, 0, 0.0), Split::Apart, "longer than the hand-over");
    }

    #[test]
    fn a_busy_prefill_worker_sends_prompts_back() {
        assert_eq!(auto(1000.0, Phase::Decode, 4, 0.5), Split::Apart);
        assert_eq!(auto(1000.0, Phase::Decode, 4, 1.0), Split::Together);
    }

    #[test]
    fn a_worker_for_everything_parts_with_prompts_when_somebody_decodes_there() {
        assert_eq!(auto(1000.0, Phase::Both, 0, 0.0), Split::Together);
        assert_eq!(auto(1000.0, Phase::Both, 3, 0.0), Split::Apart);
    }

    #[test]
    fn the_latency_preset_parts_with_shorter_prompts() {
        let split = |preset: Preset| {
            let (prefill, weight) = (0.06, preset.settings().decode_interference_weight);
            let together = Cost { prefill, stall: stall(prefill, Phase::Both, 1, weight), ..Cost::default() };
            decide(Disaggregation::Auto, 1, &together, &Cost { prefill, handover: 0.05, ..Cost::default() })
        };
        assert_eq!(split(Preset::Balanced), Split::Together, "one decode held up for 60 ms, half of the time");
        assert_eq!(split(Preset::Latency), Split::Apart);
    }

    #[test]
    fn the_mode_overrides_the_times_but_not_an_empty_hand_over() {
        let (together, apart) = costs(10.0, Phase::Decode, 0, 9.0);
        assert_eq!(decide(Disaggregation::Always, 1, &together, &apart), Split::Apart);
        assert_eq!(decide(Disaggregation::Always, 0, &together, &apart), Split::Together);
        let (together, apart) = costs(10_000.0, Phase::Decode, 9, 0.0);
        assert_eq!(decide(Disaggregation::Never, 1, &together, &apart), Split::Together);
    }
}
