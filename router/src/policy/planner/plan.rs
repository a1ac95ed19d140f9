//! The advice of the planner: whole workers of each role within a bound, and the times to expect with them.
//!
//! The need has no bound: for a target that is about as long as one decode step, each worker could only decode one
//! sequence. So the advice is bounded. A larger need is cut to the split of the bound with the least pressure, and the
//! plan says which target is then missed and by how much.

use super::{Capacity, Need, PrefillQueue, Targets, Workload, decode_batch};
use serde::Serialize;

/// How many workers of each role there should be.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) struct Plan {
    pub(crate) need: Need,
    pub(crate) prefill_workers: u64,
    pub(crate) decode_workers: u64,
    /// Upper bound of both together.
    pub(crate) max_workers: u64,
    pub(crate) ttft: Outlook,
    pub(crate) itl: Outlook,
}

/// What to expect of one target with the advised workers. Times in seconds.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub struct Outlook {
    /// The target.
    pub target_s: f64,
    /// The expected time; `null` if it grows as long as the load lasts.
    #[serde(serialize_with = "finite")]
    pub expected_s: f64,
    /// The expected time with any number of workers: an empty queue, or one sequence in a step.
    pub least_s: f64,
    /// Whether the expected time is within the target.
    pub is_met: bool,
}

/// The plan for one model.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct PlanStatus {
    /// The model.
    pub model: String,
    /// Advised number of prefill workers.
    pub prefill_workers: u64,
    /// Advised number of decode workers.
    pub decode_workers: u64,
    /// Upper bound of both together.
    pub max_workers: u64,
    /// Mean time to first token.
    pub ttft: Outlook,
    /// Time between tokens.
    pub itl: Outlook,
}

/// Bound without a configured one, as a multiple of the workers that there are: measured speeds are not extrapolated
/// further, and an autoscaler that follows the advice gets there in a few steps (that of Kubernetes doubles at most,
/// too).
const MAX_GROWTH: u64 = 2;

impl Plan {
    /// `workers`: number of workers of the model; `max_workers`: the configured bound.
    pub(crate) fn of(
        workload: &Workload,
        capacity: &Capacity,
        targets: &Targets,
        workers: usize,
        max_workers: Option<u32>,
    ) -> Self {
        let need = Need::of(workload, capacity, targets);
        let bound = max_workers.map_or(workers as u64 * MAX_GROWTH, u64::from).max(2);
        let (mut prefill_workers, mut decode_workers) = need.whole();
        if prefill_workers + decode_workers > bound {
            prefill_workers = need.split(bound as usize, 1) as u64;
            decode_workers = bound - prefill_workers;
        }
        let queue = PrefillQueue::of(workload, capacity);
        let ttft = Outlook::of(targets.ttft, queue.seconds + queue.wait(prefill_workers as f64), queue.seconds);
        let itl = |sequences: f64| capacity.step + capacity.step_per_sequence * sequences;
        let (sequences, least) = match sequences(workload, capacity, decode_workers as f64) {
            Some(sequences) => (sequences.max(1.0), itl(1.0)),
            None => (0.0, 0.0),
        };
        let expected = if least > 0.0 { itl(sequences) } else { 0.0 };
        Self {
            need,
            prefill_workers,
            decode_workers,
            max_workers: bound,
            ttft,
            itl: Outlook::of(targets.itl, expected, least),
        }
    }

    /// The targets by name.
    pub(crate) fn outlooks(&self) -> [(&'static str, Outlook); 2] {
        [("ttft", self.ttft), ("itl", self.itl)]
    }

    /// The plan as others read it.
    pub(crate) fn status(&self, model: &str) -> PlanStatus {
        let Self { prefill_workers, decode_workers, max_workers, ttft, itl, .. } = *self;
        PlanStatus { model: model.to_owned(), prefill_workers, decode_workers, max_workers, ttft, itl }
    }
}

impl Outlook {
    fn of(target: f64, expected: f64, least: f64) -> Self {
        Self { target_s: target, expected_s: expected, least_s: least, is_met: expected <= target }
    }
}

/// Sequences in a step of each of `workers`; infinite if they generate fewer tokens than are asked for, `None` if none
/// are asked for.
fn sequences(workload: &Workload, capacity: &Capacity, workers: f64) -> Option<f64> {
    let rate = workload.output_tokens / workers;
    // In a steady state n sequences make a token each per step: n = rate × (step + n × step_per_sequence).
    let slack = 1.0 - rate * capacity.step_per_sequence;
    let by_rate = if slack > 0.0 { rate * capacity.step / slack } else { f64::INFINITY };
    let sequences = by_rate.max(workload.sequences / workers);
    (sequences > 0.0).then(|| sequences.min(decode_batch(workload, capacity, f64::INFINITY)))
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "the signature that serde calls")]
fn finite<S: serde::Serializer>(seconds: &f64, serializer: S) -> Result<S::Ok, S::Error> {
    Some(*seconds).filter(|seconds| seconds.is_finite()).serialize(serializer)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const CAPACITY: Capacity = Capacity { prefill: 10_000.0, step: 0.01, step_per_sequence: 0.001, blocks: 0.0 };
    const TARGETS: Targets = Targets { ttft: 1.0, itl: 0.05 };

    fn workload(prompts: f64, output_tokens: f64) -> Workload {
        Workload { prompts, prompt_tokens: prompts * 2_000.0, output_tokens, ..Workload::default() }
    }

    #[test]
    fn a_need_within_the_bound_is_the_advice_and_meets_the_targets() {
        let plan = Plan::of(&workload(20.0, 8_000.0), &CAPACITY, &TARGETS, 16, None);
        assert_eq!((plan.prefill_workers, plan.decode_workers), plan.need.whole());
        assert!(plan.ttft.is_met && plan.itl.is_met && plan.max_workers == 32, "{plan:?}");
    }

    /// 600 tokens per second for 75 sequences.
    fn decoding() -> Workload {
        Workload { sequences: 75.0, ..workload(1.0, 600.0) }
    }

    #[test]
    fn a_need_beyond_the_bound_is_cut_and_the_miss_is_reported() {
        // One sequence in a step takes 49 ms, two take 53.
        let slow = Capacity { step: 0.045, step_per_sequence: 0.004, ..CAPACITY };
        let plan = Plan::of(&decoding(), &slow, &TARGETS, 4, None);
        assert!(plan.need.decode > 70.0, "{plan:?}");
        assert_eq!((plan.prefill_workers, plan.decode_workers, plan.max_workers), (1, 7, 8));
        assert!(plan.ttft.is_met && !plan.itl.is_met, "{plan:?}");
        let expected = 0.045 + 0.004 * 75.0 / 7.0;
        assert!((plan.itl.expected_s - expected).abs() < 1e-9 && (plan.itl.least_s - 0.049).abs() < 1e-9, "{plan:?}");
    }

    #[test]
    fn a_target_that_no_number_of_workers_meets_asks_for_what_the_load_needs() {
        let slow = Capacity { step: 0.06, ..CAPACITY };
        let plan = Plan::of(&decoding(), &slow, &TARGETS, 4, None);
        assert_eq!(plan.decode_workers, 2, "60 sequences in a step of 120 ms");
        assert!(!plan.itl.is_met && plan.itl.least_s > plan.itl.target_s, "{plan:?}");
        assert!((plan.itl.expected_s - (0.06 + 0.001 * 37.5)).abs() < 1e-9, "{plan:?}");
        let json = serde_json::to_value(plan.status("m")).unwrap();
        assert_eq!((&json["decode_workers"], &json["itl"]["is_met"]), (&2.into(), &false.into()));
    }

    #[test]
    fn a_load_beyond_the_bound_has_no_expected_time() {
        let plan = Plan::of(&workload(100.0, 0.0), &CAPACITY, &TARGETS, 4, Some(6));
        assert_eq!((plan.prefill_workers, plan.decode_workers), (5, 1), "20 workers of prefill are needed");
        assert!(plan.ttft.expected_s.is_infinite() && !plan.ttft.is_met && plan.itl.is_met, "{plan:?}");
        assert!(serde_json::to_value(plan.status("m")).unwrap()["ttft"]["expected_s"].is_null());
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        /// The advice never exceeds the bound, and a target counts as met unless the need was cut or no number of
        /// workers meets it.
        #[test]
        fn advice_stays_within_the_bound(
            prompts in 0.0..500.0f64, output in 0.0..50_000.0f64, sequences in 0.0..1_000.0f64,
            step in 0.001..0.1f64, workers in 1..64usize, max_workers in prop::option::of(1..64u32),
        ) {
            let capacity = Capacity { step, ..CAPACITY };
            let load = Workload { sequences, ..workload(prompts, output) };
            let plan = Plan::of(&load, &capacity, &TARGETS, workers, max_workers);
            prop_assert!(plan.prefill_workers >= 1 && plan.decode_workers >= 1);
            prop_assert!(plan.prefill_workers + plan.decode_workers <= plan.max_workers);
            let is_cut = (plan.prefill_workers, plan.decode_workers) != plan.need.whole();
            for (name, outlook) in plan.outlooks() {
                let is_attainable = outlook.least_s <= outlook.target_s;
                prop_assert!(outlook.is_met || is_cut || !is_attainable, "{name}: {plan:?}");
                prop_assert!(outlook.expected_s >= outlook.least_s);
            }
        }
    }
}
