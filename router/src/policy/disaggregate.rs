//! Choice between aggregated and disaggregated serving: prefill on the worker that decodes, or on a prefill worker
//! followed by a KV transfer. Pure.
//!
//! On an idle worker remote prefill is never faster; its benefit is that decoding sequences are not stalled. So local
//! prefill counts once for the request and once for the sequences that it stalls, and remote prefill counts once plus
//! its transfer. The prompt length from which remote prefill pays follows from measured speeds.

use super::cost::Cost;
use super::tuning::Disaggregation;
use worker::plane::Role;

/// How a request is served.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum ServingMode {
    /// Prefill and decode on one worker.
    Aggregated,
    /// Prefill on a prefill worker, decode on another worker.
    Disaggregated,
}

/// Delay of other requests while a prompt takes `prefill` seconds on a worker with `sequences` decoding.
pub(crate) fn decode_stall(prefill: f64, role: Role, sequences: u32, weight: f64) -> f64 {
    let share = match role {
        Role::Prefill => 0.0,
        // A decode worker expects sequences to arrive while the prompt is computed.
        Role::Decode => 1.0,
        // The more sequences, the likelier that one of them waits.
        Role::Both => f64::from(sequences) / (f64::from(sequences) + 1.0),
    };
    weight * share * prefill
}

/// Decides for one decode worker. `missing`: full prompt blocks that it has not cached; without any there is nothing to
/// transfer.
pub(crate) fn decide(mode: Disaggregation, missing: u64, aggregated: &Cost, disaggregated: &Cost) -> ServingMode {
    let pays = match mode {
        Disaggregation::Auto => disaggregated.total() < aggregated.total(),
        Disaggregation::Always => true,
        Disaggregation::Never => false,
    };
    if pays && missing > 0 { ServingMode::Disaggregated } else { ServingMode::Aggregated }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::Preset;

    fn costs(tokens: f64, role: Role, sequences: u32, prefill_queue: f64) -> (Cost, Cost) {
        let prefill = tokens / 1000.0;
        let aggregated = Cost { prefill, decode_stall: decode_stall(prefill, role, sequences, 1.0), ..Cost::default() };
        let disaggregated = Cost { prefill, queue: prefill_queue, kv_transfer: 0.05, ..Cost::default() };
        (aggregated, disaggregated)
    }

    fn auto(tokens: f64, role: Role, sequences: u32, queue: f64) -> ServingMode {
        let (aggregated, disaggregated) = costs(tokens, role, sequences, queue);
        decide(Disaggregation::Auto, 1, &aggregated, &disaggregated)
    }

    #[test]
    fn long_prompts_are_disaggregated_and_short_ones_are_not() {
        assert_eq!(auto(40.0, Role::Decode, 0, 0.0), ServingMode::Aggregated);
        assert_eq!(auto(60.0, Role::Decode, 0, 0.0), ServingMode::Disaggregated, "longer than the transfer");
    }

    #[test]
    fn a_busy_prefill_worker_sends_prompts_back() {
        assert_eq!(auto(1000.0, Role::Decode, 4, 0.5), ServingMode::Disaggregated);
        assert_eq!(auto(1000.0, Role::Decode, 4, 1.0), ServingMode::Aggregated);
    }

    #[test]
    fn workers_of_both_roles_disaggregate_when_they_decode() {
        assert_eq!(auto(1000.0, Role::Both, 0, 0.0), ServingMode::Aggregated);
        assert_eq!(auto(1000.0, Role::Both, 3, 0.0), ServingMode::Disaggregated);
    }

    #[test]
    fn the_latency_preset_disaggregates_shorter_prompts() {
        let serving_mode = |preset: Preset| {
            let (prefill, weight) = (0.06, preset.settings().decode_interference_weight);
            let aggregated =
                Cost { prefill, decode_stall: decode_stall(prefill, Role::Both, 1, weight), ..Cost::default() };
            decide(Disaggregation::Auto, 1, &aggregated, &Cost { prefill, kv_transfer: 0.05, ..Cost::default() })
        };
        assert_eq!(
            serving_mode(Preset::Balanced),
            ServingMode::Aggregated,
            "one decoding sequence stalled for 60 ms, half of the time"
        );
        assert_eq!(serving_mode(Preset::Latency), ServingMode::Disaggregated);
    }

    #[test]
    fn the_mode_overrides_the_times_but_not_an_empty_hand_over() {
        let (aggregated, disaggregated) = costs(10.0, Role::Decode, 0, 9.0);
        assert_eq!(decide(Disaggregation::Always, 1, &aggregated, &disaggregated), ServingMode::Disaggregated);
        assert_eq!(decide(Disaggregation::Always, 0, &aggregated, &disaggregated), ServingMode::Aggregated);
        let (aggregated, disaggregated) = costs(10_000.0, Role::Decode, 9, 0.0);
        assert_eq!(decide(Disaggregation::Never, 1, &aggregated, &disaggregated), ServingMode::Aggregated);
    }
}
