use super::*;
use crate::plane::contract::{engine, instance, next, soon};
use crate::plane::local::{Bus, Roster};
use crate::plane::{Membership, RouterId, StoreId, WorkerId};
use futures::stream::BoxStream;
use kvbm::{BlockEvent, Epoch, Level, SequenceHash};

fn planes() -> Planes {
    Planes { discovery: Arc::new(Roster::default()), events: Arc::new(Bus::default()) }
}

fn stored(n: u8) -> BlockEvent {
    BlockEvent::Stored { level: Level::G1, parent: None, blocks: vec![SequenceHash::from_bytes([n; 16])] }
}

/// A worker with an idle engine, its log, the hand that sets its load, and what it says.
struct Stage {
    planes: Planes,
    log: Arc<EventLog>,
    load: watch::Sender<Load>,
    said: BoxStream<'static, Event>,
    worker: Worker,
}

async fn stage() -> Stage {
    let planes = planes();
    let log = Arc::new(EventLog::new(Epoch(1)));
    let load = watch::Sender::new(Load::default());
    let said = planes.events.subscribe(Topic::Cache);
    let worker = Worker::start(&planes, instance(1, 1), engine(), Arc::clone(&log), load.subscribe()).await.unwrap();
    Stage { planes, log, load, said, worker }
}

async fn next_load(said: &mut BoxStream<'static, Event>) -> Load {
    loop {
        if let EventBody::Load(load) = soon(said).await.body {
            return load;
        }
    }
}

async fn next_block(said: &mut BoxStream<'static, Event>) -> u64 {
    loop {
        if let EventBody::Block { number, .. } = soon(said).await.body {
            return number;
        }
    }
}

#[tokio::test(start_paused = true)]
async fn load_is_reported_every_second_and_soon_after_a_change() {
    let mut stage = stage().await;
    let start = Instant::now();
    assert_eq!(next_load(&mut stage.said).await.running, 0, "at once");
    assert_eq!(start.elapsed(), Duration::ZERO);
    assert_eq!(next_load(&mut stage.said).await.running, 0, "a second later, though nothing changed");
    assert_eq!(start.elapsed(), REPORT_EVERY);
    for running in 1..=100 {
        stage.load.send_modify(|load| load.running = running);
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let reports: Vec<u32> = [next_load(&mut stage.said).await.running, next_load(&mut stage.said).await.running].into();
    assert!(reports[0] < reports[1] && reports[1] < 100, "changes are gathered: {reports:?}");
}

#[tokio::test(start_paused = true)]
async fn a_report_carries_the_number_of_the_last_published_event() {
    let mut stage = stage().await;
    stage.log.announce(stored(1));
    stage.log.announce(stored(2));
    assert_eq!([next_block(&mut stage.said).await, next_block(&mut stage.said).await], [1, 2]);
    assert_eq!(next_load(&mut stage.said).await.number, 2);
    let snapshot = stage.planes.events.snapshot(Source::Worker(WorkerId(1))).await.unwrap();
    assert_eq!((snapshot.number, snapshot.blocks().count()), (2, 2));
}

#[tokio::test(start_paused = true)]
async fn what_rests_is_told_as_one_number_however_much_happens() {
    let mut stage = stage().await;
    for round in 0..35 {
        stage.log.announce(stored(round));
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    let mut digests = Vec::new();
    let until = Instant::now() + Duration::from_secs(1);
    while let Ok(event) = tokio::time::timeout_at(until, soon(&mut stage.said)).await {
        if let EventBody::Digest { number, digest } = event.body {
            digests.push((number, digest));
        }
    }
    assert_eq!(digests.len(), 3);
    let log = EventLog::new(Epoch(1));
    (0..digests[2].0).for_each(|round| log.announce(stored(round as u8)));
    assert_eq!(log.digest(), digests[2]);
}

#[tokio::test(start_paused = true)]
async fn a_burst_longer_than_the_log_shows_as_a_gap() {
    let mut stage = stage().await;
    next_load(&mut stage.said).await;
    for n in 0..10_000_u32 {
        stage.log.announce(stored(n as u8));
    }
    // No turn was yielded above, so the ring has overflowed before the reporter looked.
    let first = next_block(&mut stage.said).await;
    assert!(first > 1, "the first kept event has number {first}");
    assert_eq!(next_block(&mut stage.said).await, first + 1);
}

#[tokio::test(start_paused = true)]
async fn draining_withdraws_at_once_and_waits_for_what_runs() {
    let Stage { planes, load, mut said, worker, .. } = stage().await;
    let mut watch = planes.discovery.watch();
    assert_eq!(next(&mut watch).await, (1, 1, true));
    load.send_modify(|load| load.running = 1);
    let draining = tokio::spawn(worker.drain());
    assert_eq!(next(&mut watch).await, (1, 1, false), "withdrawn while it still runs");
    while next_load(&mut said).await.running == 0 {}
    assert!(!draining.is_finished());
    load.send_modify(|load| load.running = 0);
    draining.await.unwrap();
    assert!(planes.events.snapshot(Source::Worker(WorkerId(1))).await.is_err(), "the offer is gone");
}

#[tokio::test(start_paused = true)]
async fn a_worker_whose_engine_dies_leaves() {
    let Stage { planes, load, worker: _worker, .. } = stage().await;
    let mut watch = planes.discovery.watch();
    assert_eq!(next(&mut watch).await, (1, 1, true));
    drop(load);
    assert_eq!(next(&mut watch).await, (1, 1, false));
}

#[tokio::test(start_paused = true)]
async fn an_engine_lives_until_its_worker_has_drained() {
    let planes = planes();
    let engine = engine();
    let alive = Arc::downgrade(&engine);
    let load = watch::Sender::new(Load { running: 1, ..Load::default() });
    let log = Arc::new(EventLog::new(Epoch(1)));
    let worker = Worker::start(&planes, instance(1, 1), engine, log, load.subscribe()).await.unwrap();
    let mut watch = planes.discovery.watch();
    assert_eq!(next(&mut watch).await, (1, 1, true));
    let draining = tokio::spawn(worker.drain());
    assert_eq!(next(&mut watch).await, (1, 1, false));
    assert!(alive.upgrade().is_some(), "what runs still needs it");
    load.send_modify(|load| load.running = 0);
    draining.await.unwrap();
    assert!(alive.upgrade().is_none(), "nobody keeps it for nothing");
}

#[tokio::test(start_paused = true)]
async fn a_worker_changes_its_phase_in_one_life_when_it_is_wished() {
    let stage = stage().await;
    let mut watch = stage.planes.discovery.watch();
    let wish = |worker, phase| {
        let body = EventBody::Phase { worker: WorkerId(worker), phase };
        stage.planes.events.publish(Event { source: Source::Router(RouterId(1)), epoch: Epoch(1), body });
    };
    assert_eq!(next(&mut watch).await, (1, 1, true));
    wish(2, Phase::Prefill);
    wish(1, Phase::Prefill);
    wish(1, Phase::Prefill);
    let Membership::Joined(instance, _) = soon(&mut watch).await else { panic!("it never left") };
    assert_eq!((instance.id, instance.epoch, instance.phase), (WorkerId(1), Epoch(1), Phase::Prefill));
    wish(1, Phase::Decode);
    let Membership::Joined(instance, _) = soon(&mut watch).await else { panic!("it never left") };
    assert_eq!(instance.phase, Phase::Decode);
    drop(stage.worker);
    assert_eq!(next(&mut watch).await, (1, 1, false));
}

#[tokio::test(start_paused = true)]
async fn dropping_a_worker_withdraws_it() {
    let stage = stage().await;
    let mut watch = stage.planes.discovery.watch();
    assert_eq!(next(&mut watch).await, (1, 1, true));
    drop(stage.worker);
    assert_eq!(next(&mut watch).await, (1, 1, false));
}

#[tokio::test(start_paused = true)]
async fn a_store_announces_what_it_recovered_and_what_comes() {
    let planes = planes();
    let mut said = planes.events.subscribe(Topic::Cache);
    let log = Arc::new(EventLog::new(Epoch(5)));
    log.announce(stored(1));
    let source = Source::Store(StoreId(3));
    let announcer = Announcer::start(Arc::clone(&planes.events), source, Arc::clone(&log));
    assert_eq!(next_block(&mut said).await, 1);
    log.announce(stored(2));
    let event = soon(&mut said).await;
    assert_eq!((event.source, event.epoch), (source, Epoch(5)));
    drop(announcer);
    tokio::task::yield_now().await;
    assert!(planes.events.snapshot(source).await.is_err());
}
