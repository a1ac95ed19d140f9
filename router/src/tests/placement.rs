//! Placement of requests: load balance, prefix affinity, policies and settings.

use super::defaults;
use super::harness::{Harness, MODEL, card, names, prompt, settle, stored};
use crate::policy::Policy;
use crate::state::{Overrides, Settings};
use futures::StreamExt;
use futures::future::join_all;
use kvbm::Level;
use tokio::time::Instant;
use worker::engine::{ModelCard, Output, Request};
use worker::plane::{Load, OnboardSpeed, Role, WorkerId};

#[tokio::test(start_paused = true)]
async fn a_burst_of_long_prompts_spreads_over_the_workers() {
    let harness = defaults();
    let workers =
        [harness.worker(1, Role::Both).await, harness.worker(2, Role::Both).await, harness.worker(3, Role::Both).await];
    let answers = join_all((0..9).map(|family| harness.answer(prompt(family, 2000)))).await;
    assert!(answers.iter().all(|answer| answer == &Ok(vec![1, 2])));
    assert_eq!(workers.map(|worker| worker.requests()), [3, 3, 3]);
    assert_eq!([1, 2, 3].map(|id| harness.load(id)), [(0, 0, 0); 3], "all bookings are released");
}

#[tokio::test(start_paused = true)]
async fn a_common_first_block_does_not_attract_all_requests() {
    let harness = defaults();
    let (a, b) = (harness.worker(1, Role::Both).await, harness.worker(2, Role::Both).await);
    for family in 0..10 {
        let request = prompt(family, 1000);
        harness.announce(&a, stored(Level::G1, &names(&request)[..1]), true);
        settle().await;
        harness.answer(request).await.unwrap();
    }
    assert_eq!((a.requests(), b.requests()), (5, 5));
}

#[tokio::test(start_paused = true)]
async fn a_hot_prefix_spills_when_waiting_costs_more_than_prefill() {
    let harness = defaults();
    let (a, b) = (harness.worker(1, Role::Both).await, harness.worker(2, Role::Both).await);
    let hot = prompt(1, 1600);
    harness.announce(&a, stored(Level::G1, &names(&hot)), true);
    settle().await;
    for _ in 0..4 {
        harness.answer(hot.clone()).await.unwrap();
    }
    assert_eq!((a.requests(), b.requests()), (4, 0));
    harness.report(&a, Load { waiting_tokens: 1000, ..Load::default() });
    settle().await;
    harness.answer(hot.clone()).await.unwrap();
    assert_eq!((a.requests(), b.requests()), (5, 0), "one second of queue is less than 1.6 of prefill");
    harness.report(&a, Load { waiting_tokens: 2000, ..Load::default() });
    harness.report(&b, Load::default());
    settle().await;
    harness.answer(hot).await.unwrap();
    assert_eq!((a.requests(), b.requests()), (5, 1));
}

#[tokio::test(start_paused = true)]
async fn a_prefix_is_not_computed_again_beside_the_queue_on_the_same_device() {
    for (devices, chosen) in [([1, 2], "w2"), ([1, 1], "w1")] {
        let harness = defaults();
        let mut workers = Vec::new();
        for (id, device) in (1..).zip(devices) {
            workers.push(harness.worker_on_device(id, device).await);
        }
        let conversation = prompt(1, 1600);
        harness.announce(&workers[0], stored(Level::G1, &names(&conversation)), true);
        harness.report(&workers[0], Load { waiting_tokens: 2000, ..Load::default() });
        harness.report(&workers[1], Load::default());
        settle().await;
        let decision = harness.explain(conversation).await;
        assert_eq!(decision["chosen"], chosen, "devices {devices:?}: {decision}");
        let shared = |at: usize| decision["candidates"][at]["terms_s"]["shared_device"].as_f64();
        // On the same device the other worker would compute the prompt while the queue of two seconds is computed.
        let expected = if devices[0] == devices[1] { [None, Some(1.6)] } else { [None, None] };
        assert_eq!([shared(0), shared(1)], expected, "{decision}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_worker_of_a_busy_device_is_not_left_without_requests() {
    let harness = defaults();
    let (a, b) = (harness.worker_on_device(1, 1).await, harness.worker_on_device(2, 1).await);
    let conversation = prompt(1, 1600);
    harness.announce(&a, stored(Level::G1, &names(&conversation)), true);
    // Of the worker that has nothing: whether it counts what the other one computes.
    let counts = async || {
        harness.report(&a, Load { waiting_tokens: 2000, ..Load::default() });
        harness.report(&b, Load::default());
        settle().await;
        let decision = harness.explain(conversation.clone()).await;
        let candidates = decision["candidates"].as_array().unwrap().clone();
        candidates.iter().any(|of| of["worker"] == "w2" && of["terms_s"]["shared_device"].is_number())
    };
    assert!(counts().await);
    assert_eq!((a.requests(), b.requests()), (1, 0));
    harness.router.cordon(WorkerId(2)).unwrap();
    for _ in 0..16 {
        harness.answer(prompt(2, 16)).await.unwrap();
    }
    harness.router.uncordon(WorkerId(2)).unwrap();
    assert_eq!((a.requests(), b.requests()), (17, 0));
    assert!(!counts().await, "16 choices have passed it by");
    // Those for other models do not: one choice of the first worker follows that of the second one.
    harness.join(3, Role::Both, "other", 1, &[]).await;
    let answer_without = async |worker| {
        harness.router.cordon(WorkerId(worker)).unwrap();
        harness.answer(prompt(2, 16)).await.unwrap();
        harness.router.uncordon(WorkerId(worker)).unwrap();
    };
    answer_without(1).await;
    for _ in 0..16 {
        harness.answer(Request { model: "other".into(), ..prompt(2, 16) }).await.unwrap();
    }
    answer_without(2).await;
    assert!(counts().await);
    assert_eq!((a.requests(), b.requests()), (20, 1));
}

#[tokio::test(start_paused = true)]
async fn a_prefix_that_is_worth_copies_spreads_over_the_workers_of_a_device() {
    let harness = defaults();
    let (a, b) = (harness.worker_on_device(1, 1).await, harness.worker_on_device(2, 1).await);
    let hot = prompt(1, 1600);
    harness.announce(&a, stored(Level::G1, &names(&hot)), true);
    settle().await;
    let shared = |decision: &serde_json::Value| {
        let candidates = decision["candidates"].as_array().unwrap();
        candidates.iter().find_map(|candidate| candidate["terms_s"]["shared_device"].as_f64())
    };
    let report = |running| {
        harness.report(&a, Load { running, waiting_tokens: 2000, ..Load::default() });
        harness.report(&b, Load::default());
    };
    report(1);
    settle().await;
    let decision = harness.explain(hot.clone()).await;
    assert!(shared(&decision).is_some(), "one request: {decision}");
    for _ in 0..2 {
        harness.answer(hot.clone()).await.unwrap();
    }
    report(4);
    settle().await;
    let decision = harness.explain(hot).await;
    assert_eq!((shared(&decision), &decision["chosen"]), (None, &"w2".into()), "{decision}");
}

#[tokio::test(start_paused = true)]
async fn blocks_have_the_size_of_the_model_card() {
    let harness = defaults();
    for (id, block_size) in [(1, 1), (2, 128)] {
        harness.join_with(id, Role::Both, ModelCard { block_size, ..card(MODEL) }, 1, &[]).await;
        let fleet = harness.router.core.fleet.snapshot();
        let stats = fleet.get(WorkerId(id)).unwrap().load.stats(Instant::now());
        assert_eq!(stats.block_tokens as usize, block_size);
    }
}

#[tokio::test(start_paused = true)]
async fn of_two_disk_holders_the_one_with_the_shorter_queue_wins() {
    let harness = defaults();
    let (a, b) = (harness.worker(1, Role::Both).await, harness.worker(2, Role::Both).await);
    let hot = prompt(1, 1600);
    for worker in [&a, &b] {
        harness.announce(worker, stored(Level::G3, &names(&hot)), true);
    }
    for (queued, chosen) in [([40, 0], "w2"), ([0, 40], "w1"), ([40, 0], "w2")] {
        for (worker, queued_blocks) in [&a, &b].into_iter().zip(queued) {
            let disk = OnboardSpeed { level: Level::G3, latency_seconds: 0.01, bytes_per_second: 1e5, queued_blocks };
            harness.report(worker, Load { onboard: vec![disk], ..Load::default() });
        }
        settle().await;
        let decision = harness.explain(hot.clone()).await;
        assert_eq!((&decision["chosen"], &decision["why"]), (&chosen.into(), &"lowest_cost".into()));
        let backlog = |at: usize| decision["candidates"][at]["terms_s"]["tier_queue"].as_f64();
        assert_eq!([backlog(0), backlog(1)], [None, Some(0.4)], "40 blocks of 10 ms");
    }
}

#[tokio::test(start_paused = true)]
async fn every_policy_serves_and_is_named_in_explanations() {
    for policy in Policy::ALL {
        let harness = Harness::new(Settings { policy: policy.clone(), ..Settings::default() });
        let (a, b) = (harness.worker(1, Role::Both).await, harness.worker(2, Role::Both).await);
        for family in 0..8 {
            assert_eq!(harness.explain(prompt(family, 100)).await["policy"], policy.name());
        }
        assert_eq!(a.requests() + b.requests(), 8);
        assert!(a.requests() > 0 && b.requests() > 0, "{policy:?} used one of two idle workers only");
    }
}

#[tokio::test(start_paused = true)]
async fn a_spilled_prefix_is_served_by_both_holders() {
    let harness = defaults();
    let (a, b) = (harness.worker(1, Role::Both).await, harness.worker(2, Role::Both).await);
    let hot = prompt(1, 1600);
    harness.announce(&a, stored(Level::G1, &names(&hot)), true);
    harness.report(&a, Load { waiting_tokens: 3000, ..Load::default() });
    settle().await;
    harness.answer(hot.clone()).await.unwrap();
    assert_eq!((a.requests(), b.requests()), (0, 1), "prefill takes less time than waiting for the holder");
    harness.announce(&b, stored(Level::G1, &names(&hot)), true);
    for worker in [&a, &b] {
        harness.report(worker, Load::default());
    }
    settle().await;
    let answers = join_all((0..10).map(|_| harness.answer(hot.clone()))).await;
    assert!(answers.iter().all(Result::is_ok));
    assert_eq!((a.requests(), b.requests()), (5, 6));
}

#[tokio::test(start_paused = true)]
async fn a_new_worker_gets_its_share_at_once() {
    let harness = defaults();
    let a = harness.worker(1, Role::Both).await;
    for family in 0..4 {
        harness.answer(prompt(family, 1000)).await.unwrap();
    }
    let b = harness.worker(2, Role::Both).await;
    for family in 4..8 {
        harness.answer(prompt(family, 1000)).await.unwrap();
    }
    assert!(b.requests() >= 2, "{} of four on the new worker, {} in all on the other", b.requests(), a.requests());
}

#[tokio::test(start_paused = true)]
async fn a_session_stays_on_its_worker() {
    let harness = Harness::new(Settings { policy: Policy::Session, ..Settings::default() });
    let workers = [harness.worker(1, Role::Both).await, harness.worker(2, Role::Both).await];
    for session in 0..8u32 {
        let before = workers.each_ref().map(|worker| worker.requests());
        for turn in 0..4 {
            let mut request = prompt(session * 100 + turn, 200);
            request.attributes.session = Some(format!("talk {session}").into());
            harness.answer(request).await.unwrap();
        }
        let [a, b] = [0, 1].map(|at| workers[at].requests() - before[at]);
        assert!(a == 0 || b == 0, "session {session}: {a} and {b}");
    }
    assert!(workers.iter().all(|worker| worker.requests() > 0));
}

#[tokio::test(start_paused = true)]
async fn new_settings_apply_to_the_next_decision() {
    let harness = defaults();
    let _workers = [harness.worker(1, Role::Both).await, harness.worker(2, Role::Both).await];
    let mut stream = harness.ask(prompt(1, 100)).await.unwrap();
    harness.router.update_settings(Settings { policy: Policy::RoundRobin, ..Settings::default() }).unwrap();
    assert_eq!(harness.explain(prompt(2, 100)).await["policy"], "round-robin");
    let wrong = Settings { decode_interference_weight: -1.0, policy: Policy::Random, ..Settings::default() };
    assert!(
        harness
            .router
            .update_settings(wrong)
            .unwrap_err()
            .to_string()
            .contains("router.decode_interference_weight: expected")
    );
    assert_eq!(harness.explain(prompt(3, 100)).await["policy"], "round-robin", "invalid settings change nothing");
    let mut ids = Vec::new();
    while let Some(item) = stream.next().await {
        let Output::Tokens(tokens) = item.unwrap() else { panic!("tokens are expected") };
        ids.extend(tokens.ids);
    }
    assert_eq!(ids, [1, 2]);
}

#[tokio::test(start_paused = true)]
async fn each_model_is_placed_by_its_own_policy() {
    let other = Overrides { policy: Some(Policy::LeastLoaded), ..Overrides::default() };
    let harness = Harness::new(Settings { models: [("other".to_owned(), other)].into(), ..Settings::default() });
    let _workers = [harness.worker(1, Role::Both).await, harness.join(2, Role::Both, "other", 1, &[]).await];
    assert_eq!(harness.explain(prompt(1, 100)).await["policy"], "kv");
    assert_eq!(harness.explain(Request { model: "other".into(), ..prompt(1, 100) }).await["policy"], "least-loaded");
}

#[tokio::test(start_paused = true)]
async fn a_composed_policy_serves_and_filters() {
    let composition: Settings = toml::from_str(
        "policy = { filter = [{ sequences_below = 1 }], \
         score = [{ term = 'overlap', weight = 2 }, { term = 'queue' }], \
         pick = 'best' }",
    )
    .unwrap();
    let harness = Harness::new(composition);
    let (a, b) = (harness.worker(1, Role::Both).await, harness.worker(2, Role::Both).await);
    let hot = prompt(1, 1600);
    harness.announce(&a, stored(Level::G1, &names(&hot)), true);
    settle().await;
    let decision = harness.explain(hot.clone()).await;
    assert_eq!((&decision["policy"], &decision["chosen"]), (&"composed".into(), &"w1".into()));
    let part = |at: usize, key: &str| decision["candidates"][at][key].clone();
    // 99 blocks at a thousand tokens per second, with weight 2.
    let scores = serde_json::json!({ "overlap": -3.168, "queue": 0.0 });
    assert_eq!((part(0, "score"), part(0, "scores")), ((-3.168).into(), scores));
    let passes = serde_json::json!([{ "sequences_below": 1 }]);
    assert_eq!((part(0, "passes"), part(1, "score"), part(1, "passes")), (passes.clone(), 0.0.into(), passes));
    assert!(part(1, "cost_s").as_f64().is_some_and(|seconds| seconds > 1.5), "the cost in seconds is included");
    let _kept = harness.ask(hot.clone()).await.unwrap();
    harness.answer(hot).await.unwrap();
    assert_eq!((a.requests(), b.requests()), (2, 1), "the holder decodes another request");
}

#[tokio::test(start_paused = true)]
async fn an_answer_names_its_worker() {
    let harness = defaults();
    let (_a, _b) = (harness.worker(1, Role::Both).await, harness.worker(2, Role::Both).await);
    harness.router.cordon(worker::plane::WorkerId(1)).unwrap();
    let mut stream = harness.ask(prompt(1, 100)).await.unwrap();
    let Some(Ok(Output::Tokens(first))) = stream.next().await else { panic!("no tokens") };
    assert_eq!(first.prompt.unwrap().worker.as_deref(), Some("w2"));
}
