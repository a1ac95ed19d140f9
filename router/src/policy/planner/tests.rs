use super::*;
use proptest::prelude::*;

const CAPACITY: Capacity = Capacity { prefill: 10_000.0, step: 0.01, step_per_sequence: 0.001, blocks: 10_000.0 };
const TARGETS: Targets = Targets { ttft: 1.0, itl: 0.05 };

/// Prompts of 2,000 tokens, answers as long as the rates say.
fn demand(prompts: f64, output_tokens: f64) -> Demand {
    Demand {
        prompts,
        prompt_tokens: prompts * 2_000.0,
        output_tokens,
        sequences: output_tokens * 0.05,
        sequence_blocks: 100.0,
    }
}

fn fleet(prefills: u64, decodes: u64) -> Vec<Seat> {
    let phase = |id| if id < prefills { Phase::Prefill } else { Phase::Decode };
    (0..prefills + decodes).map(|id| Seat { id: WorkerId(id), phase: phase(id), requests: id }).collect()
}

fn prefills(seats: &[Seat]) -> usize {
    seats.iter().filter(|seat| seat.phase == Phase::Prefill).count()
}

/// Runs for some seconds, a step each second, and answers with the flips.
fn run(planner: &mut Planner, seats: &mut [Seat], need: &Need, from: u64, seconds: u64) -> Vec<(u64, Flip)> {
    let mut flips = Vec::new();
    for now in from..from + seconds {
        if let Some(flip) = planner.step(now as f64, need, seats) {
            seats.iter_mut().find(|seat| seat.id == flip.worker).unwrap().phase = flip.to;
            flips.push((now, flip));
        }
    }
    flips
}

#[test]
fn prefill_needs_what_keeps_the_wait_within_the_target() {
    // 20 prompts of 0.2 s each keep four workers busy; the wait must stay below 0.8 s.
    let four = Need::of(&demand(20.0, 0.0), &CAPACITY, &TARGETS).prefill;
    assert!(four > 4.0 && four < 5.0, "{four}");
    let strict = Targets { ttft: 0.21, ..TARGETS };
    assert!(Need::of(&demand(20.0, 0.0), &CAPACITY, &strict).prefill > 6.0, "no time to queue");
    let hopeless = Targets { ttft: 0.1, ..TARGETS };
    let need = Need::of(&demand(20.0, 0.0), &CAPACITY, &hopeless).prefill;
    assert!((need - 4.0 / BUSY_MAX).abs() < 1e-9, "{need}");
}

#[test]
fn decode_needs_what_fits_into_the_time_between_tokens_or_into_memory() {
    // 40 sequences fit into 50 ms, and make 800 tokens a second.
    let need = Need::of(&demand(0.0, 8_000.0), &CAPACITY, &TARGETS).decode;
    assert!((need - 10.0 / USED).abs() < 1e-9, "{need}");
    let small = Capacity { blocks: 1_000.0, ..CAPACITY };
    // Ten sequences have room: 500 tokens a second, or 400 sequences that are there.
    let need = Need::of(&demand(0.0, 8_000.0), &small, &TARGETS).decode;
    assert!((need - 40.0 / USED).abs() < 1e-9, "{need}");
}

#[test]
fn nothing_measured_asks_for_one_of_each() {
    let nothing = Capacity { prefill: f64::NAN, step: f64::NAN, step_per_sequence: f64::NAN, blocks: 0.0 };
    assert_eq!(Need::of(&Demand::default(), &nothing, &TARGETS).whole(), (1, 1));
    assert_eq!(Need::of(&Demand::default(), &CAPACITY, &TARGETS).whole(), (1, 1));
}

#[test]
fn workers_follow_a_shift_of_traffic_one_at_a_time_and_back() {
    let (mut planner, mut seats) = (Planner::default(), fleet(2, 6));
    let reading = Need { prefill: 6.0, decode: 2.0 };
    let flips = run(&mut planner, &mut seats, &reading, 0, 300);
    assert!((5..=6).contains(&prefills(&seats)), "within the margin of the best");
    assert_eq!(
        flips[0],
        (HOLD as u64, Flip { worker: WorkerId(2), to: Phase::Prefill }),
        "the one with the least to do"
    );
    assert!(flips.windows(2).all(|two| two[1].0 - two[0].0 >= GAP as u64), "{flips:?}");
    let writing = Need { prefill: 1.0, decode: 7.0 };
    run(&mut planner, &mut seats, &writing, 300, 300);
    assert!((1..=2).contains(&prefills(&seats)));
}

#[test]
fn an_idle_fleet_a_burst_and_a_small_gain_move_nobody() {
    let (mut planner, mut seats) = (Planner::default(), fleet(4, 4));
    assert_eq!(run(&mut planner, &mut seats, &Need { prefill: 2.0, decode: 0.1 }, 0, 100), []);
    assert_eq!(run(&mut planner, &mut seats, &Need { prefill: 8.0, decode: 1.0 }, 100, 14), []);
    assert_eq!(run(&mut planner, &mut seats, &Need { prefill: 4.4, decode: 3.6 }, 114, 100), []);
}

#[test]
fn a_worker_keeps_its_new_side_for_a_while() {
    let (mut planner, mut seats) = (Planner::default(), fleet(1, 2));
    let flips = run(&mut planner, &mut seats, &Need { prefill: 3.0, decode: 0.5 }, 0, 20);
    assert_eq!(flips.len(), 1);
    let moved = flips[0].1.worker;
    let back = run(&mut planner, &mut seats, &Need { prefill: 0.1, decode: 3.0 }, 20, 60);
    assert_ne!(back[0].1.worker, moved, "the other one goes");
}

#[test]
fn a_worker_that_does_both_is_nobodys_to_move_and_a_missing_phase_is_filled() {
    let mut planner = Planner::default();
    let mut seats = fleet(0, 3);
    seats[0].phase = Phase::Both;
    let flips = run(&mut planner, &mut seats, &Need { prefill: 2.0, decode: 1.0 }, 0, 200);
    assert_eq!(
        flips.iter().map(|(_, flip)| *flip).collect::<Vec<_>>(),
        [Flip { worker: WorkerId(1), to: Phase::Prefill }]
    );
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn under_steady_load_the_fleet_settles_and_both_phases_keep_a_worker(
        prefill in 0.0..40.0f64, decode in 0.0..40.0f64, a in 1..12u64, b in 1..12u64,
    ) {
        let (mut planner, mut seats) = (Planner::default(), fleet(a, b));
        let need = Need { prefill, decode };
        let flips = run(&mut planner, &mut seats, &need, 0, 1_000);
        prop_assert!(flips.len() <= seats.len());
        prop_assert!(flips.iter().all(|(_, flip)| flip.to == flips[0].1.to), "nobody goes there and back");
        prop_assert!((1..seats.len()).contains(&prefills(&seats)));
        prop_assert_eq!(run(&mut planner, &mut seats, &need, 1_000, 500), []);
    }

    #[test]
    fn more_traffic_never_needs_fewer(prompts in 0.1..500.0f64, output in 1.0..50_000.0f64, more in 1.0..3.0f64) {
        let less = Need::of(&demand(prompts, output), &CAPACITY, &TARGETS);
        let more = Need::of(&demand(prompts * more, output * more), &CAPACITY, &TARGETS);
        prop_assert!(more.prefill >= less.prefill - 0.02 && more.decode >= less.decode - 1e-9);
    }
}

#[test]
fn a_target_of_nothing_is_an_error_that_names_the_key() {
    let problems = Settings { itl: HumanDuration::default(), ..Settings::default() }.check();
    assert_eq!(problems[0].key, "router.planner.itl");
    assert_eq!(Settings::default().check(), []);
}
