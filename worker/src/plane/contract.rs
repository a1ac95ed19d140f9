//! The conformance suite of planes: the macros turn each rule into a test of an implementation.

use super::*;
use crate::engine::{Error, OutputStream, Readiness, Request};
use futures::StreamExt;
use kvbm::{BlockEvent, Level, SequenceHash};
use std::time::Duration;

/// Makes one test of each rule for discovery, on the plane that `$make` (an async block) returns. `None`: its server is
/// not there, and the test is skipped.
macro_rules! discovery_contract {
    ($make:expr) => {
        crate::plane::contract::rules!($make;
            a_watcher_starts_with_the_registered_instances, changes_arrive_in_order_without_loss,
            an_old_lease_does_not_deregister_a_new_epoch, a_later_epoch_ends_the_lease_of_a_former_one
        );
    };
}

/// Makes one test of each rule for events, in the same way.
macro_rules! events_contract {
    ($make:expr) => {
        crate::plane::contract::rules!($make;
            events_of_a_source_stay_in_order, a_subscriber_receives_its_topic_only,
            publish_never_waits_and_slow_subscribers_lose_events,
            a_log_answers_as_long_as_it_is_offered, the_latest_offer_of_an_epoch_answers,
            a_range_is_bounded_and_of_one_epoch
        );
    };
}

macro_rules! rules {
    ($make:expr; $($rule:ident),+) => {$(
        #[tokio::test]
        async fn $rule() {
            if let Some(plane) = $make.await {
                crate::plane::contract::$rule(&plane).await;
            }
        }
    )+};
}

pub(crate) use {discovery_contract, events_contract, rules};

pub(crate) async fn a_watcher_starts_with_the_registered_instances(plane: &impl Discovery) {
    let _one = plane.register(instance(1, 1), engine()).await.unwrap();
    let two = plane.register(instance(2, 1), engine()).await.unwrap();
    drop(two);
    let mut watch = plane.watch();
    assert_eq!(next(&mut watch).await, (1, 1, true));
    let _three = plane.register(instance(3, 1), engine()).await.unwrap();
    assert_eq!(next(&mut watch).await, (3, 1, true), "an instance that left before is not reported");
}

pub(crate) async fn changes_arrive_in_order_without_loss(plane: &impl Discovery) {
    let mut watchers = [plane.watch(), plane.watch()];
    for epoch in 0..200 {
        drop(plane.register(instance(1, epoch), engine()).await.unwrap());
    }
    for watch in &mut watchers {
        for epoch in 0..200 {
            assert_eq!(next(watch).await, (1, epoch, true));
            assert_eq!(next(watch).await, (1, epoch, false));
        }
    }
}

pub(crate) async fn an_old_lease_does_not_deregister_a_new_epoch(plane: &impl Discovery) {
    let mut watch = plane.watch();
    let old = plane.register(instance(1, 1), engine()).await.unwrap();
    let new = plane.register(instance(1, 2), engine()).await.unwrap();
    drop(old);
    drop(new);
    assert_eq!(next(&mut watch).await, (1, 1, true));
    assert_eq!(next(&mut watch).await, (1, 2, true));
    assert_eq!(next(&mut watch).await, (1, 2, false));
}

pub(crate) async fn a_later_epoch_ends_the_lease_of_a_former_one(plane: &impl Discovery) {
    let former = plane.register(instance(1, 1), engine()).await.unwrap();
    let again = plane.register(instance(1, 1), engine()).await.unwrap();
    assert!(!again.lost().is_cancelled(), "a role may have changed");
    drop(former);
    let later = plane.register(instance(1, 2), engine()).await.unwrap();
    let lost = tokio::time::timeout(Duration::from_secs(10), again.lost().cancelled_owned());
    lost.await.expect("its holder must know");
    let refused = plane.register(instance(1, 1), engine()).await;
    assert!(matches!(refused, Err(PlaneError::Refused(_))), "{refused:?}");
    assert!(!later.lost().is_cancelled());
}

pub(crate) async fn events_of_a_source_stay_in_order(plane: &impl Events) {
    plane.publish(event(9, 1));
    let mut events = plane.subscribe(Topic::Cache);
    for number in 1..=50 {
        plane.publish(event(1, number));
        plane.publish(event(2, number));
    }
    let mut seen = [0, 0];
    for _ in 0..100 {
        let (source, number) = numbered(&mut events).await;
        assert_ne!(source, 9, "a subscription starts now");
        assert_eq!(number, seen[source as usize - 1] + 1);
        seen[source as usize - 1] = number;
    }
}

pub(crate) async fn a_subscriber_receives_its_topic_only(plane: &impl Events) {
    let [mut cache, mut reservations, mut role_requests] = Topic::ALL.map(|topic| plane.subscribe(topic));
    let router = Source::Router(RouterId(1));
    let request = EventBody::RoleRequest { worker: WorkerId(3), role: Role::Prefill };
    for body in [EventBody::Reservations(vec![ReservationUpdate::Started(4)]), request.clone()] {
        plane.publish(Event { source: router, epoch: Epoch(1), body });
    }
    plane.publish(event(9, 1));
    assert_eq!(numbered(&mut cache).await, (9, 1));
    let first = |event: Option<Event>| event.expect("a plane does not end").body;
    assert_eq!(first(reservations.next().await), EventBody::Reservations(vec![ReservationUpdate::Started(4)]));
    assert_eq!(first(role_requests.next().await), request);
}

pub(crate) async fn publish_never_waits_and_slow_subscribers_lose_events(plane: &impl Events) {
    let mut slow = plane.subscribe(Topic::Cache);
    let mut fast = plane.subscribe(Topic::Cache);
    let last = 20_000;
    for number in 1..=last {
        plane.publish(event(1, number));
        assert_eq!(numbered(&mut fast).await.1, number, "the fast subscriber is not delayed");
    }
    let mut seen = 0;
    while seen < last {
        let (_, number) = numbered(&mut slow).await;
        assert!(number > seen, "events that are not lost are in order");
        seen = number;
    }
}

pub(crate) async fn a_log_answers_as_long_as_it_is_offered(plane: &impl Events) {
    let source = Source::Store(StoreId(7));
    assert!(matches!(plane.snapshot(source).await, Err(PlaneError::Absent(_))));
    let offered = log(1, 3);
    let lease = plane.offer(source, Arc::clone(&offered));
    assert_eq!(plane.snapshot(source).await, Ok(offered.snapshot()));
    offered.announce(removed(4));
    assert_eq!(plane.snapshot(source).await.unwrap().number, 4, "the log is read at the time of the call");
    drop(lease);
    assert!(matches!(plane.snapshot(source).await, Err(PlaneError::Absent(_))));
    assert!(matches!(plane.range(source, Epoch(1), 0).await, Err(PlaneError::Absent(_))));
}

pub(crate) async fn the_latest_offer_of_an_epoch_answers(plane: &impl Events) {
    let source = Source::Store(StoreId(1));
    let range = async |epoch| plane.range(source, Epoch(epoch), 0).await.unwrap().map(|events| events.len());
    let first = plane.offer(source, log(2, 1));
    let late = plane.offer(source, log(1, 2));
    let again = plane.offer(source, log(2, 3));
    assert_eq!(plane.snapshot(source).await.unwrap().number, 3, "the latest offer of the epoch answers");
    drop(first);
    assert_eq!(plane.snapshot(source).await.unwrap().number, 3, "ending an old offer keeps the new one");
    assert_eq!((range(1).await, range(2).await, range(3).await), (Some(2), Some(3), None));
    drop(again);
    assert_eq!((plane.snapshot(source).await.unwrap().number, range(2).await), (2, None), "the other offer remains");
    drop(late);
    assert!(matches!(plane.snapshot(source).await, Err(PlaneError::Absent(_))));
}

pub(crate) async fn a_range_is_bounded_and_of_one_epoch(plane: &impl Events) {
    let source = Source::Worker(WorkerId(1));
    let offered = log(1, 700);
    let _lease = plane.offer(source, Arc::clone(&offered));
    let range = async |epoch, after| plane.range(source, Epoch(epoch), after).await.unwrap();
    let numbers = |events: Option<Vec<Numbered>>| events.unwrap().iter().map(|event| event.number).collect::<Vec<_>>();
    assert_eq!(range(1, 698).await, Some(offered.after(698, 2).unwrap()));
    assert_eq!(range(1, 700).await, Some(vec![]), "there are no later events");
    assert_eq!(numbers(range(1, 0).await), (1..=RANGE_MAX as u64).collect::<Vec<_>>(), "the first events");
    assert_eq!((range(2, 0).await, range(0, 0).await), (None, None), "another epoch");
    while offered.after(0, 1).is_ok() {
        offered.announce(removed(1));
    }
    assert_eq!(range(1, 0).await, None, "not all events are kept");
    assert_eq!(numbers(range(1, 1).await).len(), RANGE_MAX);
}

/// A worker that serves nothing.
pub(crate) fn instance(id: u64, epoch: u64) -> Instance {
    let model = Arc::new(ModelCard { vocabulary: 10, ..ModelCard::new("m", 64, 16) });
    Instance { id: WorkerId(id), epoch: Epoch(epoch), role: Role::Both, model, stores: vec![], kv_cache: None }
}

/// An engine that rejects every request.
pub(crate) fn engine() -> Arc<dyn Engine> {
    struct Rejecting;
    impl Engine for Rejecting {
        fn generate(&self, _: Request) -> BoxFuture<'_, Result<OutputStream, Error>> {
            Box::pin(async { Err(Error::Unavailable("test engine".into())) })
        }
        fn models(&self) -> Vec<Arc<ModelCard>> {
            vec![]
        }
        fn readiness(&self) -> Readiness {
            Readiness::Ready
        }
    }
    Arc::new(Rejecting)
}

/// The next change as (worker, epoch, joined).
pub(crate) async fn next(watch: &mut BoxStream<'static, Membership>) -> (u64, u64, bool) {
    match soon(watch).await {
        Membership::Joined(instance, _) => (instance.id.0, instance.epoch.0, true),
        Membership::Left(id, epoch) => (id.0, epoch.0, false),
    }
}

/// The next item; panics when none arrives. The timeout leaves time for planes over a network.
pub(crate) async fn soon<T>(stream: &mut BoxStream<'static, T>) -> T {
    let next = tokio::time::timeout(Duration::from_secs(10), stream.next());
    next.await.expect("nothing arrived").expect("the stream ended")
}

async fn numbered(events: &mut BoxStream<'static, Event>) -> (u64, u64) {
    match soon(events).await {
        Event { source: Source::Worker(id), body: EventBody::Block { number, .. }, .. } => (id.0, number),
        other => panic!("unexpected {other:?}"),
    }
}

fn removed(number: u64) -> BlockEvent {
    BlockEvent::Removed { level: Level::G1, blocks: vec![SequenceHash::from_bytes([number as u8; 16])] }
}

fn event(source: u64, number: u64) -> Event {
    let body = EventBody::Block { number, event: removed(number) };
    Event { source: Source::Worker(WorkerId(source)), epoch: Epoch(1), body }
}

/// A log of one epoch with this many events.
fn log(epoch: u64, events: u64) -> Arc<EventLog> {
    let log = EventLog::new(Epoch(epoch));
    (1..=events).for_each(|number| log.announce(removed(number)));
    Arc::new(log)
}
