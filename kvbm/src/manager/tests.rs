use super::*;
use crate::contract::Memory;
use crate::device::contract::InMemory;
use crate::plan::Patience;
use crate::tier::{Loaded, StoreError, Usage};
use crate::{Block, BlockId, Epoch, Faults, Faulty, Fingerprint};
use futures::future::BoxFuture;
use futures::stream::{BoxStream, StreamExt};
use prometheus::Registry;
use std::collections::HashSet;

const SIZE: usize = 1_000;

fn fingerprint() -> Fingerprint {
    Fingerprint::from_bytes([0xF1; 32])
}

fn name(n: usize) -> SequenceHash {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&(n as u64 + 1).to_le_bytes());
    SequenceHash::from_bytes(bytes)
}

fn names(n: usize) -> Vec<SequenceHash> {
    (0..n).map(name).collect()
}

/// What the engine computes for a block: a function of its name.
fn content(name: SequenceHash) -> Vec<u8> {
    (0..SIZE).map(|i| name.as_bytes()[0].wrapping_mul(31) ^ (i * 7) as u8).collect()
}

/// A manager and what stands around it.
struct Site {
    device: Arc<InMemory>,
    manager: BlockManager,
    host: Option<HostTier>,
    log: Arc<EventLog>,
    registry: Registry,
}

impl Site {
    fn new(slots: usize, host: usize, lower: Vec<Arc<dyn Tier>>) -> Self {
        let (log, registry) = (log(), Registry::new());
        let metrics = Metrics::new(&registry).unwrap();
        let device = InMemory::new(slots, SIZE, fingerprint());
        let host = (host > 0).then(|| HostTier::new((host * SIZE) as u64, SIZE, fingerprint(), log.clone(), &metrics));
        let manager = BlockManager::new(device.clone(), host.clone(), lower, log.clone(), metrics);
        Self { device, manager, host, log, registry }
    }

    /// Computes the chain of `range` and caches it.
    fn compute(&self, range: std::ops::Range<usize>) -> Vec<CachedBlock> {
        let slots = self.manager.allocate(range.len()).unwrap();
        let full = slots.into_iter().zip(range).map(|(slot, n)| {
            self.device.write(slot.slot(), &content(name(n)));
            slot.complete(name(n), n.checked_sub(1).map(name))
        });
        self.manager.register_all(full.collect())
    }

    fn assert_sound(&self, blocks: &[CachedBlock]) {
        let mut bytes = vec![0; SIZE];
        for block in blocks {
            self.device.read(block.slot(), &mut bytes);
            assert!(bytes == content(block.name()), "{block:?} holds other bytes");
        }
    }

    fn counter(&self, metric: &str, level: Level) -> u64 {
        let families = self.registry.gather();
        let family = families.iter().find(|family| family.name() == format!("blockyard_kvbm_{metric}"));
        let of_level = |m: &&prometheus::proto::Metric| m.get_label().iter().any(|l| l.value() == level.name());
        let found = family.and_then(|family| family.get_metric().iter().find(of_level));
        found.map_or(0, |metric| metric.get_counter().get_value() as u64)
    }
}

fn log() -> Arc<EventLog> {
    Arc::new(EventLog::new(Epoch(1)))
}

/// A tier in some other place of the order, late by a fixed time and then by so much per block.
struct At {
    level: Level,
    tier: Arc<dyn Tier>,
    latency: Duration,
    per_block: Duration,
}

fn at(level: Level, latency_ms: u64, per_block_ms: u64) -> Arc<At> {
    let tier = Arc::new(Memory::new(log(), None));
    Arc::new(At {
        level,
        tier,
        latency: Duration::from_millis(latency_ms),
        per_block: Duration::from_millis(per_block_ms),
    })
}

impl At {
    async fn keeps(&self, range: std::ops::Range<usize>) {
        let block = |n: usize| Block::seal(name(n), n.checked_sub(1).map(name), fingerprint(), content(name(n)).into());
        self.tier.store(range.map(block).collect()).await;
    }
}

impl Tier for At {
    fn level(&self) -> Level {
        self.level
    }
    fn holds(&self, fingerprint: Fingerprint, names: &[SequenceHash]) -> usize {
        self.tier.holds(fingerprint, names)
    }
    fn load(&self, fingerprint: Fingerprint, names: Vec<SequenceHash>) -> BoxStream<'static, Loaded> {
        let (latency, per_block) = (self.latency, self.per_block);
        let late = move |(n, loaded)| async move {
            tokio::time::sleep(if n == 0 { latency } else { per_block }).await;
            loaded
        };
        self.tier.load(fingerprint, names).enumerate().then(late).boxed()
    }
    fn store(&self, blocks: Vec<Block>) -> BoxFuture<'_, Vec<Result<(), StoreError>>> {
        self.tier.store(blocks)
    }
    fn discard(&self, fingerprint: Fingerprint, name: SequenceHash) {
        self.tier.discard(fingerprint, name);
    }
    fn usage(&self) -> Usage {
        self.tier.usage()
    }
}

const fn ms(seconds_per_block_ms: u64) -> Recompute {
    Recompute { seconds_per_block: Some(seconds_per_block_ms as f64 / 1e3) }
}

const UNKNOWN: Recompute = Recompute { seconds_per_block: None };

/// Down.

#[tokio::test]
async fn registered_blocks_rest_in_every_tier_after_a_flush() {
    let (ssd, store) = (at(Level::G3, 0, 0), at(Level::G4, 0, 0));
    let site = Site::new(16, 16, vec![ssd.clone(), store.clone()]);
    drop(site.compute(0..10));
    site.manager.flush().await;
    assert_eq!(site.host.as_ref().unwrap().holds(fingerprint(), &names(10)), 10);
    assert_eq!(ssd.holds(fingerprint(), &names(10)), 10);
    assert_eq!(store.holds(fingerprint(), &names(10)), 10);
    assert_eq!(site.manager.below(&names(12)), 10);
}

#[tokio::test]
async fn without_g2_blocks_go_down_from_the_device() {
    let ssd = at(Level::G3, 0, 0);
    let site = Site::new(16, 0, vec![ssd.clone()]);
    drop(site.compute(0..10));
    site.manager.flush().await;
    assert_eq!(ssd.holds(fingerprint(), &names(10)), 10);
}

#[tokio::test]
async fn what_waits_to_be_offloaded_pins_nothing() {
    let stuck = Faulty::new(at(Level::G3, 0, 0), 1, Faults { hang: 1.0, ..Faults::default() });
    let site = Site::new(16, 0, vec![Arc::new(stuck)]);
    drop(site.compute(0..16));
    tokio::task::yield_now().await;
    assert_eq!(site.manager.allocate(16).unwrap().len(), 16);
}

#[tokio::test(start_paused = true)]
async fn a_store_that_hangs_is_given_up_and_counted() {
    let stuck = Faulty::new(at(Level::G3, 0, 0), 1, Faults { hang: 1.0, ..Faults::default() });
    let site = Site::new(16, 16, vec![Arc::new(stuck)]);
    drop(site.compute(0..4));
    site.manager.flush().await;
    assert_eq!(site.counter("offload_dropped_blocks_total", Level::G3), 4);
    assert_eq!(site.manager.below(&names(4)), 4, "G2 has them");
}

#[tokio::test(start_paused = true)]
async fn a_busy_tier_is_offered_the_blocks_again() {
    let inner = at(Level::G3, 0, 0);
    let busy = Arc::new(Faulty::new(inner.clone(), 1, Faults { busy: 0.5, ..Faults::default() }));
    let site = Site::new(64, 64, vec![busy]);
    drop(site.compute(0..40));
    site.manager.flush().await;
    let stored = inner.usage().blocks;
    assert_eq!(stored + site.counter("offload_dropped_blocks_total", Level::G3), 40);
    assert!(stored >= 36, "seven tries each: {stored}");
}

#[tokio::test]
async fn blocks_are_stored_once_and_many_at_a_time() {
    struct Counting(Arc<At>, Mutex<Vec<usize>>);
    impl Tier for Counting {
        fn level(&self) -> Level {
            self.0.level()
        }
        fn holds(&self, fingerprint: Fingerprint, names: &[SequenceHash]) -> usize {
            self.0.holds(fingerprint, names)
        }
        fn load(&self, fingerprint: Fingerprint, names: Vec<SequenceHash>) -> BoxStream<'static, Loaded> {
            self.0.load(fingerprint, names)
        }
        fn store(&self, blocks: Vec<Block>) -> BoxFuture<'_, Vec<Result<(), StoreError>>> {
            self.1.lock().unwrap().push(blocks.len());
            self.0.store(blocks)
        }
        fn discard(&self, fingerprint: Fingerprint, name: SequenceHash) {
            self.0.discard(fingerprint, name);
        }
        fn usage(&self) -> Usage {
            self.0.usage()
        }
    }
    let ssd = Arc::new(Counting(at(Level::G3, 0, 0), Mutex::default()));
    let site = Site::new(256, 256, vec![ssd.clone()]);
    drop(site.compute(0..100));
    site.manager.flush().await;
    drop(site.compute(0..100));
    site.manager.flush().await;
    let stores = ssd.1.lock().unwrap().clone();
    assert_eq!(stores.iter().sum::<usize>(), 100);
    assert!(stores.len() <= 2, "{stores:?}");
}

#[tokio::test]
async fn a_task_that_panics_takes_the_tiers_with_it_but_not_the_device() {
    struct Bomb;
    impl Tier for Bomb {
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
        fn usage(&self) -> Usage {
            Usage::default()
        }
    }
    let site = Site::new(16, 16, vec![Arc::new(Bomb)]);
    let held = site.compute(0..4);
    site.manager.flush().await;
    assert_eq!(site.manager.below(&names(4)), 0);
    assert_eq!(site.manager.matched(&names(4)).len(), 4);
    drop((held, site.compute(4..8)));
    site.manager.flush().await;
}

#[tokio::test]
async fn dropping_the_last_handle_stops_the_tasks_and_frees_everything() {
    let ssd = at(Level::G3, 0, 0);
    let site = Site::new(16, 16, vec![ssd.clone()]);
    let peer = site.manager.peer();
    drop(site.compute(0..4));
    site.manager.flush().await;
    let (device, tier) = (Arc::downgrade(&site.device), Arc::downgrade(&ssd));
    drop((site, ssd));
    // The tasks are gone at their next turn.
    while tier.strong_count() + device.strong_count() > 0 {
        tokio::task::yield_now().await;
    }
    assert_eq!(peer.holds(fingerprint(), &names(4)), 0);
}

/// Up.

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
        assert_eq!(site.counter("blocks_quarantined_total", Level::G3), 8);
        drop(onboarded);
        assert_eq!(ssd.holds(fingerprint(), &names(1)), 0, "discarded");
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
async fn a_hit_is_never_slower_than_a_miss() {
    const BLOCKS: usize = 400;
    let computed = Duration::from_secs(4);
    // From a tenth of break-even to ten times of it, in microseconds per block.
    for per_block in [100_000, 50_000, 20_000, 12_000, 8_000, 5_000, 2_000, 1_000] {
        let slow = at(Level::G3, 0, 0);
        slow.keeps(0..BLOCKS).await;
        let slow = Arc::new(At {
            level: Level::G3,
            tier: slow.tier.clone(),
            latency: Duration::from_millis(20),
            per_block: Duration::from_micros(per_block),
        });
        let site = Site::new(2 * BLOCKS, 0, vec![slow]);
        for attempt in 0..3 {
            let (time, loaded) = first_token(&site, BLOCKS, ms(10)).await;
            let bound = computed.mul_f64(1.05) + Patience::GRACE;
            assert!(time <= bound, "{per_block} µs, attempt {attempt}: {time:?}, {loaded} loaded");
            if per_block <= 8_000 {
                assert_eq!(loaded, BLOCKS, "{per_block} µs: faster than computing, so all of it");
            }
            if per_block > 12_000 && attempt > 0 {
                let hiccup = Duration::from_millis(20);
                assert!(time <= computed + hiccup, "{per_block} µs: once measured, it is left alone: {time:?}");
            }
            drop(site.manager.allocate(2 * BLOCKS));
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_tier_that_hangs_costs_one_grace_and_is_then_left_alone() {
    let inner = at(Level::G3, 0, 0);
    inner.keeps(0..100).await;
    let device = Arc::new(Faulty::new(inner, 1, Faults { hang: 1.0, ..Faults::default() }));
    let site = Site::new(200, 0, vec![device.clone()]);
    assert_eq!(site.manager.below(&names(100)), 100);
    let (time, loaded) = first_token(&site, 100, ms(10)).await;
    assert_eq!((time, loaded), (Duration::from_millis(1_250), 0));
    assert_eq!(site.counter("onboard_deadline_misses_total", Level::G3), 1);
    assert_eq!(site.manager.below(&names(100)), 0);
    let (time, _) = first_token(&site, 100, ms(10)).await;
    assert_eq!(time, Duration::from_secs(1), "the next request does not wait");

    device.set(Faults::default());
    tokio::time::sleep(Duration::from_secs(2)).await;
    let (time, loaded) = first_token(&site, 100, ms(10)).await;
    assert_eq!((time, loaded), (Duration::ZERO, 100), "it came back by itself");
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
    assert_eq!(start.elapsed(), Duration::from_secs(2));
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
    ssd.keeps(0..101).await;
    let site = Site::new(200, 0, vec![ssd]);
    assert!(site.manager.speeds().is_empty());
    assert_eq!(site.manager.onboard(&names(101), ms(10)).await.blocks.len(), 101);
    let speeds = site.manager.speeds();
    assert_eq!((speeds[0].level, speeds[0].latency), (Level::G3, Duration::from_millis(20)));
    assert!((speeds[0].bytes_per_second - SIZE as f64 / 0.002).abs() < 1.0, "{speeds:?}");
}

/// Across.

#[tokio::test]
async fn a_peer_hands_over_what_it_has_in_memory_and_takes_nothing() {
    let (prefill, decode) = (Site::new(8, 32, vec![]), Site::new(32, 0, vec![]));
    drop(prefill.compute(0..8));
    prefill.manager.flush().await;
    // The first four are in G1 and G2 now, the rest in G2 only.
    let kept = prefill.manager.matched(&names(4));
    drop(prefill.manager.allocate(4));
    let peer = prefill.manager.peer();
    assert_eq!(peer.holds(fingerprint(), &names(10)), 8);
    assert_eq!(peer.holds(Fingerprint::from_bytes([0; 32]), &names(10)), 0);
    let onboarded = decode.manager.onboard_from(&peer, &names(10), ms(10)).await;
    assert_eq!(onboarded.from, [(Level::Peer, 8)]);
    decode.assert_sound(&onboarded.blocks);
    let block = Block::seal(name(0), None, fingerprint(), content(name(0)).into());
    assert!(peer.store(vec![block]).await[0].is_err());
    assert_eq!(decode.manager.speeds()[0].level, Level::Peer);
    drop(kept);
}

#[tokio::test]
async fn a_defective_copy_in_g2_is_never_served_to_a_peer() {
    /// Device memory that goes bad once it was offloaded.
    struct Rotten(Arc<InMemory>);
    impl DeviceBlocks for Rotten {
        fn capacity(&self) -> usize {
            self.0.capacity()
        }
        fn block_bytes(&self) -> usize {
            self.0.block_bytes()
        }
        fn fingerprint(&self) -> Fingerprint {
            Fingerprint::from_bytes([0xBA; 32])
        }
        fn read(&self, slot: BlockId, into: &mut [u8]) {
            self.0.read(slot, into);
        }
        fn write(&self, slot: BlockId, from: &[u8]) {
            self.0.write(slot, from);
        }
    }
    let (log, registry) = (log(), Registry::new());
    let device = Arc::new(Rotten(InMemory::new(8, SIZE, fingerprint())));
    let other = BlockManager::new(device, None, vec![], log, Metrics::new(&registry).unwrap());
    let slot = other.allocate(1).unwrap().pop().unwrap();
    drop(other.register(slot.complete(name(0), None)));
    let site = Site::new(8, 0, vec![]);
    let onboarded = site.manager.onboard_from(&other.peer(), &names(1), ms(10)).await;
    assert!(onboarded.blocks.is_empty(), "another engine's bytes");
}

/// Everything at once, seeded.

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_anything_the_log_says_what_the_memory_holds() {
    for seed in 0..8_u64 {
        let inner = at(Level::G3, 0, 0);
        let faults = Faults { error: 0.1, lost: 0.1, corrupt: 0.1, busy: 0.1, ..Faults::default() };
        let site = Arc::new(Site::new(24, 12, vec![Arc::new(Faulty::new(inner, seed, faults))]));
        let tasks = (0..3_u64).map(|task| {
            let site = site.clone();
            tokio::spawn(async move {
                for step in 0..40_u64 {
                    let dice = blake3::hash(&[seed, task, step].map(u64::to_le_bytes).concat());
                    let dice = dice.as_bytes();
                    let (length, held) = (usize::from(dice[0]) % 12 + 1, site.manager.matched(&names(12)));
                    let onboarded = site.manager.onboard(&names(length), ms(1)).await;
                    site.assert_sound(&onboarded.blocks);
                    let have = onboarded.blocks.len();
                    // Not enough room is fine: others hold it.
                    if have < length && site.manager.available() >= length {
                        let slots = site.manager.allocate(length - have).into_iter().flatten();
                        let full = slots.zip(have..length).map(|(slot, n)| {
                            site.device.write(slot.slot(), &content(name(n)));
                            slot.complete(name(n), n.checked_sub(1).map(name))
                        });
                        drop(site.manager.register_all(full.collect()));
                    }
                    if dice[1] < 60 {
                        site.host.as_ref().unwrap().discard(fingerprint(), name(usize::from(dice[2]) % 12));
                    }
                    if dice[3] < 40 {
                        drop(site.manager.allocate(usize::from(dice[4]) % 12));
                    }
                    drop((held, onboarded));
                }
            })
        });
        for task in tasks.collect::<Vec<_>>() {
            task.await.unwrap();
        }
        site.manager.flush().await;
        let announced: HashSet<(Level, SequenceHash)> = site.log.snapshot().blocks.into_iter().collect();
        let held = |level| move |name| (level, name);
        let g1 = site.manager.0.core.pool.names().into_iter().map(held(Level::G1));
        let g2 = site.host.as_ref().unwrap().names().into_iter().map(held(Level::G2));
        assert_eq!(announced, g1.chain(g2).collect(), "seed {seed}");
    }
}
