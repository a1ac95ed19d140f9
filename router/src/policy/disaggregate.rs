//! Choice between aggregated and disaggregated serving: prefill on the worker that decodes, or on a prefill worker
//! followed by a KV transfer. Pure.
//!
//! On an idle worker remote prefill is never faster; its benefit is that decoding sequences are not stalled. So local
//! prefill counts once for the request and once for the sequences that it stalls, and remote prefill counts once plus
//! its transfer. The prompt length from which remote prefill is chosen follows from measured speeds.

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

/// Weighted delay of the sequences that decode on a worker while it computes a prompt for `prefill` seconds.
/// `sequences`: those on the worker, also queued ones, which decode by then; `others_delay`: weight of one second of
/// delay of one sequence.
#[inline]
pub(crate) fn decode_stall(prefill: f64, role: Role, sequences: u32, others_delay: f64) -> f64 {
    let stalled = match role {
        Role::Prefill => 0,
        // A decode worker expects a sequence to arrive while the prompt is computed.
        Role::Decode => sequences.max(1),
        Role::Both => sequences,
    };
    others_delay * f64::from(stalled) * prefill
}

/// Decides for one decode worker. `missing`: full prompt blocks that it has not cached; without any there is nothing to
/// transfer.
pub(crate) fn decide(mode: Disaggregation, missing: u64, aggregated: &Cost, disaggregated: &Cost) -> ServingMode {
    let is_chosen = match mode {
        Disaggregation::Auto => disaggregated.total() < aggregated.total(),
        Disaggregation::Always => true,
        Disaggregation::Never => false,
    };
    if is_chosen && missing > 0 { ServingMode::Disaggregated } else { ServingMode::Aggregated }
}

#[cfg(test)]
mod tests {
    use super::*;

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
        assert_eq!(auto(1000.0, Role::Decode, 4, 4.0), ServingMode::Aggregated);
    }

    #[test]
    fn workers_of_both_roles_disaggregate_when_they_decode() {
        assert_eq!(auto(1000.0, Role::Both, 0, 0.0), ServingMode::Aggregated);
        assert_eq!(auto(1000.0, Role::Both, 3, 0.0), ServingMode::Disaggregated);
    }

    #[test]
    fn a_delay_that_is_worth_more_disaggregates_shorter_prompts() {
        let serving_mode = |others_delay| {
            let (prefill, kv_transfer) = (0.06, 0.05);
            let decode_stall = decode_stall(prefill, Role::Both, 4, others_delay);
            let aggregated = Cost { prefill, decode_stall, ..Cost::default() };
            decide(Disaggregation::Auto, 1, &aggregated, &Cost { prefill, kv_transfer, ..Cost::default() })
        };
        assert_eq!(serving_mode(0.1), ServingMode::Aggregated);
        assert_eq!(serving_mode(0.5), ServingMode::Disaggregated);
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
