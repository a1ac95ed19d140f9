use super::*;
use proptest::prelude::*;

fn run(tier: usize, blocks: usize, latency: f64, seconds_per_block: f64) -> TierRun {
    TierRun { tier, blocks, speed: TierSpeed::Measured(MeasuredSpeed { latency, seconds_per_block, queued: 0 }) }
}

/// Without a deadline.
fn plan(runs: &[TierRun], recompute: Option<f64>) -> Plan {
    super::plan(runs, recompute, None)
}

fn head_and_tail(plan: Plan) -> (usize, usize) {
    (plan.head, plan.tail)
}

#[test]
fn a_fast_tier_loads_all_and_a_much_too_slow_one_nothing() {
    assert_eq!(head_and_tail(plan(&[run(0, 100, 0.05, 0.0005)], Some(0.01))), (100, 0));
    assert_eq!(head_and_tail(plan(&[run(0, 100, 0.05, 0.2)], Some(0.01))), (0, 0));
}

#[test]
fn a_tier_as_fast_as_computing_loads_from_the_end() {
    let plan = plan(&[run(0, 100, 0.01, 0.01)], Some(0.01));
    assert_eq!(head_and_tail(plan), (0, 50), "half the time of either");
    assert_eq!(plan.budget.limit(0, Duration::ZERO), Duration::ZERO, "there is nothing to wait for");
}

#[test]
fn a_fast_tier_loads_the_head_and_a_slow_one_the_tail() {
    // 40 blocks in 4 ms, then 60 at the speed of computing: loading and computing meet in the middle of these.
    let runs = [run(0, 40, 0.0, 0.0001), run(1, 60, 0.01, 0.01)];
    assert_eq!(head_and_tail(plan(&runs, Some(0.01))), (40, 30));
}

#[test]
fn latency_counts_as_load_time() {
    assert_eq!(head_and_tail(plan(&[run(0, 4, 0.1, 0.001)], Some(0.01))), (0, 0));
    assert_eq!(head_and_tail(plan(&[run(0, 40, 0.1, 0.0001)], Some(0.01))), (40, 0));
}

#[test]
fn blocks_queued_by_other_loads_count() {
    let behind = |queued| {
        let measured = MeasuredSpeed { latency: 0.0, seconds_per_block: 0.001, queued };
        head_and_tail(plan(&[TierRun { tier: 0, blocks: 100, speed: TierSpeed::Measured(measured) }], Some(0.01)))
    };
    assert_eq!([behind(450), behind(2_000)], [(100, 0), (0, 0)]);
}

#[test]
fn a_slow_tier_is_used_while_a_fast_one_is_busy() {
    // The fast tier takes 100 ms for its 101 blocks; in that time the slow one delivers 4 of its own.
    let runs = [run(0, 101, 0.0, 0.001), run(1, 5, 0.01, 0.025)];
    assert_eq!(head_and_tail(plan(&runs, Some(0.01))), (101 + 4, 0));
}

#[test]
fn an_unmeasured_tier_is_tried_within_the_base_wait() {
    let unknown = TierRun { tier: 0, blocks: 10, speed: TierSpeed::Unmeasured };
    let budget =
        WaitBudget { base: WaitBudget::BASE, per_block: Duration::from_millis(10), idle_timeout: WaitBudget::BASE };
    assert_eq!(plan(&[unknown], Some(0.01)), Plan { head: 10, tail: 0, budget });
    let long = TierRun { blocks: 2_000, ..unknown };
    let budget = plan(&[long], Some(0.01)).budget;
    assert_eq!((budget.base, budget.idle_timeout), (Duration::from_secs(1), WaitBudget::BASE));
}

#[test]
fn an_unresponsive_tier_is_asked_and_not_waited_for() {
    let silent = TierRun { tier: 1, blocks: 10, speed: TierSpeed::Unresponsive };
    assert_eq!(head_and_tail(plan(&[silent], Some(0.01))), (0, 10));
    assert_eq!(plan(&[silent], Some(0.01)).budget.limit(0, Duration::ZERO), Duration::ZERO);
    let runs = [run(0, 20, 0.001, 0.0001), silent, run(0, 5, 0.001, 0.0001)];
    assert_eq!(head_and_tail(plan(&runs, Some(0.01))), (20, 15));
    assert_eq!(head_and_tail(plan(&runs, None)), (20, 15));
}

#[test]
fn the_idle_timeout_limits_the_wait_for_a_long_head() {
    let budget = plan(&[run(0, 1_000, 0.005, 0.0001)], Some(0.01)).budget;
    let spoke = Duration::from_millis(30);
    let idle_timeout = Duration::from_millis(60);
    assert_eq!(budget.limit(300, spoke), spoke + idle_timeout);
}

#[test]
fn waiting_keeps_a_deadline_that_computing_meets() {
    let unknown = TierRun { tier: 0, blocks: 100, speed: TierSpeed::Unmeasured };
    let base = |left| super::plan(&[unknown], Some(0.01), Some(left)).budget.base;
    assert_eq!(base(1.03).as_millis(), 30, "computing takes a second");
    assert_eq!([base(0.5), base(5.0)], [WaitBudget::BASE; 2], "late without the tier, and never late");
}

#[test]
fn a_deadline_justifies_a_small_gain() {
    // In time only when the tier loads a twelfth of the blocks.
    let slow = [run(0, 100, 0.12, 0.12)];
    assert_eq!(head_and_tail(plan(&slow, Some(0.01))), (0, 0));
    let (head, tail) = head_and_tail(super::plan(&slow, Some(0.01), Some(0.95)));
    assert!(head == 0 && tail > 5, "{tail}");
}

#[test]
fn blocks_that_miss_the_deadline_are_not_loaded() {
    let fast = [run(0, 100, 0.01, 0.01)];
    let with = |left| head_and_tail(super::plan(&fast, Some(1.0), Some(left)));
    assert_eq!([with(2.0), with(0.505), with(0.0), with(-1.0)], [(100, 0), (50, 0), (0, 0), (0, 0)]);
    let unknown = [TierRun { tier: 0, blocks: 10, speed: TierSpeed::Unmeasured }];
    assert_eq!(head_and_tail(super::plan(&unknown, None, Some(-1.0))), (0, 0));
}

#[test]
fn all_is_loaded_while_the_cost_is_unknown() {
    let runs = [run(0, 10, 0.001, 0.001)];
    assert_eq!(head_and_tail(plan(&runs, Some(0.0))), (0, 0));
    assert_eq!(head_and_tail(plan(&runs, None)), (10, 0));
    assert_eq!(head_and_tail(plan(&[], Some(0.01))), (0, 0));
}

fn any_runs() -> impl Strategy<Value = Vec<TierRun>> {
    let measured = (0.0..0.3f64, 0.0..0.03f64, 0..20usize);
    let speed = prop_oneof![
        1 => Just(TierSpeed::Unmeasured),
        1 => Just(TierSpeed::Unresponsive),
        6 => measured.prop_map(|(latency, seconds_per_block, queued)| {
            TierSpeed::Measured(MeasuredSpeed { latency, seconds_per_block, queued })
        }),
    ];
    let tiers = prop::collection::vec(speed, 3);
    (tiers, prop::collection::vec((0..3usize, 1..40usize), 0..6)).prop_map(|(tiers, runs)| {
        runs.into_iter().map(|(tier, blocks)| TierRun { tier, blocks, speed: tiers[tier] }).collect()
    })
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_plan_is_no_slower_than_any_head(runs in any_runs(), cost in 0.0..0.02f64) {
        prop_assume!(runs.iter().all(|run| run.speed != TierSpeed::Unresponsive));
        let total: usize = runs.iter().map(|run| run.blocks).sum();
        let Plan { head, tail, .. } = plan(&runs, Some(cost));
        prop_assert!(head + tail <= total);
        let planned = finish_seconds(&runs, head, tail, cost);
        for other in 0..=total {
            let alternative = finish_seconds(&runs, other, 0, cost) + NEGLIGIBLE_SECONDS;
            prop_assert!(planned <= alternative + 1e-9, "a head of {} is quicker", other);
        }
        prop_assert!(planned <= total as f64 * cost + NEGLIGIBLE_SECONDS + 1e-9);
    }

    #[test]
    fn no_plan_breaks_a_deadline_that_computing_meets(
        runs in any_runs(),
        cost in 0.001..0.02f64,
        spare in 0.0..2.0f64,
        arrived in 0..500usize,
        last_arrival in 0.0..9.0f64,
    ) {
        let total = runs.iter().map(|run| run.blocks).sum::<usize>() as f64;
        let left = total * cost + spare;
        let Plan { head, tail, budget } = super::plan(&runs, Some(cost), Some(left));
        prop_assert!(load_seconds(&runs, head, tail) <= left);
        let arrived = arrived.min(head);
        let begun = budget.limit(arrived, duration(last_arrival)).as_secs_f64();
        prop_assert!(begun + (total - arrived as f64) * cost <= left + 1e-3);
    }

    #[test]
    fn the_meeting_point_is_the_best_tail(runs in any_runs(), cost in 0.001..0.02f64, share in 0.0..1.0f64) {
        let total: usize = runs.iter().map(|run| run.blocks).sum();
        let head = (total as f64 * share) as usize;
        let met = finish_seconds(&runs, head, meeting_point(&runs, head, cost), cost);
        for tail in 0..=total - head {
            // The resolution is one block of computing.
            prop_assert!(met <= finish_seconds(&runs, head, tail, cost) + cost + 1e-9, "a tail of {} is quicker", tail);
        }
    }

    #[test]
    fn a_request_starts_no_later_than_a_miss_plus_the_base_wait(
        runs in any_runs(), cost in 0.0..0.1f64, arrived in 0..500usize, last_arrival in 0.0..9.0f64,
    ) {
        let Plan { head, budget, .. } = plan(&runs, Some(cost));
        let arrived = arrived.min(head);
        let start = budget.limit(arrived, duration(last_arrival)).as_secs_f64() + (head - arrived) as f64 * cost;
        prop_assert!(start <= head as f64 * cost * 1.05 + WaitBudget::BASE.as_secs_f64() + 1e-3);
        let silent = runs.first().is_some_and(|run| run.speed == TierSpeed::Unresponsive);
        prop_assert!(!silent || head == 0);
    }
}
