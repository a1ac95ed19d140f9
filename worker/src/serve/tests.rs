use super::worker::MAX_REPORT_INTERVAL;
use super::*;
use crate::plane::contract::{engine, instance, next, soon};
use crate::plane::local::{LocalDiscovery, LocalEvents};
use crate::plane::{Event, EventBody, Load, Membership, Role, RouterId, Source, StoreId, Topic, WorkerId};
use futures::stream::BoxStream;
use kvbm::{BlockEvent, Epoch, EventLog, Level, SequenceHash};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::Instant;

fn planes() -> Planes {
    Planes { discovery: Arc::new(LocalDiscovery::default()), events: Arc::new(LocalEvents::default()) }
}

fn stored(n: u8) -> BlockEvent {
    BlockEvent::Stored { level: Level::G1, parent: None, blocks: vec![SequenceHash::from_bytes([n; 16])] }
}

/// A worker with an idle engine, its log, the sender of its load, and the events that it publishes.
struct Harness {
    planes: Planes,
    log: Arc<EventLog>,
    load: watch::Sender<Load>,
    events: BoxStream<'static, Event>,
    worker: Worker,
}

async fn harness() -> Harness {
    let planes = planes();
    let log = Arc::new(EventLog::new(Epoch(1)));
    let load = watch::Sender::new(Load::default());
    let events = planes.events.subscribe(Topic::Cache);
    let worker = Worker::start(&planes, instance(1, 1), engine(), Arc::clone(&log), load.subscribe()).await.unwrap();
    Harness { planes, log, load, events, worker }
}

async fn next_load(events: &mut BoxStream<'static, Event>) -> Load {
    loop {
        if let EventBody::Load(load) = soon(events).await.body {
            return load;
        }
    }
}

async fn next_block(events: &mut BoxStream<'static, Event>) -> u64 {
    loop {
        if let EventBody::Block { number, .. } = soon(events).await.body {
            return number;
        }
    }
}

#[tokio::test(start_paused = true)]
async fn load_is_reported_every_second_and_soon_after_a_change() {
    let mut harness = harness().await;
    let start = Instant::now();
    assert_eq!(next_load(&mut harness.events).await.running, 0, "the first report");
    assert_eq!(start.elapsed(), Duration::ZERO);
    assert_eq!(next_load(&mut harness.events).await.running, 0, "a second later, though nothing changed");
    assert_eq!(start.elapsed(), MAX_REPORT_INTERVAL);
    for running in 1..=100 {
        harness.load.send_modify(|load| load.running = running);
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let reports: Vec<u32> =
        [next_load(&mut harness.events).await.running, next_load(&mut harness.events).await.running].into();
    assert!(reports[0] < reports[1] && reports[1] < 100, "changes are gathered: {reports:?}");
}

#[tokio::test(start_paused = true)]
async fn a_report_carries_the_number_of_the_last_published_event() {
    let mut harness = harness().await;
    harness.log.announce(stored(1));
    harness.log.announce(stored(2));
    assert_eq!([next_block(&mut harness.events).await, next_block(&mut harness.events).await], [1, 2]);
    assert_eq!(next_load(&mut harness.events).await.number, 2);
    let snapshot = harness.planes.events.snapshot(Source::Worker(WorkerId(1))).await.unwrap();
    assert_eq!((snapshot.number, snapshot.blocks().count()), (2, 2));
}

#[tokio::test(start_paused = true)]
async fn a_digest_is_sent_every_interval() {
    let mut harness = harness().await;
    for round in 0..35 {
        harness.log.announce(stored(round));
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    let mut digests = Vec::new();
    let until = Instant::now() + Duration::from_secs(1);
    while let Ok(event) = tokio::time::timeout_at(until, soon(&mut harness.events)).await {
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
    let mut harness = harness().await;
    next_load(&mut harness.events).await;
    for n in 0..10_000_u32 {
        harness.log.announce(stored(n as u8));
    }
    // Nothing was awaited above, so the ring has overflowed before the reporter looked.
    let first = next_block(&mut harness.events).await;
    assert!(first > 1, "the first kept event has number {first}");
    assert_eq!(next_block(&mut harness.events).await, first + 1);
}

#[tokio::test(start_paused = true)]
async fn drain_deregisters_at_once_and_waits_for_running_requests() {
    let Harness { planes, load, mut events, worker, .. } = harness().await;
    let mut watch = planes.discovery.watch();
    assert_eq!(next(&mut watch).await, (1, 1, true));
    load.send_modify(|load| load.running = 1);
    let draining = tokio::spawn(worker.drain());
    assert_eq!(next(&mut watch).await, (1, 1, false), "deregistered while it still runs");
    while next_load(&mut events).await.running == 0 {}
    assert!(!draining.is_finished());
    load.send_modify(|load| load.running = 0);
    draining.await.unwrap();
    assert!(planes.events.snapshot(Source::Worker(WorkerId(1))).await.is_err(), "the log is no longer offered");
}

#[tokio::test(start_paused = true)]
async fn a_worker_whose_engine_stops_deregisters() {
    let Harness { planes, load, worker: _worker, .. } = harness().await;
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
    assert!(alive.upgrade().is_some(), "running requests still need it");
    load.send_modify(|load| load.running = 0);
    draining.await.unwrap();
    assert!(alive.upgrade().is_none(), "no reference is left");
}

#[tokio::test(start_paused = true)]
async fn a_role_request_changes_the_role_within_the_epoch() {
    let harness = harness().await;
    let mut watch = harness.planes.discovery.watch();
    let request = |worker, role| {
        let body = EventBody::RoleRequest { worker: WorkerId(worker), role };
        harness.planes.events.publish(Event { source: Source::Router(RouterId(1)), epoch: Epoch(1), body });
    };
    assert_eq!(next(&mut watch).await, (1, 1, true));
    request(2, Role::Prefill);
    request(1, Role::Prefill);
    request(1, Role::Prefill);
    let Membership::Joined(instance, _) = soon(&mut watch).await else { panic!("it never left") };
    assert_eq!((instance.id, instance.epoch, instance.role), (WorkerId(1), Epoch(1), Role::Prefill));
    request(1, Role::Decode);
    let Membership::Joined(instance, _) = soon(&mut watch).await else { panic!("it never left") };
    assert_eq!(instance.role, Role::Decode);
    drop(harness.worker);
    assert_eq!(next(&mut watch).await, (1, 1, false));
}

#[tokio::test(start_paused = true)]
async fn a_cordon_deregisters_a_worker_until_it_is_lifted() {
    let Harness { planes, load, worker, .. } = harness().await;
    let (cordon, mut watch) = (worker.cordon().clone(), planes.discovery.watch());
    assert_eq!(next(&mut watch).await, (1, 1, true));
    assert!(!cordon.is_cordoned() && cordon.is_registered());
    load.send_modify(|load| load.running = 1);
    cordon.cordon();
    assert!(cordon.is_cordoned(), "at once");
    assert_eq!(next(&mut watch).await, (1, 1, false), "while a request runs");
    let draining = tokio::spawn({
        let cordon = cordon.clone();
        async move { cordon.drained().await }
    });
    tokio::time::sleep(Duration::from_secs(5)).await;
    assert!(!draining.is_finished() && !cordon.is_registered());
    load.send_modify(|load| load.running = 0);
    draining.await.unwrap();
    let offered = planes.events.snapshot(Source::Worker(WorkerId(1))).await;
    assert!(offered.is_ok(), "routers that still know its blocks can ask for them");
    cordon.cordon();
    cordon.uncordon();
    assert_eq!(next(&mut watch).await, (1, 1, true), "in the same epoch");
    cordon.cordon();
    assert_eq!(next(&mut watch).await, (1, 1, false));
    worker.drain().await;
    cordon.uncordon();
    assert!(cordon.is_cordoned() && !cordon.is_registered(), "a worker that has ended stays away");
}

#[tokio::test(start_paused = true)]
async fn a_superseded_worker_is_registered_again_when_the_later_epoch_has_ended() {
    let Harness { planes, load: _load, worker, .. } = harness().await;
    let (cordon, mut watch) = (worker.cordon().clone(), planes.discovery.watch());
    let later = async |epoch| planes.discovery.register(instance(1, epoch), engine()).await.unwrap();
    let second = Duration::from_secs(1);
    assert_eq!(next(&mut watch).await, (1, 1, true));
    let other = later(2).await;
    assert_eq!(next(&mut watch).await, (1, 2, true));
    tokio::time::sleep(second * 60).await;
    assert!(cordon.is_superseded() && !cordon.is_registered() && !cordon.is_cordoned());
    drop(other);
    assert_eq!(next(&mut watch).await, (1, 2, false));
    assert_eq!(next(&mut watch).await, (1, 1, true), "in its own epoch");
    tokio::time::sleep(second * 5).await;
    assert!(cordon.is_registered() && !cordon.is_superseded());

    let other = later(3).await;
    assert_eq!(next(&mut watch).await, (1, 3, true));
    tokio::time::sleep(second).await;
    cordon.cordon();
    tokio::time::sleep(second).await;
    assert!(!cordon.is_registered() && !cordon.is_superseded(), "it is not to be registered");
    cordon.uncordon();
    tokio::time::sleep(second).await;
    assert!(!cordon.is_registered() && cordon.is_superseded());
    drop(other);
    assert_eq!(next(&mut watch).await, (1, 3, false));
    assert_eq!(next(&mut watch).await, (1, 1, true));
}

#[tokio::test(start_paused = true)]
async fn a_cordoned_worker_keeps_its_role() {
    let harness = harness().await;
    let mut watch = harness.planes.discovery.watch();
    let request = |role| {
        let body = EventBody::RoleRequest { worker: WorkerId(1), role };
        harness.planes.events.publish(Event { source: Source::Router(RouterId(1)), epoch: Epoch(1), body });
    };
    assert_eq!(next(&mut watch).await, (1, 1, true));
    request(Role::Prefill);
    let Membership::Joined(..) = soon(&mut watch).await else { panic!("it never left") };
    assert_eq!(harness.worker.cordon().role(), Role::Prefill);
    harness.worker.cordon().cordon();
    assert_eq!(next(&mut watch).await, (1, 1, false));
    request(Role::Decode);
    tokio::time::sleep(Duration::from_secs(5)).await;
    harness.worker.cordon().uncordon();
    let Membership::Joined(instance, _) = soon(&mut watch).await else { panic!("it joins") };
    assert_eq!(instance.role, Role::Prefill, "the request came while it was away");
}

#[tokio::test(start_paused = true)]
async fn dropping_a_worker_deregisters_it() {
    let harness = harness().await;
    let mut watch = harness.planes.discovery.watch();
    assert_eq!(next(&mut watch).await, (1, 1, true));
    drop(harness.worker);
    assert_eq!(next(&mut watch).await, (1, 1, false));
}

#[tokio::test(start_paused = true)]
async fn a_store_publishes_recovered_and_new_events() {
    let planes = planes();
    let mut events = planes.events.subscribe(Topic::Cache);
    let log = Arc::new(EventLog::new(Epoch(5)));
    log.announce(stored(1));
    let source = Source::Store(StoreId(3));
    let publisher = EventPublisher::start(Arc::clone(&planes.events), source, Arc::clone(&log));
    assert_eq!(next_block(&mut events).await, 1);
    log.announce(stored(2));
    let event = soon(&mut events).await;
    assert_eq!((event.source, event.epoch), (source, Epoch(5)));
    drop(publisher);
    tokio::task::yield_now().await;
    assert!(planes.events.snapshot(source).await.is_err());
}
