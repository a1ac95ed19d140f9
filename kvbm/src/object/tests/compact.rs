//! Small objects become large ones, nobody misses a block meanwhile, and all of it takes few requests.

use super::*;
use crate::block::Clock;
use crate::object::gc::{Policy, Why};

/// After so long what another one left is anybody's.
const HOUR: Duration = Duration::from_hours(1);

/// As a trickle comes: so many blocks at a time.
async fn trickle(tier: &ObjectTier, batches: u64, blocks: usize) -> Vec<Block> {
    let mut all = Vec::new();
    for seed in 0..batches {
        let some = chain_of(fingerprint(), seed, blocks, 1_000);
        assert!(tier.store(some.clone()).await.iter().all(Result::is_ok));
        all.extend(some);
    }
    all
}

async fn pass(collector: &Collector, minutes: u64) -> Report {
    let survey = collector.survey(|_, _| ()).await.unwrap();
    let now = Clock::system().now().after(Duration::from_mins(minutes));
    collector.collect(&survey, &Policy::default(), now).await.unwrap()
}

async fn loads(tier: &ObjectTier, blocks: &[Block]) -> bool {
    let loaded = load(tier, fingerprint(), names(blocks)).await;
    loaded.iter().zip(blocks).all(|(loaded, block)| loaded.as_ref().is_some_and(|it| it.payload() == block.payload))
}

#[tokio::test(start_paused = true)]
async fn a_trickle_is_compacted_and_collected_with_a_tenth_of_a_request_per_block() {
    let shared = Arc::new(flaky::Flaky::default());
    let (tier, events) = open_on(shared.clone());
    tier.caught_up().await;
    let before = shared.requests();
    let blocks = trickle(&tier, 40, 64).await;
    // What reading takes is counted apart.
    let mut elsewhere = 0;
    let start = shared.requests();
    let (reader, learned) = open_on(shared.clone());
    reader.caught_up().await;
    let written = shared.requests();
    assert!(loads(&reader, &blocks).await);
    let scattered = shared.requests() - written;
    elsewhere += shared.requests() - start;

    assert_eq!(tier.compact(HOUR).await.unwrap(), compact::Compaction { objects: 40, blocks: 2_560 });
    assert_eq!(tier.compact(HOUR).await.unwrap(), compact::Compaction::default(), "there is nothing left to do");
    let collector = Collector::open(shared.clone(), "kv", Duration::from_secs(10));
    assert_eq!(pass(&collector, 0).await.condemned.len(), 0, "not everybody knows of the copies");
    let start = shared.requests();
    assert!(loads(&reader, &blocks).await, "nobody heard of anything");
    elsewhere += shared.requests() - start;
    let report = pass(&collector, 2).await;
    let copied = report.condemned.get(&Why::Copied).map(|amount| amount.objects);
    assert_eq!((copied, report.condemned.len()), (Some(40), 1));
    tokio::time::sleep(Duration::from_secs(10)).await;
    assert_eq!(pass(&collector, 200).await.deleted.objects, 40);
    let requests = shared.requests() - before - elsewhere;
    assert!(requests < 256, "{requests} requests for 2,560 blocks");

    let start = shared.requests();
    assert!(loads(&reader, &blocks).await && loads(&tier, &blocks).await);
    let compact = shared.requests() - start;
    assert!(compact < scattered / 2, "{compact} requests to read twice what took {scattered}");
    for (tier, events) in [(&tier, &events), (&reader, &learned)] {
        assert_eq!((tier.lost_objects(), tier.usage().blocks), (0, 2_560));
        let stored: usize = events
            .after(0, usize::MAX)
            .unwrap()
            .iter()
            .map(|event| match &event.event {
                crate::event::BlockEvent::Stored { blocks, .. } => blocks.len(),
                other => panic!("{other:?}: nothing ever went"),
            })
            .sum();
        assert_eq!(stored, 2_560);
    }
    let survey = collector.survey(|_, _| ()).await.unwrap();
    assert_eq!((survey.objects.len(), survey.manifests.len(), survey.removals.len()), (1, 1, 0));
}

#[tokio::test(start_paused = true)]
async fn what_is_few_large_or_anothers_is_left_alone_and_one_that_loses_the_race_may_miss() {
    let folder = tempfile::tempdir().unwrap();
    let settings = Settings { object_bytes: 200_000, ..Settings::default() };
    let (other, _) = open_in(folder.path(), settings);
    trickle(&other, 9, 3).await;
    drop(other);
    let (tier, _) = open_in(folder.path(), settings);
    tier.caught_up().await;
    let few: Vec<Block> = (100..107).flat_map(|seed| chain_of(fingerprint(), seed, 3, 1_000)).collect();
    for some in few.chunks(3) {
        store(&*tier, some.to_vec()).await;
    }
    store(&*tier, chain_of(fingerprint(), 200, 96, 1_000)).await;
    assert_eq!(tier.compact(HOUR).await.unwrap(), compact::Compaction::default());
    // An eighth; of one of them a bit flips.
    let last = chain_of(fingerprint(), 107, 3, 1_000);
    store(&*tier, last.clone()).await;
    let bad =
        files(folder.path(), "blocks").into_iter().rfind(|path| fs::metadata(path).unwrap().len() < 20_000).unwrap();
    let mut bytes = fs::read(&bad).unwrap();
    bytes[Header::LEN + 5] ^= 1;
    fs::write(&bad, &bytes).unwrap();
    let (slow, _) = open_in(folder.path(), settings);
    slow.caught_up().await;
    assert_eq!(tier.compact(HOUR).await.unwrap(), compact::Compaction { objects: 8, blocks: 23 });
    let collector = Collector::open(
        Arc::new(LocalFileSystem::new_with_prefix(folder.path()).unwrap()),
        "",
        Duration::from_secs(10),
    );
    assert_eq!(pass(&collector, 2).await.condemned[&Why::Copied].objects, 7, "the one with the bad block stays");
    assert_eq!(pass(&collector, 200).await.deleted.objects, 7);
    // Whether it heard of it in time or not: the block, or a miss; and soon all of them.
    let found = load(&*slow, fingerprint(), names(&few)).await;
    assert!(found.iter().zip(&few).all(|(found, block)| found.as_ref().is_none_or(|it| it.payload() == block.payload)));
    tokio::time::sleep(Duration::from_secs(10)).await;
    assert!(loads(&slow, &few).await && loads(&tier, &few).await);
}

#[tokio::test(start_paused = true)]
async fn what_processes_left_that_ended_is_packed_by_one_that_reads_it() {
    let shared = Arc::new(flaky::Flaky::default());
    let mut blocks = Vec::new();
    for seed in 0..9 {
        let (short_lived, _) = open_on(shared.clone());
        let some = chain_of(fingerprint(), seed, 3, 1_000);
        store(&*short_lived, some.clone()).await;
        blocks.extend(some);
    }
    let (tier, _) = open_on(shared.clone());
    tier.caught_up().await;
    tokio::time::sleep(HOUR / 2).await;
    let (cold, _) = open_on(shared.clone());
    cold.caught_up().await;
    assert!(loads(&tier, &blocks).await);
    assert_eq!(tier.compact(HOUR).await.unwrap(), compact::Compaction::default(), "they may live");
    tokio::time::sleep(HOUR).await;
    assert_eq!(cold.compact(HOUR).await.unwrap(), compact::Compaction::default(), "it would make them young again");
    assert_eq!(tier.compact(HOUR).await.unwrap(), compact::Compaction { objects: 9, blocks: 27 });
    assert_eq!(tier.compact(HOUR).await.unwrap(), compact::Compaction::default());
    let before = shared.requests();
    assert!(loads(&tier, &blocks).await);
    assert_eq!(shared.requests() - before, 1);
}

#[tokio::test(start_paused = true)]
async fn blocks_of_two_megabytes_take_less_than_a_tenth_of_a_request() {
    let shared = Arc::new(flaky::Flaky::default());
    let (tier, _) = open_on(shared.clone());
    tier.caught_up().await;
    // Their content does not matter here, and making it would take long.
    let payload = Bytes::from(vec![7; 2 << 20]);
    let block = |n: &SequenceHash| Block::seal(*n, None, fingerprint(), payload.clone());
    let names = names(&chain_of(fingerprint(), 1, 256, 10));
    let before = shared.requests();
    for some in names.chunks(64) {
        assert!(tier.store(some.iter().map(block).collect()).await.iter().all(Result::is_ok));
    }
    let written = shared.requests() - before;
    assert!(all(&load(&*tier, fingerprint(), names.clone()).await));
    let read = shared.requests() - before - written;
    assert!(written < 256 / 10 && read < 256 / 10, "{written} requests to write 256 blocks, {read} to read them");
}

#[test]
fn a_range_is_as_large_as_leaves_enough_of_them() {
    let of = |blocks: u64, bytes: u64| range((0..blocks).map(|_| bytes)) >> 20;
    assert_eq!([of(1, 2 << 20), of(64, 2 << 20), of(256, 2 << 20), of(4_096, 2 << 20)], [4, 8, 32, 32]);
    assert_eq!([of(4_096, 64 << 10), of(1, 64 << 20)], [4, 4], "small blocks are many in a request already");
}

#[tokio::test(start_paused = true)]
async fn what_is_packed_again_is_as_old_as_its_last_use_by_anybody() {
    // Whatever the time is at the store.
    let start = Clock::system().now();
    for (read, stands) in [false, true]
        .into_iter()
        .flat_map(|read| [start.before(HOUR * 99), start.after(HOUR * 99)].map(|at| (read, at)))
    {
        let (shared, (clock, _ticks)) = (Arc::new(flaky::Flaky::default()), super::upkeep::ticking_from(stands));
        shared.date_by(&clock);
        let ((tier, _), (other, _)) = (open_on(shared.clone()), open_on(shared.clone()));
        let blocks = trickle(&tier, 9, 3).await;
        tokio::time::sleep(HOUR * 10).await;
        if read {
            assert!(loads(&other, &blocks).await);
            other.uses.note().await;
        }
        tokio::time::sleep(HOUR * 5).await;
        assert_eq!(tier.compact(HOUR).await.unwrap().blocks, 27);
        let collector = Collector::open(shared.clone(), "kv", Duration::from_secs(10));
        let survey = collector.survey(|_, _| ()).await.unwrap();
        let policy = Policy { age_max: Some(HOUR * 24), ..Policy::default() };
        let aged = |hours| {
            let report = collector.would(&survey, &policy, clock.now().after(HOUR * hours));
            report.condemned.get(&Why::Age).map_or(0, |amount| amount.objects)
        };
        // It is hour 15; it was written in hour 0, and read in hour 10.
        assert_eq!([aged(8), aged(10), aged(18), aged(20)], if read { [0, 0, 0, 1] } else { [0, 1, 1, 1] });
    }
}

#[tokio::test(start_paused = true)]
async fn what_another_one_packed_meanwhile_is_not_packed_again() {
    let shared = Arc::new(flaky::Flaky::default());
    let settings = Settings { object_bytes: 64_000, object_blocks: 1, ..Settings::default() };
    let open = || ObjectTier::open(shared.clone(), "kv", settings, Arc::new(EventLog::new(Epoch(1))));
    let blocks = trickle(&open(), 30, 3).await;
    let (slow, quick) = (open(), open());
    for tier in [&slow, &quick] {
        tier.caught_up().await;
        assert!(loads(tier, &blocks).await);
    }
    tokio::time::sleep(HOUR).await;
    // Its first read takes until it is given up, and made again.
    shared.set(Some(("blocks", flaky::Mood::HangsOnce)));
    let packing = {
        let slow = slow.clone();
        tokio::spawn(async move { slow.compact(HOUR).await })
    };
    tokio::time::sleep(Duration::from_millis(100)).await;
    let all = quick.compact(HOUR).await.unwrap();
    assert_eq!(all, compact::Compaction { objects: 30, blocks: 90 });
    let some = packing.await.unwrap().unwrap();
    assert!((8..22).contains(&some.objects) && some.blocks == some.objects * 3, "its first pack alone: {some:?}");
    assert!(loads(&slow, &blocks).await);
}
