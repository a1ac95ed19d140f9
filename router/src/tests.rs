//! The whole router over the local planes and fake engines, on a paused clock.

mod conversations;
pub(crate) mod fake;
mod replicas;
mod trouble;
mod truth;

use crate::Router;
use crate::policy::Policy;
use crate::settings::{Disaggregation, Overrides, Settings};
use fake::{BLOCK, Behaviour, Yard, names, prompt, settle, stored};
use futures::future::{BoxFuture, join_all};
use futures::stream::{self, BoxStream};
use futures::{FutureExt, StreamExt};
use kvbm::{BlockEvent, Epoch, Level};
use std::sync::Arc;
use std::time::Duration;
use worker::engine::{Engine, Error, Finish, Output, Readiness, Request, Work};
use worker::plane::local::{Bus, Link};
use worker::plane::{Discovery, Event, EventBody, Events, Instance, Lease, Load, Membership, Phase, PlaneError};
use worker::plane::{RouterId, Source, StoreId, WorkerId};

fn defaults() -> Yard {
    Yard::new(Settings::default())
}

fn failed() -> Error {
    Error::Failed("on purpose".to_owned())
}

// ---- balance --------------------------------------------------------------------------------------------------------

#[tokio::test(start_paused = true)]
async fn trap_3_a_burst_of_long_prompts_is_booked_at_the_decision_and_spreads() {
    let yard = defaults();
    let workers =
        [yard.worker(1, Phase::Both).await, yard.worker(2, Phase::Both).await, yard.worker(3, Phase::Both).await];
    let answers = join_all((0..9).map(|family| yard.answer(prompt(family, 2000)))).await;
    assert!(answers.iter().all(|answer| answer == &Ok(vec![1, 2])));
    assert_eq!(workers.map(|worker| worker.requests()), [3, 3, 3]);
    assert_eq!([1, 2, 3].map(|id| yard.standing(id)), [(0, 0, 0); 3], "everything booked is freed");
}

#[tokio::test(start_paused = true)]
async fn a_first_block_that_all_share_does_not_pin() {
    let yard = defaults();
    let (a, b) = (yard.worker(1, Phase::Both).await, yard.worker(2, Phase::Both).await);
    for family in 0..10 {
        let request = prompt(family, 1000);
        yard.announce(&a, stored(Level::G1, &names(&request)[..1]), true);
        settle().await;
        yard.answer(request).await.unwrap();
    }
    assert_eq!((a.requests(), b.requests()), (5, 5));
}

#[tokio::test(start_paused = true)]
async fn a_hot_prefix_stays_with_its_holder_until_waiting_costs_more_than_recomputing() {
    let yard = defaults();
    let (a, b) = (yard.worker(1, Phase::Both).await, yard.worker(2, Phase::Both).await);
    let hot = prompt(1, 1600);
    yard.announce(&a, stored(Level::G1, &names(&hot)), true);
    settle().await;
    for _ in 0..4 {
        yard.answer(hot.clone()).await.unwrap();
    }
    assert_eq!((a.requests(), b.requests()), (4, 0));
    yard.report(&a, Load { waiting_tokens: 1000, ..Load::default() });
    settle().await;
    yard.answer(hot.clone()).await.unwrap();
    assert_eq!((a.requests(), b.requests()), (5, 0), "one second of queue is less than 1.6 of prefill");
    yard.report(&a, Load { waiting_tokens: 2000, ..Load::default() });
    yard.report(&b, Load::default());
    settle().await;
    yard.answer(hot).await.unwrap();
    assert_eq!((a.requests(), b.requests()), (5, 1));
}

#[tokio::test(start_paused = true)]
async fn every_policy_serves_and_says_its_name() {
    for policy in Policy::ALL {
        let yard = Yard::new(Settings { policy: policy.clone(), ..Settings::default() });
        let (a, b) = (yard.worker(1, Phase::Both).await, yard.worker(2, Phase::Both).await);
        for family in 0..8 {
            assert_eq!(yard.explain(prompt(family, 100)).await["policy"], policy.name());
        }
        assert_eq!(a.requests() + b.requests(), 8);
        assert!(a.requests() > 0 && b.requests() > 0, "{policy:?} never used one of two idle workers");
    }
}

#[tokio::test(start_paused = true)]
async fn a_hot_prefix_that_spilled_is_served_by_both_holders_from_then_on() {
    let yard = defaults();
    let (a, b) = (yard.worker(1, Phase::Both).await, yard.worker(2, Phase::Both).await);
    let hot = prompt(1, 1600);
    yard.announce(&a, stored(Level::G1, &names(&hot)), true);
    yard.report(&a, Load { waiting_tokens: 3000, ..Load::default() });
    settle().await;
    yard.answer(hot.clone()).await.unwrap();
    assert_eq!((a.requests(), b.requests()), (0, 1), "computing it again takes less time than waiting for its holder");
    yard.announce(&b, stored(Level::G1, &names(&hot)), true);
    for worker in [&a, &b] {
        yard.report(worker, Load::default());
    }
    settle().await;
    let answers = join_all((0..10).map(|_| yard.answer(hot.clone()))).await;
    assert!(answers.iter().all(Result::is_ok));
    assert_eq!((a.requests(), b.requests()), (5, 6));
}

#[tokio::test(start_paused = true)]
async fn a_newcomer_gets_its_share_at_once() {
    let yard = defaults();
    let a = yard.worker(1, Phase::Both).await;
    for family in 0..4 {
        yard.answer(prompt(family, 1000)).await.unwrap();
    }
    let b = yard.worker(2, Phase::Both).await;
    for family in 4..8 {
        yard.answer(prompt(family, 1000)).await.unwrap();
    }
    assert!(b.requests() >= 2, "{} of four went to the newcomer, {} in all to the other", b.requests(), a.requests());
}

#[tokio::test(start_paused = true)]
async fn a_session_stays_on_its_worker() {
    let yard = Yard::new(Settings { policy: Policy::Session, ..Settings::default() });
    let workers = [yard.worker(1, Phase::Both).await, yard.worker(2, Phase::Both).await];
    for session in 0..8u32 {
        let before = workers.each_ref().map(|worker| worker.requests());
        for turn in 0..4 {
            let mut request = prompt(session * 100 + turn, 200);
            request.terms.session = Some(format!("talk {session}").into());
            yard.answer(request).await.unwrap();
        }
        let [a, b] = [0, 1].map(|at| workers[at].requests() - before[at]);
        assert!(a == 0 || b == 0, "session {session}: {a} and {b}");
    }
    assert!(workers.iter().all(|worker| worker.requests() > 0));
}

// ---- settings -------------------------------------------------------------------------------------------------------

#[tokio::test(start_paused = true)]
async fn new_settings_hold_from_the_next_decision_on_and_streams_go_on() {
    let yard = defaults();
    let _workers = [yard.worker(1, Phase::Both).await, yard.worker(2, Phase::Both).await];
    let mut stream = yard.ask(prompt(1, 100)).await.unwrap();
    yard.router.retune(Settings { policy: Policy::RoundRobin, ..Settings::default() }).unwrap();
    assert_eq!(yard.explain(prompt(2, 100)).await["policy"], "round-robin");
    let wrong = Settings { decode_weight: -1.0, policy: Policy::Random, ..Settings::default() };
    assert!(yard.router.retune(wrong).unwrap_err().to_string().contains("router.decode_weight: -1"));
    assert_eq!(yard.explain(prompt(3, 100)).await["policy"], "round-robin", "what is wrong changes nothing");
    let mut ids = Vec::new();
    while let Some(item) = stream.next().await {
        let Output::Tokens(tokens) = item.unwrap() else { panic!("tokens are expected") };
        ids.extend(tokens.ids);
    }
    assert_eq!(ids, [1, 2]);
}

#[tokio::test(start_paused = true)]
async fn each_model_is_placed_by_its_own_settings() {
    let other = Overrides { policy: Some(Policy::LeastLoaded), ..Overrides::default() };
    let yard = Yard::new(Settings { models: [("other".to_owned(), other)].into(), ..Settings::default() });
    let _workers = [yard.worker(1, Phase::Both).await, yard.join(2, Phase::Both, "other", 1, &[]).await];
    assert_eq!(yard.explain(prompt(1, 100)).await["policy"], "kv");
    assert_eq!(yard.explain(Request { model: "other".into(), ..prompt(1, 100) }).await["policy"], "least-loaded");
}

#[tokio::test(start_paused = true)]
async fn a_composed_policy_serves_and_filters() {
    let composition: Settings = toml::from_str(
        "policy = { filter = [{ sequences_below = 1 }], score = [{ term = 'overlap' }, { term = 'queue' }], pick = 'best' }",
    )
    .unwrap();
    let yard = Yard::new(composition);
    let (a, b) = (yard.worker(1, Phase::Both).await, yard.worker(2, Phase::Both).await);
    let hot = prompt(1, 1600);
    yard.announce(&a, stored(Level::G1, &names(&hot)), true);
    settle().await;
    let decision = yard.explain(hot.clone()).await;
    assert_eq!((&decision["policy"], &decision["chosen"]), (&"composed".into(), &"w1".into()));
    let _kept = yard.ask(hot.clone()).await.unwrap();
    yard.answer(hot).await.unwrap();
    assert_eq!((a.requests(), b.requests()), (2, 1), "somebody is decoding at the holder");
}

// ---- what goes wrong ------------------------------------------------------------------------------------------------

#[tokio::test(start_paused = true)]
async fn trap_1_a_clients_error_is_not_tried_elsewhere_and_is_no_fault() {
    let yard = defaults();
    let (a, b) = (yard.worker(1, Phase::Both).await, yard.worker(2, Phase::Both).await);
    let invalid = Error::Invalid { field: "top_k", problem: "too large".to_owned() };
    for worker in [&a, &b] {
        worker.become_(Behaviour::Refuse(invalid.clone()));
    }
    for n in 1..=20 {
        assert_eq!(yard.answer(prompt(n, 100)).await, Err(invalid.clone()));
        assert_eq!(a.requests() + b.requests(), n as usize, "one worker is asked, once");
    }
    for worker in [&a, &b] {
        worker.become_(Behaviour::Serve);
    }
    yard.answer(prompt(1, 100)).await.unwrap();
    yard.answer(prompt(2, 100)).await.unwrap();
    assert_eq!((a.requests(), b.requests()), (11, 11), "both are still in turn");
}

#[tokio::test(start_paused = true)]
async fn a_worker_that_fails_before_its_first_output_is_replaced() {
    for behaviour in [Behaviour::Refuse(failed()), Behaviour::Break(failed()), Behaviour::End] {
        let yard = defaults();
        let (a, b) = (yard.worker(1, Phase::Both).await, yard.worker(2, Phase::Both).await);
        a.become_(behaviour);
        for family in 0..4 {
            assert_eq!(yard.answer(prompt(family, 100)).await, Ok(vec![1, 2]));
        }
        assert_eq!(b.requests(), 4);
        assert!((1..4).contains(&a.requests()), "left alone after a fault, not asked each time: {}", a.requests());
        assert_eq!(yard.standing(1), (0, 0, 0));
    }
}

#[tokio::test(start_paused = true)]
async fn tries_are_bounded_and_the_last_worker_is_never_refused() {
    let yard = defaults();
    let mut workers = Vec::new();
    for id in 1..=5 {
        workers.push(yard.worker(id, Phase::Both).await);
    }
    for worker in &workers {
        worker.become_(Behaviour::Refuse(failed()));
    }
    assert_eq!(yard.answer(prompt(1, 100)).await, Err(failed()));
    assert_eq!(workers.iter().map(|worker| worker.requests()).sum::<usize>(), 3);
    yard.answer(prompt(1, 100)).await.unwrap_err();
    for worker in &workers {
        worker.become_(Behaviour::Serve);
    }
    assert_eq!(yard.answer(prompt(1, 100)).await, Ok(vec![1, 2]), "all rest, one serves");
}

#[tokio::test(start_paused = true)]
async fn trap_2_back_pressure_is_no_fault_and_reaches_the_client_only_when_everybody_pushes_back() {
    let yard = defaults();
    let (a, b) = (yard.worker(1, Phase::Both).await, yard.worker(2, Phase::Both).await);
    let busy = |seconds| Error::Overloaded { retry_after: Duration::from_secs(seconds) };
    a.become_(Behaviour::Refuse(busy(7)));
    for family in 0..3 {
        yard.answer(prompt(family, 100)).await.unwrap();
    }
    assert_eq!(b.requests(), 3);
    b.become_(Behaviour::Refuse(busy(3)));
    assert_eq!(yard.answer(prompt(9, 100)).await, Err(busy(3)), "the sooner of the two");
}

#[tokio::test(start_paused = true)]
async fn a_worker_that_dies_takes_no_request_that_has_not_started() {
    let yard = defaults();
    let (a, b) = (yard.worker(1, Phase::Both).await, yard.worker(2, Phase::Both).await);
    a.become_(Behaviour::Hang);
    let mut requests = Box::pin(join_all((0..4).map(|family| yard.answer(prompt(family, 500)))));
    assert!(tokio::time::timeout(Duration::from_secs(5), &mut requests).await.is_err(), "two of them hang");
    assert_eq!((a.requests(), b.requests()), (2, 2), "and they do not keep the others");
    yard.roster.expire(WorkerId(1));
    assert!(requests.await.iter().all(|answer| answer == &Ok(vec![1, 2])));
    assert_eq!((a.open(), b.requests()), (0, 4));
}

#[tokio::test(start_paused = true)]
async fn trap_15_a_worker_that_leaves_finishes_what_it_has_started() {
    let yard = defaults();
    let worker = yard.worker(1, Phase::Both).await;
    let mut stream = yard.ask(prompt(1, 100)).await.unwrap();
    yard.roster.expire(WorkerId(1));
    tokio::time::sleep(Duration::from_mins(1)).await;
    let mut last = None;
    while let Some(item) = stream.next().await {
        last = Some(item.unwrap());
    }
    assert!(matches!(last, Some(Output::Tokens(tokens)) if tokens.finish == Some(Finish::Length)));
    assert_eq!(worker.requests(), 1);
    assert!(matches!(yard.answer(prompt(1, 100)).await, Err(Error::UnknownModel(_))));
}

#[tokio::test(start_paused = true)]
async fn a_plane_that_ends_kills_the_router_loudly() {
    struct Ends;
    impl Discovery for Ends {
        fn register(&self, _: Instance, _: Arc<dyn Engine>) -> BoxFuture<'_, Result<Lease, PlaneError>> {
            std::future::ready(Err(PlaneError::Unavailable("no".to_owned()))).boxed()
        }
        fn watch(&self) -> BoxStream<'static, Membership> {
            stream::empty().boxed()
        }
    }
    let registry = prometheus::Registry::new();
    let router =
        Router::new(RouterId(0), Arc::new(Ends), Arc::new(Bus::default()), Settings::default(), &registry).unwrap();
    settle().await;
    assert!(matches!(router.readiness(), Readiness::NotReady(why) if why.contains("plane ended")));
    assert!(matches!(router.generate(prompt(1, 10)).await.err(), Some(Error::Unavailable(_))));
}

// ---- the feed -------------------------------------------------------------------------------------------------------

/// What the router believes to be cached of a prompt.
async fn believed(yard: &Yard, request: &Request) -> u64 {
    yard.explain(request.clone()).await["cached_tokens"].as_u64().unwrap() / BLOCK as u64
}

#[tokio::test(start_paused = true)]
async fn a_lost_event_is_repaired_by_a_snapshot_while_the_stale_view_serves() {
    let yard = Yard::over(Settings::default(), Link { lag: Duration::from_secs(2), ..Link::default() });
    let worker = yard.worker(1, Phase::Both).await;
    let request = prompt(1, 1600);
    let blocks = names(&request);
    tokio::time::sleep(Duration::from_secs(5)).await;
    yard.announce(&worker, stored(Level::G1, &blocks[..10]), true);
    tokio::time::sleep(Duration::from_secs(5)).await;
    yard.announce(&worker, stored(Level::G1, &blocks[10..20]), false);
    yard.announce(&worker, stored(Level::G1, &blocks[20..30]), true);
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert_eq!(believed(&yard, &request).await, 10, "the snapshot is still on its way");
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert_eq!(believed(&yard, &request).await, 30);
    assert_eq!(yard.metric("blockyard_router_snapshots_total"), 2, "one when it joined, one now");
}

#[tokio::test(start_paused = true)]
async fn a_lost_last_event_is_noticed_by_the_next_reports() {
    let yard = defaults();
    let worker = yard.worker(1, Phase::Both).await;
    let request = prompt(1, 1600);
    yard.announce(&worker, stored(Level::G1, &names(&request)[..10]), false);
    for _ in 0..3 {
        yard.report(&worker, Load::default());
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    assert_eq!(believed(&yard, &request).await, 10);
}

#[tokio::test(start_paused = true)]
async fn a_new_life_forgets_the_old_one_and_a_late_farewell_does_not_take_it_down() {
    let yard = defaults();
    let request = prompt(1, 1600);
    let old = yard.worker(1, Phase::Both).await;
    yard.announce(&old, stored(Level::G1, &names(&request)), true);
    settle().await;
    assert_eq!(believed(&yard, &request).await, 99);
    let new = yard.join(1, Phase::Both, fake::MODEL, 2, &[]).await;
    yard.announce(&old, stored(Level::G1, &names(&request)), true);
    settle().await;
    assert_eq!(believed(&yard, &request).await, 0);
    yard.announce(&new, stored(Level::G2, &names(&request)[..5]), true);
    settle().await;
    assert_eq!(believed(&yard, &request).await, 5);
    assert_eq!(new.requests(), 2);
}

#[tokio::test(start_paused = true)]
async fn a_shared_store_serves_every_worker_that_reaches_it() {
    let yard = defaults();
    let (request, store) = (prompt(1, 1600), Source::Store(StoreId(5)));
    let log = Arc::new(kvbm::EventLog::new(Epoch(3)));
    log.announce(stored(Level::G3, &names(&request)[..40]));
    let from = log.clone();
    let _offer = yard.bus.offer(store, Arc::new(move || from.snapshot()));
    let a = yard.join(1, Phase::Both, fake::MODEL, 1, &[5]).await;
    let _b = yard.join(2, Phase::Both, fake::MODEL, 1, &[]).await;
    assert_eq!(believed(&yard, &request).await, 40, "the one that reaches it is the cheaper");
    let event = stored(Level::G3, &names(&request)[40..50]);
    log.announce(event.clone());
    yard.bus.publish(Event { source: store, epoch: Epoch(3), body: EventBody::Block { number: 2, event } });
    settle().await;
    let explained = yard.explain(request).await;
    assert_eq!(explained["candidates"][0]["cached_blocks"]["g3"], 50);
    assert_eq!(a.requests(), 2);
}

#[tokio::test(start_paused = true)]
async fn a_link_that_loses_every_fifth_event_costs_no_truth_in_the_end() {
    let yard = Yard::over(Settings::default(), Link { loss: 0.2, seed: 11, ..Link::default() });
    let mut workers = Vec::new();
    for id in 1..=3 {
        workers.push(yard.worker(id, Phase::Both).await);
    }
    for round in 0..60u32 {
        for (id, worker) in (0..).zip(&workers) {
            let blocks = names(&prompt(round * 3 + id, 20 * BLOCK));
            yard.announce(worker, stored(Level::G1, &blocks), true);
            yard.announce(worker, BlockEvent::Removed { level: Level::G1, blocks: blocks[..7].to_vec() }, true);
            yard.report(worker, Load::default());
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    for _ in 0..10 {
        for worker in &workers {
            yard.report(worker, Load::default());
        }
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    let announced: usize = workers.iter().map(|worker| worker.log.snapshot().blocks.len()).sum();
    assert_eq!(yard.router.core.index.memberships(), announced);
    assert!(yard.metric("blockyard_router_snapshots_total") > 10, "the link lost nothing: the test shows nothing");
}

// ---- disaggregation -------------------------------------------------------------------------------------------------

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
    assert!(long["disaggregation"]["apart_s"].as_f64() < long["disaggregation"]["together_s"].as_f64());
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
async fn trap_16_a_failed_prefill_falls_back_to_the_decode_worker() {
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
async fn trap_5_dropping_a_request_at_any_point_cancels_both_legs_and_frees_what_was_booked() {
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

// ---- what is seen ---------------------------------------------------------------------------------------------------

#[tokio::test(start_paused = true)]
async fn an_explanation_is_one_bounded_line_of_json_and_only_on_request() {
    let yard = defaults();
    for id in 1..=40 {
        yard.worker(id, if id == 1 { Phase::Prefill } else { Phase::Decode }).await;
    }
    let mut stream = yard.ask(Request { explain: true, ..prompt(1, 3000) }).await.unwrap();
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
    let mut stream = yard.ask(prompt(2, 3000)).await.unwrap();
    assert!(matches!(stream.next().await, Some(Ok(Output::Tokens(tokens))) if tokens.explain.is_none()));
}

#[tokio::test(start_paused = true)]
async fn predictions_are_held_against_what_the_engine_found() {
    let yard = defaults();
    let worker = yard.worker(1, Phase::Both).await;
    let request = prompt(1, 1600);
    yard.announce(&worker, stored(Level::G1, &names(&request)[..10]), true);
    settle().await;
    yard.answer(request).await.unwrap();
    // The fake finds nothing cached, whatever it announced.
    assert_eq!(yard.metric("blockyard_router_overlap_predicted_tokens_total"), 160);
    assert_eq!(yard.metric("blockyard_router_overlap_actual_tokens_total"), 0);
    assert_eq!(yard.metric("blockyard_router_overlap_false_tokens_total"), 160);
}

#[tokio::test(start_paused = true)]
async fn several_models_are_served_at_once_and_others_are_refused_by_name() {
    let yard = defaults();
    let toy = yard.worker(1, Phase::Both).await;
    let other = yard.join(2, Phase::Both, "other", 1, &[]).await;
    yard.answer(Request { model: "other".into(), ..prompt(1, 100) }).await.unwrap();
    assert_eq!((toy.requests(), other.requests()), (0, 1));
    let ids: Vec<String> = yard.router.models().iter().map(|card| card.id.clone()).collect();
    assert_eq!(ids, ["other", "toy"]);
    let unknown = yard.answer(Request { model: "third".into(), ..prompt(1, 100) }).await;
    assert_eq!(unknown, Err(Error::UnknownModel("third".to_owned())));
    let long = yard.answer(prompt(1, 100_000)).await;
    assert_eq!(long, Err(Error::PromptTooLong { prompt: 100_000, context: 100_000 }));
}
