use super::*;
use crate::plane::contract::{engine, instance, next, soon};
use crate::plane::local::{LocalDiscovery, LocalEvents};
use crate::plane::{EventBody, Load, ReservationUpdate, RouterId, WorkerId};
use kvbm::{BlockEvent, Level, SequenceHash};

mod discovery {
    crate::plane::contract::discovery_contract!(async { Some(super::Discoveries::new().combined) });
}

mod events {
    crate::plane::contract::events_contract!(async { Some(super::Planes::new().combined) });
}

/// The local plane of a process, the shared one, and both as one.
struct Discoveries {
    local: Arc<LocalDiscovery>,
    shared: Arc<LocalDiscovery>,
    combined: CombinedDiscovery,
}

impl Discoveries {
    fn new() -> Self {
        let [local, shared] = [(), ()].map(|()| Arc::new(LocalDiscovery::default()));
        let combined = CombinedDiscovery::new(shared.clone(), local.clone());
        Self { local, shared, combined }
    }
}

struct Planes {
    local: Arc<LocalEvents>,
    shared: Arc<LocalEvents>,
    combined: CombinedEvents,
}

impl Planes {
    fn new() -> Self {
        let [local, shared] = [(), ()].map(|()| Arc::new(LocalEvents::default()));
        let combined = CombinedEvents::new(shared.clone(), local.clone());
        Self { local, shared, combined }
    }
}

fn load(worker: u64) -> Event {
    Event { source: Source::Worker(WorkerId(worker)), epoch: Epoch(1), body: EventBody::Load(Load::default()) }
}

fn log(epoch: u64, events: u8) -> Arc<EventLog> {
    let log = EventLog::new(Epoch(epoch));
    for n in 1..=events {
        log.announce(BlockEvent::Removed { level: Level::G1, blocks: vec![SequenceHash::from_bytes([n; 16])] });
    }
    Arc::new(log)
}

#[tokio::test]
async fn a_watcher_sees_the_instances_of_both_and_other_processes_only_the_shared() {
    let Discoveries { local, shared, combined } = Discoveries::new();
    let own = local.register(instance(1, 1), engine()).await.unwrap();
    let _worker = shared.register(instance(2, 1), engine()).await.unwrap();
    let (mut watch, mut elsewhere) = (combined.watch(), shared.watch());
    let mut first = [next(&mut watch).await, next(&mut watch).await];
    first.sort_unstable();
    assert_eq!(first, [(1, 1, true), (2, 1, true)]);
    drop(own);
    assert_eq!(next(&mut watch).await, (1, 1, false));
    let _third = combined.register(instance(3, 1), engine()).await.unwrap();
    assert_eq!(next(&mut watch).await, (3, 1, true));
    assert_eq!([next(&mut elsewhere).await, next(&mut elsewhere).await], [(2, 1, true), (3, 1, true)]);
}

#[tokio::test]
async fn a_subscriber_gets_the_events_of_both_and_publishes_in_the_shared_one() {
    let Planes { local, shared, combined } = Planes::new();
    let mut events = combined.subscribe(Topic::Cache);
    let mut elsewhere = shared.subscribe(Topic::Cache);
    local.publish(load(1));
    assert_eq!(soon(&mut events).await, load(1));
    shared.publish(load(2));
    assert_eq!([soon(&mut events).await, soon(&mut elsewhere).await], [load(2), load(2)], "not the local one");
    let mut reservations = [shared.subscribe(Topic::Reservations), local.subscribe(Topic::Reservations)];
    let body = EventBody::Reservations(vec![ReservationUpdate::Started(4)]);
    let reservation = Event { source: Source::Router(RouterId(1)), epoch: Epoch(0), body };
    combined.publish(reservation.clone());
    assert_eq!(soon(&mut reservations[0]).await, reservation, "other routers get it");
    assert!(futures::poll!(reservations[1].next()).is_pending());
}

#[tokio::test]
async fn logs_are_found_in_either_plane_and_the_local_ones_without_the_shared() {
    let Planes { local, shared, combined } = Planes::new();
    let [own, other, none] = [1, 2, 3].map(|id| Source::Worker(WorkerId(id)));
    let _own = local.offer(own, log(1, 2));
    let _other = shared.offer(other, log(1, 3));
    let count =
        async |source| combined.range(source, Epoch(1), 0).await.map(|events| events.map_or(0, |all| all.len()));
    assert_eq!([count(own).await, count(other).await], [Ok(2), Ok(3)]);
    for (source, number) in [(own, 2), (other, 3)] {
        assert_eq!(combined.snapshot(source).await.unwrap().number, number);
    }
    assert!(matches!(count(none).await, Err(PlaneError::Absent(_))));
    assert!(matches!(shared.snapshot(own).await, Err(PlaneError::Absent(_))), "it stays in the process");
    // Another epoch of a local source is no reason to ask the shared plane.
    assert_eq!(combined.range(own, Epoch(2), 0).await, Ok(None));
}

#[tokio::test]
async fn a_stream_ends_when_one_of_its_planes_does() {
    let ended: BoxStream<'static, u8> = stream::iter([1]).boxed();
    let open: BoxStream<'static, u8> = stream::iter([2]).chain(stream::pending()).boxed();
    let mut items: Vec<u8> = both(ended, open).collect().await;
    items.sort_unstable();
    assert!(items.contains(&1), "{items:?}");
}
