//! Prefill on one worker, decode on another.

use super::harness::{Behaviour, Yard, names, prompt, settle, stored};
use super::{defaults, failed};
use crate::policy::Disaggregation;
use crate::settings::Settings;
use futures::StreamExt;
use kvbm::Level;
use std::time::Duration;
use worker::engine::{Engine, Readiness, Work};
use worker::plane::{Load, Phase, WorkerId};

#[tokio::test(start_paused = true)]
async fn a_long_prompt_is_prefilled_apart_and_a_short_one_where_it_decodes() {
    let yard = defaults();
    let (p, d) = (yard.worker(1, Phase::Prefill).await, yard.worker(2, Phase::Decode).await);
    let mut stream = yard.ask(prompt(1, 3000)).await.unwrap();
    assert_eq!(p.works(), [Work::Prefill]);
    assert!(matches!(&d.works()[..], [Work::Resume(handoff)] if &handoff.0[..] == b"3000 tokens"));
    assert_eq!(p.open(), 0, "the blocks are let go once the decode leg has its first output");
    assert_eq!(stream.next().await.map(|item| item.is_ok()), Some(true));
    drop(stream);
    yard.answer(prompt(2, 8)).await.unwrap();
    assert_eq!((p.requests(), d.works().last()), (1, Some(&Work::Generate)));
    let long = yard.explain(prompt(3, 3000)).await;
    assert_eq!(long["disaggregation"]["prefill"], "w1");
    assert!(long["disaggregation"]["disaggregated_s"].as_f64() < long["disaggregation"]["aggregated_s"].as_f64());
}

#[tokio::test(start_paused = true)]
async fn a_long_prompt_that_is_cached_where_it_decodes_is_not_sent_away() {
    let yard = defaults();
    let (p, d) = (yard.worker(1, Phase::Prefill).await, yard.worker(2, Phase::Decode).await);
    let request = prompt(1, 3000);
    yard.announce(&d, stored(Level::G1, &names(&request)), true);
    settle().await;
    yard.answer(request).await.unwrap();
    assert_eq!((p.requests(), d.requests()), (0, 1));
}

#[tokio::test(start_paused = true)]
async fn a_failed_prefill_falls_back_to_the_decode_worker() {
    for behaviour in [Behaviour::Refuse(failed()), Behaviour::Break(failed()), Behaviour::End, Behaviour::Hang] {
        let yard = defaults();
        let (p, d) = (yard.worker(1, Phase::Prefill).await, yard.worker(2, Phase::Decode).await);
        p.become_(behaviour);
        assert_eq!(yard.answer(prompt(1, 3000)).await, Ok(vec![1, 2]));
        assert_eq!((p.works(), d.works()), (vec![Work::Prefill], vec![Work::Generate]));
        assert_eq!(p.open(), 0);
        assert_eq!([yard.standing(1), yard.standing(2)], [(0, 0, 0); 2]);
    }
}

#[tokio::test(start_paused = true)]
async fn waiting_for_a_busy_decode_worker_is_no_time_of_a_hand_over() {
    let yard = Yard::new(Settings { disaggregation: Disaggregation::Always, ..Settings::default() });
    let (p, d) = (yard.worker(1, Phase::Prefill).await, yard.worker(2, Phase::Decode).await);
    let resume = || {
        let member = yard.router.core.fleet.roster().get(WorkerId(2)).unwrap().clone();
        member.books.standing(tokio::time::Instant::now()).speeds.resume.get()
    };
    let full = Load { active_blocks: 500, total_blocks: 400, ..Load::default() };
    let queue = Load { waiting: 3, waiting_tokens: 900, ..Load::default() };
    for (family, load) in [(1, full), (2, queue), (3, Load::default())] {
        assert_eq!(resume(), None);
        yard.report(&d, load);
        yard.report(&p, Load::default());
        settle().await;
        yard.answer(prompt(family, 3000)).await.unwrap();
    }
    assert!(resume().is_some(), "nothing waited before the third");
    assert_eq!(d.works().iter().filter(|work| matches!(work, Work::Resume(_))).count(), 3);
}

#[tokio::test(start_paused = true)]
async fn a_prompt_that_is_computed_elsewhere_does_not_go_on_behind_a_long_queue() {
    let yard = Yard::new(Settings { disaggregation: Disaggregation::Always, ..Settings::default() });
    let _p = yard.worker(1, Phase::Prefill).await;
    let (busy, idle) = (yard.worker(2, Phase::Decode).await, yard.worker(3, Phase::Decode).await);
    for family in 0..4 {
        yard.report(&busy, Load { waiting: 3, waiting_tokens: 90_000, ..Load::default() });
        yard.report(&idle, Load::default());
        settle().await;
        yard.answer(prompt(family, 3000)).await.unwrap();
    }
    assert_eq!((busy.requests(), idle.requests()), (0, 4));
}

#[tokio::test(start_paused = true)]
async fn a_prefill_worker_that_leaves_is_not_waited_for() {
    let yard = defaults();
    let (p, d) = (yard.worker(1, Phase::Prefill).await, yard.worker(2, Phase::Decode).await);
    p.become_(Behaviour::Hang);
    let started = tokio::time::Instant::now();
    let answer = yard.answer(prompt(1, 3000));
    let leave = async {
        tokio::time::sleep(Duration::from_secs(1)).await;
        yard.roster.expire(WorkerId(1));
    };
    assert_eq!(futures::future::join(answer, leave).await.0, Ok(vec![1, 2]));
    assert!(started.elapsed() < Duration::from_secs(10), "did not sit out the time of a hung prefill");
    assert_eq!(d.works(), [Work::Generate]);
}

#[tokio::test(start_paused = true)]
async fn a_decode_worker_that_refuses_the_hand_over_is_replaced() {
    let yard = defaults();
    let p = yard.worker(1, Phase::Prefill).await;
    let (a, b) = (yard.worker(2, Phase::Decode).await, yard.worker(3, Phase::Decode).await);
    a.become_(Behaviour::Refuse(failed()));
    for family in 0..2 {
        assert_eq!(yard.answer(prompt(family, 3000)).await, Ok(vec![1, 2]));
    }
    assert!(a.requests() > 0 && b.requests() == 2);
    assert_eq!(p.open(), 0);
}

#[tokio::test(start_paused = true)]
async fn dropping_a_request_cancels_both_legs_and_its_bookings() {
    // The prefill takes three seconds, the decode leg's first output comes some milliseconds later.
    for after_ms in [0, 1500, 3002, 3500] {
        let yard = defaults();
        let (p, d) = (yard.worker(1, Phase::Prefill).await, yard.worker(2, Phase::Decode).await);
        let asked = tokio::time::timeout(Duration::from_millis(after_ms), yard.ask(prompt(1, 3000))).await;
        assert_eq!(asked.is_ok(), after_ms == 3500);
        drop(asked);
        settle().await;
        assert_eq!((p.open(), d.open()), (0, 0), "after {after_ms} ms");
        assert_eq!([yard.standing(1), yard.standing(2)], [(0, 0, 0); 2], "after {after_ms} ms");
    }
}

#[tokio::test(start_paused = true)]
async fn prefill_workers_decode_when_nobody_else_is_there() {
    let yard = defaults();
    let p = yard.worker(1, Phase::Prefill).await;
    assert!(matches!(yard.router.readiness(), Readiness::NotReady(_)));
    assert_eq!(yard.answer(prompt(1, 3000)).await, Ok(vec![1, 2]));
    let _d = yard.worker(2, Phase::Decode).await;
    assert_eq!(yard.router.readiness(), Readiness::Ready);
    yard.answer(prompt(2, 8)).await.unwrap();
    assert_eq!(p.works(), [Work::Generate]);
}

#[tokio::test(start_paused = true)]
async fn never_means_never() {
    let yard = Yard::new(Settings { disaggregation: Disaggregation::Never, ..Settings::default() });
    let (p, d) = (yard.worker(1, Phase::Prefill).await, yard.worker(2, Phase::Decode).await);
    yard.answer(prompt(1, 30_000)).await.unwrap();
    assert_eq!((p.requests(), d.works()), (0, vec![Work::Generate]));
}

#[tokio::test(start_paused = true)]
async fn a_prompt_to_be_scored_is_computed_where_it_decodes() {
    let yard = Yard::new(Settings { disaggregation: Disaggregation::Always, ..Settings::default() });
    let (p, d) = (yard.worker(1, Phase::Prefill).await, yard.worker(2, Phase::Decode).await);
    let mut request = prompt(1, 3000);
    request.sampling.prompt_logprobs = Some(0);
    yard.answer(request).await.unwrap();
    assert_eq!((p.works(), d.works()), (vec![], vec![Work::Generate]));
    yard.answer(prompt(2, 3000)).await.unwrap();
    assert_eq!(p.works(), [Work::Prefill], "another prompt is handed over");
    yard.announce(&d, stored(Level::G1, &names(&prompt(3, 3000))), true);
    settle().await;
    let mut request = prompt(3, 3000);
    assert!(yard.explain(request.clone()).await["cached_tokens"].as_u64() > Some(0));
    request.sampling.prompt_logprobs = Some(0);
    assert_eq!(yard.explain(request).await["cached_tokens"], 0, "no cached block serves it");
}
