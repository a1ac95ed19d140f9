//! Messages: large answers, several offers of a source, and other protocol numbers.

use super::*;
use crate::plane::contract::{engine, instance, next, soon};
use crate::plane::{Discovery, Event, EventBody, Events, Load, Source, StoreId, Topic, WorkerId};
use async_nats::header::{HeaderMap, NATS_MESSAGE_TTL};
use kvbm::{BlockEvent, Epoch, EventLog, Level, Numbered, SequenceHash};

const STORE: Source = Source::Store(StoreId(1));

/// A log of one epoch with this many events of this many blocks.
fn log(epoch: u64, events: u64, blocks: u64) -> Arc<EventLog> {
    let log = EventLog::new(Epoch(epoch));
    for event in 0..events {
        let hash = |block| SequenceHash::from_bytes(u128::from(event * blocks + block).to_le_bytes());
        log.announce(BlockEvent::Stored { level: Level::G3, parent: None, blocks: (0..blocks).map(hash).collect() });
    }
    Arc::new(log)
}

async fn events(settings: &Settings) -> NatsEvents {
    NatsEvents::new(connect(settings.clone()).await)
}

#[tokio::test]
async fn a_snapshot_larger_than_a_message_arrives() {
    let Some(server) = shared() else { return };
    let settings = settings(&server);
    let (worker, router) = (events(&settings).await, events(&settings).await);
    let log = log(1, 200, 1000);
    let _offer = worker.offer(STORE, Arc::clone(&log));
    until("the log is offered", async || router.snapshot(STORE).await.is_ok()).await;
    let (first, second) = tokio::join!(router.snapshot(STORE), router.snapshot(STORE));
    assert_eq!(first.as_ref().map(|snapshot| snapshot.blocks().count()), Ok(200_000));
    assert_eq!(first, second);
    assert_eq!(first, Ok(log.snapshot()));
}

#[tokio::test]
async fn a_range_larger_than_a_message_arrives_in_parts() {
    let Some(server) = shared() else { return };
    let settings = settings(&server);
    let (worker, router) = (events(&settings).await, events(&settings).await);
    let log = log(1, 100, EventLog::MAX_EVENT_BLOCKS as u64);
    let _offer = worker.offer(STORE, Arc::clone(&log));
    until("the log is offered", async || router.snapshot(STORE).await.is_ok()).await;
    let (mut received, mut answers) = (Vec::<Numbered>::new(), 0);
    while received.len() < 100 {
        let after = received.last().map_or(0, |event| event.number);
        received.extend(router.range(STORE, Epoch(1), after).await.unwrap().unwrap());
        answers += 1;
    }
    assert_eq!(Ok(received), log.after(0, 100));
    assert!(answers > 1, "1.6 MB do not fit into a message");
}

#[tokio::test]
async fn of_several_processes_the_latest_epoch_answers() {
    let Some(server) = shared() else { return };
    let settings = settings(&server);
    let (one, two, router) = (events(&settings).await, events(&settings).await, events(&settings).await);
    let _former = one.offer(STORE, log(1, 1, 1));
    let latest = two.offer(STORE, log(2, 2, 1));
    let range = async |epoch| router.range(STORE, Epoch(epoch), 0).await.map(|events| events.map(|some| some.len()));
    until("both logs are offered", async || range(1).await == Ok(Some(1)) && range(2).await == Ok(Some(2))).await;
    for _ in 0..10 {
        assert_eq!(router.snapshot(STORE).await.unwrap().epoch, Epoch(2));
    }
    assert_eq!(range(3).await, Ok(None));
    drop(latest);
    until("the other offer answers", async || {
        router.snapshot(STORE).await.is_ok_and(|snapshot| snapshot.epoch == Epoch(1))
    })
    .await;
    assert_eq!(range(2).await, Ok(None));
}

#[tokio::test]
async fn events_of_another_protocol_number_or_topic_are_refused() {
    let Some(server) = shared() else { return };
    let (connection, registry) = open(settings(&server)).await.unwrap();
    let events = NatsEvents::new(Arc::clone(&connection));
    let mut cache = events.subscribe(Topic::Cache);
    let source = Source::Worker(WorkerId(1));
    let body = EventBody::Load(Load { number: 7, ..Load::default() });
    let valid = codec::encode(&codec::EventMessage { epoch: Epoch(1), body: body.clone() });
    let mut newer = valid.clone();
    newer[0] = PROTOCOL + 1;
    let request = EventBody::RoleRequest { worker: WorkerId(1), role: crate::plane::Role::Prefill };
    let other_topic = codec::encode(&codec::EventMessage { epoch: Epoch(1), body: request });
    let subject = connection.subjects.event(Topic::Cache, source);
    let subscribed = async || {
        connection.client.publish(subject.clone(), valid.clone().into()).await.unwrap();
        !is_quiet(&mut cache, Duration::from_millis(100)).await
    };
    until("the topic is subscribed to", subscribed).await;
    while !is_quiet(&mut cache, Duration::from_millis(100)).await {}
    for refused in [newer, other_topic, valid[..1].to_vec(), vec![]] {
        connection.client.publish(subject.clone(), refused.into()).await.unwrap();
    }
    events.publish(Event { source, epoch: Epoch(1), body: body.clone() });
    assert_eq!(soon(&mut cache).await.body, body);
    assert_eq!(counter(&registry, "blockyard_nats_refused_total", "event"), 4);
}

#[tokio::test]
async fn records_of_another_protocol_number_are_not_used() {
    let Some(server) = shared() else { return };
    let settings = settings(&server);
    let (connection, registry) = open(settings.clone()).await.unwrap();
    let discovery = discovery_of(&connection);
    let mut watch = discovery.watch();
    let lease = discovery.register(instance(1, 1), engine()).await.unwrap();
    assert_eq!(next(&mut watch).await, (1, 1, true));
    // A newer process with the same id takes over, and another one registers.
    let jetstream = async_nats::jetstream::new(connection.client.clone());
    for id in [1, 2] {
        let (record, _) = record::Record::new(&instance(id, 2), &address(), "newer");
        let json = String::from_utf8(record.encode().to_vec()).unwrap();
        let json = json.replace("\"protocol\":1", "\"protocol\":2");
        let mut headers = HeaderMap::new();
        headers.insert(NATS_MESSAGE_TTL, "60");
        let subject = connection.subjects.instance(WorkerId(id));
        let written = jetstream.publish_with_headers(subject, headers, json.into()).await.unwrap();
        written.await.unwrap();
    }
    assert_eq!(next(&mut watch).await, (1, 1, false), "its epoch is over");
    let _other = discovery.register(instance(3, 1), engine()).await.unwrap();
    assert_eq!(next(&mut watch).await, (3, 1, true));
    assert_eq!(counter(&registry, "blockyard_nats_refused_total", "instance"), 2);
    drop(lease);
}
