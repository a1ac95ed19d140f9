//! Workers in trouble: hung, slow, left alone, asked again.

use super::harness::{Behaviour, Fake, MODEL, Yard, prompt, settle};
use super::{defaults, failed};
use futures::StreamExt;
use futures::future::join_all;
use kvbm::{Epoch, EventLog};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::Instant;
use worker::engine::{Engine, Error, Output};
use worker::plane::{Event, EventBody, Events, Instance, Load, Phase, RouterId, Source, WorkerId};
use worker::serve::{Planes, Worker};

fn avoided(yard: &Yard, id: u64) -> bool {
    yard.router.core.fleet.roster().get(WorkerId(id)).unwrap().avoided(Instant::now())
}

fn probes(worker: &Fake) -> usize {
    worker.probes.load(Ordering::SeqCst)
}

async fn two() -> (Arc<Yard>, Arc<Fake>, Arc<Fake>) {
    let yard = Arc::new(defaults());
    let (a, b) = (yard.worker(1, Phase::Both).await, yard.worker(2, Phase::Both).await);
    (yard, a, b)
}

/// Workers that report say every second that they are there.
async fn pass(yard: &Yard, workers: &[&Arc<Fake>], seconds: u64) {
    for _ in 0..seconds {
        for worker in workers {
            yard.report(worker, Load::default());
        }
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_hung_worker_does_not_hang_other_requests() {
    let (yard, a, b) = two().await;
    a.become_(Behaviour::Hang);
    let before = Instant::now();
    let asking = yard.clone();
    let answers = tokio::spawn(async move {
        let answers = join_all((0..6).map(|family| asking.answer(prompt(family, 100)))).await;
        (answers, Instant::now())
    });
    pass(&yard, &[&a, &b], 40).await;
    let (answers, ended) = answers.await.unwrap();
    assert!(answers.iter().all(|answer| answer == &Ok(vec![1, 2])));
    assert!(ended - before < Duration::from_secs(30), "{:?}", ended - before);
    assert_eq!((a.requests(), b.requests(), a.open()), (3, 6, 0));
    let before = Instant::now();
    join_all((6..12).map(|family| yard.answer(prompt(family, 100)))).await;
    assert_eq!((a.requests(), before.elapsed().as_secs()), (3, 0), "and it is left alone");
}

#[tokio::test(start_paused = true)]
async fn no_worker_counts_as_hung_when_all_are_slow() {
    let (yard, a, b) = two().await;
    for worker in [&a, &b] {
        worker.become_(Behaviour::Hang);
    }
    let asking = yard.clone();
    let answers = tokio::spawn(async move { join_all((0..2).map(|family| asking.answer(prompt(family, 100)))).await });
    pass(&yard, &[&a, &b], 120).await;
    assert_eq!((a.requests(), b.requests(), avoided(&yard, 1), avoided(&yard, 2)), (1, 1, false, false));
    answers.abort();
}

#[tokio::test(start_paused = true)]
async fn a_worker_that_was_left_alone_is_probed_before_a_client_is_risked_on_it() {
    let (yard, a, b) = two().await;
    a.become_(Behaviour::Refuse(failed()));
    for family in 0..10 {
        yard.answer(prompt(family, 10)).await.unwrap();
    }
    assert_eq!(a.requests(), 3, "three in a row open");
    pass(&yard, &[&a, &b], 20).await;
    let failing = probes(&a);
    assert!((5..12).contains(&failing), "asked ever more seldom: {failing}");
    assert!(avoided(&yard, 1));
    a.become_(Behaviour::Serve);
    pass(&yard, &[&a, &b], 9).await;
    assert_eq!((probes(&a), avoided(&yard, 1)), (failing + 1, false));
    yard.answer(prompt(20, 10)).await.unwrap();
    yard.answer(prompt(21, 10)).await.unwrap();
    assert_eq!(a.requests(), 4);
}

#[tokio::test(start_paused = true)]
async fn an_idle_worker_is_probed_twice_a_minute_and_a_hang_is_found() {
    let (yard, a, b) = two().await;
    pass(&yard, &[&a, &b], 300).await;
    assert!((8..=10).contains(&probes(&a)), "{} in five minutes", probes(&a));
    a.become_(Behaviour::Hang);
    pass(&yard, &[&a, &b], 60).await;
    assert!(avoided(&yard, 1) && !avoided(&yard, 2));
    for family in 0..4 {
        yard.answer(prompt(family, 10)).await.unwrap();
    }
    assert_eq!((a.requests(), b.requests()), (0, 4), "no client has noticed");
}

#[tokio::test(start_paused = true)]
async fn a_worker_that_pushes_back_is_steered_around_for_as_long_as_it_asked() {
    let (yard, a, b) = two().await;
    a.become_(Behaviour::Refuse(Error::Overloaded { retry_after: Duration::from_secs(20) }));
    yard.answer(prompt(1, 10)).await.unwrap();
    yard.answer(prompt(2, 10)).await.unwrap();
    a.become_(Behaviour::Serve);
    pass(&yard, &[&a, &b], 19).await;
    yard.answer(prompt(3, 10)).await.unwrap();
    assert_eq!((a.requests(), b.requests()), (1, 3));
    pass(&yard, &[&a, &b], 1).await;
    yard.answer(prompt(4, 10)).await.unwrap();
    assert_eq!((a.requests(), b.requests()), (2, 3));
}

#[tokio::test(start_paused = true)]
async fn models_are_listed_and_served_while_a_worker_is_down() {
    let (yard, a, b) = two().await;
    let other = yard.join(3, Phase::Both, "other", 1, &[]).await;
    let ids = || -> Vec<String> { yard.router.models().iter().map(|card| card.id.clone()).collect() };
    for worker in [&a, &other] {
        worker.become_(Behaviour::Hang);
    }
    assert_eq!(ids(), ["other", MODEL], "nobody is asked for the list");
    yard.roster.expire(WorkerId(1));
    yard.roster.expire(WorkerId(3));
    settle().await;
    assert_eq!(ids(), [MODEL]);
    yard.answer(prompt(1, 100)).await.unwrap();
    assert_eq!(b.requests(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_worker_that_changes_its_phase_keeps_its_streams_its_books_and_its_standing() {
    let (yard, a, b) = two().await;
    // The second worker computes elsewhere: what is asked goes to the first, which is a real one around its engine.
    yard.report(&b, Load { waiting_tokens: 5000, running: 1, ..Load::default() });
    let planes = Planes { discovery: yard.roster.clone(), events: yard.bus.clone() };
    let (id, epoch, model) = (WorkerId(1), Epoch(1), a.models()[0].clone());
    let instance = Instance { id, epoch, phase: Phase::Both, model, stores: vec![] };
    let (_load, load) = watch::channel(Load::default());
    let _worker = Worker::start(&planes, instance, a.clone(), Arc::new(EventLog::new(epoch)), load).await.unwrap();
    settle().await;
    let mut stream = yard.ask(prompt(1, 100)).await.unwrap();
    let (runs, phase) = (yard.standing(1), || yard.router.core.fleet.roster().get(id).unwrap().instance.phase);
    assert_eq!((a.open(), b.open(), runs.1, phase()), (1, 0, 1, Phase::Both));
    for to in [Phase::Prefill, Phase::Decode] {
        let body = EventBody::Phase { worker: id, phase: to };
        yard.bus.publish(Event { source: Source::Router(RouterId(0)), epoch: Epoch(0), body });
        settle().await;
        assert_eq!((phase(), yard.standing(1), a.open()), (to, runs, 1), "what runs there goes on, and is booked");
    }
    let mut ids = Vec::new();
    while let Some(item) = stream.next().await {
        let Output::Tokens(tokens) = item.unwrap() else { panic!("tokens are expected") };
        ids.extend(tokens.ids);
    }
    drop(stream);
    assert_eq!((ids, a.open(), yard.standing(1)), (vec![1, 2], 0, (0, 0, 0)), "it is freed when it ends");
    assert_eq!((avoided(&yard, 1), yard.metric("blockyard_router_retries_total")), (false, 0));
}
