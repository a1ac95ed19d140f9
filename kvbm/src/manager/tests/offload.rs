//! Blocks on their way down.

use super::*;
use crate::tier::Quota;

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

#[tokio::test(start_paused = true)]
async fn a_trickle_costs_a_shared_store_few_requests_and_what_comes_alone_goes_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let store = crate::object::ObjectTier::folder(folder.path(), crate::object::Settings::default(), log()).unwrap();
    store.caught_up().await;
    let site = Site::new(2_000, 2_000, vec![store.clone()]);
    drop(site.compute(0..1));
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!(store.holds(fingerprint(), &names(1)), 1, "nothing was written lately");
    // Three blocks a second, as one conversation makes them.
    let (start, before) = (Instant::now(), store.counts().requests);
    for n in 1..1_801 {
        drop(site.compute(n..n + 1));
        tokio::time::sleep_until(start + Duration::from_millis(n as u64 * 333)).await;
    }
    site.manager.flush().await;
    assert_eq!(store.holds(fingerprint(), &names(1_801)), 1_801);
    // One process alone lists writers every second, and what is about to be deleted every fifth, whoever writes what.
    let (asked, seconds) = (store.counts().requests - before, start.elapsed().as_secs());
    let written = asked.saturating_sub(seconds * 6 / 5);
    assert!((20..90).contains(&written), "{written} requests for 1,800 blocks, {asked} in all");
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

#[tokio::test(start_paused = true)]
async fn a_flood_of_one_domain_costs_another_no_block_on_the_way_down() {
    let domain = |n| Custody { domain: DomainId::from_bytes([n; 16]), ..Custody::default() };
    let (flood, quiet) = (domain(1), domain(2));
    let quota = Quota { guaranteed: (16 * SIZE) as u64, maximum: None };
    for level in [Level::G3, Level::G4] {
        let inner = at(level, 0, 0);
        let second = Duration::from_secs(1);
        let slow = Faulty::new(inner.clone(), 1, Faults { latency: second..=second, ..Faults::default() });
        let mut site = Site::new(64, 0, vec![Arc::new(slow)]);
        site.manager = site.manager.with_shares(&Shares::default().promise(quiet.domain, Level::G1, quota));
        // 64 names fill the lane, and the tier takes 16 of them a second.
        for n in 0..40 {
            drop(site.compute_for(1_000 + n * 32..1_032 + n * 32, flood));
            if n == 20 {
                drop(site.compute_for(0..12, quiet));
            }
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
        assert_eq!(inner.holds(fingerprint(), &names(12)), 12, "{level}: and without waiting for all of the flood");
        site.manager.flush().await;
        assert!(site.counter("offload_dropped_blocks_total", level) > 1_000, "{level}: it was a flood");
    }
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
        fn expire(&self, now: Date) -> usize {
            self.0.expire(now)
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
        fn expire(&self, _: Date) -> usize {
            0
        }
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
