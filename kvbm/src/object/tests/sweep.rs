//! Collecting while others read and write: bytes are right or missing, and whoever runs on learns what went.

use super::*;
use crate::block::Clock;
use crate::object::gc::Policy;
use crate::object::gc::collector::Report;

/// Longer than any grace here.
const LATER: Duration = Duration::from_hours(2);

fn collector(store: &Arc<dyn ObjectStore>) -> Collector {
    Collector::open(store.clone(), "kv", Duration::from_secs(10))
}

/// One pass, `after` now.
async fn pass(collector: &Collector, policy: &Policy, after: Duration) -> Report {
    let survey = collector.survey(|_, _| ()).await.unwrap();
    collector.collect(&survey, policy, Clock::system().now().after(after)).await.unwrap()
}

fn nothing() -> Policy {
    Policy { budget: Some(0), ..Policy::default() }
}

async fn seconds(seconds: u64) {
    tokio::time::sleep(Duration::from_secs(seconds)).await;
}

#[tokio::test(start_paused = true)]
async fn a_running_process_reads_in_the_grace_and_soon_knows_better() {
    let shared: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
    let (theirs, _) = open_on(shared.clone());
    let blocks = chain(1, 20);
    store(&*theirs, blocks.clone()).await;
    let (ours, events) = open_on(shared.clone());
    ours.caught_up().await;
    let report = pass(&collector(&shared), &nothing(), Duration::ZERO).await;
    assert_eq!((report.condemned.values().map(|amount| amount.objects).sum::<u64>(), report.deleted.objects), (1, 0));
    assert!(all(&load(&*ours, fingerprint(), names(&blocks)).await), "not heard of it yet");
    seconds(8).await;
    for tier in [&ours, &theirs] {
        assert_eq!(tier.holds(fingerprint(), &names(&blocks)), 0);
    }
    assert_eq!(announced(&events, Level::G4), []);
    // Whoever comes now neither; and what comes again rests again.
    let (late, _) = open_on(shared.clone());
    late.caught_up().await;
    assert_eq!(late.holds(fingerprint(), &names(&blocks)), 0);
    store(&*theirs, blocks.clone()).await;
    seconds(3).await;
    assert!(all(&load(&*ours, fingerprint(), names(&blocks)).await));
    assert_eq!((ours.lost_objects(), theirs.lost_objects()), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn what_goes_is_chosen_off_the_async_threads() {
    let shared: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
    let (writer, _) = open_on(shared.clone());
    store(&*writer, chain(1, 5)).await;
    let report = pass(&collector(&shared), &nothing(), Duration::ZERO).await;
    assert_eq!((report.condemned.len(), gc::PLANNED.get()), (1, 0), "and not a second time, to say what was done");
}

#[tokio::test(start_paused = true)]
async fn a_reader_that_loses_the_race_records_a_miss() {
    let shared: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
    let (tier, _) = open_on(shared.clone());
    store(&*tier, chain(1, 5)).await;
    let collector = collector(&shared);
    pass(&collector, &nothing(), Duration::ZERO).await;
    let report = pass(&collector, &Policy::default(), LATER).await;
    assert_eq!((report.deleted.objects, report.manifests), (1, 1));
    // It had no time to hear of it.
    assert_eq!(load(&*tier, fingerprint(), names(&chain(1, 5))).await.iter().flatten().count(), 0);
    assert_eq!(tier.lost_objects(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_writer_whose_first_manifests_are_gone_is_still_followed() {
    let shared: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
    let (writer, _) = open_on(shared.clone());
    let (follower, _) = open_on(shared.clone());
    follower.caught_up().await;
    let pinned =
        crate::block::Keep { pinned: Some(Clock::system().now().after(LATER * 9)), ..crate::block::Keep::default() };
    let kept = chain(7, 5)
        .into_iter()
        .map(|block| block.in_custody(crate::block::Custody { keep: pinned, ..Default::default() }));
    let kept: Vec<Block> = kept.collect();
    store(&*writer, chain(1, 5)).await;
    store(&*writer, kept.clone()).await;
    store(&*writer, chain(2, 5)).await;
    let collector = collector(&shared);
    pass(&collector, &nothing(), Duration::ZERO).await;
    pass(&collector, &Policy::default(), LATER).await;
    let survey = collector.survey(|_, _| ()).await.unwrap();
    let left = (survey.manifests.len(), survey.objects.len(), survey.removals.len());
    assert_eq!(
        left,
        (2, 1, 1),
        "the pinned object, its manifest, the highest one, and the list that says what that one names"
    );
    store(&*writer, chain(3, 5)).await;
    let (late, _) = open_on(shared.clone());
    late.caught_up().await;
    seconds(8).await;
    for tier in [&follower, &late] {
        assert!(all(&load(&**tier, fingerprint(), names(&kept)).await));
        assert!(all(&load(&**tier, fingerprint(), names(&chain(3, 5))).await));
        assert_eq!(tier.holds(fingerprint(), &names(&chain(1, 5))), 0);
    }
}

#[tokio::test(start_paused = true)]
async fn one_that_slept_through_a_deletion_finds_what_came_after_it() {
    let shared: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
    let (writer, _) = open_on(shared.clone());
    let catalog = Arc::new(Catalog::new(Level::G4, 1_000, false, Arc::new(EventLog::new(Epoch(1)))));
    let client = Arc::new(Client::new(shared.clone(), Duration::from_secs(10), 1));
    let stands = watch::Sender::new(Standing::Learning);
    let mut follower = Follower::new(client, Layout::new("kv"), Writer::new(), catalog.clone(), stands, None);
    store(&*writer, chain(1, 5)).await;
    assert_eq!(follower.follow_once().await, Standing::Ready);
    store(&*writer, chain(2, 5)).await;
    let collector = collector(&shared);
    pass(&collector, &nothing(), Duration::ZERO).await;
    pass(&collector, &Policy::default(), LATER).await;
    store(&*writer, chain(3, 5)).await;
    seconds(120).await;
    assert_eq!(follower.follow_once().await, Standing::Ready);
    assert_eq!(catalog.index.holds(fingerprint(), &names(&chain(3, 5))), 5);
}

#[tokio::test(start_paused = true)]
async fn several_collectors_readers_and_writers_at_once_never_yield_a_wrong_byte() {
    let folder = tempfile::tempdir().unwrap();
    let shared: Arc<dyn ObjectStore> = Arc::new(LocalFileSystem::new_with_prefix(folder.path()).unwrap());
    // Three conversations.
    let policy = Policy { budget: Some(110_000), ..Policy::default() };
    let (writer, _) = open_on(shared.clone());
    let (reader, _) = open_on(shared.clone());
    let (one, other) = (collector(&shared), collector(&shared));
    let (mut young, mut old) = (0, 0);
    for seed in 0..30_u64 {
        let blocks = chain(seed, 10);
        let wanted = [seed.saturating_sub(1), seed.saturating_sub(9)].map(|seed| chain(seed, 10));
        let (lately, long_ago, ..) = tokio::join!(
            load(&*reader, fingerprint(), names(&wanted[0])),
            load(&*reader, fingerprint(), names(&wanted[1])),
            store(&*writer, blocks),
            // One of them is far ahead of its time, so that it deletes what others still ask for.
            pass(&one, &policy, Duration::ZERO),
            pass(&other, &policy, LATER),
        );
        for ((loaded, blocks), hits) in [lately, long_ago].iter().zip(&wanted).zip([&mut young, &mut old]) {
            for (loaded, block) in loaded.iter().zip(blocks) {
                assert!(loaded.as_ref().is_none_or(|loaded| loaded.payload() == block.payload));
                *hits += usize::from(loaded.is_some() && seed >= 9);
            }
        }
        // A minute older than what comes next.
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
    pass(&other, &policy, LATER).await;
    let survey = one.survey(|_, _| ()).await.unwrap();
    assert!((1..=110_000).contains(&survey.bytes()), "{}", survey.bytes());
}

#[tokio::test(start_paused = true)]
async fn a_bounded_store_takes_nothing_more_until_what_goes_has_gone() {
    let shared: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
    let (budget, events) = (60_000, Arc::new(EventLog::new(Epoch(1))));
    let settings = Settings { level: Level::Pod, capacity: Some(budget), ..Settings::default() };
    let tier = ObjectTier::open(shared.clone(), "kv", settings, events.clone());
    assert!(matches!(tier.store(chain(0, 1)).await[..], [Err(StoreError::Busy)]), "it is not known what lies there");
    tier.caught_up().await;
    let full = async |seed| {
        let answers = tier.store(chain(seed, 10)).await;
        answers.iter().any(|answer| matches!(answer, Err(StoreError::Full)))
    };
    let mut seed = 0;
    while !full(seed).await {
        seed += 1;
        assert!(seed < 10, "it takes everything");
    }
    assert!((budget * 3 / 4..=budget).contains(&tier.usage().bytes), "{:?}", tier.usage());
    let collector = collector(&shared);
    let policy = Policy { budget: Some(budget), headroom: budget / 2, ..Policy::default() };
    pass(&collector, &policy, Duration::ZERO).await;
    seconds(8).await;
    assert!(tier.usage().blocks * 3_000 < budget && full(99).await, "named as going, and still there");
    pass(&collector, &policy, LATER).await;
    seconds(20).await;
    assert!(tier.usage().bytes <= budget / 2 && !full(99).await, "{:?}", tier.usage());
    assert_eq!(announced(&events, Level::Pod).len() as u64, tier.usage().blocks);
}

#[tokio::test(start_paused = true)]
async fn verifying_reads_every_block_and_removes_what_is_unsound_when_told() {
    let folder = tempfile::tempdir().unwrap();
    let (tier, _) = open_in(folder.path(), Settings { object_bytes: 15_000, object_blocks: 1, ..Settings::default() });
    store(&*tier, chain(1, 10)).await;
    store(&*tier, chain(2, 10)).await;
    let bad = files(folder.path(), "blocks").remove(0);
    let mut bytes = fs::read(&bad).unwrap();
    bytes[Header::LEN + 5] ^= 1;
    fs::write(&bad, bytes).unwrap();
    let location = Location::Folder(folder.path().into());
    let access = Access { endpoint: None, region: None, credentials: Credentials::default() };
    let collector = Collector::at(&location, &access, Duration::from_secs(10)).unwrap();
    let verify = async |remove| {
        let survey = collector.survey(|_, _| ()).await.unwrap();
        collector.verify(&survey, remove, async |_, _| Ok(false), |_, _| ()).await.unwrap()
    };
    let seen = verify(false).await;
    assert_eq!((seen.valid_blocks, seen.corrupt_blocks, seen.undecryptable_blocks, seen.marked_objects), (19, 1, 0, 0));
    assert_eq!(verify(true).await.marked_objects, 1);
    assert_eq!((verify(false).await.corrupt_blocks, verify(false).await.missing_objects), (0, 0));
}
