//! Manifests that the store lists but does not serve: other manifests are read, collection continues, and few requests
//! are made.

use super::flaky::{Fault, Flaky};
use super::*;
use crate::block::Clock;
use crate::object::gc::Policy;
use object_store::ObjectStoreExt;

/// Longer than the grace periods of these tests.
const AFTER_GRACE: Duration = Duration::from_hours(2);

/// The path of a manifest of the only writer so far.
async fn manifest(store: &Flaky, number: u64) -> object_store::path::Path {
    let mut listed: Vec<_> =
        store.list(Some(&"kv/manifests".into())).map(|meta| meta.unwrap().location).collect().await;
    listed.sort();
    let end = format!("/{number:012}");
    listed.into_iter().find(|path| path.as_ref().ends_with(&end)).expect("it was written")
}

async fn seconds(seconds: u64) {
    tokio::time::sleep(Duration::from_secs(seconds)).await;
}

#[tokio::test(start_paused = true)]
async fn a_new_node_skips_an_unreadable_manifest() {
    let shared = Arc::new(Flaky::default());
    let (writer, _) = open_on(shared.clone());
    for seed in 0..4 {
        store(&*writer, chain(seed, 5)).await;
    }
    for denied in 0..4 {
        shared.set_fault(Some((manifest(&shared, denied).await.as_ref(), Fault::Denied)));
        let (late, _) = open_on(shared.clone());
        let settled = tokio::time::timeout(Duration::from_secs(2), late.initial_health()).await;
        assert_eq!(settled.expect("soon"), StoreHealth::Ready, "manifest {denied}");
        let held: Vec<usize> = (0..4).map(|seed| late.holds(fingerprint(), &hashes(&chain(seed, 5)))).collect();
        let expected: Vec<usize> = (0..4).map(|seed| if seed == denied { 0 } else { 5 }).collect();
        assert_eq!((held, late.unreadable_manifests()), (expected, 1));
        // Later manifests are found, and the denied one once it can be read.
        let next = chain(10 + denied, 5);
        store(&*writer, next.clone()).await;
        assert!(seconds_until_found(&late, &hashes(&next)).await < 2.0);
        shared.set_fault(None);
        assert!(seconds_until_found(&late, &hashes(&chain(denied, 5))).await < 10.0);
        assert_eq!(late.unreadable_manifests(), 0);
    }
}

#[tokio::test(start_paused = true)]
async fn a_running_node_skips_an_unreadable_manifest() {
    let shared = Arc::new(Flaky::default());
    let (writer, _) = open_on(shared.clone());
    let (reader, _) = open_on(shared.clone());
    reader.wait_until_ready().await;
    store(&*writer, chain(1, 5)).await;
    assert!(seconds_until_found(&reader, &hashes(&chain(1, 5))).await < 2.0);
    let next = manifest(&shared, 0).await.as_ref().replace("/000000000000", "/000000000001");
    shared.set_fault(Some((&next, Fault::Denied)));
    store(&*writer, chain(2, 5)).await;
    store(&*writer, chain(3, 5)).await;
    assert!(seconds_until_found(&reader, &hashes(&chain(3, 5))).await < 2.0);
    assert_eq!((reader.holds(fingerprint(), &hashes(&chain(2, 5))), reader.unreadable_manifests()), (0, 1));
    assert_eq!(reader.initial_health().await, StoreHealth::Ready);
}

#[tokio::test(start_paused = true)]
async fn requests_for_an_unreadable_manifest_are_few() {
    let shared = Arc::new(Flaky::default());
    let writers: Vec<_> = (0..6).map(|_| open_on(shared.clone()).0).collect();
    for (seed, writer) in (0..).zip(&writers) {
        for nth in 0..5 {
            store(&**writer, chain(seed * 10 + nth, 5)).await;
        }
    }
    let denied = manifest(&shared, 2).await;
    drop(writers);
    let (reader, _) = open_on(shared.clone());
    reader.wait_until_ready().await;
    let in_ten_minutes = async || {
        let before = shared.requests();
        seconds(600).await;
        shared.requests() - before
    };
    let usual = in_ten_minutes().await;
    drop(reader);
    shared.set_fault(Some((denied.as_ref(), Fault::Denied)));
    let (reader, _) = open_on(shared.clone());
    reader.wait_until_ready().await;
    let requests = in_ten_minutes().await;
    assert_eq!(reader.unreadable_manifests(), 1);
    assert!(requests <= usual + 25, "{requests} requests in ten minutes, {usual} without it");
}

#[tokio::test(start_paused = true)]
async fn a_store_that_denies_every_read_is_refused() {
    let shared = Arc::new(Flaky::default());
    let (writer, _) = open_on(shared.clone());
    store(&*writer, chain(1, 5)).await;
    drop(writer);
    shared.set_fault(Some(("kv/", Fault::Denied)));
    let (late, _) = open_on(shared.clone());
    assert!(matches!(late.initial_health().await, StoreHealth::Refused(why) if why.contains("archived")));
    assert_eq!(late.unreadable_manifests(), 0, "it is not the manifest's fault");
    let before = shared.reads();
    seconds(60).await;
    assert!(shared.reads() - before <= 130, "{} reads in a minute", shared.reads() - before);
    shared.set_fault(None);
    assert!(seconds_until_found(&late, &hashes(&chain(1, 5))).await < 2.0);
}

#[tokio::test(start_paused = true)]
async fn collection_continues_beside_unreadable_objects() {
    let shared = Arc::new(Flaky::default());
    let (archived, _) = open_on(shared.clone());
    store(&*archived, chain(1, 5)).await;
    let denied = manifest(&shared, 0).await;
    let (writer, _) = open_on(shared.clone());
    store(&*writer, chain(2, 5)).await;
    let collector = Collector::open(shared.clone(), "kv", Duration::from_secs(10));
    let pass = async |policy: &Policy, after: Duration| {
        let inventory = collector.scan(|_, _| ()).await.unwrap();
        collector.collect(&inventory, policy, Clock::system().now().after(after)).await.unwrap()
    };
    shared.set_fault(Some((denied.as_ref(), Fault::Denied)));
    let nothing = Policy { capacity: Some(0), max_age: Some(AFTER_GRACE / 2), ..Policy::default() };
    let marked = pass(&nothing, Duration::ZERO).await;
    assert_eq!((marked.marked.values().map(|it| it.objects).sum::<u64>(), marked.unreadable_manifests), (1, 1));
    let before = shared.reads();
    assert_eq!(pass(&nothing, AFTER_GRACE * 100).await.deleted.objects, 1);
    assert!(shared.reads() - before <= 1, "the tombstone list, and not the manifest again");
    let left = collector.scan(|_, _| ()).await.unwrap();
    assert_eq!((left.objects.len(), left.manifests.len()), (1, 1), "what it names stays");
    shared.set_fault(Some(("removals/", Fault::Denied)));
    seconds(10).await;
    assert_eq!(pass(&nothing, Duration::ZERO).await.marked.len(), 1, "it can be read again, and is over capacity");
    // An unreadable tombstone list stops neither followers nor collectors.
    let (late, _) = open_on(shared.clone());
    late.wait_until_ready().await;
    pass(&nothing, AFTER_GRACE).await;
    shared.set_fault(Some(("kv/", Fault::Denied)));
    seconds(10).await;
    assert!(collector.scan(|_, _| ()).await.is_err(), "that is the store's fault, and no object's");
}

#[tokio::test(start_paused = true)]
async fn a_writer_without_its_last_manifest_is_followed() {
    let shared = Arc::new(Flaky::default());
    let (writer, _) = open_on(shared.clone());
    for seed in 0..3 {
        store(&*writer, chain(seed, 5)).await;
    }
    // An earlier version of the collector deleted the last manifest of a writer.
    for number in [2, 1] {
        shared.delete(&manifest(&shared, number).await).await.unwrap();
    }
    let (late, _) = open_on(shared.clone());
    late.wait_until_ready().await;
    store(&*writer, chain(3, 5)).await;
    // The manifests of inactive writers are listed once a minute.
    seconds(65).await;
    assert_eq!(late.holds(fingerprint(), &hashes(&chain(3, 5))), 5);
    store(&*writer, chain(4, 5)).await;
    assert!(seconds_until_found(&late, &hashes(&chain(4, 5))).await < 2.0, "it counts from there");
}

#[tokio::test(start_paused = true)]
async fn a_writer_with_deleted_latest_objects_is_followed() {
    let shared: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
    let (writer, _) = open_on(shared.clone());
    let retention = crate::block::BlockRetention {
        pinned: Some(Clock::system().now().after(AFTER_GRACE * 9)),
        ..crate::block::BlockRetention::default()
    };
    let attrs = crate::block::BlockAttrs { retention, ..crate::block::BlockAttrs::default() };
    store(&*writer, chain(0, 5).into_iter().map(|block| block.with_attrs(attrs)).collect()).await;
    store(&*writer, chain(1, 5)).await;
    store(&*writer, chain(2, 5)).await;
    let collector = Collector::open(shared.clone(), "kv", Duration::from_secs(10));
    for (capacity, after) in [(Some(0), Duration::ZERO), (None, AFTER_GRACE), (None, AFTER_GRACE * 2)] {
        let inventory = collector.scan(|_, _| ()).await.unwrap();
        let policy = Policy { capacity, ..Policy::default() };
        collector.collect(&inventory, &policy, Clock::system().now().after(after)).await.unwrap();
    }
    let (late, _) = open_on(shared.clone());
    late.wait_until_ready().await;
    for seed in 3..8 {
        store(&*writer, chain(seed, 5)).await;
        assert!(seconds_until_found(&late, &hashes(&chain(seed, 5))).await < 2.0);
    }
    assert_eq!(late.missing_objects(), 0);
}
