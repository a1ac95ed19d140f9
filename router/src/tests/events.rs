//! Lost, late and repeated KV events, restarts of sources, and stores that several workers can read.

use super::harness::{BLOCK, Harness, MODEL, names, prompt, settle, stored};
use super::{cached_blocks, defaults};
use crate::index::Holder;
use crate::state::Settings;
use kvbm::{BlockEvent, Epoch, EventLog, Level};
use std::sync::{Arc, mpsc};
use std::time::Duration;
use worker::plane::local::Link;
use worker::plane::{Event, EventBody, Events, Load, Role, Source, StoreId, WorkerId};

#[tokio::test(start_paused = true)]
async fn a_lost_event_is_replayed_without_a_snapshot() {
    let harness = Harness::over(Settings::default(), Link { lag: Duration::from_secs(2), ..Link::default() });
    let worker = harness.worker(1, Role::Both).await;
    let request = prompt(1, 1600);
    let blocks = names(&request);
    tokio::time::sleep(Duration::from_secs(5)).await;
    harness.announce(&worker, stored(Level::G1, &blocks[..10]), true);
    tokio::time::sleep(Duration::from_secs(5)).await;
    harness.announce(&worker, stored(Level::G1, &blocks[10..20]), false);
    harness.announce(&worker, stored(Level::G1, &blocks[20..30]), true);
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert_eq!(cached_blocks(&harness, &request).await, 10, "the answer has not arrived");
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert_eq!(cached_blocks(&harness, &request).await, 30);
    assert_eq!(
        (harness.resyncs("replayed"), harness.resyncs("snapshot_applied")),
        (1, 1),
        "the snapshot is the one of joining"
    );
}

#[tokio::test(start_paused = true)]
async fn a_truncated_log_takes_a_snapshot_while_the_index_serves() {
    let harness = Harness::over(Settings::default(), Link { lag: Duration::from_secs(2), ..Link::default() });
    let worker = harness.worker(1, Role::Both).await;
    let request = prompt(1, 1600);
    let blocks = names(&request);
    harness.announce(&worker, stored(Level::G1, &blocks[..10]), true);
    tokio::time::sleep(Duration::from_secs(5)).await;
    while worker.log.after(1, 1).is_ok() {
        harness.announce(&worker, stored(Level::G1, &blocks[10..20]), false);
    }
    harness.announce(&worker, stored(Level::G1, &blocks[20..30]), true);
    tokio::time::sleep(Duration::from_secs(5)).await;
    assert_eq!((harness.resyncs("log_truncated"), cached_blocks(&harness, &request).await), (1, 10));
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert_eq!(cached_blocks(&harness, &request).await, 30);
    assert_eq!((harness.resyncs("replayed"), harness.resyncs("snapshot_applied")), (0, 2));
}

#[tokio::test(start_paused = true)]
async fn a_resync_answered_by_a_new_epoch_is_handled() {
    let harness = Harness::over(Settings::default(), Link { lag: Duration::from_secs(2), ..Link::default() });
    let (blocks, store) = (names(&prompt(1, 1600)), Source::Store(StoreId(5)));
    let indexed = || harness.router.core.index.digest(Holder::Store(StoreId(5)), Level::G4).unwrap().blocks;
    let _worker = harness.join(1, Role::Both, MODEL, 1, &[5]).await;
    let publish = |log: &EventLog, blocks: &[_], arrives: bool| {
        let event = stored(Level::G4, blocks);
        log.announce(event.clone());
        let body = EventBody::Block { number: *log.latest().borrow(), event };
        if arrives {
            harness.events.publish(Event { source: store, epoch: log.epoch(), body });
        }
    };
    let old = Arc::new(EventLog::new(Epoch(3)));
    let offer = harness.events.offer(store, old.clone());
    publish(&old, &blocks[..10], true);
    tokio::time::sleep(Duration::from_secs(9)).await;
    assert_eq!(indexed(), 10);
    publish(&old, &blocks[10..20], false);
    publish(&old, &blocks[20..30], true);
    // When the request arrives, the source has restarted with other blocks and has not published events of the new
    // epoch.
    tokio::time::sleep(Duration::from_millis(1990)).await;
    drop(offer);
    let new = Arc::new(EventLog::new(Epoch(4)));
    let _offer = harness.events.offer(store, new.clone());
    publish(&new, &blocks[..40], false);
    publish(&new, &blocks[..50], false);
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert_eq!((harness.resyncs("log_truncated"), indexed()), (1, 10));
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert_eq!(indexed(), 50);
}

#[tokio::test(start_paused = true)]
async fn an_answer_to_a_former_subscriber_is_ignored() {
    let harness = Harness::over(Settings::default(), Link { lag: Duration::from_secs(2), ..Link::default() });
    let (blocks, store) = (names(&prompt(1, 1600)), Source::Store(StoreId(5)));
    let indexed = || harness.router.core.index.digest(Holder::Store(StoreId(5)), Level::G4).map(|digest| digest.blocks);
    let offer = |epoch, blocks: &[_]| {
        let log = Arc::new(EventLog::new(Epoch(epoch)));
        log.announce(stored(Level::G4, blocks));
        harness.events.offer(store, log)
    };
    let _old = offer(3, &blocks[..10]);
    let _worker = harness.join(1, Role::Both, MODEL, 1, &[5]).await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    // The only worker that reads the store leaves, and another joins, before the answer arrives.
    harness.discovery.expire(WorkerId(1));
    let _new = offer(4, &blocks[..50]);
    let _worker = harness.join(2, Role::Both, MODEL, 1, &[5]).await;
    tokio::time::sleep(Duration::from_millis(1500)).await;
    assert_eq!(indexed(), Some(0), "the answer belongs to the former subscriber");
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(indexed(), Some(50));
}

#[tokio::test(start_paused = true)]
async fn another_publisher_of_a_store_takes_over() {
    let harness = defaults();
    let (blocks, store) = (names(&prompt(1, 1600)), Source::Store(StoreId(5)));
    let held = || harness.router.core.index.digest(Holder::Store(StoreId(5)), Level::G4).unwrap().blocks;
    let logs = [3, 4].map(|epoch| Arc::new(EventLog::new(Epoch(epoch))));
    let announce = |log: &EventLog, blocks: &[_]| {
        let event = stored(Level::G4, blocks);
        log.announce(event.clone());
        let body = EventBody::Block { number: *log.latest().borrow(), event };
        harness.events.publish(Event { source: store, epoch: log.epoch(), body });
    };
    let publish_digest = async |logs: &[Arc<EventLog>]| {
        for _ in 0..6 {
            for log in logs {
                let (number, digest) = log.digest();
                harness.events.publish(Event {
                    source: store,
                    epoch: log.epoch(),
                    body: EventBody::Digest { number, digest },
                });
            }
            tokio::time::sleep(Duration::from_secs(10)).await;
        }
    };
    let [first, second] = logs.each_ref().map(|log| harness.events.offer(store, log.clone()));
    let _worker = harness.join(1, Role::Both, MODEL, 1, &[5]).await;
    for log in &logs {
        announce(log, &blocks[..10]);
    }
    publish_digest(&logs).await;
    assert_eq!(
        (held(), harness.resyncs("snapshot_applied")),
        (10, 2),
        "the latest publisher is followed without a resync"
    );
    drop(second);
    announce(&logs[0], &blocks[10..30]);
    publish_digest(&logs[..1]).await;
    assert_eq!(held(), 30);
    announce(&logs[0], &blocks[30..40]);
    settle().await;
    assert_eq!((held(), harness.resyncs("snapshot_applied")), (40, 3));
    drop(first);
}

#[tokio::test(start_paused = true)]
async fn events_are_applied_when_no_snapshot_arrives_in_time() {
    let harness = Harness::over(Settings::default(), Link { lag: Duration::from_secs(12), ..Link::default() });
    let worker = harness.worker(1, Role::Both).await;
    let request = prompt(1, 1600);
    for part in names(&request)[..40].chunks(10) {
        harness.announce(&worker, stored(Level::G1, part), true);
    }
    tokio::time::sleep(Duration::from_secs(11)).await;
    assert_eq!((harness.resyncs("failed"), harness.router.core.index.entries()), (1, 0));
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!(harness.router.core.index.entries(), 40);
    let failed = harness.resyncs("failed");
    tokio::time::sleep(Duration::from_mins(2)).await;
    assert_eq!(
        (harness.resyncs("failed"), harness.resyncs("snapshot_applied")),
        (failed + 1, 0),
        "nothing is missing, so there is no resync"
    );
}

#[tokio::test(start_paused = true)]
async fn forged_events_cost_few_resyncs_and_no_accuracy() {
    let harness = defaults();
    let (a, b) = (harness.worker(1, Role::Both).await, harness.worker(2, Role::Both).await);
    let (request, source) = (prompt(1, 1600), |id| Source::Worker(WorkerId(id)));
    let blocks = names(&request);
    let held = |id| harness.router.core.index.digest(Holder::Worker(WorkerId(id)), Level::G1).unwrap().blocks;
    let resyncs = || {
        ["replayed", "empty", "log_truncated", "snapshot_applied", "snapshot_stale", "failed"]
            .map(|outcome| harness.resyncs(outcome))
    };
    for worker in [&a, &b] {
        harness.announce(worker, stored(Level::G1, &blocks[..10]), true);
    }
    settle().await;
    assert_eq!(resyncs().iter().sum::<u64>(), 2, "one each when joining");
    for number in [1 << 40, u64::MAX] {
        for (id, epoch) in [(1, 1), (2, u64::MAX)] {
            let body = EventBody::Block { number, event: stored(Level::G1, &blocks[..20]) };
            harness.events.publish(Event { source: source(id), epoch: Epoch(epoch), body });
        }
        tokio::time::sleep(Duration::from_mins(1)).await;
        assert_eq!([held(1), held(2)], [10, 10]);
    }
    let total = resyncs();
    assert!(total.iter().sum::<u64>() <= 10, "{total:?}");
    for worker in [&a, &b] {
        harness.announce(worker, stored(Level::G1, &blocks[10..30]), true);
    }
    settle().await;
    assert_eq!(([held(1), held(2)], resyncs()), ([30, 30], total));
}

#[tokio::test(start_paused = true)]
async fn resyncs_back_off_when_snapshots_are_stale_on_arrival() {
    let harness = Harness::over(Settings::default(), Link { lag: Duration::from_secs(1), ..Link::default() });
    let worker = harness.worker(1, Role::Both).await;
    let blocks = names(&prompt(1, 1600));
    tokio::time::sleep(Duration::from_secs(5)).await;
    // Of each round only the last event arrives. A round exceeds what the log keeps, so ranges are truncated.
    let round = 4_200;
    for last in (3..).map(|rounds| rounds * round).take(60) {
        let event = stored(Level::G1, &blocks[..1]);
        (0..round).for_each(|_| harness.announce(&worker, event.clone(), false));
        let body = EventBody::Block { number: last, event };
        harness.events.publish(Event { source: Source::Worker(WorkerId(1)), epoch: Epoch(1), body });
        tokio::time::sleep(Duration::from_millis(900)).await;
    }
    let (taken, missed) = (harness.resyncs("snapshot_applied"), harness.resyncs("log_truncated"));
    assert!((8..=12).contains(&taken) && missed > 6, "{taken} snapshots, {missed} truncated ranges");
    harness.announce(&worker, stored(Level::G1, &blocks), false);
    tokio::time::sleep(Duration::from_secs(10)).await;
    assert_eq!(harness.router.core.index.entries(), blocks.len());
}

/// Blocks the only thread for blocking tasks until it is dropped.
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
    tokio::time::timeout(Duration::from_mins(1), wait).await.expect("the condition never held");
}

#[test]
fn a_large_snapshot_does_not_delay_events_of_other_sources() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().max_blocking_threads(1).build().unwrap();
    runtime.block_on(async {
        let harness = defaults();
        let other = harness.worker(2, Role::Both).await;
        let store = Source::Store(StoreId(5));
        let held = |holder, level| harness.router.core.index.digest(holder, level).unwrap().blocks;
        let (log, blocks) = (Arc::new(EventLog::new(Epoch(1))), names(&prompt(1, 10_000 * BLOCK)));
        log.announce(stored(Level::G4, &blocks[..9_000]));
        let _offer = harness.events.offer(store, log.clone());
        let making = busy();
        let _worker = harness.join(1, Role::Both, MODEL, 1, &[5]).await;
        let taking = busy();
        for (round, busy) in (1..).zip([making, taking]) {
            harness.announce(&other, stored(Level::G1, &names(&prompt(1 + round, 4 * BLOCK))), true);
            until(|| held(Holder::Worker(WorkerId(2)), Level::G1) == 4 * u64::from(round)).await;
            let event = stored(Level::G4, &blocks[8_500 + 500 * round as usize..][..500]);
            log.announce(event.clone());
            let number = *log.latest().borrow();
            harness.events.publish(Event { source: store, epoch: Epoch(1), body: EventBody::Block { number, event } });
            settle().await;
            assert_eq!(
                (held(Holder::Store(StoreId(5)), Level::G4), harness.resyncs("snapshot_applied")),
                (0, 2),
                "the snapshot waits for the blocking thread"
            );
            drop(busy);
        }
        until(|| held(Holder::Store(StoreId(5)), Level::G4) == 10_000).await;
    });
}

#[tokio::test(start_paused = true)]
async fn a_lost_last_event_is_found_by_the_next_load_reports() {
    let harness = defaults();
    let worker = harness.worker(1, Role::Both).await;
    let request = prompt(1, 1600);
    harness.announce(&worker, stored(Level::G1, &names(&request)[..10]), false);
    for _ in 0..3 {
        harness.report(&worker, Load::default());
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    assert_eq!(cached_blocks(&harness, &request).await, 10);
}

#[tokio::test(start_paused = true)]
async fn a_new_epoch_replaces_the_blocks_of_the_old_one() {
    let harness = defaults();
    let request = prompt(1, 1600);
    let old = harness.worker(1, Role::Both).await;
    harness.announce(&old, stored(Level::G1, &names(&request)), true);
    settle().await;
    assert_eq!(cached_blocks(&harness, &request).await, 99);
    let new = harness.join(1, Role::Both, MODEL, 2, &[]).await;
    harness.announce(&old, stored(Level::G1, &names(&request)), true);
    settle().await;
    assert_eq!(cached_blocks(&harness, &request).await, 0);
    harness.announce(&new, stored(Level::G2, &names(&request)[..5]), true);
    settle().await;
    assert_eq!(cached_blocks(&harness, &request).await, 5);
    assert_eq!(new.requests(), 2);
}

#[tokio::test(start_paused = true)]
async fn events_before_a_restarted_worker_joins_are_dropped() {
    let harness = defaults();
    let (blocks, source) = (names(&prompt(1, 1600)), Source::Worker(WorkerId(1)));
    let _old = harness.worker(1, Role::Both).await;
    let _held = harness.ask(prompt(1, 1600)).await.unwrap();
    settle().await;
    assert_ne!(harness.load(1), (0, 0, 0));
    let body = EventBody::Block { number: 1, event: stored(Level::G1, &blocks) };
    harness.events.publish(Event { source, epoch: Epoch(2), body });
    settle().await;
    let _new = harness.join(1, Role::Both, MODEL, 2, &[]).await;
    assert_eq!(harness.load(1), (0, 0, 0));
    let member = harness.router.core.fleet.snapshot().get(WorkerId(1)).cloned().unwrap();
    assert!(!member.lease_ended.is_cancelled(), "its requests do not end with the former epoch");
}

#[tokio::test(start_paused = true)]
async fn a_shared_store_serves_every_worker_that_reads_it() {
    let harness = defaults();
    let (request, store) = (prompt(1, 1600), Source::Store(StoreId(5)));
    let log = Arc::new(EventLog::new(Epoch(3)));
    log.announce(stored(Level::G3, &names(&request)[..40]));
    let _offer = harness.events.offer(store, log.clone());
    let a = harness.join(1, Role::Both, MODEL, 1, &[5]).await;
    let _b = harness.join(2, Role::Both, MODEL, 1, &[]).await;
    assert_eq!(cached_blocks(&harness, &request).await, 40, "the worker that reads the store is cheaper");
    let event = stored(Level::G3, &names(&request)[40..50]);
    log.announce(event.clone());
    harness.events.publish(Event { source: store, epoch: Epoch(3), body: EventBody::Block { number: 2, event } });
    settle().await;
    let explained = harness.explain(request).await;
    assert_eq!(explained["candidates"][0]["cached_blocks"]["g3"], 50);
    assert_eq!(a.requests(), 2);
}

#[tokio::test(start_paused = true)]
async fn the_index_converges_over_a_lossy_link() {
    let harness =
        Harness::over(Settings::default(), Link { loss: 0.2, reorder: 0.2, repeat: 0.2, seed: 11, ..Link::default() });
    let mut workers = Vec::new();
    for id in 1..=3 {
        workers.push(harness.worker(id, Role::Both).await);
    }
    for round in 0..60u32 {
        for (id, worker) in (0..).zip(&workers) {
            let blocks = names(&prompt(round * 3 + id, 20 * BLOCK));
            harness.announce(worker, stored(Level::G1, &blocks), true);
            harness.announce(worker, BlockEvent::Removed { level: Level::G1, blocks: blocks[..7].to_vec() }, true);
            harness.report(worker, Load::default());
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    for _ in 0..10 {
        for worker in &workers {
            harness.report(worker, Load::default());
        }
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    let announced: usize = workers.iter().map(|worker| worker.log.snapshot().blocks().count()).sum();
    assert_eq!(harness.router.core.index.entries(), announced);
    assert!(harness.resyncs("replayed") > 10, "the link lost too little for this test");
    assert_eq!(harness.resyncs("snapshot_applied"), 3, "one per worker when joining");
}
