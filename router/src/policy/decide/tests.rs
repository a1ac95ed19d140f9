//! The explanation of a decision uses the values that made it, and targets decide before costs.

use super::*;
use crate::fleet::Needs;
use crate::load::ExpectedOutput;
use crate::policy::explain;
use crate::policy::inputs::Overlaps;
use crate::state::Settings;
use crate::tests::harness::{Harness, MODEL, prompt};
use std::time::Duration;
use worker::plane::Load;

#[tokio::test(start_paused = true)]
async fn reports_during_a_decision_count_for_the_next_one() {
    let harness = Harness::new(Settings::default());
    for id in 1..=4 {
        harness.worker(id, Role::Both).await;
    }
    let (core, request) = (&harness.router.core, prompt(1, 1600));
    let (snapshot, resolved) = (core.fleet.snapshot(), core.settings());
    let (pool, tuning) = (snapshot.pool(MODEL).unwrap(), resolved.of(MODEL));
    let overlaps =
        Overlaps::of(&request.tokens, PromptTokens::Known, &request.domain, pool, &core.hash_cache, &core.index);
    let fleet = || FleetView::new(pool, &overlaps, request.tokens.len(), Needs::default(), &[], Instant::now());
    let mut scratch = Scratch::default();
    let decision = decide(
        tuning,
        PlacementRequest::of(&request, None, 256.0, 256.0, Instant::now()),
        fleet(),
        &mut scratch,
        SelectionContext::default(),
    )
    .unwrap();
    let output = ExpectedOutput::default();
    let (line, chosen) = (explain::line(&tuning.policy, &decision, &[], 0, &output), decision.chosen.at);

    let busy = Load { waiting_tokens: 50_000, running: 30, prefill_tokens_per_second: Some(10.0), ..Load::default() };
    pool.entries().iter().for_each(|entry| entry.load.report(busy.clone(), Instant::now()));
    assert_eq!(explain::line(&tuning.policy, &decision, &[], 0, &output), line);
    for candidate in decision.all_candidates().iter() {
        let row = decision.row(candidate.entry);
        assert!((row.cost().total() - candidate.cost).abs() < f64::EPSILON, "the explanation shows the scored cost");
    }

    drop(decision);
    let next = decide(
        tuning,
        PlacementRequest::of(&request, None, 256.0, 256.0, Instant::now()),
        fleet(),
        &mut scratch,
        SelectionContext::default(),
    )
    .unwrap();
    assert!(next.row(chosen as u32).cost().queue > 1_000.0, "the next decision reads the reports");
}

#[tokio::test(start_paused = true)]
async fn workers_that_keep_the_target_between_tokens_are_preferred() {
    let harness = Harness::new(Settings::default());
    for id in 1..=2 {
        harness.worker(id, Role::Both).await;
    }
    let (core, request) = (&harness.router.core, prompt(1, 160));
    let (snapshot, resolved) = (core.fleet.snapshot(), core.settings());
    let pool = snapshot.pool(MODEL).unwrap();
    // Steps take 10 ms, and 1 ms more for each sequence. One worker has many sequences, the other a long queue.
    let loads = [(60_u32, 0.07, 0_u64), (10, 0.02, 9000)];
    for (entry, (sequences, ..)) in pool.entries().iter().zip(loads) {
        let demand = Demand { sequences: sequences.into(), ..Demand::default() };
        let number = entry.load.book(demand, None, ExpectedOutput::default(), Instant::now());
        entry.load.sent(number, Instant::now());
    }
    tokio::time::sleep(Duration::from_secs(1)).await;
    for (entry, (running, step, waiting_tokens)) in pool.entries().iter().zip(loads) {
        let (prefill_tokens_per_second, decode_step_seconds) = (Some(1000.0), Some(step));
        let load = Load { running, waiting_tokens, prefill_tokens_per_second, decode_step_seconds, ..Load::default() };
        entry.load.report(load, Instant::now());
    }
    let overlaps =
        Overlaps::of(&request.tokens, PromptTokens::Known, &request.domain, pool, &core.hash_cache, &core.index);
    let chosen = |itl| {
        let (tuning, mut scratch, now) =
            (Tuning { itl, ..resolved.of(MODEL).clone() }, Scratch::default(), Instant::now());
        let fleet = FleetView::new(pool, &overlaps, request.tokens.len(), Needs::default(), &[], now);
        let placement = PlacementRequest::of(&request, None, 256.0, 256.0, now);
        let decision = decide(&tuning, placement, fleet, &mut scratch, SelectionContext::default()).unwrap();
        decision.chosen.entry.id.0
    };
    assert_eq!(chosen(None), 1, "its cost is lower");
    assert_eq!(chosen(Some(0.05)), 2, "the other one keeps the target");
    assert_eq!(chosen(Some(0.001)), 1, "none keeps it");
}
