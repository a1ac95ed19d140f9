//! Prefill on one worker, decode on another.

use super::harness::{Behaviour, FakeEngine, Harness, PrefillEnd, names, prompt, settle, stored};
use super::{defaults, failed};
use crate::policy::Disaggregation;
use crate::state::Settings;
use futures::StreamExt;
use kvbm::Level;
use std::sync::Arc;
use std::time::Duration;
use worker::engine::{Engine, Readiness, Work};
use worker::plane::{Load, Role, WorkerId};

#[tokio::test(start_paused = true)]
async fn only_long_prompts_are_prefilled_on_another_worker() {
    let harness = defaults();
    let (p, d) = (harness.worker(1, Role::Prefill).await, harness.worker(2, Role::Decode).await);
    let mut stream = harness.ask(prompt(1, 3000)).await.unwrap();
    assert_eq!(p.works(), [Work::Prefill]);
    assert!(matches!(&d.works()[..], [Work::Resume(handoff)] if &handoff.0[..] == b"3000 tokens"));
    assert_eq!(p.open(), 0, "the prefill stream is dropped after the first output of the decode worker");
    assert_eq!(stream.next().await.map(|item| item.is_ok()), Some(true));
    drop(stream);
    harness.answer(prompt(2, 8)).await.unwrap();
    assert_eq!((p.requests(), d.works().last()), (1, Some(&Work::Generate)));
    let long = harness.explain(prompt(3, 3000)).await;
    assert_eq!(long["disaggregation"]["prefill"], "w1");
    assert!(long["disaggregation"]["disaggregated_s"].as_f64() < long["disaggregation"]["aggregated_s"].as_f64());
}

#[tokio::test(start_paused = true)]
async fn prompts_are_prefilled_on_another_worker_while_no_reports_arrive() {
    let harness = defaults();
    let (p, d) = (harness.worker(1, Role::Prefill).await, harness.worker(2, Role::Decode).await);
    tokio::time::sleep(Duration::from_secs(10)).await;
    harness.answer(prompt(1, 3000)).await.unwrap();
    assert_eq!((p.requests(), d.requests()), (1, 1));
    // Only the prefill worker is silent.
    tokio::time::sleep(Duration::from_secs(10)).await;
    harness.report(&d, Load::default());
    settle().await;
    harness.answer(prompt(2, 3000)).await.unwrap();
    assert_eq!((p.requests(), d.requests()), (1, 2));
}

#[tokio::test(start_paused = true)]
async fn nothing_is_handed_over_to_a_worker_that_cannot_load_the_blocks() {
    let settings = || Settings { disaggregation: Disaggregation::Always, ..Settings::default() };
    for (fingerprint, handed_over) in [(1, 1), (2, 0)] {
        let harness = Harness::new(settings());
        let prefill = harness.worker_with_fingerprint(1, Role::Prefill, 1).await;
        let decode = harness.worker_with_fingerprint(2, Role::Decode, fingerprint).await;
        harness.answer(prompt(1, 3000)).await.unwrap();
        assert_eq!((prefill.requests(), decode.requests()), (handed_over, 1));
    }
}

#[tokio::test(start_paused = true)]
async fn a_prompt_cached_on_the_decode_worker_is_prefilled_there() {
    let harness = defaults();
    let (p, d) = (harness.worker(1, Role::Prefill).await, harness.worker(2, Role::Decode).await);
    let request = prompt(1, 3000);
    harness.announce(&d, stored(Level::G1, &names(&request)), true);
    settle().await;
    harness.answer(request).await.unwrap();
    assert_eq!((p.requests(), d.requests()), (0, 1));
}

#[tokio::test(start_paused = true)]
async fn a_failed_prefill_falls_back_to_the_decode_worker() {
    for behaviour in [Behaviour::Refuse(failed()), Behaviour::Break(failed()), Behaviour::End, Behaviour::Hang] {
        let harness = defaults();
        let (p, d) = (harness.worker(1, Role::Prefill).await, harness.worker(2, Role::Decode).await);
        p.set_behaviour(behaviour);
        assert_eq!(harness.answer(prompt(1, 3000)).await, Ok(vec![1, 2]));
        assert_eq!((p.works(), d.works()), (vec![Work::Prefill], vec![Work::Generate]));
        assert_eq!(p.open(), 0);
        assert_eq!([harness.load(1), harness.load(2)], [(0, 0, 0); 2]);
    }
}

#[tokio::test(start_paused = true)]
async fn waiting_for_a_decode_worker_is_not_handoff_overhead() {
    let harness = Harness::new(Settings { disaggregation: Disaggregation::Always, ..Settings::default() });
    let (p, d) = (harness.worker(1, Role::Prefill).await, harness.worker(2, Role::Decode).await);
    let resume = || {
        let member = harness.router.core.fleet.snapshot().get(WorkerId(2)).unwrap().clone();
        member.load.stats(tokio::time::Instant::now()).speeds.handoff_overhead.get()
    };
    let full = Load { active_blocks: 500, total_blocks: 400, ..Load::default() };
    let queue = Load { waiting: 3, waiting_tokens: 900, ..Load::default() };
    for (family, load) in [(1, full), (2, queue), (3, Load::default())] {
        assert_eq!(resume(), None);
        harness.report(&d, load);
        harness.report(&p, Load::default());
        settle().await;
        harness.answer(prompt(family, 3000)).await.unwrap();
    }
    assert!(resume().is_some(), "only the third had no queue");
    assert_eq!(d.works().iter().filter(|work| matches!(work, Work::Resume(_))).count(), 3);
}

#[tokio::test(start_paused = true)]
async fn a_prefilled_prompt_does_not_decode_behind_a_long_queue() {
    let harness = Harness::new(Settings { disaggregation: Disaggregation::Always, ..Settings::default() });
    let _p = harness.worker(1, Role::Prefill).await;
    let (busy, idle) = (harness.worker(2, Role::Decode).await, harness.worker(3, Role::Decode).await);
    for family in 0..4 {
        harness.report(&busy, Load { waiting: 3, waiting_tokens: 90_000, ..Load::default() });
        harness.report(&idle, Load::default());
        settle().await;
        harness.answer(prompt(family, 3000)).await.unwrap();
    }
    assert_eq!((busy.requests(), idle.requests()), (0, 4));
}

#[tokio::test(start_paused = true)]
async fn a_prefill_worker_that_leaves_is_not_awaited() {
    let harness = defaults();
    let (p, d) = (harness.worker(1, Role::Prefill).await, harness.worker(2, Role::Decode).await);
    p.set_behaviour(Behaviour::Hang);
    let started = tokio::time::Instant::now();
    let answer = harness.answer(prompt(1, 3000));
    let leave = async {
        tokio::time::sleep(Duration::from_secs(1)).await;
        harness.discovery.expire(WorkerId(1));
    };
    assert_eq!(futures::future::join(answer, leave).await.0, Ok(vec![1, 2]));
    assert!(started.elapsed() < Duration::from_secs(10), "does not wait for the stall timeout");
    assert_eq!(d.works(), [Work::Generate]);
}

#[tokio::test(start_paused = true)]
async fn a_decode_worker_that_refuses_the_handoff_is_replaced() {
    let harness = defaults();
    let p = harness.worker(1, Role::Prefill).await;
    let (a, b) = (harness.worker(2, Role::Decode).await, harness.worker(3, Role::Decode).await);
    a.set_behaviour(Behaviour::Refuse(failed()));
    for family in 0..2 {
        assert_eq!(harness.answer(prompt(family, 3000)).await, Ok(vec![1, 2]));
    }
    assert!(a.requests() > 0 && b.requests() == 2);
    assert_eq!(p.open(), 0);
}

#[tokio::test(start_paused = true)]
async fn dropping_a_request_cancels_both_legs_and_its_bookings() {
    // Prefill takes three seconds; the first output of the decode worker follows some milliseconds later.
    for after_ms in [0, 1500, 3002, 3500] {
        let harness = defaults();
        let (p, d) = (harness.worker(1, Role::Prefill).await, harness.worker(2, Role::Decode).await);
        let asked = tokio::time::timeout(Duration::from_millis(after_ms), harness.ask(prompt(1, 3000))).await;
        assert_eq!(asked.is_ok(), after_ms == 3500);
        drop(asked);
        settle().await;
        assert_eq!((p.open(), d.open()), (0, 0), "after {after_ms} ms");
        assert_eq!([harness.load(1), harness.load(2)], [(0, 0, 0); 2], "after {after_ms} ms");
    }
}

/// A prefill worker that hands off at once, and a decode worker that waits as long as the prefill takes.
async fn overlapping(end: PrefillEnd) -> (Harness, Arc<FakeEngine>, Arc<FakeEngine>) {
    let harness = defaults();
    let (p, d) = (harness.worker(1, Role::Prefill).await, harness.worker(2, Role::Decode).await);
    p.set_behaviour(Behaviour::HandOff(end));
    d.set_behaviour(Behaviour::HandOff(PrefillEnd::Complete));
    (harness, p, d)
}

#[tokio::test(start_paused = true)]
async fn the_decode_worker_has_the_request_while_the_prompt_is_computed() {
    let (harness, p, d) = overlapping(PrefillEnd::Complete).await;
    let answer = harness.answer(prompt(1, 3000));
    let meanwhile = async {
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert!(matches!(&d.works()[..], [Work::Resume(handoff)] if &handoff.0[..] == b"3000 tokens"));
        assert_eq!((p.works(), p.open(), d.open()), (vec![Work::Prefill], 1, 1));
        // The prompt counts on the prefill worker only.
        assert!(harness.load(1).0 > 0);
        assert_eq!(harness.load(2).0, 0);
    };
    assert_eq!(futures::future::join(answer, meanwhile).await.0, Ok(vec![1, 2]));
    settle().await;
    assert_eq!((p.open(), d.open()), (0, 0));
    assert_eq!([harness.load(1), harness.load(2)], [(0, 0, 0); 2]);
}

#[tokio::test(start_paused = true)]
async fn a_prefill_that_fails_after_the_handoff_is_finished_by_the_decode_worker() {
    let (harness, p, d) = overlapping(PrefillEnd::Fails(failed())).await;
    assert_eq!(harness.answer(prompt(1, 3000)).await, Ok(vec![1, 2]));
    assert!(matches!(&d.works()[..], [Work::Resume(_)]), "it notices by itself");
    assert_eq!((p.open(), d.open()), (0, 0));
    assert_eq!([harness.load(1), harness.load(2)], [(0, 0, 0); 2]);
}

#[tokio::test(start_paused = true)]
async fn a_prefill_worker_that_is_lost_after_the_handoff_is_not_awaited() {
    for leaves in [true, false] {
        let (harness, p, d) = overlapping(PrefillEnd::Hangs).await;
        // It would wait for ever.
        d.set_behaviour(Behaviour::Hang);
        let started = tokio::time::Instant::now();
        let answer = harness.answer(prompt(1, 3000));
        let lose = async {
            tokio::time::sleep(Duration::from_secs(1)).await;
            if leaves {
                harness.discovery.expire(WorkerId(1));
            }
            d.set_behaviour(Behaviour::Serve);
        };
        assert_eq!(futures::future::join(answer, lose).await.0, Ok(vec![1, 2]));
        assert!(matches!(&d.works()[..], [Work::Resume(_), Work::Generate]));
        assert_eq!(started.elapsed() < Duration::from_secs(10), leaves, "else after its stall timeout");
        settle().await;
        assert_eq!((p.open(), d.open()), (0, 0));
        assert_eq!(harness.load(2), (0, 0, 0));
    }
}

#[tokio::test(start_paused = true)]
async fn a_decode_worker_that_fails_during_the_prefill_is_replaced() {
    let (harness, p, d) = overlapping(PrefillEnd::Complete).await;
    let other = harness.worker(3, Role::Decode).await;
    other.set_behaviour(Behaviour::HandOff(PrefillEnd::Complete));
    d.set_behaviour(Behaviour::Break(failed()));
    for family in 0..2 {
        assert_eq!(harness.answer(prompt(family, 3000)).await, Ok(vec![1, 2]));
    }
    assert!(d.requests() > 0 && other.requests() == 2);
    settle().await;
    assert_eq!((p.open(), d.open(), other.open()), (0, 0, 0));
}

#[tokio::test(start_paused = true)]
async fn dropping_a_request_during_the_prefill_cancels_both_legs() {
    for after_ms in [0, 1, 1500, 3001, 3500] {
        let (harness, p, d) = overlapping(PrefillEnd::Complete).await;
        let asked = tokio::time::timeout(Duration::from_millis(after_ms), harness.ask(prompt(1, 3000))).await;
        drop(asked);
        settle().await;
        assert_eq!((p.open(), d.open()), (0, 0), "after {after_ms} ms");
        assert_eq!([harness.load(1), harness.load(2)], [(0, 0, 0); 2], "after {after_ms} ms");
    }
}

#[tokio::test(start_paused = true)]
async fn prefill_workers_decode_without_a_decode_worker() {
    let harness = defaults();
    let p = harness.worker(1, Role::Prefill).await;
    assert!(matches!(harness.router.readiness(), Readiness::NotReady(why) if why.contains("is registered now")));
    assert_eq!(harness.answer(prompt(1, 3000)).await, Ok(vec![1, 2]));
    let _d = harness.worker(2, Role::Decode).await;
    assert_eq!(harness.router.readiness(), Readiness::Ready);
    harness.answer(prompt(2, 8)).await.unwrap();
    assert_eq!(p.works(), [Work::Generate]);
}

#[tokio::test(start_paused = true)]
async fn disaggregation_never_prefills_on_the_decode_worker() {
    let harness = Harness::new(Settings { disaggregation: Disaggregation::Never, ..Settings::default() });
    let (p, d) = (harness.worker(1, Role::Prefill).await, harness.worker(2, Role::Decode).await);
    harness.answer(prompt(1, 30_000)).await.unwrap();
    assert_eq!((p.requests(), d.works()), (0, vec![Work::Generate]));
}

#[tokio::test(start_paused = true)]
async fn prompt_logprobs_are_computed_on_the_decode_worker() {
    let harness = Harness::new(Settings { disaggregation: Disaggregation::Always, ..Settings::default() });
    let (p, d) = (harness.worker(1, Role::Prefill).await, harness.worker(2, Role::Decode).await);
    let mut request = prompt(1, 3000);
    request.sampling.prompt_logprobs = Some(0);
    harness.answer(request).await.unwrap();
    assert_eq!((p.works(), d.works()), (vec![], vec![Work::Generate]));
    harness.answer(prompt(2, 3000)).await.unwrap();
    assert_eq!(p.works(), [Work::Prefill], "another prompt is handed over");
    harness.announce(&d, stored(Level::G1, &names(&prompt(3, 3000))), true);
    settle().await;
    let mut request = prompt(3, 3000);
    assert!(harness.explain(request.clone()).await["cached_tokens"].as_u64() > Some(0));
    request.sampling.prompt_logprobs = Some(0);
    assert_eq!(harness.explain(request).await["cached_tokens"], 0, "no cached block serves it");
}
