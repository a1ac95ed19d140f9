//! Several routers over the same workers.

use super::harness::{BLOCK, Fake, MODEL, SPEED, Yard, prompt, settle};
use crate::control::replicas::{GONE, HEARTBEAT};
use crate::load::Amount;
use crate::{PlannerMode, PlannerSettings, Router, Settings};
use std::sync::Arc;
use std::time::Duration;
use tokio::task::JoinHandle;
use worker::engine::{Engine, Request, RequestGroup};
use worker::plane::local::Link;
use worker::plane::{EventBody, Events, Load, Phase, RouterId, Topic, WorkerId};

/// Less than what a worker takes before others wait in the router.
const PROMPT: usize = 1_600;

/// A yard with `workers`, and as many routers over it as asked, which know each other.
async fn yard(workers: u64, routers: u64) -> (Yard, Vec<Arc<Router>>, Vec<Arc<Fake>>) {
    yard_over(Link::default(), workers, routers).await
}

async fn yard_over(link: Link, workers: u64, routers: u64) -> (Yard, Vec<Arc<Router>>, Vec<Arc<Fake>>) {
    let yard = Yard::over(Settings::default(), link);
    let mut all = vec![yard.router.clone()];
    for id in 1..routers {
        let (registry, settings) = (prometheus::Registry::new(), Settings::default());
        all.push(Router::new(RouterId(id), yard.roster.clone(), yard.bus.clone(), settings, &registry).unwrap());
    }
    let mut fakes = Vec::new();
    for id in 1..=workers {
        fakes.push(yard.worker(id, Phase::Both).await);
    }
    tokio::time::sleep(2 * HEARTBEAT).await;
    (yard, all, fakes)
}

/// Sends a prompt of its own kind, and waits until everybody knows of it.
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
async fn router_replicas_do_not_herd() {
    let (_yard, routers, fakes) = yard(8, 8).await;
    for (family, router) in routers.iter().enumerate() {
        send(router, family as u32).await;
    }
    let requests: Vec<usize> = fakes.iter().map(|fake| fake.requests()).collect();
    assert_eq!(requests, [1; 8], "each sees where the others sent theirs");
}

#[tokio::test(start_paused = true)]
async fn replicas_without_peer_updates_choose_different_workers() {
    let link = Link { lag: Duration::from_millis(100), ..Link::default() };
    let (_yard, routers, fakes) = yard_over(link, 8, 8).await;
    for round in 0..3 {
        let asked = routers.iter().zip(0..).map(|(router, nth)| router.generate(prompt(8 * round + nth, 100)));
        let before: Vec<usize> = fakes.iter().map(|fake| fake.requests()).collect();
        let _answers = futures::future::join_all(asked).await;
        let most = fakes.iter().zip(before).map(|(fake, before)| fake.requests() - before).max();
        assert!(most.unwrap() <= 4, "round {round}: {most:?} of 8 went to one of eight idle workers");
    }
}

#[tokio::test(start_paused = true)]
async fn what_another_router_sends_counts_until_its_first_token_and_its_end() {
    let (yard, routers, _fakes) = yard(1, 2).await;
    let sent = send(&routers[1], 1).await;
    let (waiting, sequences, blocks) = yard.standing(1);
    assert_eq!((waiting, sequences), (PROMPT as u64, 1));
    assert!(blocks > (PROMPT / BLOCK) as u64, "and room for its answer");
    tokio::time::sleep(seconds(PROMPT) + Duration::from_millis(100)).await;
    assert_eq!(yard.standing(1), (0, 1, blocks), "computed");
    sent.abort();
    settle().await;
    settle().await;
    assert_eq!(yard.standing(1), (0, 0, 0));
}

#[tokio::test(start_paused = true)]
async fn answers_that_are_to_come_with_the_first_do_not_wait_in_another_router() {
    let (yard, routers, _fakes) = yard(1, 2).await;
    let (router, request) = (routers[1].clone(), Request { group: Some(RequestGroup::new(3)), ..prompt(1, PROMPT) });
    let sent = tokio::spawn(async move { router.generate(request).await.map(drop) });
    settle().await;
    settle().await;
    let books = yard.router.core.fleet.roster().get(WorkerId(1)).unwrap().books.clone();
    assert_eq!((yard.standing(1).1, books.elsewhere()), (3, Amount::default()));
    sent.abort();
}

#[tokio::test(start_paused = true)]
async fn who_decodes_once_its_prompt_is_computed_elsewhere_does_not_wait_in_another_router() {
    let (yard, routers, _) = yard(0, 2).await;
    let (d, p) = (yard.worker(1, Phase::Decode).await, yard.worker(2, Phase::Prefill).await);
    let sent = send(&routers[1], 1).await;
    assert_eq!((d.requests(), p.requests()), (0, 1));
    let books = yard.router.core.fleet.roster().get(WorkerId(1)).unwrap().books.clone();
    assert_eq!((yard.standing(1).1, books.elsewhere()), (1, Amount::default()));
    sent.abort();
}

#[tokio::test(start_paused = true)]
async fn two_waiting_rooms_do_not_keep_each_other_waiting() {
    let (yard, routers, fakes) = yard(1, 2).await;
    yard.report(&fakes[0], Load { waiting_tokens: 3000, running: 1, ..Load::default() });
    settle().await;
    for (family, router) in (0..).zip([0, 1, 0, 1].map(|at| &routers[at])) {
        send(router, family).await;
    }
    assert_eq!(fakes[0].requests(), 0, "in each room waits more than a worker takes");
    yard.report(&fakes[0], Load::default());
    settle().await;
    assert!(fakes[0].requests() >= 2, "it has nothing to do");
    tokio::time::sleep(3 * seconds(PROMPT)).await;
    assert_eq!(fakes[0].requests(), 4);
}

#[tokio::test(start_paused = true)]
async fn who_comes_with_the_same_prompt_queues_behind_the_other_routers_request() {
    let (_yard, routers, fakes) = yard(4, 2).await;
    send(&routers[1], 1).await;
    let holder = fakes.iter().position(|fake| fake.requests() == 1).unwrap();
    send(&routers[0], 1).await;
    assert_eq!(fakes[holder].requests(), 2, "to wait for it costs no more than to compute it again");
    send(&routers[0], 2).await;
    assert_eq!(fakes[holder].requests(), 2, "another prompt goes where nobody waits");
}

#[tokio::test(start_paused = true)]
async fn a_router_that_falls_silent_takes_its_bookings_with_it() {
    let (yard, mut routers, _fakes) = yard(1, 2).await;
    let sent = send(&routers[1], 1).await;
    tokio::time::sleep(seconds(PROMPT) + Duration::from_millis(100)).await;
    // Whoever would say that the booking has ended goes first; the stream goes on.
    drop(routers.pop());
    settle().await;
    assert_eq!(yard.standing(1).1, 1);
    tokio::time::sleep(GONE + 2 * HEARTBEAT).await;
    assert_eq!(yard.standing(1), (0, 0, 0));
    sent.abort();
}

#[tokio::test(start_paused = true)]
async fn a_router_that_is_alone_says_only_that_it_is_there() {
    let (_yard, routers, _fakes) = yard(1, 1).await;
    send(&routers[0], 1).await;
    assert_eq!(routers[0].core.outbox.take(), []);
}

/// What the first wish on the plane is, within a minute of one mode and a minute of the next, under a load that `report`
/// describes; and how many prefill workers are advised in the end.
async fn wish(modes: [PlannerMode; 2], report: impl Fn(Phase) -> Load) -> (Option<(WorkerId, Phase)>, i64) {
    let settings =
        |mode| Settings { planner: PlannerSettings { mode, ..PlannerSettings::default() }, ..Settings::default() };
    let yard = Yard::new(settings(modes[0]));
    let mut wishes = yard.bus.subscribe(Topic::Phases);
    let mut fakes = Vec::new();
    for id in 1..=4 {
        fakes.push(yard.worker(id, Phase::Decode).await);
    }
    fakes.push(yard.worker(5, Phase::Prefill).await);
    let asking = async {
        loop {
            for (fake, phase) in fakes.iter().zip([Phase::Decode; 4].into_iter().chain([Phase::Prefill])) {
                yard.report(fake, report(phase));
            }
            // Two prompts a second take two workers that compute a prompt a second, and answers are of two tokens.
            for family in 0..2 {
                let answer = yard.ask(prompt(family + 10, 1_000));
                drop(tokio::time::timeout(Duration::from_millis(500), answer).await);
            }
        }
    };
    let turn = async {
        tokio::time::sleep(Duration::from_mins(1)).await;
        yard.router.update_settings(settings(modes[1])).unwrap();
        tokio::time::sleep(Duration::from_mins(1)).await;
    };
    let wish = tokio::select! {
        () = asking => unreachable!("asking goes on"),
        wish = futures::StreamExt::next(&mut wishes) => match wish.unwrap().body {
            EventBody::Phase { worker, phase } => Some((worker, phase)),
            other => panic!("not a wish: {other:?}"),
        },
        () = turn => None,
    };
    (wish, yard.router.core.metrics.desired_workers.with_label_values(&[MODEL, "prefill"]).get())
}

#[tokio::test(start_paused = true)]
async fn the_planner_wishes_an_idle_decode_worker_to_prefill_when_prompts_need_it() {
    use PlannerMode::{Apply, Off, Recommend};
    let busy = |phase| match phase {
        Phase::Prefill => Load { waiting_tokens: 5_000, waiting: 5, ..Load::default() },
        _ => Load { running: 1, decode_step_seconds: Some(0.01), ..Load::default() },
    };
    for modes in [[Apply, Off], [Recommend, Apply]] {
        let (wish, advised) = wish(modes, busy).await;
        let (worker, phase) = wish.expect("a wish");
        assert!((1..=4).contains(&worker.0) && phase == Phase::Prefill && advised >= 2, "{modes:?}: {advised}");
    }
    let (advice, advised) = wish([Off, Recommend], busy).await;
    assert!(advice.is_none() && advised >= 2, "advice is not a wish, and was given: {advised}");
    assert_eq!(wish([Recommend, Off], busy).await, (None, 0), "what was advised is taken back");
}
