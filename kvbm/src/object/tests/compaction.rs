//! Compaction: small objects become large ones, no block is missed meanwhile, and it takes few requests.

use super::*;
use crate::block::Clock;
use crate::object::gc::{MarkReason, Policy};

/// After this time, other processes compact the objects of a writer.
const HOUR: Duration = Duration::from_hours(1);

/// Stores `batches` batches of `blocks` blocks each.
async fn write_small_objects(tier: &ObjectTier, batches: u64, blocks: usize) -> Vec<Block> {
    let mut all = Vec::new();
    for seed in 0..batches {
        let some = chain_of(fingerprint(), seed, blocks, 1_000);
        assert!(tier.store(some.clone()).await.iter().all(Result::is_ok));
        all.extend(some);
    }
    all
}

async fn pass(collector: &Collector, minutes: u64) -> GcReport {
    let inventory = collector.scan(|_, _| ()).await.unwrap();
    let now = Clock::system().now().after(Duration::from_mins(minutes));
    collector.collect(&inventory, &Policy::default(), now).await.unwrap()
}

async fn all_load(tier: &ObjectTier, blocks: &[Block]) -> bool {
    let loaded = load(tier, fingerprint(), hashes(blocks)).await;
    loaded.iter().zip(blocks).all(|(loaded, block)| loaded.as_ref().is_some_and(|it| it.payload() == block.payload))
}

#[tokio::test(start_paused = true)]
async fn compaction_takes_a_tenth_of_a_request_per_block() {
    let shared = Arc::new(flaky::Flaky::default());
    let (tier, events) = open_on(shared.clone());
    tier.wait_until_ready().await;
    let before = shared.requests();
    let blocks = write_small_objects(&tier, 40, 64).await;
    // Requests of readers are counted separately.
    let mut elsewhere = 0;
    let start = shared.requests();
    let (reader, learned) = open_on(shared.clone());
    reader.wait_until_ready().await;
    let written = shared.requests();
    assert!(all_load(&reader, &blocks).await);
    let scattered = shared.requests() - written;
    elsewhere += shared.requests() - start;

    assert_eq!(tier.compact(HOUR).await.unwrap(), Compaction { objects: 40, blocks: 2_560 });
    assert_eq!(tier.compact(HOUR).await.unwrap(), Compaction::default(), "nothing is left to compact");
    let collector = Collector::open(shared.clone(), "kv", Duration::from_secs(10));
    assert_eq!(pass(&collector, 0).await.marked.len(), 0, "followers do not know the copies");
    let start = shared.requests();
    assert!(all_load(&reader, &blocks).await, "followers have not polled");
    elsewhere += shared.requests() - start;
    let report = pass(&collector, 2).await;
    let copied = report.marked.get(&MarkReason::Duplicate).map(|amount| amount.objects);
    assert_eq!((copied, report.marked.len()), (Some(40), 1));
    tokio::time::sleep(Duration::from_secs(10)).await;
    assert_eq!(pass(&collector, 200).await.deleted.objects, 40);
    let requests = shared.requests() - before - elsewhere;
    assert!(requests < 256, "{requests} requests for 2,560 blocks");

    let start = shared.requests();
    assert!(all_load(&reader, &blocks).await && all_load(&tier, &blocks).await);
    let compact = shared.requests() - start;
    assert!(compact < scattered / 2, "{compact} requests to read twice what took {scattered}");
    for (tier, events) in [(&tier, &events), (&reader, &learned)] {
        assert_eq!((tier.missing_objects(), tier.usage().blocks), (0, 2_560));
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
    let inventory = collector.scan(|_, _| ()).await.unwrap();
    assert_eq!((inventory.objects.len(), inventory.manifests.len(), inventory.tombstone_lists.len()), (1, 1, 0));
}

#[tokio::test(start_paused = true)]
async fn few_large_or_foreign_objects_are_not_compacted() {
    let folder = tempfile::tempdir().unwrap();
    let settings = Settings { object_bytes: 200_000, ..Settings::default() };
    let (other, _) = open_in(folder.path(), settings);
    write_small_objects(&other, 9, 3).await;
    drop(other);
    let (tier, _) = open_in(folder.path(), settings);
    tier.wait_until_ready().await;
    let few: Vec<Block> = (100..107).flat_map(|seed| chain_of(fingerprint(), seed, 3, 1_000)).collect();
    for some in few.chunks(3) {
        store(&*tier, some.to_vec()).await;
    }
    store(&*tier, chain_of(fingerprint(), 200, 96, 1_000)).await;
    assert_eq!(tier.compact(HOUR).await.unwrap(), Compaction::default());
    // The eighth small object; one of its blocks is corrupt.
    let last = chain_of(fingerprint(), 107, 3, 1_000);
    store(&*tier, last.clone()).await;
    let bad =
        files(folder.path(), "blocks").into_iter().rfind(|path| fs::metadata(path).unwrap().len() < 20_000).unwrap();
    let mut bytes = fs::read(&bad).unwrap();
    bytes[Header::LEN + 5] ^= 1;
    fs::write(&bad, &bytes).unwrap();
    let (slow, _) = open_in(folder.path(), settings);
    slow.wait_until_ready().await;
    assert_eq!(tier.compact(HOUR).await.unwrap(), Compaction { objects: 8, blocks: 23 });
    let collector = Collector::open(
        Arc::new(LocalFileSystem::new_with_prefix(folder.path()).unwrap()),
        "",
        Duration::from_secs(10),
    );
    assert_eq!(
        pass(&collector, 2).await.marked[&MarkReason::Duplicate].objects,
        7,
        "the object with the corrupt block is kept"
    );
    assert_eq!(pass(&collector, 200).await.deleted.objects, 7);
    // A read in time returns the block, a late one misses; soon all blocks are found.
    let found = load(&*slow, fingerprint(), hashes(&few)).await;
    assert!(found.iter().zip(&few).all(|(found, block)| found.as_ref().is_none_or(|it| it.payload() == block.payload)));
    tokio::time::sleep(Duration::from_secs(10)).await;
    assert!(all_load(&slow, &few).await && all_load(&tier, &few).await);
}

#[tokio::test(start_paused = true)]
async fn a_reader_compacts_objects_of_ended_writers() {
    let shared = Arc::new(flaky::Flaky::default());
    let mut blocks = Vec::new();
    for seed in 0..9 {
        let (short_lived, _) = open_on(shared.clone());
        let some = chain_of(fingerprint(), seed, 3, 1_000);
        store(&*short_lived, some.clone()).await;
        blocks.extend(some);
    }
    let (tier, _) = open_on(shared.clone());
    tier.wait_until_ready().await;
    tokio::time::sleep(HOUR / 2).await;
    let (cold, _) = open_on(shared.clone());
    cold.wait_until_ready().await;
    assert!(all_load(&tier, &blocks).await);
    assert_eq!(tier.compact(HOUR).await.unwrap(), Compaction::default(), "the writers may be alive");
    tokio::time::sleep(HOUR).await;
    assert_eq!(cold.compact(HOUR).await.unwrap(), Compaction::default(), "this process did not read them");
    assert_eq!(tier.compact(HOUR).await.unwrap(), Compaction { objects: 9, blocks: 27 });
    assert_eq!(tier.compact(HOUR).await.unwrap(), Compaction::default());
    let before = shared.requests();
    assert!(all_load(&tier, &blocks).await);
    assert_eq!(shared.requests() - before, 1);
}

#[tokio::test(start_paused = true)]
async fn large_blocks_take_less_than_a_tenth_of_a_request() {
    let shared = Arc::new(flaky::Flaky::default());
    let (tier, _) = open_on(shared.clone());
    tier.wait_until_ready().await;
    // The content does not matter, and creating it would take long.
    let payload = Bytes::from(vec![7; 2 << 20]);
    let block = |n: &SequenceHash| Block::new(*n, None, fingerprint(), payload.clone());
    let names = hashes(&chain_of(fingerprint(), 1, 256, 10));
    let before = shared.requests();
    for some in names.chunks(64) {
        assert!(tier.store(some.iter().map(block).collect()).await.iter().all(Result::is_ok));
    }
    let written = shared.requests() - before;
    assert!(all_found(&load(&*tier, fingerprint(), names.clone()).await));
    let read = shared.requests() - before - written;
    assert!(written < 256 / 10 && read < 256 / 10, "{written} requests to write 256 blocks, {read} to read them");
}

#[test]
fn range_size_grows_with_the_block_and_load_size() {
    let of = |blocks: u64, bytes: u64| range_bytes((0..blocks).map(|_| bytes)) >> 20;
    assert_eq!([of(1, 2 << 20), of(64, 2 << 20), of(256, 2 << 20), of(4_096, 2 << 20)], [4, 8, 32, 32]);
    assert_eq!([of(4_096, 64 << 10), of(1, 64 << 20)], [4, 4], "small blocks are many in a request already");
}

#[tokio::test(start_paused = true)]
async fn compaction_keeps_the_time_of_the_last_use() {
    // For any clock of the store.
    let start = Clock::system().now();
    for (read, stands) in [false, true]
        .into_iter()
        .flat_map(|read| [start.before(HOUR * 99), start.after(HOUR * 99)].map(|at| (read, at)))
    {
        let (shared, (clock, _ticks)) =
            (Arc::new(flaky::Flaky::default()), super::gc_schedule::virtual_clock_from(stands));
        shared.use_clock(&clock);
        let ((tier, _), (other, _)) = (open_on(shared.clone()), open_on(shared.clone()));
        let blocks = write_small_objects(&tier, 9, 3).await;
        tokio::time::sleep(HOUR * 10).await;
        if read {
            assert!(all_load(&other, &blocks).await);
            other.access_log.flush().await;
        }
        tokio::time::sleep(HOUR * 5).await;
        assert_eq!(tier.compact(HOUR).await.unwrap().blocks, 27);
        let collector = Collector::open(shared.clone(), "kv", Duration::from_secs(10));
        let inventory = collector.scan(|_, _| ()).await.unwrap();
        let policy = Policy { max_age: Some(HOUR * 24), ..Policy::default() };
        let aged = |hours| {
            let report = collector.dry_run(&inventory, &policy, clock.now().after(HOUR * hours));
            report.marked.get(&MarkReason::MaxAge).map_or(0, |amount| amount.objects)
        };
        // It is hour 15. The blocks were written in hour 0, and read in hour 10.
        assert_eq!([aged(8), aged(10), aged(18), aged(20)], if read { [0, 0, 0, 1] } else { [0, 1, 1, 1] });
    }
}

#[tokio::test(start_paused = true)]
async fn blocks_compacted_by_another_process_are_skipped() {
    let shared = Arc::new(flaky::Flaky::default());
    let settings = Settings { object_bytes: 64_000, object_blocks: 1, ..Settings::default() };
    let open = || ObjectTier::open(shared.clone(), "kv", settings, Arc::new(EventLog::new(Epoch(1))));
    let blocks = write_small_objects(&open(), 30, 3).await;
    let (slow, quick) = (open(), open());
    for tier in [&slow, &quick] {
        tier.wait_until_ready().await;
        assert!(all_load(tier, &blocks).await);
    }
    tokio::time::sleep(HOUR).await;
    // Its first read hangs until the timeout, and is retried.
    shared.set_fault(Some(("blocks", flaky::Fault::HangsOnce)));
    let packing = {
        let slow = slow.clone();
        tokio::spawn(async move { slow.compact(HOUR).await })
    };
    tokio::time::sleep(Duration::from_millis(100)).await;
    let all = quick.compact(HOUR).await.unwrap();
    assert_eq!(all, Compaction { objects: 30, blocks: 90 });
    let some = packing.await.unwrap().unwrap();
    assert!((8..22).contains(&some.objects) && some.blocks == some.objects * 3, "its first pack alone: {some:?}");
    assert!(all_load(&slow, &blocks).await);
}
