//! Several routers over the same workers.

use super::harness::{BLOCK, FakeEngine, Harness, MODEL, SPEED, prompt, settle};
use crate::control::replicas::{HEARTBEAT, PEER_TIMEOUT};
use crate::load::Demand;
use crate::{PlannerMode, PlannerSettings, Router, Settings};
use kvbm::Epoch;
use std::sync::Arc;
use std::time::Duration;
use tokio::task::JoinHandle;
use worker::engine::{Engine, Request, RequestGroup};
use worker::plane::local::Link;
use worker::plane::{Event, EventBody, Events, Load, ReservationUpdate, Role, RouterId, Source, Topic, WorkerId};

/// A prompt short enough that the next one need not wait in the router.
const PROMPT: usize = 1_600;

/// A harness with several workers and several routers, which know each other.
async fn harness(workers: u64, routers: u64) -> (Harness, Vec<Arc<Router>>, Vec<Arc<FakeEngine>>) {
    harness_over(Link::default(), workers, routers).await
}

async fn harness_over(link: Link, workers: u64, routers: u64) -> (Harness, Vec<Arc<Router>>, Vec<Arc<FakeEngine>>) {
    let harness = Harness::over(Settings::default(), link);
    let mut all = vec![harness.router.clone()];
    for id in 1..routers {
        let (registry, settings) = (prometheus::Registry::new(), Settings::default());
        all.push(
            Router::new(RouterId(id), harness.discovery.clone(), harness.events.clone(), settings, &registry).unwrap(),
        );
    }
    let mut engines = Vec::new();
    for id in 1..=workers {
        engines.push(harness.worker(id, Role::Both).await);
    }
    tokio::time::sleep(2 * HEARTBEAT).await;
    (harness, all, engines)
}

/// Sends a prompt of its own family and waits until all routers know its reservation.
async fn send(router: &Arc<Router>, family: u32) -> JoinHandle<()> {
    let (router, request) = (Arc::downgrade(router), prompt(family, PROMPT));
    let sent = tokio::spawn(async move {
        let answer = router.upgrade().unwrap().generate(request).await;
        let _stream = answer.unwrap();
        std::future::pending::<()>().await;
    });
    settle().await;
    settle().await;
    sent
}

fn seconds(tokens: usize) -> Duration {
    Duration::from_secs_f64(tokens as f64 / SPEED)
}

#[tokio::test(start_paused = true)]
async fn several_routers_do_not_herd() {
    let (_harness, routers, engines) = harness(8, 8).await;
    for (family, router) in routers.iter().enumerate() {
        send(router, family as u32).await;
    }
    let requests: Vec<usize> = engines.iter().map(|engine| engine.requests()).collect();
    assert_eq!(requests, [1; 8], "each router sees the reservations of the others");
}

#[tokio::test(start_paused = true)]
async fn simultaneous_decisions_of_routers_spread_over_workers() {
    let link = Link { lag: Duration::from_millis(100), ..Link::default() };
    let (_harness, routers, engines) = harness_over(link, 8, 8).await;
    for round in 0..3 {
        let asked = routers.iter().zip(0..).map(|(router, nth)| router.generate(prompt(8 * round + nth, 100)));
        let before: Vec<usize> = engines.iter().map(|engine| engine.requests()).collect();
        let _answers = futures::future::join_all(asked).await;
        let most = engines.iter().zip(before).map(|(engine, before)| engine.requests() - before).max();
        assert!(most.unwrap() <= 4, "round {round}: {most:?} of 8 went to one of eight idle workers");
    }
}

#[tokio::test(start_paused = true)]
async fn reservations_of_another_router_count_until_they_end() {
    let (harness, routers, _engines) = harness(1, 2).await;
    let sent = send(&routers[1], 1).await;
    let (waiting, sequences, blocks) = harness.load(1);
    assert_eq!((waiting, sequences), (PROMPT as u64, 1));
    assert!(blocks > (PROMPT / BLOCK) as u64, "includes blocks of the answer");
    tokio::time::sleep(seconds(PROMPT) + Duration::from_millis(100)).await;
    assert_eq!(harness.load(1), (0, 1, blocks), "computed");
    sent.abort();
    settle().await;
    settle().await;
    assert_eq!(harness.load(1), (0, 0, 0));
}

#[tokio::test(start_paused = true)]
async fn a_reservation_whose_end_was_lost_ends_with_a_heartbeat() {
    let (harness, routers, _engines) = harness(1, 2).await;
    let stream = routers[1].generate(prompt(1, PROMPT)).await.unwrap();
    settle().await;
    settle().await;
    assert_eq!(harness.load(1).1, 1);
    drop(stream);
    let lost = routers[1].core.outbox.take();
    assert!(matches!(lost[..], [ReservationUpdate::Released(_)]), "{lost:?}");
    tokio::time::sleep(2 * HEARTBEAT).await;
    assert_eq!(harness.load(1), (0, 0, 0));
}

#[tokio::test(start_paused = true)]
async fn a_repeated_end_ends_a_reservation_that_was_placed_late() {
    let (harness, _routers, _engines) = harness(1, 1).await;
    let placed = ReservationUpdate::Placed {
        number: 1,
        worker: WorkerId(1),
        prefill_tokens: 100,
        blocks: 7,
        decodes: true,
        context_tokens: 100,
        anchors: vec![5],
    };
    let inflight = &harness.router.core.inflight;
    for (change, sequences) in [
        (ReservationUpdate::Released(1), 0),
        (placed, 1),
        (ReservationUpdate::Released(2), 1),
        (ReservationUpdate::Released(1), 0),
        (ReservationUpdate::Released(1), 0),
    ] {
        let body = EventBody::Reservations(vec![change]);
        harness.events.publish(Event { source: Source::Router(RouterId(9)), epoch: Epoch(0), body });
        settle().await;
        assert_eq!((harness.load(1).1, inflight.anchor_count()), (sequences, sequences as usize));
    }
    assert_eq!(harness.load(1), (0, 0, 0));
}

#[tokio::test(start_paused = true)]
async fn parallel_choices_are_not_queued_for_another_router() {
    let (harness, routers, _engines) = harness(1, 2).await;
    let (router, request) = (routers[1].clone(), Request { group: Some(RequestGroup::new(3)), ..prompt(1, PROMPT) });
    let sent = tokio::spawn(async move { router.generate(request).await.map(drop) });
    settle().await;
    settle().await;
    let load = harness.router.core.fleet.snapshot().get(WorkerId(1)).unwrap().load.clone();
    assert_eq!((harness.load(1).1, load.remote()), (3, Demand::default()));
    sent.abort();
}

#[tokio::test(start_paused = true)]
async fn a_remote_prefill_is_not_queued_for_another_router() {
    let (harness, routers, _) = harness(0, 2).await;
    let (d, p) = (harness.worker(1, Role::Decode).await, harness.worker(2, Role::Prefill).await);
    let sent = send(&routers[1], 1).await;
    assert_eq!((d.requests(), p.requests()), (0, 1));
    let load = harness.router.core.fleet.snapshot().get(WorkerId(1)).unwrap().load.clone();
    assert_eq!((harness.load(1).1, load.remote()), (1, Demand::default()));
    sent.abort();
}

#[tokio::test(start_paused = true)]
async fn admission_queues_of_two_routers_do_not_deadlock() {
    let (harness, routers, engines) = harness(1, 2).await;
    harness.report(&engines[0], Load { waiting_tokens: 3000, running: 1, ..Load::default() });
    settle().await;
    for (family, router) in (0..).zip([0, 1, 0, 1].map(|at| &routers[at])) {
        send(router, family).await;
    }
    assert_eq!(engines[0].requests(), 0, "each queue has more than a worker takes");
    harness.report(&engines[0], Load::default());
    settle().await;
    assert!(engines[0].requests() >= 2, "the worker is idle");
    tokio::time::sleep(3 * seconds(PROMPT)).await;
    assert_eq!(engines[0].requests(), 4);
}

#[tokio::test(start_paused = true)]
async fn an_equal_prompt_queues_behind_another_routers_request() {
    let (_harness, routers, engines) = harness(4, 2).await;
    // Without other prompts nothing would wait for what is computed again.
    send(&routers[0], 3).await;
    let other = engines.iter().position(|engine| engine.requests() == 1).unwrap();
    send(&routers[1], 1).await;
    let holder = (0..engines.len()).find(|at| *at != other && engines[*at].requests() == 1).unwrap();
    send(&routers[0], 1).await;
    assert_eq!(engines[holder].requests(), 2, "waiting costs no more than computing it again");
    send(&routers[0], 2).await;
    assert_eq!(engines[holder].requests(), 2, "another prompt goes to an idle worker");
}

#[tokio::test(start_paused = true)]
async fn the_demand_for_a_prefix_includes_the_requests_of_other_routers() {
    // The requests come to the routers in turn, one after the other, so that their rate is the same.
    let per_minute = async |routers: u64| {
        let (harness, routers, _engines) = harness(2, routers).await;
        for nth in 0..40 {
            let router = &routers[nth % routers.len()];
            drop(router.generate(prompt(1, PROMPT)).await.unwrap());
            settle().await;
        }
        let explained = harness.explain(prompt(1, PROMPT)).await;
        explained["shared_prefix"]["requests_per_minute"].as_u64().unwrap_or_default() as f64
    };
    let (one, four) = (per_minute(1).await, per_minute(4).await);
    assert!(four > 0.6 * one, "each of four routers sees a quarter of the requests: {four} of {one} per minute");
}

#[tokio::test(start_paused = true)]
async fn bookings_of_a_silent_router_expire() {
    let (harness, mut routers, _engines) = harness(1, 2).await;
    let sent = send(&routers[1], 1).await;
    tokio::time::sleep(seconds(PROMPT) + Duration::from_millis(100)).await;
    // The router that would announce the end of the reservation stops first; its stream continues.
    drop(routers.pop());
    settle().await;
    assert_eq!(harness.load(1).1, 1);
    tokio::time::sleep(PEER_TIMEOUT + 2 * HEARTBEAT).await;
    assert_eq!(harness.load(1), (0, 0, 0));
    sent.abort();
}

#[tokio::test(start_paused = true)]
async fn a_router_without_peers_sends_heartbeats_only() {
    let (_harness, routers, _engines) = harness(1, 1).await;
    send(&routers[0], 1).await;
    assert_eq!(routers[0].core.outbox.take(), []);
}

/// Runs the planner for a minute in each of two modes, under the load that `report` describes. Returns the first role
/// request on the plane, and the number of prefill workers that the planner recommends in the end.
async fn role_request(modes: [PlannerMode; 2], report: impl Fn(Role) -> Load) -> (Option<(WorkerId, Role)>, i64) {
    let settings =
        |mode| Settings { planner: PlannerSettings { mode, ..PlannerSettings::default() }, ..Settings::default() };
    let harness = Harness::new(settings(modes[0]));
    let mut role_requests = harness.events.subscribe(Topic::RoleRequests);
    let mut engines = Vec::new();
    for id in 1..=4 {
        engines.push(harness.worker(id, Role::Decode).await);
    }
    engines.push(harness.worker(5, Role::Prefill).await);
    let asking = async {
        loop {
            for (engine, role) in engines.iter().zip([Role::Decode; 4].into_iter().chain([Role::Prefill])) {
                harness.report(engine, report(role));
            }
            // Two prompts of a thousand tokens per second need two prefill workers; answers have two tokens.
            for family in 0..2 {
                let answer = harness.ask(prompt(family + 10, 1_000));
                drop(tokio::time::timeout(Duration::from_millis(500), answer).await);
            }
        }
    };
    let turn = async {
        tokio::time::sleep(Duration::from_mins(1)).await;
        harness.router.update_settings(settings(modes[1])).unwrap();
        tokio::time::sleep(Duration::from_mins(1)).await;
    };
    let request = tokio::select! {
        () = asking => unreachable!("the loop is infinite"),
        request = futures::StreamExt::next(&mut role_requests) => match request.unwrap().body {
            EventBody::RoleRequest { worker, role } => Some((worker, role)),
            other => panic!("not a request: {other:?}"),
        },
        () = turn => None,
    };
    (request, harness.router.core.metrics.desired_workers.with_label_values(&[MODEL, "prefill"]).get())
}

#[tokio::test(start_paused = true)]
async fn the_planner_gives_an_idle_decode_worker_the_prefill_role() {
    use PlannerMode::{Apply, Off, Recommend};
    let busy = |role| match role {
        Role::Prefill => Load { waiting_tokens: 5_000, waiting: 5, ..Load::default() },
        _ => Load { running: 1, decode_step_seconds: Some(0.01), ..Load::default() },
    };
    for modes in [[Apply, Off], [Recommend, Apply]] {
        let (request, advised) = role_request(modes, busy).await;
        let (worker, role) = request.expect("a request");
        assert!((1..=4).contains(&worker.0) && role == Role::Prefill && advised >= 2, "{modes:?}: {advised}");
    }
    let (advice, advised) = role_request([Off, Recommend], busy).await;
    assert!(advice.is_none() && advised >= 2, "advice is not a request, and was given: {advised}");
    assert_eq!(role_request([Recommend, Off], busy).await, (None, 0), "the recommendation is reset");
}
