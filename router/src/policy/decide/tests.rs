//! The explanation of a decision uses the values that made it.

use super::*;
use crate::fleet::Needs;
use crate::load::ExpectedOutput;
use crate::policy::explain;
use crate::policy::inputs::Overlaps;
use crate::settings::Settings;
use crate::tests::harness::{Harness, MODEL, prompt};
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
    for candidate in decision.candidates {
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
