//! Blocks on their way up: nothing wrong is served, nothing hangs, a hit is never slower than a miss.

use super::*;

#[tokio::test(start_paused = true)]
async fn nothing_below_brings_nothing() {
    let site = Site::new(16, 16, vec![]);
    let onboarded = site.manager.onboard(&names(4), ms(10)).await;
    assert!(onboarded.blocks.is_empty() && onboarded.from.is_empty());
}

#[tokio::test(start_paused = true)]
async fn blocks_come_back_from_g2_as_they_were() {
    let site = Site::new(8, 32, vec![]);
    drop(site.compute(0..8));
    site.manager.flush().await;
    drop(site.manager.allocate(8));
    assert_eq!(site.manager.matched(&names(8)).len(), 0);
    let onboarded = site.manager.onboard(&names(8), ms(10)).await;
    assert_eq!(onboarded.from, [(Level::G2, 8)]);
    site.assert_sound(&onboarded.blocks);
    assert_eq!(site.manager.matched(&names(8)).len(), 8);
}

/// Device memory that takes nothing until it is told to.
struct Closed {
    memory: Arc<InMemory>,
    waits: AtomicBool,
    open: AtomicBool,
}
impl DeviceBlocks for Closed {
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

impl Closed {
    fn new(slots: usize) -> Arc<Self> {
        let (waits, open) = (AtomicBool::new(false), AtomicBool::new(false));
        Arc::new(Self { memory: InMemory::new(slots, SIZE, fingerprint()), waits, open })
    }

    async fn is_written_to(&self) {
        while !self.waits.load(Ordering::SeqCst) {
            tokio::time::advance(Duration::from_millis(1)).await;
        }
    }
}

#[tokio::test(start_paused = true)]
async fn blocks_that_are_being_written_when_the_turn_comes_take_no_room_from_the_rest() {
    let device = Closed::new(8);
    let below = at(Level::G3, 1, 0);
    below.keeps(0..8).await;
    let metrics = Metrics::new(&Registry::new()).unwrap();
    let manager = BlockManager::new(device.clone(), None, vec![below], log(), metrics);
    let wake = Arc::new(Notify::new());
    let onboarding = manager.begin(&names(8), UNKNOWN, wake.clone()).unwrap();
    device.is_written_to().await;
    onboarding.turn();
    for _ in 0..100 {
        // The task hears of its turn while the first blocks are still being written.
        tokio::task::yield_now().await;
    }
    device.open.store(true, Ordering::SeqCst);
    while onboarding.is_worth_waiting() {
        wake.notified().await;
    }
    assert_eq!(manager.matched(&names(8)).len(), 8, "all slots are for these blocks");
}

#[tokio::test(start_paused = true)]
async fn who_lets_go_of_what_came_makes_room_at_once() {
    let below = at(Level::G3, 1, 0);
    below.keeps(0..8).await;
    let site = Site::new(32, 32, vec![below]);
    let onboarding = site.manager.begin(&names(8), UNKNOWN, Arc::default()).unwrap();
    while onboarding.held() < 8 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    assert_eq!(site.manager.available(), 24);
    drop(onboarding);
    // Nobody else has had a turn to run since.
    assert_eq!(site.manager.available(), 32);
    site.manager.flush().await;
    assert_eq!(
        site.host.as_ref().unwrap().holds(fingerprint(), &names(8)),
        8,
        "what came is kept where it was not yet"
    );
    assert_eq!(site.counter("offload_dropped_blocks_total", Level::G2), 0);
}

#[tokio::test(start_paused = true)]
async fn who_found_no_room_for_blocks_leaves_them_to_others() {
    let below = at(Level::G3, 1, 0);
    below.keeps(0..8).await;
    let site = Site::new(16, 0, vec![below]);
    let waiting = site.manager.begin(&names(4), UNKNOWN, Arc::default()).unwrap();
    // It has asked, and what it asked for comes later.
    tokio::task::yield_now().await;
    let all = site.manager.allocate(16).unwrap();
    tokio::time::sleep(Duration::from_millis(10)).await;
    drop(all);
    let onboarded = site.manager.onboard(&names(8), ms(100)).await;
    assert_eq!(onboarded.from, [(Level::G3, 8)]);
    drop(waiting);
}

#[tokio::test(start_paused = true)]
async fn where_there_is_no_room_nobody_repeats_what_found_none() {
    let below = at(Level::G3, 10, 20);
    below.keeps(0..8).await;
    let site = Site::new(128, 0, vec![below]);
    // What it takes is known from here on: with computing as quick, the end is worth loading meanwhile.
    drop(site.manager.onboard(&names(8), UNKNOWN).await);
    drop(site.manager.allocate(128));
    let begin = || site.manager.begin(&names(8), ms(20), Arc::default()).unwrap();
    let waiting: Vec<_> = (0..4).map(|_| begin()).collect();
    tokio::task::yield_now().await;
    let all = site.manager.allocate(128).unwrap();
    tokio::time::sleep(Duration::from_secs(1)).await;
    let asked = || site.counter("hit_blocks_total", Level::G3) + site.counter("miss_blocks_total", Level::G3);
    drop(waiting);
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert!(asked() <= 8 + 8, "the others asked for {} too", asked() - 16);
    // Nor at their turns.
    let before = asked();
    let computing: Vec<_> = (0..4).map(|_| begin()).collect();
    computing.iter().for_each(Onboarding::turn);
    tokio::time::sleep(Duration::from_secs(1)).await;
    drop(computing);
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(asked(), before);
    drop(all);
}

#[tokio::test(start_paused = true)]
async fn a_block_that_is_written_after_others_were_taken_back_is_a_hit() {
    let below = at(Level::G3, 1, 100_000);
    below.keeps(0..8).await;
    let (device, registry) = (Closed::new(32), Registry::new());
    let manager = BlockManager::new(device.clone(), None, vec![below], log(), Metrics::new(&registry).unwrap());
    let onboarding = manager.begin(&names(8), UNKNOWN, Arc::default()).unwrap();
    device.is_written_to().await;
    let rest = manager.allocate(manager.available()).unwrap();
    for _ in 0..20 {
        // The second comes, and there is no room for it.
        tokio::time::advance(Duration::from_secs(7)).await;
    }
    device.open.store(true, Ordering::SeqCst);
    while onboarding.held() == 0 {
        tokio::task::yield_now().await;
    }
    onboarding.end().await;
    let count = |metric: &str| counted(&registry, metric, Level::G3);
    assert_eq!(
        (count("hit_blocks_total"), count("miss_blocks_total")),
        (1, 6),
        "and no miss of the tier's for want of room"
    );
    assert_eq!(count("transfer_bytes_total"), SIZE as u64);
    drop(rest);
}

#[tokio::test(start_paused = true)]
async fn each_block_comes_from_the_fastest_tier_that_holds_it() {
    let (ssd, store) = (at(Level::G3, 1, 0), at(Level::G4, 2, 0));
    store.keeps(0..10).await;
    ssd.keeps(3..6).await;
    let site = Site::new(16, 16, vec![ssd.clone(), store]);
    drop(site.compute(0..1));
    let onboarded = site.manager.onboard(&names(12), ms(10)).await;
    assert_eq!(onboarded.from, [(Level::G1, 1), (Level::G4, 2), (Level::G3, 3), (Level::G4, 4)]);
    site.assert_sound(&onboarded.blocks);
    site.manager.flush().await;
    assert_eq!(site.host.as_ref().unwrap().holds(fingerprint(), &names(10)), 10, "onboarded blocks go up into G2");
    assert_eq!(ssd.holds(fingerprint(), &names(10)), 10, "and down to where they were missing");
}

#[tokio::test(start_paused = true)]
async fn a_lying_tier_is_found_out_and_the_next_one_asked() {
    for faults in [
        Faults { corrupt: 1.0, ..Faults::default() },
        Faults { wrong: 1.0, ..Faults::default() },
        Faults { short: 1.0, ..Faults::default() },
    ] {
        let (ssd, store) = (at(Level::G3, 0, 0), at(Level::G4, 5, 0));
        ssd.keeps(0..8).await;
        store.keeps(0..5).await;
        let site = Site::new(16, 0, vec![Arc::new(Faulty::new(ssd.clone(), 7, faults.clone())), store]);
        let onboarded = site.manager.onboard(&names(8), ms(10)).await;
        assert_eq!(onboarded.from, [(Level::G4, 5)], "{faults:?}");
        site.assert_sound(&onboarded.blocks);
        assert_eq!(site.counter("corrupt_blocks_total", Level::G3), 8);
        drop(onboarded);
        assert_eq!(ssd.holds(fingerprint(), &names(8)[5..]), 0, "discarded, and nobody could repair it");
    }
}

#[tokio::test(start_paused = true)]
async fn a_block_that_was_given_up_meanwhile_ends_the_run() {
    let inner = at(Level::G3, 0, 0);
    inner.keeps(0..8).await;
    let lossy = Faulty::new(inner, 3, Faults { lost: 0.3, ..Faults::default() });
    let site = Site::new(16, 0, vec![Arc::new(lossy)]);
    let onboarded = site.manager.onboard(&names(8), ms(10)).await;
    assert!(onboarded.blocks.len() < 8);
    assert!(onboarded.blocks.iter().zip(names(8)).all(|(block, name)| block.name() == name));
    let in_use = onboarded.blocks.len();
    assert_eq!(site.manager.available(), 16 - in_use, "slots of blocks that follow a hole went back");
}

/// Virtual time until the last block is there, loaded or computed, and how many were loaded.
async fn first_token(site: &Site, blocks: usize, recompute: Recompute) -> (Duration, usize) {
    let start = Instant::now();
    let loaded = site.manager.onboard(&names(blocks), recompute).await.blocks.len();
    let computing = Duration::from_secs_f64((blocks - loaded) as f64 * recompute.seconds_per_block.unwrap());
    (start.elapsed() + computing, loaded)
}

#[tokio::test(start_paused = true)]
async fn a_hanging_tier_does_not_take_the_others_blocks_along() {
    let (fast, inner) = (at(Level::G3, 1, 1), at(Level::G4, 0, 0));
    fast.keeps(0..50).await;
    inner.keeps(50..100).await;
    let hanging = Faulty::new(inner, 1, Faults { hang: 1.0, ..Faults::default() });
    let site = Site::new(200, 0, vec![fast, Arc::new(hanging)]);
    let (time, loaded) = first_token(&site, 100, ms(10)).await;
    assert_eq!(loaded, 50);
    assert!(time <= Duration::from_secs(1) + Patience::GRACE, "{time:?}");
}

#[tokio::test(start_paused = true)]
async fn nothing_waits_for_ever_even_when_nobody_knows_what_computing_costs() {
    let inner = at(Level::G3, 0, 0);
    inner.keeps(0..8).await;
    let hanging = Faulty::new(inner, 1, Faults { hang: 1.0, ..Faults::default() });
    let site = Site::new(16, 0, vec![Arc::new(hanging)]);
    let start = Instant::now();
    assert!(site.manager.onboard(&names(8), UNKNOWN).await.blocks.is_empty());
    assert_eq!(start.elapsed(), Patience::GRACE);
}

#[tokio::test(start_paused = true)]
async fn dropping_an_onboarding_gives_everything_back() {
    let slow = at(Level::G3, 1, 50);
    slow.keeps(0..8).await;
    let site = Site::new(16, 0, vec![slow]);
    let asked = names(8);
    let cut = tokio::time::timeout(Duration::from_millis(120), site.manager.onboard(&asked, ms(1_000))).await;
    assert!(cut.is_err());
    while site.manager.available() < 16 {
        tokio::task::yield_now().await;
    }
}

#[tokio::test(start_paused = true)]
async fn requests_for_the_same_blocks_load_them_once() {
    let slow = at(Level::G3, 10, 10);
    slow.keeps(0..40).await;
    let site = Site::new(100, 0, vec![slow]);
    let (all, some) = (names(40), names(20));
    let start = Instant::now();
    let (one, other) = tokio::join!(site.manager.onboard(&all, ms(100)), site.manager.onboard(&some, ms(100)));
    assert_eq!(start.elapsed(), Duration::from_millis(400));
    assert_eq!((one.from, other.from), (vec![(Level::G3, 40)], vec![(Level::G1, 20)]));
    assert_eq!(site.counter("hit_blocks_total", Level::G3), 40);
}

#[tokio::test(start_paused = true)]
async fn who_follows_takes_over_when_the_first_one_is_dropped() {
    let slow = at(Level::G3, 10, 10);
    slow.keeps(0..40).await;
    let site = Site::new(100, 0, vec![slow]);
    let asked = names(40);
    let first = tokio::time::timeout(Duration::from_millis(205), site.manager.onboard(&asked, ms(100)));
    let (first, second) = tokio::join!(first, site.manager.onboard(&asked, ms(100)));
    assert!(first.is_err());
    assert_eq!(second.blocks.len(), 40);
    assert!(matches!(second.from[..], [(Level::G1, kept), (Level::G3, _)] if kept >= 15), "{:?}", second.from);
    site.assert_sound(&second.blocks);
}

#[tokio::test(start_paused = true)]
async fn who_follows_waits_no_longer_than_who_leads() {
    let inner = at(Level::G3, 0, 0);
    inner.keeps(0..40).await;
    let hanging = Faulty::new(inner, 1, Faults { hang: 1.0, ..Faults::default() });
    let site = Site::new(100, 0, vec![Arc::new(hanging)]);
    let asked = names(40);
    let start = Instant::now();
    let (one, other) = tokio::join!(site.manager.onboard(&asked, ms(10)), site.manager.onboard(&asked, ms(10)));
    assert_eq!((one.blocks.len(), other.blocks.len()), (0, 0));
    assert_eq!(start.elapsed(), Patience::GRACE);
}

#[tokio::test(start_paused = true)]
async fn a_small_device_takes_what_fits() {
    let ssd = at(Level::G3, 1, 0);
    ssd.keeps(0..20).await;
    let site = Site::new(16, 0, vec![ssd]);
    let held = site.manager.allocate(6).unwrap();
    let onboarded = site.manager.onboard(&names(20), ms(10)).await;
    assert_eq!(onboarded.blocks.len(), 10);
    drop(held);
}

#[tokio::test(start_paused = true)]
async fn speeds_are_what_was_seen() {
    let ssd = at(Level::G3, 20, 2);
    ssd.keeps(0..151).await;
    let site = Site::new(200, 0, vec![ssd]);
    assert!(site.manager.speeds().is_empty());
    assert_eq!(site.manager.onboard(&names(101), ms(10)).await.blocks.len(), 101);
    let speeds = site.manager.speeds();
    assert_eq!((speeds[0].level, speeds[0].latency), (Level::G3, Duration::from_millis(20)));
    assert!((speeds[0].bytes_per_second - SIZE as f64 / 0.002).abs() < 1.0, "{speeds:?}");
    let (all, amid) = (names(151), async {
        tokio::time::sleep(Duration::from_millis(50)).await;
        site.manager.speeds()[0].queued
    });
    let (_, queued) = tokio::join!(site.manager.onboard(&all, ms(10)), amid);
    assert!((20..50).contains(&queued), "of 50 blocks {queued} were still to come");
    assert_eq!((speeds[0].queued, site.manager.speeds()[0].queued), (0, 0), "nobody waits before and after");
}
