//! Garbage collection during reads and writes: loads return the right bytes or miss, and followers learn of deletions.

use super::*;
use crate::block::Clock;
use crate::object::gc::Policy;

/// Longer than the grace periods of these tests.
const AFTER_GRACE: Duration = Duration::from_hours(2);

fn collector(store: &Arc<dyn ObjectStore>) -> Collector {
    Collector::open(store.clone(), "kv", Duration::from_secs(10))
}

/// One run at the time `after` from now.
async fn pass(collector: &Collector, policy: &Policy, after: Duration) -> GcReport {
    let inventory = collector.scan(|_, _| ()).await.unwrap();
    collector.collect(&inventory, policy, Clock::system().now().after(after)).await.unwrap()
}

fn keep_nothing() -> Policy {
    Policy { capacity: Some(0), ..Policy::default() }
}

async fn seconds(seconds: u64) {
    tokio::time::sleep(Duration::from_secs(seconds)).await;
}

#[tokio::test(start_paused = true)]
async fn marked_objects_are_readable_until_followers_know() {
    let shared: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
    let (writer, _) = open_on(shared.clone());
    let blocks = chain(1, 20);
    store(&*writer, blocks.clone()).await;
    let (reader, events) = open_on(shared.clone());
    reader.wait_until_ready().await;
    let report = pass(&collector(&shared), &keep_nothing(), Duration::ZERO).await;
    assert_eq!((report.marked.values().map(|amount| amount.objects).sum::<u64>(), report.deleted.objects), (1, 0));
    assert!(all_found(&load(&*reader, fingerprint(), hashes(&blocks)).await), "not polled yet");
    seconds(8).await;
    for tier in [&reader, &writer] {
        assert_eq!(tier.holds(fingerprint(), &hashes(&blocks)), 0);
    }
    assert_eq!(announced(&events, Level::G4), []);
    // A new process does not find them either. Blocks that are stored again are found again.
    let (late, _) = open_on(shared.clone());
    late.wait_until_ready().await;
    assert_eq!(late.holds(fingerprint(), &hashes(&blocks)), 0);
    store(&*writer, blocks.clone()).await;
    seconds(3).await;
    assert!(all_found(&load(&*reader, fingerprint(), hashes(&blocks)).await));
    assert_eq!((reader.missing_objects(), writer.missing_objects()), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn planning_runs_once_and_off_the_async_threads() {
    let shared: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
    let (writer, _) = open_on(shared.clone());
    store(&*writer, chain(1, 5)).await;
    let report = pass(&collector(&shared), &keep_nothing(), Duration::ZERO).await;
    assert_eq!((report.marked.len(), gc::PLANS.get()), (1, 0), "none on this thread");
}

#[tokio::test(start_paused = true)]
async fn reading_a_deleted_object_is_a_counted_miss() {
    let shared: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
    let (tier, _) = open_on(shared.clone());
    store(&*tier, chain(1, 5)).await;
    let collector = collector(&shared);
    pass(&collector, &keep_nothing(), Duration::ZERO).await;
    let report = pass(&collector, &Policy::default(), AFTER_GRACE).await;
    assert_eq!((report.deleted.objects, report.deleted_manifests), (1, 1));
    // The follower has not polled yet.
    assert_eq!(load(&*tier, fingerprint(), hashes(&chain(1, 5))).await.iter().flatten().count(), 0);
    assert_eq!(tier.missing_objects(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_writer_without_its_first_manifests_is_followed() {
    let shared: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
    let (writer, _) = open_on(shared.clone());
    let (follower, _) = open_on(shared.clone());
    follower.wait_until_ready().await;
    let pinned = crate::block::BlockRetention {
        pinned: Some(Clock::system().now().after(AFTER_GRACE * 9)),
        ..crate::block::BlockRetention::default()
    };
    let kept = chain(7, 5)
        .into_iter()
        .map(|block| block.with_attrs(crate::block::BlockAttrs { retention: pinned, ..Default::default() }));
    let kept: Vec<Block> = kept.collect();
    store(&*writer, chain(1, 5)).await;
    store(&*writer, kept.clone()).await;
    store(&*writer, chain(2, 5)).await;
    let collector = collector(&shared);
    pass(&collector, &keep_nothing(), Duration::ZERO).await;
    pass(&collector, &Policy::default(), AFTER_GRACE).await;
    let inventory = collector.scan(|_, _| ()).await.unwrap();
    let left = (inventory.manifests.len(), inventory.objects.len(), inventory.tombstone_lists.len());
    assert_eq!(
        left,
        (2, 1, 1),
        "the pinned object, its manifest, the highest one, and the list that says what that one names"
    );
    store(&*writer, chain(3, 5)).await;
    let (late, _) = open_on(shared.clone());
    late.wait_until_ready().await;
    seconds(8).await;
    for tier in [&follower, &late] {
        assert!(all_found(&load(&**tier, fingerprint(), hashes(&kept)).await));
        assert!(all_found(&load(&**tier, fingerprint(), hashes(&chain(3, 5))).await));
        assert_eq!(tier.holds(fingerprint(), &hashes(&chain(1, 5))), 0);
    }
}

#[tokio::test(start_paused = true)]
async fn a_stale_follower_finds_manifests_after_a_gap() {
    let shared: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
    let (writer, _) = open_on(shared.clone());
    let catalog = Arc::new(Catalog::new(Level::G4, 1_000, false, Arc::new(EventLog::new(Epoch(1)))));
    let client = Arc::new(Client::new(shared.clone(), Duration::from_secs(10), 1));
    let set_health = watch::Sender::new(StoreHealth::Starting);
    let mut follower = Follower::new(client, Layout::new("kv"), InstanceId::new(), catalog.clone(), set_health, None);
    store(&*writer, chain(1, 5)).await;
    assert_eq!(follower.poll_once().await, StoreHealth::Ready);
    store(&*writer, chain(2, 5)).await;
    let collector = collector(&shared);
    pass(&collector, &keep_nothing(), Duration::ZERO).await;
    pass(&collector, &Policy::default(), AFTER_GRACE).await;
    store(&*writer, chain(3, 5)).await;
    seconds(120).await;
    assert_eq!(follower.poll_once().await, StoreHealth::Ready);
    assert_eq!(catalog.index.holds(fingerprint(), &hashes(&chain(3, 5))), 5);
}

#[tokio::test(start_paused = true)]
async fn concurrent_collection_yields_no_wrong_bytes() {
    let folder = tempfile::tempdir().unwrap();
    let shared: Arc<dyn ObjectStore> = Arc::new(LocalFileSystem::new_with_prefix(folder.path()).unwrap());
    // Three chains of blocks.
    let policy = Policy { capacity: Some(110_000), ..Policy::default() };
    let (writer, _) = open_on(shared.clone());
    let (reader, _) = open_on(shared.clone());
    let (one, other) = (collector(&shared), collector(&shared));
    let (mut young, mut old) = (0, 0);
    for seed in 0..30_u64 {
        let blocks = chain(seed, 10);
        let wanted = [seed.saturating_sub(1), seed.saturating_sub(9)].map(|seed| chain(seed, 10));
        let (lately, long_ago, ..) = tokio::join!(
            load(&*reader, fingerprint(), hashes(&wanted[0])),
            load(&*reader, fingerprint(), hashes(&wanted[1])),
            store(&*writer, blocks),
            // The clock of one collector is ahead, so that it deletes objects that others still read.
            pass(&one, &policy, Duration::ZERO),
            pass(&other, &policy, AFTER_GRACE),
        );
        for ((loaded, blocks), hits) in [lately, long_ago].iter().zip(&wanted).zip([&mut young, &mut old]) {
            for (loaded, block) in loaded.iter().zip(blocks) {
                assert!(loaded.as_ref().is_none_or(|loaded| loaded.payload() == block.payload));
                *hits += usize::from(loaded.is_some() && seed >= 9);
            }
        }
        // A minute older than the next ones.
        let written = std::time::SystemTime::now() - Duration::from_secs(60 * (30 - seed));
        for object in files(folder.path(), "kv/blocks") {
            let file = fs::File::options().write(true).open(object).unwrap();
            if file.metadata().unwrap().modified().unwrap() > written {
                file.set_modified(written).unwrap();
            }
        }
        seconds(2).await;
    }
    assert!(young >= 200, "{young} of 210 young blocks were found, which are never the oldest");
    assert!(old <= 20, "{old} of 210 old blocks were found, although there is no room for them");
    pass(&one, &policy, Duration::ZERO).await;
    pass(&other, &policy, AFTER_GRACE).await;
    let inventory = one.scan(|_, _| ()).await.unwrap();
    assert!((1..=110_000).contains(&inventory.bytes()), "{}", inventory.bytes());
}

#[tokio::test(start_paused = true)]
async fn a_full_store_accepts_blocks_only_after_deletions() {
    let shared: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
    let capacity = 60_000;
    let events = Arc::new(EventLog::new(Epoch(1)));
    let settings = Settings { level: Level::G3_5, capacity: Some(capacity), ..Settings::default() };
    let tier = ObjectTier::open(shared.clone(), "kv", settings, events.clone());
    assert!(matches!(tier.store(chain(0, 1)).await[..], [Err(StoreError::Busy)]), "the used bytes are not known");
    tier.wait_until_ready().await;
    let full = async |seed| {
        let answers = tier.store(chain(seed, 10)).await;
        answers.iter().any(|answer| matches!(answer, Err(StoreError::Full)))
    };
    let mut seed = 0;
    while !full(seed).await {
        seed += 1;
        assert!(seed < 10, "no capacity limit");
    }
    assert!((capacity * 3 / 4..=capacity).contains(&tier.usage().bytes), "{:?}", tier.usage());
    let collector = collector(&shared);
    let policy = Policy { capacity: Some(capacity), headroom: capacity / 2, ..Policy::default() };
    pass(&collector, &policy, Duration::ZERO).await;
    seconds(8).await;
    assert!(tier.usage().blocks * 3_000 < capacity && full(99).await, "marked, but not deleted");
    pass(&collector, &policy, AFTER_GRACE).await;
    seconds(20).await;
    assert!(tier.usage().bytes <= capacity / 2 && !full(99).await, "{:?}", tier.usage());
    assert_eq!(announced(&events, Level::G3_5).len() as u64, tier.usage().blocks);
}

#[tokio::test(start_paused = true)]
async fn verification_reads_all_blocks_and_can_mark_corrupt() {
    let folder = tempfile::tempdir().unwrap();
    let (tier, _) = open_in(folder.path(), Settings { object_bytes: 15_000, object_blocks: 1, ..Settings::default() });
    store(&*tier, chain(1, 10)).await;
    store(&*tier, chain(2, 10)).await;
    let bad = files(folder.path(), "blocks").remove(0);
    let mut bytes = fs::read(&bad).unwrap();
    bytes[Header::LEN + 5] ^= 1;
    fs::write(&bad, bytes).unwrap();
    let location = StoreLocation::Folder(folder.path().into());
    let access = Access { endpoint: None, region: None, credentials: Credentials::default() };
    let collector = Collector::open_location(&location, &access, Duration::from_secs(10)).unwrap();
    let verify = async |remove| {
        let inventory = collector.scan(|_, _| ()).await.unwrap();
        collector.verify(&inventory, remove, async |_, _| Ok(false), |_, _| ()).await.unwrap()
    };
    let seen = verify(false).await;
    assert_eq!((seen.valid_blocks, seen.corrupt_blocks, seen.undecryptable_blocks, seen.marked_objects), (19, 1, 0, 0));
    assert_eq!(verify(true).await.marked_objects, 1);
    assert_eq!((verify(false).await.corrupt_blocks, verify(false).await.missing_objects), (0, 0));
}
