//! Events that are lost, late, or of another life; and stores that several workers reach.

use super::harness::{BLOCK, MODEL, Yard, names, prompt, settle, stored};
use super::{believed, defaults};
use crate::settings::Settings;
use kvbm::{BlockEvent, Epoch, EventLog, Level};
use std::sync::{Arc, mpsc};
use std::time::Duration;
use worker::plane::local::Link;
use worker::plane::{Event, EventBody, Events, Load, Phase, Source, StoreId, WorkerId};

#[tokio::test(start_paused = true)]
async fn a_lost_event_is_asked_for_while_the_stale_view_serves_and_takes_no_snapshot() {
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
    assert_eq!(believed(&yard, &request).await, 10, "the answer is still on its way");
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert_eq!(believed(&yard, &request).await, 30);
    assert_eq!(
        (yard.repairs("replayed"), yard.repairs("snapshot_applied")),
        (1, 1),
        "the snapshot is of when it joined"
    );
}

#[tokio::test(start_paused = true)]
async fn what_the_source_keeps_no_more_takes_a_snapshot_while_the_stale_view_serves() {
    let yard = Yard::over(Settings::default(), Link { lag: Duration::from_secs(2), ..Link::default() });
    let worker = yard.worker(1, Phase::Both).await;
    let request = prompt(1, 1600);
    let blocks = names(&request);
    yard.announce(&worker, stored(Level::G1, &blocks[..10]), true);
    tokio::time::sleep(Duration::from_secs(5)).await;
    while worker.log.after(1, 1).is_ok() {
        yard.announce(&worker, stored(Level::G1, &blocks[10..20]), false);
    }
    yard.announce(&worker, stored(Level::G1, &blocks[20..30]), true);
    tokio::time::sleep(Duration::from_secs(5)).await;
    assert_eq!((yard.repairs("log_truncated"), believed(&yard, &request).await), (1, 10));
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert_eq!(believed(&yard, &request).await, 30);
    assert_eq!((yard.repairs("replayed"), yard.repairs("snapshot_applied")), (0, 2));
}

#[tokio::test(start_paused = true)]
async fn a_question_that_a_new_life_answers_does_no_harm() {
    let yard = Yard::over(Settings::default(), Link { lag: Duration::from_secs(2), ..Link::default() });
    let (blocks, store) = (names(&prompt(1, 1600)), Source::Store(StoreId(5)));
    let believed = || yard.router.core.index.digest(store, Level::G4).unwrap().blocks;
    let _worker = yard.join(1, Phase::Both, MODEL, 1, &[5]).await;
    let publish = |log: &EventLog, blocks: &[_], arrives: bool| {
        let event = stored(Level::G4, blocks);
        log.announce(event.clone());
        let body = EventBody::Block { number: *log.latest().borrow(), event };
        if arrives {
            yard.bus.publish(Event { source: store, epoch: log.epoch(), body });
        }
    };
    let old = Arc::new(EventLog::new(Epoch(3)));
    let offer = yard.bus.offer(store, old.clone());
    publish(&old, &blocks[..10], true);
    tokio::time::sleep(Duration::from_secs(9)).await;
    assert_eq!(believed(), 10);
    publish(&old, &blocks[10..20], false);
    publish(&old, &blocks[20..30], true);
    // When the question comes, whoever is asked begins anew, has other blocks, and tells nobody yet.
    tokio::time::sleep(Duration::from_millis(1990)).await;
    drop(offer);
    let new = Arc::new(EventLog::new(Epoch(4)));
    let _offer = yard.bus.offer(store, new.clone());
    publish(&new, &blocks[..40], false);
    publish(&new, &blocks[..50], false);
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert_eq!((yard.repairs("log_truncated"), believed()), (1, 10));
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert_eq!(believed(), 50);
}

#[tokio::test(start_paused = true)]
async fn an_answer_to_who_asked_before_is_not_taken_for_an_answer() {
    let yard = Yard::over(Settings::default(), Link { lag: Duration::from_secs(2), ..Link::default() });
    let (blocks, store) = (names(&prompt(1, 1600)), Source::Store(StoreId(5)));
    let believed = || yard.router.core.index.digest(store, Level::G4).map(|digest| digest.blocks);
    let offer = |epoch, blocks: &[_]| {
        let log = Arc::new(EventLog::new(Epoch(epoch)));
        log.announce(stored(Level::G4, blocks));
        yard.bus.offer(store, log)
    };
    let _old = offer(3, &blocks[..10]);
    let _worker = yard.join(1, Phase::Both, MODEL, 1, &[5]).await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    // The only one that reaches the store goes, and another comes, before the answer does.
    yard.roster.expire(WorkerId(1));
    let _new = offer(4, &blocks[..50]);
    let _worker = yard.join(2, Phase::Both, MODEL, 1, &[5]).await;
    tokio::time::sleep(Duration::from_millis(1500)).await;
    assert_eq!(believed(), Some(0), "that was asked by another");
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(believed(), Some(50));
}

#[tokio::test(start_paused = true)]
async fn of_several_that_announce_a_store_the_next_is_followed_when_one_dies() {
    let yard = defaults();
    let (blocks, store) = (names(&prompt(1, 1600)), Source::Store(StoreId(5)));
    let held = || yard.router.core.index.digest(store, Level::G4).unwrap().blocks;
    let logs = [3, 4].map(|epoch| Arc::new(EventLog::new(Epoch(epoch))));
    let announce = |log: &EventLog, blocks: &[_]| {
        let event = stored(Level::G4, blocks);
        log.announce(event.clone());
        let body = EventBody::Block { number: *log.latest().borrow(), event };
        yard.bus.publish(Event { source: store, epoch: log.epoch(), body });
    };
    let attest = async |logs: &[Arc<EventLog>]| {
        for _ in 0..6 {
            for log in logs {
                let (number, digest) = log.digest();
                yard.bus.publish(Event {
                    source: store,
                    epoch: log.epoch(),
                    body: EventBody::Digest { number, digest },
                });
            }
            tokio::time::sleep(Duration::from_secs(10)).await;
        }
    };
    let [first, second] = logs.each_ref().map(|log| yard.bus.offer(store, log.clone()));
    let _worker = yard.join(1, Phase::Both, MODEL, 1, &[5]).await;
    for log in &logs {
        announce(log, &blocks[..10]);
    }
    attest(&logs).await;
    assert_eq!((held(), yard.repairs("snapshot_applied")), (10, 2), "whoever began last is followed, and nobody asks");
    drop(second);
    announce(&logs[0], &blocks[10..30]);
    attest(&logs[..1]).await;
    assert_eq!(held(), 30);
    announce(&logs[0], &blocks[30..40]);
    settle().await;
    assert_eq!((held(), yard.repairs("snapshot_applied")), (40, 3));
    drop(first);
}

#[tokio::test(start_paused = true)]
async fn where_no_answer_comes_in_time_events_are_as_good() {
    let yard = Yard::over(Settings::default(), Link { lag: Duration::from_secs(12), ..Link::default() });
    let worker = yard.worker(1, Phase::Both).await;
    let request = prompt(1, 1600);
    for part in names(&request)[..40].chunks(10) {
        yard.announce(&worker, stored(Level::G1, part), true);
    }
    tokio::time::sleep(Duration::from_secs(11)).await;
    assert_eq!((yard.repairs("failed"), yard.router.core.index.entries()), (1, 0));
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!(yard.router.core.index.entries(), 40);
    let failed = yard.repairs("failed");
    tokio::time::sleep(Duration::from_mins(2)).await;
    assert_eq!(
        (yard.repairs("failed"), yard.repairs("snapshot_applied")),
        (failed + 1, 0),
        "nothing is missing, so nobody asks"
    );
}

#[tokio::test(start_paused = true)]
async fn events_that_nobody_announced_cost_some_questions_and_no_truth() {
    let yard = defaults();
    let (a, b) = (yard.worker(1, Phase::Both).await, yard.worker(2, Phase::Both).await);
    let (request, source) = (prompt(1, 1600), |id| Source::Worker(WorkerId(id)));
    let blocks = names(&request);
    let held = |id| yard.router.core.index.digest(source(id), Level::G1).unwrap().blocks;
    let asked = || {
        ["replayed", "empty", "log_truncated", "snapshot_applied", "snapshot_stale", "failed"]
            .map(|outcome| yard.repairs(outcome))
    };
    for worker in [&a, &b] {
        yard.announce(worker, stored(Level::G1, &blocks[..10]), true);
    }
    settle().await;
    assert_eq!(asked().iter().sum::<u64>(), 2, "when they joined");
    for number in [1 << 40, u64::MAX] {
        for (id, epoch) in [(1, 1), (2, u64::MAX)] {
            let body = EventBody::Block { number, event: stored(Level::G1, &blocks[..20]) };
            yard.bus.publish(Event { source: source(id), epoch: Epoch(epoch), body });
        }
        tokio::time::sleep(Duration::from_mins(1)).await;
        assert_eq!([held(1), held(2)], [10, 10]);
    }
    let questions = asked();
    assert!(questions.iter().sum::<u64>() <= 10, "{questions:?}");
    for worker in [&a, &b] {
        yard.announce(worker, stored(Level::G1, &blocks[10..30]), true);
    }
    settle().await;
    assert_eq!(([held(1), held(2)], asked()), ([30, 30], questions));
}

#[tokio::test(start_paused = true)]
async fn whose_snapshots_come_too_late_to_be_followed_is_asked_less_and_less() {
    let yard = Yard::over(Settings::default(), Link { lag: Duration::from_secs(1), ..Link::default() });
    let worker = yard.worker(1, Phase::Both).await;
    let blocks = names(&prompt(1, 1600));
    tokio::time::sleep(Duration::from_secs(5)).await;
    // Of each round, more than a log keeps, the last event arrives: before it could be told of, for it is sent ahead.
    let round = 4_200;
    for last in (3..).map(|rounds| rounds * round).take(60) {
        let event = stored(Level::G1, &blocks[..1]);
        (0..round).for_each(|_| yard.announce(&worker, event.clone(), false));
        let body = EventBody::Block { number: last, event };
        yard.bus.publish(Event { source: Source::Worker(WorkerId(1)), epoch: Epoch(1), body });
        tokio::time::sleep(Duration::from_millis(900)).await;
    }
    let (taken, missed) = (yard.repairs("snapshot_applied"), yard.repairs("log_truncated"));
    assert!((8..=12).contains(&taken) && missed > 6, "{taken} snapshots, and none could be followed {missed} times");
    yard.announce(&worker, stored(Level::G1, &blocks), false);
    tokio::time::sleep(Duration::from_secs(10)).await;
    assert_eq!(yard.router.core.index.entries(), blocks.len());
}

/// Keeps the only thread for long work busy until it is dropped.
fn busy() -> mpsc::Sender<()> {
    let (sender, receiver) = mpsc::channel::<()>();
    drop(tokio::task::spawn_blocking(move || receiver.recv()));
    sender
}

async fn until(what: impl Fn() -> bool) {
    let wait = async {
        while !what() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::time::timeout(Duration::from_mins(1), wait).await.expect("it never happened");
}

#[test]
fn a_large_snapshot_is_made_and_taken_while_others_events_go_on() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().max_blocking_threads(1).build().unwrap();
    runtime.block_on(async {
        let yard = defaults();
        let other = yard.worker(2, Phase::Both).await;
        let store = Source::Store(StoreId(5));
        let held = |source, level| yard.router.core.index.digest(source, level).unwrap().blocks;
        let (log, blocks) = (Arc::new(EventLog::new(Epoch(1))), names(&prompt(1, 10_000 * BLOCK)));
        log.announce(stored(Level::G4, &blocks[..9_000]));
        let _offer = yard.bus.offer(store, log.clone());
        let making = busy();
        let _worker = yard.join(1, Phase::Both, MODEL, 1, &[5]).await;
        let taking = busy();
        for (round, busy) in (1..).zip([making, taking]) {
            yard.announce(&other, stored(Level::G1, &names(&prompt(1 + round, 4 * BLOCK))), true);
            until(|| held(Source::Worker(WorkerId(2)), Level::G1) == 4 * u64::from(round)).await;
            let event = stored(Level::G4, &blocks[8_500 + 500 * round as usize..][..500]);
            log.announce(event.clone());
            let number = *log.latest().borrow();
            yard.bus.publish(Event { source: store, epoch: Epoch(1), body: EventBody::Block { number, event } });
            settle().await;
            assert_eq!((held(store, Level::G4), yard.repairs("snapshot_applied")), (0, 2), "it waits for its turn");
            drop(busy);
        }
        until(|| held(store, Level::G4) == 10_000).await;
    });
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
    let new = yard.join(1, Phase::Both, MODEL, 2, &[]).await;
    yard.announce(&old, stored(Level::G1, &names(&request)), true);
    settle().await;
    assert_eq!(believed(&yard, &request).await, 0);
    yard.announce(&new, stored(Level::G2, &names(&request)[..5]), true);
    settle().await;
    assert_eq!(believed(&yard, &request).await, 5);
    assert_eq!(new.requests(), 2);
}

#[tokio::test(start_paused = true)]
async fn a_life_that_is_heard_of_before_it_joins_inherits_nothing() {
    let yard = defaults();
    let (blocks, source) = (names(&prompt(1, 1600)), Source::Worker(WorkerId(1)));
    let _old = yard.worker(1, Phase::Both).await;
    let _held = yard.ask(prompt(1, 1600)).await.unwrap();
    settle().await;
    assert_ne!(yard.standing(1), (0, 0, 0));
    let body = EventBody::Block { number: 1, event: stored(Level::G1, &blocks) };
    yard.bus.publish(Event { source, epoch: Epoch(2), body });
    settle().await;
    let _new = yard.join(1, Phase::Both, MODEL, 2, &[]).await;
    assert_eq!(yard.standing(1), (0, 0, 0));
    let member = yard.router.core.fleet.roster().get(WorkerId(1)).cloned().unwrap();
    assert!(!member.gone.is_cancelled(), "its requests do not end with its former life");
}

#[tokio::test(start_paused = true)]
async fn a_shared_store_serves_every_worker_that_reaches_it() {
    let yard = defaults();
    let (request, store) = (prompt(1, 1600), Source::Store(StoreId(5)));
    let log = Arc::new(EventLog::new(Epoch(3)));
    log.announce(stored(Level::G3, &names(&request)[..40]));
    let _offer = yard.bus.offer(store, log.clone());
    let a = yard.join(1, Phase::Both, MODEL, 1, &[5]).await;
    let _b = yard.join(2, Phase::Both, MODEL, 1, &[]).await;
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
async fn a_link_that_loses_repeats_and_reorders_costs_no_truth_in_the_end() {
    let yard =
        Yard::over(Settings::default(), Link { loss: 0.2, reorder: 0.2, repeat: 0.2, seed: 11, ..Link::default() });
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
    let announced: usize = workers.iter().map(|worker| worker.log.snapshot().blocks().count()).sum();
    assert_eq!(yard.router.core.index.entries(), announced);
    assert!(yard.repairs("replayed") > 10, "the link lost nothing: the test shows nothing");
    assert_eq!(yard.repairs("snapshot_applied"), 3, "each worker's, when it joined");
}
