//! Onboarding: no wrong block is served, no load hangs, a hit is never slower than a miss.

use super::*;

#[tokio::test(start_paused = true)]
async fn onboarding_without_tiers_loads_nothing() {
    let harness = Harness::new(16, 16, vec![]);
    let onboarded = harness.manager.onboard(&hashes(4), ms(10)).await;
    assert!(onboarded.blocks.is_empty() && onboarded.from.is_empty());
}

#[tokio::test(start_paused = true)]
async fn blocks_come_back_from_g2_as_they_were() {
    let harness = Harness::new(8, 32, vec![]);
    drop(harness.compute(0..8));
    harness.manager.flush().await;
    drop(harness.manager.allocate(8));
    assert_eq!(harness.manager.lookup(&hashes(8)).len(), 0);
    let onboarded = harness.manager.onboard(&hashes(8), ms(10)).await;
    assert_eq!(onboarded.from, [(Level::G2, 8)]);
    harness.assert_sound(&onboarded.blocks);
    assert_eq!(harness.manager.lookup(&hashes(8)).len(), 8);
}

/// Device memory that blocks writes until it is opened.
struct GatedDevice {
    memory: Arc<InMemory>,
    waits: AtomicBool,
    open: AtomicBool,
}
impl DeviceBlocks for GatedDevice {
    fn capacity(&self) -> usize {
        self.memory.capacity()
    }
    fn block_bytes(&self) -> usize {
        self.memory.block_bytes()
    }
    fn fingerprint(&self) -> Fingerprint {
        fingerprint()
    }
    fn read(&self, slot: BlockId, into: &mut [u8]) {
        self.memory.read(slot, into);
    }
    fn write(&self, slot: BlockId, from: &[u8]) {
        self.waits.store(true, Ordering::SeqCst);
        while !self.open.load(Ordering::SeqCst) {
            std::thread::yield_now();
        }
        self.memory.write(slot, from);
    }
}

impl GatedDevice {
    fn new(slots: usize) -> Arc<Self> {
        let waits = AtomicBool::new(false);
        let open = AtomicBool::new(false);
        Arc::new(Self { memory: InMemory::new(slots, SIZE, fingerprint()), waits, open })
    }

    async fn wait_for_write(&self) {
        while !self.waits.load(Ordering::SeqCst) {
            tokio::time::advance(Duration::from_millis(1)).await;
        }
    }
}

#[tokio::test(start_paused = true)]
async fn blocks_being_written_need_no_further_slot() {
    let device = GatedDevice::new(8);
    let below = placed(Level::G3, 1, 0);
    below.fill(0..8).await;
    let metrics = Metrics::new(&Registry::new()).unwrap();
    let manager = BlockManager::new(device.clone(), None, vec![below], log(), metrics);
    let wake = Arc::new(Notify::new());
    let onboarding = manager.start_onboarding(&hashes(8), UNKNOWN, wake.clone(), &UNTRACED).unwrap();
    device.wait_for_write().await;
    onboarding.start_waiting();
    for _ in 0..100 {
        // The task learns of the start of the wait while the first blocks are still being written.
        tokio::task::yield_now().await;
    }
    device.open.store(true, Ordering::SeqCst);
    while onboarding.should_wait() {
        wake.notified().await;
    }
    assert_eq!(manager.lookup(&hashes(8)).len(), 8, "all slots are for these blocks");
}

#[tokio::test(start_paused = true)]
async fn dropping_an_onboarding_releases_loaded_blocks_at_once() {
    let below = placed(Level::G3, 1, 0);
    below.fill(0..8).await;
    let harness = Harness::new(32, 32, vec![below]);
    let onboarding = harness.manager.start_onboarding(&hashes(8), UNKNOWN, Arc::default(), &UNTRACED).unwrap();
    while onboarding.held_blocks() < 8 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    assert_eq!(harness.manager.available(), 24);
    drop(onboarding);
    // No other task has run since.
    assert_eq!(harness.manager.available(), 32);
    harness.manager.flush().await;
    assert_eq!(harness.host.as_ref().unwrap().holds(fingerprint(), &hashes(8)), 8, "loaded blocks are offloaded to G2");
    assert_eq!(harness.counter("offload_dropped_blocks_total", Level::G2), 0);
}

#[tokio::test(start_paused = true)]
async fn a_load_without_free_slots_releases_its_claim() {
    let below = placed(Level::G3, 1, 0);
    below.fill(0..8).await;
    let harness = Harness::new(16, 0, vec![below]);
    let waiting = harness.manager.start_onboarding(&hashes(4), UNKNOWN, Arc::default(), &UNTRACED).unwrap();
    // The blocks are requested, and arrive later.
    tokio::task::yield_now().await;
    let all = harness.manager.allocate(16).unwrap();
    tokio::time::sleep(Duration::from_millis(10)).await;
    drop(all);
    let onboarded = harness.manager.onboard(&hashes(8), ms(100)).await;
    assert_eq!(onboarded.from, [(Level::G3, 8)]);
    drop(waiting);
}

#[tokio::test(start_paused = true)]
async fn loads_without_free_slots_are_not_repeated() {
    let below = placed(Level::G3, 10, 20);
    below.fill(0..8).await;
    let harness = Harness::new(128, 0, vec![below]);
    // Its speed is measured from here on: with computing as fast, the tail is worth loading.
    drop(harness.manager.onboard(&hashes(8), UNKNOWN).await);
    drop(harness.manager.allocate(128));
    let begin = || harness.manager.start_onboarding(&hashes(8), ms(20), Arc::default(), &UNTRACED).unwrap();
    let waiting: Vec<_> = (0..4).map(|_| begin()).collect();
    tokio::task::yield_now().await;
    let all = harness.manager.allocate(128).unwrap();
    tokio::time::sleep(Duration::from_secs(1)).await;
    let requested = || harness.counter("hit_blocks_total", Level::G3) + harness.counter("miss_blocks_total", Level::G3);
    drop(waiting);
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert!(requested() <= 8 + 8, "the other loads requested {} too", requested() - 16);
    // Nor when the engines are ready.
    let before = requested();
    let computing: Vec<_> = (0..4).map(|_| begin()).collect();
    computing.iter().for_each(Onboarding::start_waiting);
    tokio::time::sleep(Duration::from_secs(1)).await;
    drop(computing);
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(requested(), before);
    drop(all);
}

#[tokio::test(start_paused = true)]
async fn a_block_written_after_a_cancellation_counts_as_a_hit() {
    let below = placed(Level::G3, 1, 100_000);
    below.fill(0..8).await;
    let device = GatedDevice::new(32);
    let registry = Registry::new();
    let manager = BlockManager::new(device.clone(), None, vec![below], log(), Metrics::new(&registry).unwrap());
    let onboarding = manager.start_onboarding(&hashes(8), UNKNOWN, Arc::default(), &UNTRACED).unwrap();
    device.wait_for_write().await;
    let rest = manager.allocate(manager.available()).unwrap();
    for _ in 0..20 {
        // The second block arrives, and there is no slot for it.
        tokio::time::advance(Duration::from_secs(7)).await;
    }
    device.open.store(true, Ordering::SeqCst);
    while onboarding.held_blocks() == 0 {
        tokio::task::yield_now().await;
    }
    onboarding.stop().await;
    let count = |metric: &str| counted(&registry, metric, Level::G3);
    assert_eq!(
        (count("hit_blocks_total"), count("miss_blocks_total")),
        (1, 6),
        "and a block without a slot is no miss"
    );
    assert_eq!(count("transfer_bytes_total"), SIZE as u64);
    drop(rest);
}

#[tokio::test(start_paused = true)]
async fn each_block_comes_from_the_fastest_tier_that_holds_it() {
    let ssd = placed(Level::G3, 1, 0);
    let store = placed(Level::G4, 2, 0);
    store.fill(0..10).await;
    ssd.fill(3..6).await;
    let harness = Harness::new(16, 16, vec![ssd.clone(), store]);
    drop(harness.compute(0..1));
    let onboarded = harness.manager.onboard(&hashes(12), ms(10)).await;
    assert_eq!(onboarded.from, [(Level::G1, 1), (Level::G4, 2), (Level::G3, 3), (Level::G4, 4)]);
    harness.assert_sound(&onboarded.blocks);
    harness.manager.flush().await;
    assert_eq!(harness.host.as_ref().unwrap().holds(fingerprint(), &hashes(10)), 10, "onboarded blocks go up into G2");
    assert_eq!(ssd.holds(fingerprint(), &hashes(10)), 10, "and to tiers that lack them");
}

#[tokio::test(start_paused = true)]
async fn a_corrupt_block_is_loaded_from_the_next_tier() {
    for faults in [
        Faults { corrupt: 1.0, ..Faults::default() },
        Faults { wrong: 1.0, ..Faults::default() },
        Faults { short: 1.0, ..Faults::default() },
    ] {
        let ssd = placed(Level::G3, 0, 0);
        let store = placed(Level::G4, 5, 0);
        ssd.fill(0..8).await;
        store.fill(0..5).await;
        let harness = Harness::new(16, 0, vec![Arc::new(Faulty::new(ssd.clone(), 7, faults.clone())), store]);
        let onboarded = harness.manager.onboard(&hashes(8), ms(10)).await;
        assert_eq!(onboarded.from, [(Level::G4, 5)], "{faults:?}");
        harness.assert_sound(&onboarded.blocks);
        assert_eq!(harness.counter("corrupt_blocks_total", Level::G3), 8);
        drop(onboarded);
        assert_eq!(ssd.holds(fingerprint(), &hashes(8)[5..]), 0, "discarded, and not stored again");
    }
}

#[tokio::test(start_paused = true)]
async fn a_block_lost_meanwhile_ends_the_loaded_prefix() {
    let inner = placed(Level::G3, 0, 0);
    inner.fill(0..8).await;
    let lossy = Faulty::new(inner, 3, Faults { lost: 0.3, ..Faults::default() });
    let harness = Harness::new(16, 0, vec![Arc::new(lossy)]);
    let onboarded = harness.manager.onboard(&hashes(8), ms(10)).await;
    assert!(onboarded.blocks.len() < 8);
    assert!(onboarded.blocks.iter().zip(hashes(8)).all(|(block, hash)| block.hash() == hash));
    let in_use = onboarded.blocks.len();
    assert_eq!(harness.manager.available(), 16 - in_use, "slots of blocks that follow a hole went back");
}

/// Virtual time until the last block is in G1, loaded or computed, and how many were loaded.
async fn first_token(harness: &Harness, blocks: usize, recompute: Recompute) -> (Duration, usize) {
    let start = Instant::now();
    let loaded = harness.manager.onboard(&hashes(blocks), recompute).await.blocks.len();
    let computing = Duration::from_secs_f64((blocks - loaded) as f64 * recompute.seconds_per_block.unwrap());
    (start.elapsed() + computing, loaded)
}

#[tokio::test(start_paused = true)]
async fn a_hanging_tier_does_not_delay_other_tiers() {
    let fast = placed(Level::G3, 1, 1);
    let inner = placed(Level::G4, 0, 0);
    fast.fill(0..50).await;
    inner.fill(50..100).await;
    let hanging = Faulty::new(inner, 1, Faults { hang: 1.0, ..Faults::default() });
    let harness = Harness::new(200, 0, vec![fast, Arc::new(hanging)]);
    let (time, loaded) = first_token(&harness, 100, ms(10)).await;
    assert_eq!(loaded, 50);
    assert!(time <= Duration::from_secs(1) + WaitBudget::BASE, "{time:?}");
}

#[tokio::test(start_paused = true)]
async fn the_wait_is_bounded_while_the_cost_is_unknown() {
    let inner = placed(Level::G3, 0, 0);
    inner.fill(0..8).await;
    let hanging = Faulty::new(inner, 1, Faults { hang: 1.0, ..Faults::default() });
    let harness = Harness::new(16, 0, vec![Arc::new(hanging)]);
    let start = Instant::now();
    assert!(harness.manager.onboard(&hashes(8), UNKNOWN).await.blocks.is_empty());
    assert_eq!(start.elapsed(), WaitBudget::BASE);
}

#[tokio::test(start_paused = true)]
async fn dropping_an_onboarding_frees_its_slots() {
    let slow = placed(Level::G3, 1, 50);
    slow.fill(0..8).await;
    let harness = Harness::new(16, 0, vec![slow]);
    let requested = hashes(8);
    let cut = tokio::time::timeout(Duration::from_millis(120), harness.manager.onboard(&requested, ms(1_000))).await;
    assert!(cut.is_err());
    while harness.manager.available() < 16 {
        tokio::task::yield_now().await;
    }
}

#[tokio::test(start_paused = true)]
async fn requests_for_the_same_blocks_load_them_once() {
    let slow = placed(Level::G3, 10, 10);
    slow.fill(0..40).await;
    let harness = Harness::new(100, 0, vec![slow]);
    let (all, some) = (hashes(40), hashes(20));
    let start = Instant::now();
    let (one, other) = tokio::join!(harness.manager.onboard(&all, ms(100)), harness.manager.onboard(&some, ms(100)));
    assert_eq!(start.elapsed(), Duration::from_millis(400));
    assert_eq!((one.from, other.from), (vec![(Level::G3, 40)], vec![(Level::G1, 20)]));
    assert_eq!(harness.counter("hit_blocks_total", Level::G3), 40);
}

#[tokio::test(start_paused = true)]
async fn a_follower_takes_over_when_the_first_load_is_dropped() {
    let slow = placed(Level::G3, 10, 10);
    slow.fill(0..40).await;
    let harness = Harness::new(100, 0, vec![slow]);
    let requested = hashes(40);
    let first = tokio::time::timeout(Duration::from_millis(205), harness.manager.onboard(&requested, ms(100)));
    let (first, second) = tokio::join!(first, harness.manager.onboard(&requested, ms(100)));
    assert!(first.is_err());
    assert_eq!(second.blocks.len(), 40);
    assert!(matches!(second.from[..], [(Level::G1, kept), (Level::G3, _)] if kept >= 15), "{:?}", second.from);
    harness.assert_sound(&second.blocks);
}

#[tokio::test(start_paused = true)]
async fn a_follower_waits_no_longer_than_the_first_load() {
    let inner = placed(Level::G3, 0, 0);
    inner.fill(0..40).await;
    let hanging = Faulty::new(inner, 1, Faults { hang: 1.0, ..Faults::default() });
    let harness = Harness::new(100, 0, vec![Arc::new(hanging)]);
    let requested = hashes(40);
    let start = Instant::now();
    let (one, other) =
        tokio::join!(harness.manager.onboard(&requested, ms(10)), harness.manager.onboard(&requested, ms(10)));
    assert_eq!((one.blocks.len(), other.blocks.len()), (0, 0));
    assert_eq!(start.elapsed(), WaitBudget::BASE);
}

#[tokio::test(start_paused = true)]
async fn a_small_device_takes_what_fits() {
    let ssd = placed(Level::G3, 1, 0);
    ssd.fill(0..20).await;
    let harness = Harness::new(16, 0, vec![ssd]);
    let held = harness.manager.allocate(6).unwrap();
    let onboarded = harness.manager.onboard(&hashes(20), ms(10)).await;
    assert_eq!(onboarded.blocks.len(), 10);
    drop(held);
}

#[tokio::test(start_paused = true)]
async fn speeds_are_as_measured() {
    let ssd = placed(Level::G3, 20, 2);
    ssd.fill(0..151).await;
    let harness = Harness::new(200, 0, vec![ssd]);
    assert!(harness.manager.speeds().is_empty());
    assert_eq!(harness.manager.onboard(&hashes(101), ms(10)).await.blocks.len(), 101);
    let speeds = harness.manager.speeds();
    assert_eq!((speeds[0].level, speeds[0].latency), (Level::G3, Duration::from_millis(20)));
    assert!((speeds[0].bytes_per_second - SIZE as f64 / 0.002).abs() < 1.0, "{speeds:?}");
    let all = hashes(151);
    let amid = async {
        tokio::time::sleep(Duration::from_millis(50)).await;
        harness.manager.speeds()[0].queued
    };
    let (_, queued) = tokio::join!(harness.manager.onboard(&all, ms(10)), amid);
    assert!((20..50).contains(&queued), "of 50 blocks {queued} were still to come");
    assert_eq!((speeds[0].queued, harness.manager.speeds()[0].queued), (0, 0), "no load waits before and after");
}
