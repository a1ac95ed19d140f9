//! What explains a decision is what made it.

use super::*;
use crate::policy::explain;
use crate::policy::inputs::Overlaps;
use crate::settings::Settings;
use crate::tests::harness::{Harness, MODEL, prompt};
use worker::plane::Load;

#[tokio::test(start_paused = true)]
async fn reports_that_come_while_it_is_made_are_for_the_next_decision() {
    let yard = Harness::new(Settings::default());
    for id in 1..=4 {
        yard.worker(id, Phase::Both).await;
    }
    let (core, request) = (&yard.router.core, prompt(1, 1600));
    let (roster, resolved) = (core.fleet.roster(), core.settings());
    let (serving, tuning) = (roster.serving(MODEL).unwrap(), resolved.of(MODEL));
    let overlaps = Overlaps::of(&request.tokens, &request.domain, serving, &core.index);
    let survey = || Survey::new(serving, &overlaps, request.tokens.len(), &[], Instant::now());
    let mut scratch = Scratch::default();
    let decision = decide(tuning, Ask::of(&request, Instant::now()), survey(), &mut scratch, Turn::default()).unwrap();
    let (line, chosen) = (explain::line(&tuning.policy, &decision, &[]), decision.chosen.at);

    let busy = Load { waiting_tokens: 50_000, running: 30, prefill_tokens_per_second: Some(10.0), ..Load::default() };
    serving.seats().iter().for_each(|seat| seat.books.report(busy.clone(), Instant::now()));
    assert_eq!(explain::line(&tuning.policy, &decision, &[]), line);
    for candidate in decision.candidates {
        let row = decision.row(candidate.seat);
        assert!((row.cost().total() - candidate.cost).abs() < f64::EPSILON, "what was weighed is what is told");
    }

    drop(decision);
    let next = decide(tuning, Ask::of(&request, Instant::now()), survey(), &mut scratch, Turn::default()).unwrap();
    assert!(next.row(chosen as u32).cost().queue > 1_000.0, "the next one knows");
}
