use super::*;
use proptest::prelude::*;

const CAPACITY: Capacity = Capacity { prefill: 10_000.0, step: 0.01, step_per_sequence: 0.001, blocks: 10_000.0 };
const TARGETS: Targets = Targets { ttft: 1.0, itl: 0.05 };

/// Prompts of 2,000 tokens, answers as long as the rates say.
fn workload(prompts: f64, output_tokens: f64) -> Workload {
    Workload {
        prompts,
        prompt_tokens: prompts * 2_000.0,
        output_tokens,
        sequences: output_tokens * 0.05,
        sequence_blocks: 100.0,
    }
}

fn fleet(prefill_workers: u64, decodes: u64) -> Vec<PlannedWorker> {
    let role = |id| if id < prefill_workers { Role::Prefill } else { Role::Decode };
    (0..prefill_workers + decodes).map(|id| PlannedWorker { id: WorkerId(id), role: role(id), requests: id }).collect()
}

fn prefill_workers(workers: &[PlannedWorker]) -> usize {
    workers.iter().filter(|worker| worker.role == Role::Prefill).count()
}

/// Runs the planner for some seconds, one step per second, and returns the role changes.
fn run(
    planner: &mut Planner,
    workers: &mut [PlannedWorker],
    need: &Need,
    from: u64,
    seconds: u64,
) -> Vec<(u64, RoleChange)> {
    let mut changes = Vec::new();
    for now in from..from + seconds {
        if let Some(change) = planner.step(now as f64, need, workers) {
            workers.iter_mut().find(|worker| worker.id == change.worker).unwrap().role = change.to;
            changes.push((now, change));
        }
    }
    changes
}

#[test]
fn prefill_need_keeps_the_wait_within_the_target() {
    // 20 prompts of 0.2 s each keep four workers busy; the wait must stay below 0.8 s.
    let four = Need::of(&workload(20.0, 0.0), &CAPACITY, &TARGETS).prefill;
    assert!(four > 4.0 && four < 5.0, "{four}");
    let strict = Targets { ttft: 0.21, ..TARGETS };
    assert!(Need::of(&workload(20.0, 0.0), &CAPACITY, &strict).prefill > 6.0, "no time to queue");
    let hopeless = Targets { ttft: 0.1, ..TARGETS };
    let need = Need::of(&workload(20.0, 0.0), &CAPACITY, &hopeless).prefill;
    assert!((need - 4.0 / MAX_UTILIZATION).abs() < 1e-9, "{need}");
}

#[test]
fn decode_need_follows_the_token_interval_and_memory() {
    // 40 sequences fit into 50 ms, and make 800 tokens a second.
    let need = Need::of(&workload(0.0, 8_000.0), &CAPACITY, &TARGETS).decode;
    assert!((need - 10.0 / TARGET_UTILIZATION).abs() < 1e-9, "{need}");
    let small = Capacity { blocks: 1_000.0, ..CAPACITY };
    // Memory for ten sequences: 500 tokens a second, or 400 sequences that are there.
    let need = Need::of(&workload(0.0, 8_000.0), &small, &TARGETS).decode;
    assert!((need - 40.0 / TARGET_UTILIZATION).abs() < 1e-9, "{need}");
}

#[test]
fn nothing_measured_asks_for_one_of_each() {
    let nothing = Capacity { prefill: f64::NAN, step: f64::NAN, step_per_sequence: f64::NAN, blocks: 0.0 };
    assert_eq!(Need::of(&Workload::default(), &nothing, &TARGETS).whole(), (1, 1));
    assert_eq!(Need::of(&Workload::default(), &CAPACITY, &TARGETS).whole(), (1, 1));
}

#[test]
fn workers_follow_traffic_one_at_a_time_and_back() {
    let (mut planner, mut workers) = (Planner::default(), fleet(2, 6));
    let reading = Need { prefill: 6.0, decode: 2.0 };
    let changes = run(&mut planner, &mut workers, &reading, 0, 300);
    assert!((5..=6).contains(&prefill_workers(&workers)), "within the margin of the best");
    assert_eq!(
        changes[0],
        (HOLD_SECONDS as u64, RoleChange { worker: WorkerId(2), to: Role::Prefill }),
        "the worker with the fewest requests"
    );
    assert!(changes.windows(2).all(|two| two[1].0 - two[0].0 >= MIN_INTERVAL as u64), "{changes:?}");
    let writing = Need { prefill: 1.0, decode: 7.0 };
    run(&mut planner, &mut workers, &writing, 300, 300);
    assert!((1..=2).contains(&prefill_workers(&workers)));
}

#[test]
fn idleness_bursts_and_small_gains_change_no_role() {
    let (mut planner, mut workers) = (Planner::default(), fleet(4, 4));
    assert_eq!(run(&mut planner, &mut workers, &Need { prefill: 2.0, decode: 0.1 }, 0, 100), []);
    assert_eq!(run(&mut planner, &mut workers, &Need { prefill: 8.0, decode: 1.0 }, 100, 14), []);
    assert_eq!(run(&mut planner, &mut workers, &Need { prefill: 4.4, decode: 3.6 }, 114, 100), []);
}

#[test]
fn a_worker_keeps_its_new_role_during_the_cooldown() {
    let (mut planner, mut workers) = (Planner::default(), fleet(1, 2));
    let changes = run(&mut planner, &mut workers, &Need { prefill: 3.0, decode: 0.5 }, 0, 20);
    assert_eq!(changes.len(), 1);
    let moved = changes[0].1.worker;
    let back = run(&mut planner, &mut workers, &Need { prefill: 0.1, decode: 3.0 }, 20, 60);
    assert_ne!(back[0].1.worker, moved, "the other worker changes");
}

#[test]
fn workers_of_both_roles_stay_and_a_missing_role_is_filled() {
    let mut planner = Planner::default();
    let mut workers = fleet(0, 3);
    workers[0].role = Role::Both;
    let changes = run(&mut planner, &mut workers, &Need { prefill: 2.0, decode: 1.0 }, 0, 200);
    assert_eq!(
        changes.iter().map(|(_, change)| *change).collect::<Vec<_>>(),
        [RoleChange { worker: WorkerId(1), to: Role::Prefill }]
    );
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn steady_load_settles_with_a_worker_in_each_role(
        prefill in 0.0..40.0f64, decode in 0.0..40.0f64, a in 1..12u64, b in 1..12u64,
    ) {
        let (mut planner, mut workers) = (Planner::default(), fleet(a, b));
        let need = Need { prefill, decode };
        let changes = run(&mut planner, &mut workers, &need, 0, 1_000);
        prop_assert!(changes.len() <= workers.len());
        prop_assert!(changes.iter().all(|(_, change)| change.to == changes[0].1.to), "no worker changes back");
        prop_assert!((1..workers.len()).contains(&prefill_workers(&workers)));
        prop_assert_eq!(run(&mut planner, &mut workers, &need, 1_000, 500), []);
    }

    #[test]
    fn more_traffic_never_needs_fewer(prompts in 0.1..500.0f64, output in 1.0..50_000.0f64, more in 1.0..3.0f64) {
        let less = Need::of(&workload(prompts, output), &CAPACITY, &TARGETS);
        let more = Need::of(&workload(prompts * more, output * more), &CAPACITY, &TARGETS);
        prop_assert!(more.prefill >= less.prefill - 0.02 && more.decode >= less.decode - 1e-9);
    }
}
