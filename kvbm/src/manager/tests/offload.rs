//! Offloading.

use super::*;
use crate::manager::offload::OffloadRequest;
use crate::tier::{Change, IoHealth, Quota};

#[tokio::test]
async fn flush_waits_until_blocks_are_in_every_tier() {
    let ssd = placed(Level::G3, 0, 0);
    let store = placed(Level::G4, 0, 0);
    let harness = Harness::new(16, 16, vec![ssd.clone(), store.clone()]);
    drop(harness.compute(0..10));
    harness.manager.flush().await;
    assert_eq!(harness.host.as_ref().unwrap().holds(fingerprint(), &hashes(10)), 10);
    assert_eq!(ssd.holds(fingerprint(), &hashes(10)), 10);
    assert_eq!(store.holds(fingerprint(), &hashes(10)), 10);
    assert_eq!(harness.manager.count_in_tiers(&hashes(12)), 10);
}

#[tokio::test(start_paused = true)]
async fn a_trickle_to_a_shared_store_is_batched() {
    let folder = tempfile::tempdir().unwrap();
    let store =
        crate::object::ObjectTier::open_folder(folder.path(), crate::object::Settings::default(), log()).unwrap();
    store.wait_until_ready().await;
    let harness = Harness::new(2_000, 2_000, vec![store.clone()]);
    drop(harness.compute(0..1));
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!(store.holds(fingerprint(), &hashes(1)), 1, "the first block after a pause is stored at once");
    // Three blocks a second, the rate of one conversation.
    let start = Instant::now();
    let before = store.request_counts().requests;
    for n in 1..1_801 {
        drop(harness.compute(n..n + 1));
        tokio::time::sleep_until(start + Duration::from_millis(n as u64 * 333)).await;
    }
    harness.manager.flush().await;
    assert_eq!(store.holds(fingerprint(), &hashes(1_801)), 1_801);
    // A process alone lists writers every second and tombstones every fifth second, in addition to its writes.
    let requested = store.request_counts().requests - before;
    let seconds = start.elapsed().as_secs();
    let written = requested.saturating_sub(seconds * 6 / 5);
    assert!((20..90).contains(&written), "{written} requests for 1,800 blocks, {requested} in all");
}

/// Changes the bytes of the second of these blocks.
fn corrupt_second(harness: &Harness, blocks: &CachedBlocks) {
    harness.device.write(blocks.iter().nth(1).unwrap().slot(), &[1; SIZE]);
}

#[tokio::test]
async fn a_block_whose_bytes_have_changed_in_the_device_is_not_copied() {
    let harness = Harness::new(16, 16, vec![]);
    let host = harness.host.clone().unwrap();
    let held = harness.compute(0..4);
    harness.manager.flush().await;
    for hash in hashes(4) {
        host.discard(fingerprint(), hash);
    }
    corrupt_second(&harness, &held);
    // Computed again by another request, and so offloaded again.
    drop(harness.compute(0..4));
    harness.manager.flush().await;
    let in_order = |mut hashes: Vec<SequenceHash>| {
        hashes.sort();
        hashes
    };
    let intact = [0, 2, 3].map(hash);
    assert_eq!(in_order(host.hashes()), intact);
    assert_eq!(in_order(harness.manager.0.core.pool.hashes()), intact, "nor is it found in the device");
    assert_eq!(harness.counter("corrupt_blocks_total", Level::G1), 1);
}

#[tokio::test]
async fn a_copy_compares_with_the_noted_checksum_or_notes_one() {
    // In G2 there is room for all blocks, or for one after the other.
    for room in [16, 3] {
        let (harness, other) = (Harness::new(16, 0, vec![]), Harness::new(0, room, vec![]));
        let (held, host) = (harness.compute(0..4), other.host.unwrap());
        let copy =
            || host.copy_from_device(&held, 0, |slot, into, observe| harness.device.read_observed(slot, into, observe));
        assert!(copy().corrupt.is_empty(), "their checksums were not known");
        for hash in hashes(4) {
            host.discard(fingerprint(), hash);
        }
        corrupt_second(&harness, &held);
        let copied = copy();
        assert_eq!((copied.resident, copied.corrupt), ([0, 2, 3].map(hash).to_vec(), vec![hash(1)]));
        assert_eq!(host.holds(fingerprint(), &[hash(1)]), 0);
    }
}

#[tokio::test]
async fn without_g2_blocks_are_offloaded_from_the_device() {
    let ssd = placed(Level::G3, 0, 0);
    let harness = Harness::new(16, 0, vec![ssd.clone()]);
    drop(harness.compute(0..10));
    harness.manager.flush().await;
    assert_eq!(ssd.holds(fingerprint(), &hashes(10)), 10);
}

#[tokio::test]
async fn queued_offloads_pin_nothing() {
    let stuck = Faulty::new(placed(Level::G3, 0, 0), 1, Faults { hang: 1.0, ..Faults::default() });
    let harness = Harness::new(16, 0, vec![Arc::new(stuck)]);
    drop(harness.compute(0..16));
    tokio::task::yield_now().await;
    assert_eq!(harness.manager.allocate(16).unwrap().len(), 16);
}

#[tokio::test(start_paused = true)]
async fn a_store_that_hangs_times_out_and_is_counted() {
    let stuck = Faulty::new(placed(Level::G3, 0, 0), 1, Faults { hang: 1.0, ..Faults::default() });
    let harness = Harness::new(16, 16, vec![Arc::new(stuck)]);
    drop(harness.compute(0..4));
    harness.manager.flush().await;
    assert_eq!(harness.counter("offload_dropped_blocks_total", Level::G3), 4);
    assert_eq!(harness.manager.count_in_tiers(&hashes(4)), 4, "G2 has them");
}

#[tokio::test(start_paused = true)]
async fn a_flush_of_one_level_does_not_wait_for_a_store_that_hangs() {
    let ssd = placed(Level::G3, 0, 0);
    let stuck = Faulty::new(placed(Level::G4, 0, 0), 1, Faults { hang: 1.0, ..Faults::default() });
    let harness = Harness::new(16, 16, vec![ssd.clone(), Arc::new(stuck)]);
    drop(harness.compute(0..4));
    let start = Instant::now();
    harness.manager.flush_level(Level::G3).await;
    assert_eq!((ssd.holds(fingerprint(), &hashes(4)), start.elapsed().as_secs()), (4, 0));
    let waiting = tokio::time::timeout(Duration::from_secs(10), harness.manager.flush_level(Level::G4));
    assert!(waiting.await.is_err());
}

#[tokio::test(start_paused = true)]
async fn storing_in_a_busy_tier_is_retried() {
    let inner = placed(Level::G3, 0, 0);
    let busy = Arc::new(Faulty::new(inner.clone(), 1, Faults { busy: 0.5, ..Faults::default() }));
    let harness = Harness::new(64, 64, vec![busy]);
    drop(harness.compute(0..40));
    harness.manager.flush().await;
    let stored = inner.usage().blocks;
    assert_eq!(stored + harness.counter("offload_dropped_blocks_total", Level::G3), 40);
    assert!(stored >= 36, "seven tries each: {stored}");
}

#[tokio::test(start_paused = true)]
async fn only_a_written_block_ends_an_outage_of_writes() {
    let ssd = Arc::new(Faulty::new(placed(Level::G3, 0, 0), 1, Faults::default()));
    let harness = Harness::new(16, 0, vec![ssd.clone()]);
    let _held = harness.compute(0..8);
    let writes = IoHealth::default();
    let request = |n| OffloadRequest { hash: hash(n), domain: DomainId::SHARED };
    let store = async |range: std::ops::Range<usize>| {
        let outcome = harness.manager.0.core.store_in(0, range.map(request).collect()).await;
        (outcome.record(&writes), writes.failure().is_some())
    };
    assert_eq!(store(0..4).await, (Change::Same, false));
    ssd.set(Faults { error: 1.0, ..Faults::default() });
    harness.manager.flush().await;
    let ssd_holds = |n| ssd.holds(fingerprint(), &[hash(n)]) == 1;
    assert!(ssd_holds(0));
    // The worker of the manager may have stored the others before the fault.
    for n in 4..8 {
        ssd.discard(fingerprint(), hash(n));
    }
    assert_eq!(store(4..8).await, (Change::Changed, true));
    assert_eq!(store(4..8).await, (Change::Same, true));
    assert_eq!(store(0..4).await, (Change::Same, true), "the tier has these already");
    assert_eq!(store(0..0).await, (Change::Same, true), "a flush of an empty queue");
    assert_eq!(store(20..24).await, (Change::Same, true), "these are not in memory");
    ssd.set(Faults { busy: 1.0, ..Faults::default() });
    assert_eq!(store(4..8).await, (Change::Same, true), "a tier that is busy writes nothing");
    ssd.set(Faults::default());
    assert_eq!(store(4..8).await, (Change::Changed, false));
    assert!((4..8).all(ssd_holds));
}

#[tokio::test(start_paused = true)]
async fn a_flood_drops_no_offloads_of_another_domain() {
    let domain = |n| BlockAttrs { domain: DomainId::from_bytes([n; 16]), ..BlockAttrs::default() };
    let (flood, quiet) = (domain(1), domain(2));
    let quota = Quota { guaranteed: (16 * SIZE) as u64, maximum: None };
    for level in [Level::G3, Level::G4] {
        let inner = placed(level, 0, 0);
        let second = Duration::from_secs(1);
        let slow = Faulty::new(inner.clone(), 1, Faults { latency: second..=second, ..Faults::default() });
        let mut harness = Harness::new(64, 0, vec![Arc::new(slow)]);
        harness.manager = harness.manager.with_quotas(&Quotas::default().with_quota(quiet.domain, Level::G1, quota));
        // 64 requests fill the queue, and the tier takes 16 of them a second.
        for n in 0..40 {
            drop(harness.compute_for(1_000 + n * 32..1_032 + n * 32, flood));
            if n == 20 {
                drop(harness.compute_for(0..12, quiet));
            }
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
        assert_eq!(inner.holds(fingerprint(), &hashes(12)), 12, "{level}: without waiting for the whole flood");
        harness.manager.flush().await;
        assert!(harness.counter("offload_dropped_blocks_total", level) > 1_000, "{level}: it was a flood");
    }
}

#[tokio::test]
async fn blocks_are_stored_once_and_many_at_a_time() {
    struct CountingTier(Arc<PlacedTier>, Mutex<Vec<usize>>);
    impl Tier for CountingTier {
        delegate!(0: level, holds, load, discard, withdraw, expire_one, expire, usage);

        fn store(&self, blocks: Vec<Block>) -> BoxFuture<'_, Vec<Result<(), StoreError>>> {
            self.1.lock().push(blocks.len());
            self.0.store(blocks)
        }
    }
    let ssd = Arc::new(CountingTier(placed(Level::G3, 0, 0), Mutex::default()));
    let harness = Harness::new(256, 256, vec![ssd.clone()]);
    drop(harness.compute(0..100));
    harness.manager.flush().await;
    drop(harness.compute(0..100));
    harness.manager.flush().await;
    let stores = ssd.1.lock().clone();
    assert_eq!(stores.iter().sum::<usize>(), 100);
    assert!(stores.len() <= 2, "{stores:?}");
}

#[tokio::test]
async fn a_task_panic_disables_the_tiers_but_not_the_device() {
    struct PanickingTier;
    impl Tier for PanickingTier {
        fn level(&self) -> Level {
            Level::G3
        }
        fn holds(&self, _: Fingerprint, _: &[SequenceHash]) -> usize {
            0
        }
        fn load(&self, _: Fingerprint, _: Vec<SequenceHash>) -> BoxStream<'static, Loaded> {
            futures::stream::empty().boxed()
        }
        fn store(&self, _: Vec<Block>) -> BoxFuture<'_, Vec<Result<(), StoreError>>> {
            panic!("a defect")
        }
        fn discard(&self, _: Fingerprint, _: SequenceHash) {}
        fn expire(&self, _: Date) -> usize {
            0
        }
        fn usage(&self) -> Usage {
            Usage::default()
        }
    }
    let harness = Harness::new(16, 16, vec![Arc::new(PanickingTier)]);
    let held = harness.compute(0..4);
    harness.manager.flush().await;
    assert_eq!(harness.manager.count_in_tiers(&hashes(4)), 0);
    assert_eq!(harness.manager.lookup(&hashes(4)).len(), 4);
    drop((held, harness.compute(4..8)));
    harness.manager.flush().await;
}

#[tokio::test]
async fn dropping_the_last_handle_stops_the_tasks() {
    let ssd = placed(Level::G3, 0, 0);
    let harness = Harness::new(16, 16, vec![ssd.clone()]);
    let peer = harness.manager.peer();
    drop(harness.compute(0..4));
    harness.manager.flush().await;
    let device = Arc::downgrade(&harness.device);
    let tier = Arc::downgrade(&ssd);
    drop((harness, ssd));
    // The tasks end when they run next.
    while tier.strong_count() + device.strong_count() > 0 {
        tokio::task::yield_now().await;
    }
    assert_eq!(peer.holds(fingerprint(), &hashes(4)), 0);
}

#[tokio::test]
async fn the_series_of_alerts_exist_from_the_start() {
    let harness = Harness::new(16, 16, vec![placed(Level::G3, 0, 0)]);
    let families = harness.registry.gather();
    for metric in ["corrupt_blocks_total", "undecryptable_blocks_total", "offload_dropped_blocks_total"] {
        let metric = &format!("blockyard_tier_{metric}");
        let family = families.iter().find(|family| family.name() == metric).expect(metric);
        assert_eq!(family.get_metric().len(), 2, "{metric} of G2 and G3");
    }
}
