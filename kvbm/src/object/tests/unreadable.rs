//! Manifests that the store lists and does not hand out: others are learned, collection goes on, and few requests are made.

use super::flaky::{Flaky, Mood};
use super::*;
use crate::block::Clock;
use crate::object::gc::Policy;
use object_store::ObjectStoreExt;

/// Longer than any grace here.
const LATER: Duration = Duration::from_hours(2);

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
async fn an_unreadable_manifest_costs_a_new_node_nothing_else() {
    let shared = Arc::new(Flaky::default());
    let (writer, _) = open_on(shared.clone());
    for seed in 0..4 {
        store(&*writer, chain(seed, 5)).await;
    }
    for denied in 0..4 {
        shared.set(Some((manifest(&shared, denied).await.as_ref(), Mood::Denied)));
        let (late, _) = open_on(shared.clone());
        let settled = tokio::time::timeout(Duration::from_secs(2), late.settled()).await;
        assert_eq!(settled.expect("soon"), Standing::Ready, "manifest {denied}");
        let held: Vec<usize> = (0..4).map(|seed| late.holds(fingerprint(), &names(&chain(seed, 5)))).collect();
        let expected: Vec<usize> = (0..4).map(|seed| if seed == denied { 0 } else { 5 }).collect();
        assert_eq!((held, late.unreadable_manifests()), (expected, 1));
        // What comes next is found, and the denied one once it can be read.
        let next = chain(10 + denied, 5);
        store(&*writer, next.clone()).await;
        assert!(found_after(&late, &names(&next)).await < 2.0);
        shared.set(None);
        assert!(found_after(&late, &names(&chain(denied, 5))).await < 10.0);
        assert_eq!(late.unreadable_manifests(), 0);
    }
}

#[tokio::test(start_paused = true)]
async fn a_running_node_skips_an_unreadable_manifest() {
    let shared = Arc::new(Flaky::default());
    let (writer, _) = open_on(shared.clone());
    let (reader, _) = open_on(shared.clone());
    reader.caught_up().await;
    store(&*writer, chain(1, 5)).await;
    assert!(found_after(&reader, &names(&chain(1, 5))).await < 2.0);
    let next = manifest(&shared, 0).await.as_ref().replace("/000000000000", "/000000000001");
    shared.set(Some((&next, Mood::Denied)));
    store(&*writer, chain(2, 5)).await;
    store(&*writer, chain(3, 5)).await;
    assert!(found_after(&reader, &names(&chain(3, 5))).await < 2.0);
    assert_eq!((reader.holds(fingerprint(), &names(&chain(2, 5))), reader.unreadable_manifests()), (0, 1));
    assert_eq!(reader.settled().await, Standing::Ready);
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
    reader.caught_up().await;
    let in_ten_minutes = async || {
        let before = shared.requests();
        seconds(600).await;
        shared.requests() - before
    };
    let usual = in_ten_minutes().await;
    drop(reader);
    shared.set(Some((denied.as_ref(), Mood::Denied)));
    let (reader, _) = open_on(shared.clone());
    reader.caught_up().await;
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
    shared.set(Some(("kv/", Mood::Denied)));
    let (late, _) = open_on(shared.clone());
    assert!(matches!(late.settled().await, Standing::Refused(why) if why.contains("archived")));
    assert_eq!(late.unreadable_manifests(), 0, "it is not the manifest's fault");
    let before = shared.reads();
    seconds(60).await;
    assert!(shared.reads() - before <= 130, "{} reads in a minute", shared.reads() - before);
    shared.set(None);
    assert!(found_after(&late, &names(&chain(1, 5))).await < 2.0);
}

#[tokio::test(start_paused = true)]
async fn collection_goes_on_beside_unreadable_objects() {
    let shared = Arc::new(Flaky::default());
    let (archived, _) = open_on(shared.clone());
    store(&*archived, chain(1, 5)).await;
    let denied = manifest(&shared, 0).await;
    let (writer, _) = open_on(shared.clone());
    store(&*writer, chain(2, 5)).await;
    let collector = Collector::open(shared.clone(), "kv", Duration::from_secs(10));
    let pass = async |policy: &Policy, after: Duration| {
        let survey = collector.survey(|_, _| ()).await.unwrap();
        collector.collect(&survey, policy, Clock::system().now().after(after)).await.unwrap()
    };
    shared.set(Some((denied.as_ref(), Mood::Denied)));
    let nothing = Policy { budget: Some(0), age_max: Some(LATER / 2), ..Policy::default() };
    let marked = pass(&nothing, Duration::ZERO).await;
    assert_eq!((marked.condemned.values().map(|it| it.objects).sum::<u64>(), marked.unreadable), (1, 1));
    let before = shared.reads();
    assert_eq!(pass(&nothing, LATER * 100).await.deleted.objects, 1);
    assert!(shared.reads() - before <= 1, "the list of removals, and not the manifest again");
    let left = collector.survey(|_, _| ()).await.unwrap();
    assert_eq!((left.objects.len(), left.manifests.len()), (1, 1), "what it names stays");
    shared.set(Some(("removals/", Mood::Denied)));
    seconds(10).await;
    assert_eq!(pass(&nothing, Duration::ZERO).await.condemned.len(), 1, "it can be read again, and is over budget");
    // A list of removals that cannot be read stops neither followers nor collectors.
    let (late, _) = open_on(shared.clone());
    late.caught_up().await;
    pass(&nothing, LATER).await;
    shared.set(Some(("kv/", Mood::Denied)));
    seconds(10).await;
    assert!(collector.survey(|_, _| ()).await.is_err(), "that is the store's fault, and no object's");
}

#[tokio::test(start_paused = true)]
async fn a_writer_is_learned_from_although_its_highest_manifest_went() {
    let shared = Arc::new(Flaky::default());
    let (writer, _) = open_on(shared.clone());
    for seed in 0..3 {
        store(&*writer, chain(seed, 5)).await;
    }
    // As an earlier version of the collector did.
    for number in [2, 1] {
        shared.delete(&manifest(&shared, number).await).await.unwrap();
    }
    let (late, _) = open_on(shared.clone());
    late.caught_up().await;
    store(&*writer, chain(3, 5)).await;
    // Quiet writers are listed once a minute.
    seconds(65).await;
    assert_eq!(late.holds(fingerprint(), &names(&chain(3, 5))), 5);
    store(&*writer, chain(4, 5)).await;
    assert!(found_after(&late, &names(&chain(4, 5))).await < 2.0, "it counts from there");
}

#[tokio::test(start_paused = true)]
async fn a_new_node_learns_from_a_writer_whose_latest_objects_were_collected() {
    let shared: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
    let (writer, _) = open_on(shared.clone());
    let keep =
        crate::block::Keep { pinned: Some(Clock::system().now().after(LATER * 9)), ..crate::block::Keep::default() };
    let custody = crate::block::Custody { keep, ..crate::block::Custody::default() };
    store(&*writer, chain(0, 5).into_iter().map(|block| block.in_custody(custody)).collect()).await;
    store(&*writer, chain(1, 5)).await;
    store(&*writer, chain(2, 5)).await;
    let collector = Collector::open(shared.clone(), "kv", Duration::from_secs(10));
    for (budget, after) in [(Some(0), Duration::ZERO), (None, LATER), (None, LATER * 2)] {
        let survey = collector.survey(|_, _| ()).await.unwrap();
        let policy = Policy { budget, ..Policy::default() };
        collector.collect(&survey, &policy, Clock::system().now().after(after)).await.unwrap();
    }
    let (late, _) = open_on(shared.clone());
    late.caught_up().await;
    for seed in 3..8 {
        store(&*writer, chain(seed, 5)).await;
        assert!(found_after(&late, &names(&chain(seed, 5))).await < 2.0);
    }
    assert_eq!(late.lost_objects(), 0);
}
