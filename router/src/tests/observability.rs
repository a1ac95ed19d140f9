//! What a router publishes: explanations, metrics, models.

use super::harness::{Behaviour, Harness, MODEL, SPEED, names, prompt, settle, stored};
use super::{defaults, failed};
use crate::policy::{Composition, Filter, Pick, Policy, Score, Term};
use crate::state::Settings;
use futures::StreamExt;
use kvbm::Level;
use std::time::Duration;
use units::HumanDuration;
use worker::engine::{Engine, Error, Output, Request, RequestAttributes, StopConditions};
use worker::plane::Role;

#[tokio::test(start_paused = true)]
async fn an_explanation_is_one_bounded_line_of_json_on_request() {
    let harness = defaults();
    for id in 1..=40 {
        harness.worker(id, if id == 1 { Role::Prefill } else { Role::Decode }).await;
    }
    let mut stream = harness.ask(Request { explain: true, ..prompt(1, 3000) }).await.unwrap();
    let Some(Ok(Output::Tokens(first))) = stream.next().await else { panic!("no tokens") };
    let line = first.explain.unwrap();
    assert!(line.len() < 4096 && line.is_ascii() && !line.contains('\n'), "{} bytes", line.len());
    let explained: serde_json::Value = serde_json::from_str(&line).unwrap();
    let candidates = explained["candidates"].as_array().unwrap();
    assert_eq!((candidates.len(), explained["not_shown"].as_u64()), (8, Some(31)));
    assert_eq!(candidates[0]["worker"], explained["chosen"]);
    for candidate in candidates {
        let terms: f64 = candidate["terms_s"].as_object().unwrap().values().map(|term| term.as_f64().unwrap()).sum();
        assert!((terms - candidate["cost_s"].as_f64().unwrap()).abs() < 1e-4, "the terms add up: {candidate}");
    }
    let mut stream = harness.ask(prompt(2, 3000)).await.unwrap();
    assert!(matches!(stream.next().await, Some(Ok(Output::Tokens(tokens))) if tokens.explain.is_none()));
}

#[tokio::test(start_paused = true)]
async fn a_long_explanation_omits_candidates_to_fit_a_header() {
    let filter = (0..32).map(|nth| Filter::QueueBelow(HumanDuration::millis(1000 + nth * 143))).collect();
    let score = vec![Score { term: Term::Queue, weight: 1.0 }, Score { term: Term::Prefill, weight: 1.0 }];
    let policy = Policy::Composed(Composition { filter, score, pick: Pick::Best });
    let harness = Harness::new(Settings { policy, ..Settings::default() });
    for id in 1..=9 {
        harness.worker(id, if id == 1 { Role::Prefill } else { Role::Decode }).await;
    }
    let explained = harness.explain(prompt(1, 3000)).await;
    let (candidates, bytes) = (explained["candidates"].as_array().unwrap(), explained.to_string().len());
    assert!(bytes < 4096, "{bytes} bytes");
    assert_eq!(explained["not_shown"].as_u64().map(|left_out| left_out as usize + candidates.len()), Some(8));
    assert_eq!(candidates[0]["worker"], explained["chosen"]);
    assert_eq!(candidates[0]["passes"].as_array().map(Vec::len), Some(32), "each candidate is complete");
}

#[tokio::test(start_paused = true)]
async fn a_router_without_workers_shows_zero() {
    let harness = defaults();
    let workers = || -> Vec<(String, i64)> {
        let families = harness.registry.gather();
        let family = families.iter().find(|family| family.name() == "blockyard_router_workers");
        let series = family.map_or(&[][..], |family| family.get_metric());
        series.iter().map(|of| (of.get_label()[0].value().to_owned(), of.get_gauge().get_value() as i64)).collect()
    };
    let counts = |both: i64, prefill: i64| -> Vec<(String, i64)> {
        [("both", both), ("decode", 0), ("prefill", prefill)].map(|(role, count)| (role.to_owned(), count)).into()
    };
    settle().await;
    assert_eq!(workers(), counts(0, 0), "before the first worker");
    harness.worker(1, Role::Both).await;
    harness.worker(2, Role::Prefill).await;
    assert_eq!(workers(), counts(1, 1));
    harness.all_leave();
    settle().await;
    assert_eq!(workers(), counts(0, 0), "after the last worker");
}

#[tokio::test(start_paused = true)]
async fn predicted_hits_are_compared_with_the_engines_report() {
    let harness = defaults();
    let worker = harness.worker(1, Role::Both).await;
    let request = prompt(1, 1600);
    harness.announce(&worker, stored(Level::G1, &names(&request)[..10]), true);
    settle().await;
    harness.answer(request).await.unwrap();
    // The fake engine reports no cache hit, whatever it announced.
    assert_eq!(harness.metric("blockyard_router_prefix_predicted_tokens_total"), 160);
    assert_eq!(harness.metric("blockyard_router_prefix_actual_tokens_total"), 0);
    assert_eq!(harness.metric("blockyard_router_prefix_overpredicted_tokens_total"), 160);
}

#[tokio::test(start_paused = true)]
async fn regret_is_the_time_that_the_next_best_choice_would_save() {
    // Scores are not in seconds.
    let score = vec![Score { term: Term::Prefill, weight: 100.0 }];
    let composed = Policy::Composed(Composition { filter: vec![], score, pick: Pick::Best });
    for policy in [Policy::Kv, composed] {
        check_regret(Harness::new(Settings { policy, ..Settings::default() })).await;
    }
}

async fn check_regret(harness: Harness) {
    let (inaccurate, other) = (harness.worker(1, Role::Both).await, harness.worker(2, Role::Both).await);
    let regret = || harness.router.core.metrics.regret_seconds.get();
    let request = prompt(1, 1600);
    harness.announce(&inaccurate, stored(Level::G1, &names(&request)[..99]), true);
    harness.announce(&other, stored(Level::G1, &names(&request)[..50]), true);
    settle().await;
    // The worker computes all 1,600 tokens, although the other one has 800 of them.
    harness.answer(request.clone()).await.unwrap();
    assert_eq!((inaccurate.requests(), other.requests()), (1, 0));
    assert_eq!(harness.metric("blockyard_router_prefix_overpredicted_tokens_total"), 1584);
    assert!((regret() - 800.0 / SPEED).abs() < 1e-6, "{} s", regret());

    // If no other worker has any of the blocks, no other choice would have been better.
    let alone = prompt(2, 1600);
    harness.announce(&inaccurate, stored(Level::G1, &names(&alone)[..50]), true);
    settle().await;
    harness.answer(alone).await.unwrap();
    assert_eq!(harness.metric("blockyard_router_prefix_overpredicted_tokens_total"), 1584 + 800);
    assert!((regret() - 800.0 / SPEED).abs() < 1e-6, "{} s", regret());
}

#[tokio::test(start_paused = true)]
async fn underpredicted_hits_cause_no_regret() {
    let harness = defaults();
    let worker = harness.worker(1, Role::Both).await;
    let request = prompt(1, 1600);
    worker.cache_blocks(&names(&request)[..30]);
    harness.announce(&worker, stored(Level::G1, &names(&request)[..10]), true);
    settle().await;
    harness.answer(request).await.unwrap();
    assert_eq!(harness.metric("blockyard_router_prefix_actual_tokens_total"), 480);
    assert_eq!(harness.metric("blockyard_router_prefix_underpredicted_tokens_total"), 320);
    assert_eq!(harness.metric("blockyard_router_prefix_overpredicted_tokens_total"), 0);
    assert!(harness.router.core.metrics.regret_seconds.get().abs() < 1e-9);
}

#[tokio::test(start_paused = true)]
async fn several_models_are_served_and_unknown_ones_are_refused() {
    let harness = defaults();
    let toy = harness.worker(1, Role::Both).await;
    let other = harness.join(2, Role::Both, "other", 1, &[]).await;
    harness.answer(Request { model: "other".into(), ..prompt(1, 100) }).await.unwrap();
    assert_eq!((toy.requests(), other.requests()), (0, 1));
    let ids: Vec<String> = harness.router.models().iter().map(|card| card.id.clone()).collect();
    assert_eq!(ids, ["other", "toy"]);
    let unknown = harness.answer(Request { model: "third".into(), ..prompt(1, 100) }).await;
    assert_eq!(unknown, Err(Error::UnknownModel("third".to_owned())));
    let long = harness.answer(prompt(1, 100_000)).await;
    assert_eq!(long, Err(Error::PromptTooLong { prompt: 100_000, context: 100_000 }));
}

/// Expected output tokens of a request of the model.
fn expected_output(harness: &Harness) -> f64 {
    let fleet = harness.router.core.fleet.snapshot();
    fleet.pool(MODEL).unwrap().stats().expect_output("", None).0.tokens()
}

#[tokio::test(start_paused = true)]
async fn quantiles_of_output_lengths_are_explained_and_published() {
    let harness = defaults();
    harness.worker(1, Role::Both).await;
    let explained = harness.explain(prompt(0, 100)).await;
    let of = |explained: &serde_json::Value, name: &str| explained["output_quantiles"][name].as_u64().unwrap();
    assert!(of(&explained, "p50") > 100 && of(&explained, "p90") > 400, "of the default: {explained}");
    let limited =
        Request { stop: StopConditions { max_tokens: Some(7), ..StopConditions::default() }, ..prompt(0, 100) };
    let explained = harness.explain(limited).await;
    assert_eq!((of(&explained, "p50"), of(&explained, "p90")), (7, 7));
    for family in 1..100 {
        harness.answer(prompt(family, 100)).await.unwrap();
    }
    let explained = harness.explain(prompt(0, 100)).await;
    assert!(of(&explained, "p50") <= 3 && of(&explained, "p90") <= 3, "outputs have two tokens: {explained}");
    // The gauges are updated every five seconds.
    tokio::time::sleep(Duration::from_secs(10)).await;
    let quantile = |share| harness.router.core.metrics.output_tokens.with_label_values(&[MODEL, share]).get();
    assert!((1..=3).contains(&quantile("0.5")) && (1..=3).contains(&quantile("0.9")));
    harness.all_leave();
    settle().await;
    let families = harness.registry.gather();
    assert!(families.iter().all(|family| family.name() != "blockyard_router_output_tokens"), "the model has left");
}

#[tokio::test(start_paused = true)]
async fn cancelled_and_failed_outputs_are_not_learned_as_whole_ones() {
    let cancel = async |harness: &Harness, attributes: RequestAttributes| {
        for family in 0..40 {
            let request = Request { attributes: attributes.clone(), ..prompt(family, 100) };
            let mut stream = harness.ask(request).await.unwrap();
            assert!(matches!(stream.next().await, Some(Ok(Output::Tokens(_)))));
        }
    };
    let harness = defaults();
    let worker = harness.worker(1, Role::Both).await;
    let before = expected_output(&harness);
    cancel(&harness, RequestAttributes::default()).await;
    worker.set_behaviour(Behaviour::BreakLater(failed()));
    for family in 40..42 {
        harness.ask(prompt(family, 100)).await.unwrap().collect::<Vec<_>>().await;
    }
    let after = expected_output(&harness);
    assert!((after / before - 1.0).abs() < 0.15, "{after} instead of {before}");

    let harness = defaults();
    harness.worker(1, Role::Both).await;
    cancel(&harness, RequestAttributes { has_stop_strings: true, ..RequestAttributes::default() }).await;
    let after = expected_output(&harness);
    assert!(after < 0.5 * before, "a stream is dropped at a stop string: {after} instead of {before}");
}
